"""The run's server as the launcher describes it in ``processes/server_state.json``, for processes that send requests.

The file has its ``epoch`` (every server that is started gets the next), its ``state`` ("starting", "ready" or "gone"),
its ``url``, ``guard``, the pid of its process guard on the first node, and ``model`` if the trainer gave it one::

    {"epoch": 2, "state": "ready", "url": "http://127.0.0.1:8000", "guard": 4711}
"""

import os
from pathlib import Path
from urllib.parse import urlsplit

from grpo_recipes.process.listeners import OwnListener
from grpo_recipes.runs.rundir import json_mapping, read_json


def server_state(file: Path) -> tuple[int, str]:
    """Return epoch and state of the run's server; without the file it is the first one and ready."""
    content = read_json(file) or {"epoch": 1, "state": "ready"}
    return int(content["epoch"]), str(content["state"])


def server_url(file: Path) -> str | None:
    """Return the server's address, which changes if another process takes its port; None if none is recorded."""
    url = (json_mapping(file) or {}).get("url")
    return url if isinstance(url, str) else None


def server_listener(file: Path, url: str) -> OwnListener | None:
    """Return what tells whether the run's own server listens at ``url``; None if this process cannot know.

    The sockets of another node cannot be seen, and a server that no launcher describes has no owner.
    """
    if os.environ.get("GRPO_NODE", "0") != "0" or _guard(file) is None:
        return None
    address = urlsplit(url)
    return OwnListener(address.hostname or "", address.port or 80, lambda: _guard(file))


def _guard(file: Path) -> int | None:
    pid = (json_mapping(file) or {}).get("guard")
    return pid if isinstance(pid, int) else None
