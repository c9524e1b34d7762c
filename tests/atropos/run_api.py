"""The real run-api in a separate process, on a free port of 127.0.0.1."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import requests

from grpo_recipes.extensions.atropos.group import Group
from grpo_recipes.process.tree import die_with_parent

_START_SECONDS = 60.0
_STARTED = re.compile(r"Uvicorn running on http://127\.0\.0\.1:(\d+)")
REGISTRATION: dict[str, Any] = {
    "wandb_group": "", "wandb_project": "", "batch_size": 4, "max_token_len": 64, "checkpoint_dir": "",
    "save_checkpoint_interval": 0, "starting_step": 0, "num_steps": 10,
}  # fmt: skip


class RunApi:
    """A run-api process. ``restart`` starts an empty server at the same URL; ``reset`` clears most state fast."""

    def __init__(self, port: int = 0) -> None:
        with tempfile.NamedTemporaryFile(prefix="run-api-", suffix=".log", delete=False) as log:
            self._log = Path(log.name)
        self._session = requests.Session()
        self._session.trust_env = False
        self.port = port
        self._start()

    def _start(self) -> None:
        argv = [sys.executable, "-m", "atroposlib.cli.run_api", "--host", "127.0.0.1", "--port", str(self.port)]
        with self._log.open("wb") as log:
            parent = partial(die_with_parent, os.getpid())
            self.process = subprocess.Popen(argv, stdout=log, stderr=subprocess.STDOUT, preexec_fn=parent)
        deadline = time.monotonic() + _START_SECONDS
        while (started := _STARTED.search(self.log)) is None:
            assert self.process.poll() is None and time.monotonic() < deadline, self.log
            time.sleep(0.02)
        self.port = int(started[1])
        self.url = f"http://127.0.0.1:{self.port}"

    @property
    def log(self) -> str:
        """Return the output since the last start."""
        return self._log.read_text(errors="replace")

    def stop(self) -> None:
        """Kill the process. Clients get no connection until ``restart``."""
        self.process.kill()
        self.process.wait()

    def restart(self) -> None:
        """Start a new process at the same URL, without any registration."""
        self.stop()
        self._start()

    def close(self) -> None:
        """Kill the process and remove its log."""
        self.stop()
        self._session.close()
        self._log.unlink()

    def get(self, path: str, **keys: Any) -> requests.Response:
        """Send GET with a time limit."""
        return self._session.get(self.url + path, timeout=30, **keys)

    def post(self, path: str, body: Any) -> requests.Response:
        """POST ``body`` as JSON with a time limit."""
        return self._session.post(self.url + path, json=body, timeout=30)

    def reset(self) -> None:
        """Clear queue, environments and registration with ``/reset_data``; /batch is 500 until the next trainer."""
        assert self.get("/reset_data").ok

    def register(self, **changes: Any) -> None:
        """Register a trainer with ``REGISTRATION`` and these changes, and let environments join."""
        assert self.post("/register", {**REGISTRATION, **changes}).ok
        assert self.get("/batch").json() == {"batch": None}

    def register_env(self, group_size: int, **changes: Any) -> int:
        """Register an environment; return its id."""
        body = {"max_token_length": 64, "desired_name": "test", "weight": 1.0, "group_size": group_size, **changes}
        answer = self.post("/register-env", body).json()
        assert answer["status"] == "success", answer
        return answer["env_id"]


def post_groups(url: str, groups: Sequence[Group]) -> None:
    """Post groups to a run-api in order, like an environment."""
    for start in range(0, len(groups), 64):
        body = [group.to_json() for group in groups[start : start + 64]]
        answer = requests.post(f"{url}/scored_data_list", json=body, timeout=30)
        assert answer.ok, answer.text


@contextlib.contextmanager
def run_api(port: int = 0) -> Iterator[RunApi]:
    """Yield a running run-api and end it after the block."""
    api = RunApi(port)
    try:
        yield api
    finally:
        api.close()
