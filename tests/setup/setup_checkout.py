"""A copy of the repository's scripts to run, with environments that cost nothing to make."""

import hashlib
import json
import os
import platform
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]


@dataclass
class Checkout:
    """A copy of what setting up needs, and a clean environment to run it in."""

    root: Path
    env: dict[str, str]

    def run(self, *command: str, **env: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", *command], cwd=self.root, env=self.env | env, timeout=120, capture_output=True, text=True
        )

    def setup(self, *options: str, **env: str) -> subprocess.CompletedProcess[str]:
        return self.run("scripts/setup.sh", *options, **env)

    def add_command(self, name: str, body: str) -> Path:
        """Puts a bash script in front of everything else on PATH."""
        folder = self.root.parent / "bin"
        folder.mkdir(exist_ok=True)
        script = folder / name
        script.write_text(f"#!/bin/bash\n{body}\n")
        script.chmod(0o755)
        self.env["PATH"] = f"{folder}:{os.environ['PATH']}"
        return script

    def make_environment(self, flavour: str = "cpu", name: str = ".venv") -> Path:
        """A stamped environment without pip, so that every install into it fails."""
        prefix = self.root / name
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(prefix)], check=True)
        script = prefix / "bin" / "grpo"
        script.write_text(f'#!/bin/bash\n# {prefix}/bin/python\necho "grpo $*"\ngrep SigIgn "/proc/$$/status"\n')
        script.chmod(0o755)
        (site,) = prefix.glob("lib/python3*/site-packages")
        (site / "grpo_recipes.pth").write_text(f"{self.root / 'src'}\n")
        stamp = {
            "flavour": flavour,
            "lock": self.lock_hash("cpu" if flavour == "cpu" else "gpu"),
            "extras": self.lock_hash("environments"),
            "search": self.lock_hash("search"),
            "python": platform.python_version(),
        }
        (prefix / "grpo-environment.json").write_text(json.dumps(stamp))
        return prefix

    def lock_hash(self, name: str) -> str:
        """Hash a lock as the stamp records it."""
        return hashlib.sha256((self.root / "requirements" / f"{name}.txt").read_bytes()).hexdigest()

    def stamp(self, **changes: str) -> None:
        """Change values in the stamp of the environment."""
        file = self.root / ".venv/grpo-environment.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
