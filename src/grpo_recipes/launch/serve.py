"""A vLLM server for one model, for as long as a command runs: no plan, no trainers, nothing left behind."""

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
from grpo_recipes.launch.processes import tail
from grpo_recipes.plan.commands import base_environment, run_environment, server_command, server_environment
from grpo_recipes.plan.devices import find_resources
from grpo_recipes.plan.ports import LOOPBACK, NotReady, wait_until_ready
from grpo_recipes.process.listeners import OwnListener
from grpo_recipes.process.scratch import Scratch, make_scratch
from grpo_recipes.process.tree import descendants, die_with_parent, end_all
from grpo_recipes.recipe import Recipe


class ServerFailed(RuntimeError):
    """The server did not start; the message has the last lines of its log."""


@dataclass(frozen=True)
class Server:
    """A server that is ready."""

    url: str
    name: str  # of its model
    token: str  # that its requests need
    owner: OwnListener  # tells whether this server listens at the url


@contextmanager
def serving(recipe: Recipe, model: str, environment: Mapping[str, str]) -> Iterator[Server]:
    """Serve ``model``, a folder or a hub id, on the loopback with the server's keys of ``recipe``.

    The server ends with the block, and with this process however that ends. Ctrl-C does not reach it.
    """
    name, port = f"chat-{secrets.token_hex(4)}", _free_port()
    scratch = make_scratch(environment)
    log = scratch.disk / "server.log"
    try:
        process = _start(recipe, model, name, port, environment, scratch, log)
        try:
            limit, token = recipe["vllm_server_timeout"], scratch.token.read_text()
            try:
                wait_until_ready(lambda: process.poll() is None, process.pid, LOOPBACK, port, name, token, limit)
            except NotReady as error:
                raise ServerFailed(f"{error}; the end of its log:\n{tail(log)}") from error
            yield Server(f"http://{LOOPBACK}:{port}", name, token, OwnListener(LOOPBACK, port, lambda: process.pid))
        finally:
            everything = descendants(process.pid)  # before it ends: they would have another parent
            if process.poll() is None:
                everything.append(psutil.Process(process.pid))
            end_all(everything)
            process.wait()
    finally:
        scratch.remove()


def _start(
    recipe: Recipe, model: str, name: str, port: int, environment: Mapping[str, str], scratch: Scratch, log: Path
) -> subprocess.Popen[bytes]:
    resources, parallel = find_resources(environment), recipe["vllm_tensor_parallel_size"]
    if resources.device == "cuda" and len(resources.gpus) < parallel:
        what = f"{parallel} GPUs are needed (vllm_tensor_parallel_size), {len(resources.gpus)} are visible here"
        raise config_error("CUDA_VISIBLE_DEVICES", what, "run this where there are GPUs")
    folder = scratch.disk / "run"
    folder.mkdir()
    variables = {
        **base_environment(environment),
        **run_environment(environment, scratch, folder, name),
        **server_environment(resources.device, None, os.environ),
        "CUDA_VISIBLE_DEVICES": ",".join(resources.gpus[:parallel]),
    }
    argv = server_command(recipe, model, name, LOOPBACK, port, resources.device)
    with log.open("wb") as output:
        return subprocess.Popen(
            argv, env=variables, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True,
            preexec_fn=functools.partial(die_with_parent, os.getpid(), signal.SIGTERM), pass_fds=scratch.locks,
        )  # fmt: skip


def _free_port() -> int:
    with socket.socket() as free:
        free.bind((LOOPBACK, 0))
        return int(free.getsockname()[1])
