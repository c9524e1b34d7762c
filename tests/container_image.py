"""Carry out docker/Dockerfile, and `docker run` and `apptainer` commands, without either: in a Debian root on disk.

A Debian root is made by debootstrap; each command runs chrooted in new mount and process namespaces. Whatever
ends the command, a kill of the tests included, ends its processes and mounts; ``Image.remove`` removes the root itself.
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest
from no_network import without_network

REPOSITORY = Path(__file__).resolve().parents[1]
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_PROGRAMS = ("debootstrap", "unshare", "setpriv", "chroot", "mount")
# Mounts and processes of a command end with it, and it ends with this process, however that ends.
_APART = ("setpriv", "--pdeathsig", "KILL", "unshare", "--mount", "--pid", "--fork", "--kill-child")
_PREFIX = "grpo-image-"
_GIGABYTES = 15  # disk space for root, environment and pip's temporary files
_PIP_SETTINGS = ("index-url", "extra-index-url", "find-links", "trusted-host", "proxy", "timeout")
# In the namespaces: mounts as a container has them, then the command. Its words: the root, its access (rw or ro),
# options of a tmpfs on /tmp or none, the size of /dev/shm; source, target and access of each mount; --; the command.
_ENTER = """
set -e
root=$1 access=$2 temporary=$3 shared=$4; shift 4
mount --bind "$root" "$root"
mount -t proc proc "$root/proc"
mount -t sysfs -o ro sysfs "$root/sys"
mount --rbind /dev "$root/dev"
mount -t tmpfs -o "nosuid,nodev,noexec,mode=1777,size=$shared" tmpfs "$root/dev/shm"
[[ -z $temporary ]] || mount -t tmpfs -o "nosuid,nodev,mode=1777,$temporary" tmpfs "$root/tmp"
while [[ $1 != -- ]]; do
    [[ -e $root$2 ]] || mkdir -p "$root$2"
    mount --bind "$1" "$root$2"
    [[ $3 == rw ]] || mount -o remount,bind,ro "$root$2"
    shift 3
done
shift
[[ $access == rw ]] || mount -o remount,bind,ro "$root"
exec "$@"
"""


def needs_of_the_test() -> str | None:
    """Return why no Debian root can be made here, or None."""
    missing = [program for program in _PROGRAMS if shutil.which(program) is None]
    if os.geteuid() != 0:
        return "only root can make a Debian root"
    if missing:
        return f"not installed: {', '.join(missing)}"
    if shutil.disk_usage(tempfile.gettempdir()).free < _GIGABYTES * 1e9:
        return f"{tempfile.gettempdir()} has less than {_GIGABYTES} GB free"
    mounted = subprocess.run(["unshare", "--mount", "--pid", "--fork", "mount", "-t", "tmpfs", "none", "/mnt"])
    return "this kernel does not allow mounts" if mounted.returncode else None


def new_root() -> Path:
    """Make the folder of a root, with this process's id in its name, and remove the folders of killed processes."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        if not psutil.pid_exists(int(folder.name.split("-")[2])):
            shutil.rmtree(folder)
    return Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-"))


