"""A real server of two replicas: it trains, none may be stale, and one that is lost or hangs is replaced."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import requests
from one_by_one import Bench
from real_runs import LEARNS, Launch, same_rows, weights_hash
from test_server_restarts import HUNG, SHORT, Places

from grpo_recipes.runs.rundir import read_metrics
from grpo_recipes.weights.sampling import sampling_seed

REPLICAS = ("--vllm_data_parallel_size", "2")
NOISE = random.Random(5)
PROMPTS = [[NOISE.randrange(5, 20) for _ in range(NOISE.randrange(4, 40))] for _ in range(9)]
LONG = {"n": 4, "max_tokens": 16, "generation_kwargs": {"ignore_eos": True}}


def engines_of(run: Launch) -> dict[str, psutil.Process]:
    """Return the server's engines by their names, which vLLM gives its processes."""
    children = psutil.Process(run.pid_of("server")).children(recursive=True)
    return {child.name().removeprefix("VLLM::"): child for child in children if "EngineCore" in child.name()}


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_killed_replica_and_a_stop_change_nothing(launch: Callable[..., Launch]) -> None:
    """The smoke recipe, once with a replica killed and a stop and once without: both learn, to the same bits."""
    places = Places()
    run = launch(*REPLICAS, *LEARNS, *places.keys)
    run.wait_for_step(2)
    places.note(run)
    engines = engines_of(run)
    assert engines.keys() == {"EngineCore_DP0", "EngineCore_DP1"}
    engines["EngineCore_DP1"].kill()
    run.wait_for(lambda: "only the server is started again (1 of 2)" in run.output, "another server")
    assert f"the vLLM engine process EngineCore_DP1 (pid {engines['EngineCore_DP1'].pid}) died or was" in run.output
    run.wait_for_step(len(run.rows()) + 1)
    run.process.terminate()

    assert run.wait() == 75, run.output
    assert run.processes() == []
    places.assert_left()
    resumed = launch("--resume", str(run.run_dir), by_exec=True)
    assert resumed.wait(600) == 0, resumed.output
    summary = run.summary()
    assert (summary["status"], summary["restarts"]) == ("completed", 1)
    assert summary["final_reward"] >= 0.85
    differences = [row["sampling/sampling_logp_difference/mean"] for row in run.rows()]
    assert len(differences) == 30 and max(differences) < 1e-4

    expected = launch(*REPLICAS, *LEARNS, folder="uninterrupted")
    assert expected.wait(600) == 0, expected.output
    assert same_rows(run, expected) and weights_hash(run) == weights_hash(expected)
    loads = Counter(re.findall(r"^\(Worker pid=(\d+)\) .*grpo: weights loaded", expected.log("server"), re.MULTILINE))
    assert [*loads.values()] == [30, 30]


@pytest.mark.slow
def test_a_hung_replica_is_named_and_its_server_is_replaced(launch: Callable[..., Launch]) -> None:
    """The other replica goes on, so only the server's stall timeout ends the wait for the missing completions."""
    places = Places()
    run = launch(*SHORT, *REPLICAS, *HUNG, *places.keys)
    run.wait_for_step(1)
    engine = engines_of(run)["EngineCore_DP1"]
    engine.suspend()
    assert run.wait(600) == 0, run.output
    stall = r"the vLLM server has made no token for \d+ s \(server_stall_timeout 20\)(; stacks of .*)?"
    named = rf"; stopped by a signal \(SIGSTOP\): pid {engine.pid} \(EngineCore_DP1\)"
    assert re.search(stall + named + r": only the server is started again \(1 of 2\)", run.output), run.output
    summary = run.summary()
    assert (summary["status"], summary["server_restarts"], summary["restarts"]) == ("completed", 1, 0)
    assert len(run.rows()) == 6 and run.processes() == []
    places.assert_left()


@pytest.mark.slow
def test_a_stale_replica_stops_the_run_and_the_replica_decides_no_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(tmp_path, *REPLICAS).joined(monkeypatch)
    folder = str(Path(__file__).parent)
    with bench.server(extension="fake_stale_replica.StaleReplica", PYTHONPATH=folder) as url:
        client = bench.client(url)
        assert client.get_world_size() == 2  # the members of a group for NCCL besides the trainer
        seeds = [sampling_seed(7, "train/1", index) for index in range(len(PROMPTS))]
        first = client.generate_seeded(PROMPTS, seeds, logprobs=0, **LONG)
        shares = tokens_of_replicas(url, client)
        assert shares == [5 * 4 * 16, 4 * 4 * 16]
        bench.client(url, seed=None).generate([[*PROMPTS[3], 7], PROMPTS[2]], n=3, max_tokens=7)  # vLLM places it
        assert client.generate_seeded(PROMPTS, seeds, logprobs=0, **LONG) == first  # log-probs to the last bit

        # Each prompt on the other replica: the same tokens.
        moved = client.generate_seeded(PROMPTS[1:], seeds[1:], logprobs=0, **LONG)
        assert moved["completion_ids"] == first["completion_ids"][4:]

        code, output = bench.train()

    assert code != 0, output
    (cause,) = bench.causes()
    assert "WeightsDiffer: weights did not reach the server through the 'file' bridge: replica 1: after the" in cause
    assert "replica 1: it has the weights of sync 2, and the trainer sent sync 3; step 2 was not taken" in cause
    assert "replica 0" not in cause and len(read_metrics(bench.run_dir)) == 2


def tokens_of_replicas(url: str, client: Any) -> list[int]:
    """Return the number of tokens that each replica has generated."""
    headers = {"Authorization": client.session.headers["Authorization"]}
    metrics = requests.get(f"{url}/metrics", headers=headers, timeout=60).text
    pattern = r'^vllm:generation_tokens_total{engine="(\d)".*} (\S+)$'
    return [int(float(count)) for _, count in sorted(re.findall(pattern, metrics, re.MULTILINE))]
