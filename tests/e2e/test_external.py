"""A training through a real vLLM server that the launch did not start."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import bridge_cells
import pytest
import requests
from documented import documented
from real_runs import REPOSITORY, Launch, clean_environment, smoke_model

from grpo_recipes.process.tree import descendants, die_with_parent, end_all

MODE = "VLLM_SERVER_DEV_MODE=1"
ON_CPU = ("--dtype", "float32", "--max-model-len", "256", "--enforce-eager")
SHORT = ("--prompts_per_step", "8", "--num_generations", "8", "--save_steps", "100", "--max_steps", "3")
SETUPS = {
    **{name: (*bridge_cells.TWO, "--accelerator", name) for name in ("ddp", "zero2", "zero3", "fsdp2")},
    "lora": bridge_cells.LORA,
}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def server_words(port: int) -> list[str]:
    module = ("-m", "vllm.entrypoints.launchers.api_server.entry")
    return ["env", MODE, sys.executable, *module, "--model", smoke_model(), "--port", str(port)]


def start(folder: Path, port: int, development: bool = True) -> subprocess.Popen[bytes]:
    """Start a plain vLLM as a user does, and wait until it answers."""
    words = [*(word for word in server_words(port) if development or word != MODE), *ON_CPU]
    environment = clean_environment(folder, f"external-{port}", VLLM_CPU_KVCACHE_SPACE="1", TORCHDYNAMO_DISABLE="1")
    environment.pop("GRPO_RUN", None)
    with (folder / "server.log").open("wb") as log:
        ends_with_us = partial(die_with_parent, os.getpid(), signal.SIGKILL)
        process = subprocess.Popen(words, env=environment, stdout=log, stderr=log, preexec_fn=ends_with_us)
    deadline = time.monotonic() + 400
    while True:
        try:
            if requests.get(f"http://127.0.0.1:{port}/v1/models", timeout=5).ok:
                return process
        except requests.RequestException:
            assert process.poll() is None and time.monotonic() < deadline, (folder / "server.log").read_text()
            time.sleep(1)


def end(process: subprocess.Popen[bytes]) -> None:
    everything = descendants(process.pid)
    process.kill()
    process.wait()
    end_all(everything)


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    number = free_port()
    process = start(tmp_path_factory.mktemp("server"), number)
    yield number
    end(process)


def places(port: int) -> dict[str, str]:
    """Return the words of the page that differ here."""
    return {
        "recipes/smoke/grpo.yaml": str(REPOSITORY / "recipes/smoke/grpo.yaml"), "MODEL": smoke_model(),
        "http://127.0.0.1:30000": f"http://127.0.0.1:{port}",
    }  # fmt: skip


def flags(port: int) -> list[str]:
    address = ("--vllm_server_base_url", f"http://127.0.0.1:{port}")
    return [str(REPOSITORY / "recipes/smoke/grpo.yaml"), "--model_name_or_path", smoke_model(), *address]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_smoke_recipe_trains_through_an_external_server(launch: Callable[..., Launch], port: int) -> None:
    started = "VLLM_SERVER_DEV_MODE=1 python -m vllm.entrypoints.launchers.api_server.entry --model MODEL --port 30000"
    replacements = {"MODEL": smoke_model(), "30000": str(port), "python": sys.executable}
    assert documented(started, replacements) == server_words(port)  # the fixture's command
    shown = (
        "grpo launch recipes/smoke/grpo.yaml --model_name_or_path MODEL --vllm_server_base_url http://127.0.0.1:30000"
    )
    words = documented(shown, places(port))[2:]
    assert words == flags(port)
    run = launch(*words, "--max_steps", "8")  # such a server waits in loops: each step takes seconds of a processor
    assert run.wait(600) == 0, run.output
    differences = [row["sampling/sampling_logp_difference/mean"] for row in run.rows()]
    assert len(differences) == 8 and max(differences) < 1e-4
    assert requests.get(f"http://127.0.0.1:{port}/v1/models", timeout=5).ok  # it is not ours to end


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("setup", SETUPS)
def test_the_server_has_the_weights_of_every_step(launch: Callable[..., Launch], port: int, setup: str) -> None:
    run = launch(*flags(port), *SHORT, *SETUPS[setup])
    assert run.wait(500) == 0, run.output
    rows = run.rows()
    assert len(rows) == 3 and all(row["grad_norm"] > 0 for row in rows)
    assert all(row["sampling/sampling_logp_difference/mean"] < 1e-4 for row in rows)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_server_that_takes_no_weights_and_one_that_is_gone_are_refused(
    launch: Callable[..., Launch], tmp_path: Path
) -> None:
    number = free_port()
    (tmp_path / "plain").mkdir()
    process = start(tmp_path / "plain", number, development=False)
    try:
        refused = launch(*flags(number))
        assert refused.wait(200) == 2, refused.output
        assert "can't load new weights" in refused.output and MODE in refused.output
        assert not list((refused.folder / "runs").glob("*"))
    finally:
        end(process)
    gone = launch(*flags(number))
    assert gone.wait(200) == 2, gone.output
    assert f"no server answers at http://127.0.0.1:{number}" in gone.output


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_whose_server_dies_ends_with_the_cause(launch: Callable[..., Launch], tmp_path: Path) -> None:
    number = free_port()
    process = start(tmp_path, number)
    try:
        run = launch(*flags(number), "--max_steps", "2000", "--server_request_timeout", "20")
        run.wait_for_step(3)
    finally:
        end(process)
    assert run.wait(200) == 1, run.output
    assert "server" in run.summary()["cause"], run.summary()
    assert run.processes() == []