def instructions(path: Path = REPOSITORY / "docker/Dockerfile") -> list[tuple[str, str]]:
    """Return the instructions of a Dockerfile with the text that follows each."""
    dockerfile = re.sub(r"^#.*\n", "", path.read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    return [(word, text.strip()) for word, _, text in (line.partition(" ") for line in dockerfile.splitlines() if line)]


def sections(path: Path = REPOSITORY / "docker/grpo.def") -> dict[str, list[str]]:
    """Return the sections of an Apptainer definition, each as its lines, and its header as ``header``."""
    sections_by_name: dict[str, list[str]] = {"header": []}
    name = "header"
    for line in (line.strip() for line in path.read_text().splitlines()):
        if line.startswith("%"):
            name = line[1:]
            sections_by_name[name] = []
        elif line and not line.startswith("#"):
            sections_by_name[name].append(line)
    return sections_by_name


def in_context(name: str) -> bool:
    """Return whether .dockerignore lets a file of the repository into the build."""
    included = True
    for rule in (REPOSITORY / ".dockerignore").read_text().splitlines():
        pattern = rule.removeprefix("!")
        if not rule or rule.startswith("#"):
            continue
        if pattern.startswith("**/"):
            matches = any(fnmatch.fnmatch(part, pattern[3:]) for part in Path(name).parts)
        else:
            matches = fnmatch.fnmatch(Path(name).parts[0], pattern)
        included = rule.startswith("!") if matches else included
    return included


def mirror(suite: str) -> str:
    """Return the address of this machine's package mirror, or Debian's if none is configured."""
    files = [Path("/etc/apt/sources.list"), *Path("/etc/apt/sources.list.d").glob("*")]
    text = "\n".join(path.read_text() for path in files if path.is_file())
    stanzas = re.findall(r"^URIs:\s*(\S+)\nSuites:.*\b" + suite + r"\b(?!-)", text, re.MULTILINE)
    lines = re.findall(r"^deb (?:\[.*\] )?(\S+) " + suite + " main", text, re.MULTILINE)
    return [*stanzas, *lines, "http://deb.debian.org/debian"][0]


def pip_settings() -> dict[str, str]:
    """Return pip's settings on this machine, its variables before its files."""
    command = [sys.executable, "-m", "pip", "config", "list"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    rows = re.findall(r"^(:env:|\w+)\.([\w-]+)='(.*)'$", listed, re.MULTILINE)
    ordered = sorted(rows, key=lambda row: row[0] == ":env:")
    return {name: value for _, name, value in ordered}


@dataclass
class Image:
    """An image during and after its build: its root on disk, and the settings of its instructions."""

    root: Path
    variables: dict[str, str] = field(default_factory=dict)
    arguments: dict[str, str] = field(default_factory=dict)
    labels: dict[str, str] = field(default_factory=dict)
    folder: str = "/"
    user: str = "0:0"
    entrypoint: list[str] = field(default_factory=list)
    command: list[str] = field(default_factory=list)

    def remove(self) -> None:
        subprocess.run(["rm", "-rf", "--one-file-system", str(self.root)], check=True)

    # --- docker build ---------------------------------------------------------------------------------------------

    def build(self, words: Sequence[str]) -> None:
        """Carry out the `docker build` command ``words``."""
        parser = argparse.ArgumentParser()
        parser.add_argument("--build-arg", action="append", default=[])
        for option in ("-f", "-t", "context"):
            parser.add_argument(option)
        assert list(words[:2]) == ["docker", "build"]
        options = parser.parse_args(words[2:])
        build_arguments = dict(item.split("=", 1) for item in options.build_arg)
        for instruction, text in instructions(REPOSITORY / options.f):
            if instruction == "ARG":
                name, _, default = text.partition("=")
                self.arguments[name] = build_arguments.get(name, default)
            else:
                getattr(self, f"_{instruction.lower()}")(text)
        assert build_arguments.keys() <= self.arguments.keys()

    def _from(self, text: str) -> None:
        """Make the root by debootstrap: the packages of Debian's own image, and apt's own configuration."""
        suite = re.fullmatch(r"debian:(\w+)-slim", text)
        assert suite, text
        address = mirror(suite[1])
        debootstrap = subprocess.run(
            [*_APART, "debootstrap", "--variant=minbase", suite[1], str(self.root), address],
            capture_output=True, text=True, timeout=400,
        )  # fmt: skip
        if debootstrap.returncode:
            pytest.skip(
                f"debootstrap got no {suite[1]} from {address}: {debootstrap.stdout[-500:]}{debootstrap.stderr[-500:]}"
            )

        self.root.chmod(0o755)

    def _workdir(self, text: str) -> None:
        self.folder = text
        (self.root / text.lstrip("/")).mkdir(parents=True, exist_ok=True)

    def _copy(self, text: str) -> None:
        *sources, target = text.split()
        if sources == ["."]:
            names = [path.name for path in REPOSITORY.iterdir()]
        else:
            names = [name.rstrip("/") for name in sources]
        for name in names:
            place = self.root / self.folder.lstrip("/") / (name if target in (".", "./") else target)
            for path in _files(REPOSITORY / name):
                if in_context(str(path.relative_to(REPOSITORY))):
                    copy = place / path.relative_to(REPOSITORY / name)
                    copy.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(path, copy)
                    copy.chmod(0o700 if os.access(path, os.X_OK) else 0o600)  # a checkout made with umask 077

    def _run(self, text: str) -> None:
        """Run a shell line, as root, with the network; pip's settings of this machine are the secret ``pip``."""
        secret = re.match(r"--mount=type=secret,id=pip,target=(\S+) ", text)
        with tempfile.TemporaryDirectory() as outside, contextlib.ExitStack() as places:
            binds = self._pip_configuration(Path(outside), secret[1]) if secret else []
            for source, target, _ in binds:
                places.enter_context(self._mount_point(Path(source).is_dir(), target))
            line = text[secret.end() :] if secret else text
            done = self.enter(["/bin/sh", "-c", line], {**self.variables, **self.arguments}, binds=binds, timeout=1200)
        if "no answer from a package index" in done.stderr:
            pytest.skip(done.stderr[-500:])
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]

    @contextlib.contextmanager
    def _mount_point(self, is_folder: bool, target: str) -> Iterator[None]:
        place = self.root / target.lstrip("/")
        place.mkdir(parents=True) if is_folder else place.touch(exist_ok=False)
        yield
        place.rmdir() if is_folder else place.unlink()

    def _pip_configuration(self, folder: Path, target: str) -> list[tuple[str, str, str]]:
        """Write pip's settings to a folder; return the binds: that file, certificates, and folders it names."""
        settings = pip_settings()
        lines = [f"{name} = {settings[name]}" for name in _PIP_SETTINGS if name in settings]
        named = re.findall(r"(?:^|\s|file://)(/[^\s]+)", " ".join(settings.get(name, "") for name in _PIP_SETTINGS))
        folders = [(path.removesuffix("/simple"), path.removesuffix("/simple"), "ro") for path in dict.fromkeys(named)]
        if "cert" in settings:
            shutil.copyfile(settings["cert"], folder / "cert.pem")
            folders.append((str(folder / "cert.pem"), "/etc/pip.pem", "ro"))
            lines.append("cert = /etc/pip.pem")
        (folder / "pip.conf").write_text("\n".join(["[global]", *lines, ""]))
        return [*folders, (str(folder / "pip.conf"), target, "ro")]

    def _env(self, text: str) -> None:
        name, _, value = text.partition("=")
        self.variables[name] = value

    def _label(self, text: str) -> None:
        (word,) = shlex.split(text.replace("$COMMIT", self.arguments["COMMIT"]))
        name, _, value = word.partition("=")
        self.labels[name] = value

    def _user(self, text: str) -> None:
        self.user = text

    def _entrypoint(self, text: str) -> None:
        self.entrypoint = json.loads(text)

    def _cmd(self, text: str) -> None:
        self.command = json.loads(text)

    # --- docker run, apptainer exec and run -----------------------------------------------------------------------

    def docker(self, words: Sequence[str], timeout: float = 300) -> subprocess.CompletedProcess[str]:
        """Carry out a `docker run` command; GPUs there are none, and the network is cut off."""
        parser = argparse.ArgumentParser()
        for option in ("--rm", "--read-only"):
            parser.add_argument(option, action="store_true")
        for option in ("--gpus", "--user"):
            parser.add_argument(option)
        parser.add_argument("--tmpfs", default="")
        parser.add_argument("--shm-size", default="64m")
        for option in ("-v", "-e"):
            parser.add_argument(option, action="append", default=[])
        parser.add_argument("image")
        parser.add_argument("command", nargs=argparse.REMAINDER)
        assert list(words[:2]) == ["docker", "run"]
        options = parser.parse_args(words[2:])
        temporary, _, mode = options.tmpfs.partition(":")
        assert temporary in ("", "/tmp")
        return self.enter(
            [*self.entrypoint, *(options.command or self.command)],
            {"HOME": "/", **self.variables, **dict(item.split("=", 1) for item in options.e)},
            user=options.user or self.user,
            folder=self.folder,
            binds=[(*item.split(":"), "rw") for item in options.v],
            access="ro" if options.read_only else "rw",
            temporary=(mode or "noexec") if temporary else "",  # as Docker mounts it
            shared=options.shm_size,
            network=False,
            timeout=timeout,
        )

    def apptainer(
        self, words: Sequence[str], user: str, home: Path, variables: Mapping[str, str], timeout: float = 300
    ) -> subprocess.CompletedProcess[str]:
        """Carry out `apptainer exec` or `run`: the caller's user, environment and home, and a read-only image."""
        parser = argparse.ArgumentParser()
        parser.add_argument("--nv", action="store_true")
        parser.add_argument("image")
        parser.add_argument("command", nargs=argparse.REMAINDER)
        assert words[0] == "apptainer" and words[1] in ("exec", "run")
        options = parser.parse_args(words[2:])
        command = [
            "grpo" if word.endswith("/bin/grpo") else word for word in options.command
        ]  # as ``documented`` says it
        if words[1] == "run":
            command = ["/bin/sh", "-c", "\n".join(sections()["runscript"]), "runscript", *command]
        return self.enter(
            command,
            {**variables, "HOME": str(home)},
            user=user,
            folder=str(home),
            binds=[(str(home), str(home), "rw")],
            access="ro",
            temporary="exec",
            network=False,
            timeout=timeout,
        )

    def enter(
        self,
        command: Sequence[str],
        variables: Mapping[str, str],
        *,
        user: str = "0:0",
        folder: str | None = None,
        binds: Sequence[tuple[str, ...]] = (),
        access: str = "rw",
        temporary: str = "",
        shared: str = "1g",
        network: bool = True,
        timeout: float = 300,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command in the root as process 1 of a new namespace, like Docker."""
        mounts = [word for bind in binds for word in bind]
        enter = ["bash", "-c", _ENTER, "enter", str(self.root), access, temporary, shared, *mounts, "--"]
        inside = ["chroot", f"--userspec={user}", "--groups=", str(self.root)]
        inside += ["env", "-i", f"--chdir={folder or self.folder}"]
        inside += [f"{name}={value}" for name, value in {"PATH": PATH, **variables}.items()]
        argv = [*_APART, *enter, *inside, *command]
        argv = argv if network else without_network(*argv)
        return subprocess.run(argv, capture_output=True, text=True, timeout=timeout, stdin=subprocess.DEVNULL)


def _files(path: Path) -> list[Path]:
    return [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
