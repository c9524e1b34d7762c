"""Run a vLLM server for a model while a block of code runs, without a plan and trainers.

with serving(recipe, "runs/my-run/model", os.environ) as server:
    client = CompletionClient(server.url, model=server.name, token=server.token, owner=server.owner)
"""

from __future__ import annotations

import functools
import os
import secrets
import signal
import socket
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from grpo_recipes.errors import config_error
from grpo_recipes.launch.processes import read_last_lines
from grpo_recipes.launch.readiness import NotReady, wait_until_ready
from grpo_recipes.plan.commands import base_environment, run_environment, server_command, server_environment
from grpo_recipes.plan.devices import find_resources
from grpo_recipes.plan.ports import LOOPBACK
from grpo_recipes.process.listeners import OwnListener
from grpo_recipes.process.scratch import Scratch, make_scratch
from grpo_recipes.process.tree import descendants, die_with_parent, end_all
from grpo_recipes.recipe import Recipe


class ServerFailed(RuntimeError):
    """The server did not start; the message contains the last lines of its log."""


@dataclass(frozen=True)
class Server:
    """A server that is ready."""

    url: str
    name: str  # name of its model in requests
    token: str  # token that requests need
    owner: OwnListener  # checks that this server listens at the URL


@contextmanager
def serving(recipe: Recipe, model: str, environment: Mapping[str, str]) -> Iterator[Server]:
    """Start a vLLM server for ``model``, a local folder or a hub id, and yield it when it is ready.

    The server listens on the loopback address and has the server settings of ``recipe``. It ends with the block, or
    when this process dies. Ctrl-C does not reach it. Raise ServerFailed with the end of its log if it dies, or if it is
    not ready after ``vllm_server_timeout`` seconds, and ConfigError if it needs more GPUs than are visible.
    """
    name = f"chat-{secrets.token_hex(4)}"
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        port = int(probe.getsockname()[1])  # free now, but not reserved
    scratch = make_scratch(environment)
    log = scratch.disk / "server.log"
    try:
        process = _start_server(recipe, model, name, port, environment, scratch, log)
        try:
            limit, token = recipe.server.timeout, scratch.token_file.read_text()
            try:
                wait_until_ready(lambda: process.poll() is None, process.pid, LOOPBACK, port, name, token, limit)
            except NotReady as error:
                raise ServerFailed(f"{error}; the end of its log:\n{read_last_lines(log)}") from error
            yield Server(f"http://{LOOPBACK}:{port}", name, token, OwnListener(LOOPBACK, port, lambda: process.pid))
        finally:
            server_processes = descendants(process.pid)  # listed first, because orphans get another parent
            if process.poll() is None:
                server_processes.append(psutil.Process(process.pid))
            end_all(server_processes)
            process.wait()
    finally:
        scratch.remove()


def _start_server(
    recipe: Recipe, model: str, name: str, port: int, environment: Mapping[str, str], scratch: Scratch, log: Path
) -> subprocess.Popen[bytes]:
    """Start the server with its output in ``log``, and return its process. The server ends with this process.

    Create its run directory, ``run`` in the scratch folder on disk. Raise ConfigError if fewer GPUs are visible than
    ``vllm_tensor_parallel_size`` needs.
    """
    resources, parallel = find_resources(environment), recipe.server.tensor_parallel_size
    if resources.device == "cuda" and len(resources.gpus) < parallel:
        problem = f"vllm_tensor_parallel_size needs {parallel} GPUs, but {len(resources.gpus)} are visible"
        raise config_error("CUDA_VISIBLE_DEVICES", problem, "run this command on a node with enough GPUs")
    folder = scratch.disk / "run"
    folder.mkdir()
    variables = {
        **base_environment(environment),
        **run_environment(environment, scratch, folder, name),
        **server_environment(resources.device, None, environment),
        "CUDA_VISIBLE_DEVICES": ",".join(resources.gpus[:parallel]),
    }
    argv = server_command(recipe, model, name, LOOPBACK, port, resources.device)
    with log.open("wb") as output:
        return subprocess.Popen(
            argv, env=variables, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True,
            preexec_fn=functools.partial(die_with_parent, os.getpid(), signal.SIGTERM), pass_fds=scratch.locks,
        )  # fmt: skip
