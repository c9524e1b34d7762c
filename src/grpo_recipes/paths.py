"""Where the code and its caches are, how a path is shown, and whether a file is locked."""

import contextlib
import fcntl
import os
import shlex
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

CODE_VARIABLE = "GRPO_CODE"


def home() -> Path:
    """Return the code that runs: GRPO_CODE of a frozen run, else GRPO_HOME, else the tree that was installed."""
    given = os.environ.get(CODE_VARIABLE) or os.environ.get("GRPO_HOME")
    return Path(given or Path(__file__).resolve().parents[2])


def cache_root(environment: Mapping[str, str]) -> Path:
    """Return where downloads and the smoke model live: CACHE_ROOT, or ``.cache`` in the repository."""
    return Path(environment.get("CACHE_ROOT") or home() / ".cache").absolute()


def display_path(path: Path | str) -> str:
    """Return ``path`` as a person would type it: relative to the working folder where that is shorter."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative


def shell_quote(text: Path | str) -> str:
    """Return a word of a command as one line that bash reads back as it was, control characters included."""
    text = str(text)
    if text.isprintable():
        return shlex.quote(text)
    return f"$'{''.join(_in_ansi_quotes(char) for char in text)}'"


def _in_ansi_quotes(char: str) -> str:
    if char.isprintable():
        return f"\\{char}" if char in "\\'" else char
    return "".join(f"\\x{byte:02x}" for byte in os.fsencode(char))


def shell_path(path: Path | str) -> str:
    """Return ``path`` as a person would type it in a command."""
    return shell_quote(display_path(path))


def python_module(name: str, *arguments: str) -> list[str]:
    """Return the command that runs a module in this Python; a ``yaml.py`` in the working folder is not imported."""
    return [sys.executable, "-P", "-m", name, *arguments]


def nearest_existing_folder(path: Path) -> Path:
    """Return ``path``, or its nearest parent that exists."""
    return next(folder for folder in (path, *path.parents) if folder.exists())


def newest_first(paths: Iterable[Path]) -> list[Path]:
    """Return those of the paths that are still there, the one written last first."""
    written = {}
    for path in paths:
        with contextlib.suppress(OSError):  # removed meanwhile
            written[path] = path.stat().st_mtime
    return sorted(written, key=written.__getitem__, reverse=True)


def is_locked(path: Path) -> bool:
    """Return whether a living process holds a lock on a file, in whichever container it runs."""
    try:
        with path.open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False
