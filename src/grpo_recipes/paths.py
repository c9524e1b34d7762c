"""Find the code, its caches and existing folders, format paths for messages and commands, and check file locks."""

import contextlib
import fcntl
import os
import shlex
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

CODE_VARIABLE = "GRPO_CODE"


def find_code_root() -> Path:
    """Return the folder of the running code: GRPO_CODE of a frozen run, else GRPO_HOME, else the installed tree."""
    folder = os.environ.get(CODE_VARIABLE) or os.environ.get("GRPO_HOME")
    return Path(folder or Path(__file__).resolve().parents[2])


def cache_root(environment: Mapping[str, str]) -> Path:
    """Return the folder of downloads and the smoke model, absolute: CACHE_ROOT, or ``.cache`` in the repository."""
    return Path(environment.get("CACHE_ROOT") or find_code_root() / ".cache").absolute()


def display_path(path: Path | str) -> str:
    """Return ``path`` as text for a message: relative if it is below the working folder, else unchanged."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative


def shell_quote(text: Path | str) -> str:
    """Return a word quoted for a command on one line; bash reads it back unchanged, including control characters."""
    text = str(text)
    if text.isprintable():
        return shlex.quote(text)
    return f"$'{''.join(_escape_in_ansi_quotes(char) for char in text)}'"


def _escape_in_ansi_quotes(char: str) -> str:
    """Return a character as bash reads it in ``$'...'``: with a backslash if needed, or as its bytes in hex."""
    if char.isprintable():
        return f"\\{char}" if char in "\\'" else char
    return "".join(f"\\x{byte:02x}" for byte in os.fsencode(char))


def shell_path(path: Path | str) -> str:
    """Return ``path`` quoted for a shell command, relative if it is below the working folder."""
    return shell_quote(display_path(path))


def module_command(name: str, *arguments: str) -> list[str]:
    """Return the command that runs a module with this Python, without imports from the working folder (``-P``)."""
    return [sys.executable, "-P", "-m", name, *arguments]


def nearest_existing_folder(path: Path) -> Path:
    """Return ``path`` if it exists, else its nearest existing parent."""
    return next(folder for folder in (path, *path.parents) if folder.exists())


def sort_newest_first(paths: Iterable[Path]) -> list[Path]:
    """Return the existing paths, the latest modification first."""
    times = {}
    for path in paths:
        with contextlib.suppress(OSError):  # removed in the meantime
            times[path] = path.stat().st_mtime
    return sorted(times, key=times.__getitem__, reverse=True)


def is_locked(path: Path) -> bool:
    """Return whether a process, even in another container, locks a file exclusively. False if it can't be read."""
    try:
        with path.open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False
