"""An environment that runs a copy of the package, or has one more package, without changing the tester's own.

It is a virtual environment that reads all other packages from the tester's.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
_PARTS = ("src", "recipes", "conf", "scripts", "pyproject.toml")  # files and folders that commands read


@dataclass(frozen=True)
class Overlay:
    """A copy of the repository with its environment."""

    repository: Path
    python: Path

    def run(self, *words: str, cwd: Path | None = None, timeout: float = 120) -> subprocess.CompletedProcess[str]:
        """Run Python with these words; the environment has no variable that the launcher reads."""
        inherited = ("PATH", "HOME", "LANG", "TMPDIR", "CACHE_ROOT", "OPENBLAS_CORETYPE")
        variables = {name: os.environ[name] for name in inherited if name in os.environ}
        variables |= {"CACHE_ROOT": variables.get("CACHE_ROOT", str(REPOSITORY / ".cache"))}
        return subprocess.run(
            [str(self.python), *words], cwd=cwd or self.repository, env=variables, text=True, capture_output=True,
            timeout=timeout, check=False,
        )  # fmt: skip

    def grpo(self, *words: str, cwd: Path | None = None, timeout: float = 120) -> subprocess.CompletedProcess[str]:
        """Run a command of `grpo`."""
        return self.run("-m", "grpo_recipes", *words, cwd=cwd, timeout=timeout)

    def delete(self, *packages: str) -> None:
        """Delete packages of the copy, such as ``extensions.atropos``."""
        for package in packages:
            shutil.rmtree(self.repository / "src/grpo_recipes" / package.replace(".", "/"))

    @property
    def site(self) -> Path:
        """The folder of its installed packages."""
        return self.python.parents[1] / f"lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages"


def make_overlay(folder: Path, *more_files: str) -> Overlay:
    """Copy the repository into ``folder``, with ``more_files`` of it, and make an environment that runs the copy."""
    repository, environment = folder / "repository", folder / "environment"
    repository.mkdir(parents=True)
    for name in (*_PARTS, *more_files):
        source = REPOSITORY / name
        if source.is_dir():
            shutil.copytree(source, repository / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        else:
            shutil.copy(source, repository / name)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True)
    overlay = Overlay(repository, environment / "bin/python")
    packages = sysconfig.get_paths()["purelib"]
    lines = [str(repository / "src"), f"import site; site.addsitedir({packages!r})"]
    (overlay.site / "overlay.pth").write_text("\n".join(lines) + "\n")
    program = environment / "bin/grpo"
    program.write_text(f"#!{overlay.python}\nimport sys\nfrom grpo_recipes.cli import main\n\nsys.exit(main())\n")
    program.chmod(0o755)
    return overlay
