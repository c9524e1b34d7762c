"""Run the docs' `docker` commands with Podman, in an image storage of the test.

Podman accepts Docker's commands. The base image comes from debootstrap instead of a registry, so the test needs only a
Debian mirror and a package index:

    with Podman.create() as podman:
        podman.docker(["docker", "build", "-f", "docker/Dockerfile", "-t", "grpo:cpu", "."], folder)
        podman.docker(["docker", "run", "--rm", "grpo:cpu", "--version"])
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
BASE = "docker.io/library/debian:bookworm-slim"
_PROGRAMS = ("podman", "runc", "debootstrap")
_MOST = 16_384  # open files and processes of a container
_GIGABYTES = 20  # disk space for the layers of the image and for installing the packages
_PIP_SETTINGS = ("index-url", "extra-index-url", "find-links", "constraint", "trusted-host", "proxy", "timeout")


def missing_for_containers() -> str | None:
    """Return why no image can be built on this machine, or None."""
    missing = [program for program in _PROGRAMS if shutil.which(program) is None]
    if os.geteuid() != 0:
        return "debootstrap needs root"
    if missing:
        return f"not installed: {', '.join(missing)}"
    if shutil.disk_usage(tempfile.gettempdir()).free < _GIGABYTES * 1e9:
        return f"{tempfile.gettempdir()} has less than {_GIGABYTES} GB free"
    return None


def find_mirror(suite: str) -> str:
    """Return the address of this machine's package mirror, or Debian's if none is configured."""
    files = [Path("/etc/apt/sources.list"), *Path("/etc/apt/sources.list.d").glob("*")]
    text = "\n".join(path.read_text() for path in files if path.is_file())
    stanzas = re.findall(r"^URIs:\s*(\S+)\nSuites:.*\b" + suite + r"\b(?!-)", text, re.MULTILINE)
    lines = re.findall(r"^deb (?:\[.*\] )?(\S+) " + suite + " main", text, re.MULTILINE)
    return [*stanzas, *lines, "http://deb.debian.org/debian"][0]


def read_pip_settings() -> dict[str, str]:
    """Return pip's settings on this machine. Variables win over files."""
    command = [sys.executable, "-m", "pip", "config", "list"]
    listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    rows = re.findall(r"^(:env:|\w+)\.([\w-]+)='(.*)'$", listing, re.MULTILINE)
    ordered = sorted(rows, key=lambda row: row[0] == ":env:")
    return {name: value for _, name, value in ordered}


@dataclass
class Podman:
    """Podman with its storage in ``folder``."""

    folder: Path

    @classmethod
    @contextlib.contextmanager
    def create(cls) -> Iterator[Podman]:
        """Make a storage that contains only the base image. Remove it at the end."""
        podman = cls(Path(tempfile.mkdtemp(prefix="grpo-podman-")))
        try:
            podman._import_base()
            yield podman
        finally:
            podman._call("rmi", "--all", "--force")
            shutil.rmtree(podman.folder)

    def docker(
        self, command: Sequence[str], folder: Path | None = None, timeout: float = 300
    ) -> subprocess.CompletedProcess[str]:
        """Run a `docker build` or `docker run` command in a folder, runs without a network."""
        assert command[0] == "docker"
        if command[1] == "build":
            return self._call("build", *self._build_options(), *command[2:], folder=folder, timeout=timeout)
        assert command[1] == "run"
        return self._call("run", *_run_options(), *command[2:], folder=folder, timeout=timeout)

    def read_label(self, image: str, name: str) -> str:
        """Return a label of an image."""
        template = '{{ index .Labels "' + name + '" }}'
        return self._call("inspect", "--format", template, image).stdout.strip()

    def _import_base(self) -> None:
        root, (suite,) = self.folder / "debian", re.findall(r":(\w+)-slim", BASE)
        address = find_mirror(suite)
        command = ["debootstrap", "--variant=minbase", suite, str(root), address]
        done = subprocess.run(command, capture_output=True, text=True, timeout=400)
        if done.returncode:
            pytest.skip(f"debootstrap got no {suite} from {address}: {done.stdout[-500:]}{done.stderr[-500:]}")
        archive = self.folder / "debian.tar"
        subprocess.run(["tar", "-C", root, "-cf", archive, "."], check=True, timeout=120)
        shutil.rmtree(root)
        done = self._call("import", str(archive), BASE)
        assert done.returncode == 0, done.stderr
        archive.unlink()

    def _build_options(self) -> list[str]:
        """Hand pip's settings to the build as the secret of the Dockerfile, with the folders and files they name."""
        settings = read_pip_settings()
        lines = [f"{name} = {settings[name]}" for name in _PIP_SETTINGS if name in settings]
        paths = re.findall(r"(?:^|\s|file://)(/[^\s]+)", " ".join(settings.get(name, "") for name in _PIP_SETTINGS))
        volumes = {path.removesuffix("/simple"): path.removesuffix("/simple") for path in paths}
        if "cert" in settings:
            volumes[settings["cert"]] = "/etc/pip.pem"
            lines.append("cert = /etc/pip.pem")
        configuration = self.folder / "pip.conf"
        configuration.write_text("\n".join(["[global]", *lines, ""]))
        mounts = [word for source, target in volumes.items() for word in ("-v", f"{source}:{target}:ro")]
        secret = ["--secret", f"id=pip,src={configuration}"]
        return ["--pull=never", "--isolation", "chroot", "--network", "host", *secret, *mounts]

    def _call(
        self, *command: str, folder: Path | None = None, timeout: float = 300
    ) -> subprocess.CompletedProcess[str]:
        storage = ["--root", str(self.folder / "root"), "--runroot", str(self.folder / "run")]
        options = [*storage, "--cgroup-manager", "cgroupfs", "--runtime", "runc"]
        return subprocess.run(
            ["podman", *options, *command],
            cwd=folder or self.folder, capture_output=True, text=True, timeout=timeout, stdin=subprocess.DEVNULL,
        )  # fmt: skip


def _run_options() -> list[str]:
    """Cut off the network. Lower the limits of open files and processes: root may not be allowed to raise them."""
    limits = []
    for name in ("nofile", "nproc"):
        _, hard = resource.getrlimit(getattr(resource, f"RLIMIT_{name.upper()}"))
        number = _MOST if hard == resource.RLIM_INFINITY else min(hard, _MOST)
        limits += ["--ulimit", f"{name}={number}:{number}"]
    return ["--network", "none", *limits]
