"""Read the launcher's description of the run's server, ``processes/server_state.json``.

Processes that send requests to the server read it. Its keys are ``epoch`` (the number of the server, since each restart
gets the next), ``state`` ("starting", "ready" or "gone"), ``url``, ``guard`` (the pid of the server's process guard on
the first node), and ``model`` if the trainer set one::

    {"epoch": 2, "state": "ready", "url": "http://127.0.0.1:8000", "guard": 4711}
"""

import os
from pathlib import Path
from urllib.parse import urlsplit

from grpo_recipes.process.listeners import OwnListener
from grpo_recipes.runs.rundir import load_json_mapping, read_json


def read_server_state(file: Path) -> tuple[int, str]:
    """Return epoch and state of the run's server from the file; (1, "ready") without it. ConfigError if damaged."""
    content = read_json(file) or {"epoch": 1, "state": "ready"}
    return int(content["epoch"]), str(content["state"])


def read_server_url(file: Path) -> str | None:
    """Return the server's address from the file, or None if the file or its address is missing.

    Read it again before a request: the address changes if another process takes the server's port.
    """
    url = (load_json_mapping(file) or {}).get("url")
    return url if isinstance(url, str) else None


def server_listener(file: Path, url: str) -> OwnListener | None:
    """Return a check that the process listening at ``url`` belongs to the run's own server; None if it is not possible.

    Sockets of another node are not visible, and an external server has no process in this run.
    """
    if os.environ.get("GRPO_NODE", "0") != "0" or _read_guard_pid(file) is None:
        return None
    address = urlsplit(url)
    return OwnListener(address.hostname or "", address.port or 80, lambda: _read_guard_pid(file))


def _read_guard_pid(file: Path) -> int | None:
    """Return the pid of the server's process guard from the file, or None."""
    pid = (load_json_mapping(file) or {}).get("guard")
    return pid if isinstance(pid, int) else None
