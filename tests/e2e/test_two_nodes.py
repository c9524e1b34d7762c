"""One run on both nodes of a real Slurm: the server on the first, trainers on both."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import bridge_cells
import psutil
import pytest
from documented import documented
from real_runs import REPOSITORY, Launch, clean_environment, override
from slurm_cluster import SlurmCluster
from test_slurm_run import FEWER, wait_until

SHORT = ("--max_steps", "3", "--prompts_per_step", "8", "--num_generations", "8", "--save_steps", "100")


def submit(
    slurm: SlurmCluster, folder: Path, mark: str, *flags: str, words: Sequence[str] = ("", "--nodes=2", "training.sh")
) -> tuple[int, Launch]:
    environment = clean_environment(folder, mark, ENV_DIR=sys.prefix)
    job = slurm.sbatch(*words[1:], *flags, "--run_name", mark, cwd=REPOSITORY, env=environment)
    return job, Launch(None, folder, REPOSITORY, mark)  # type: ignore[arg-type]


def read_rank_records(run: Launch) -> list[dict]:
    return [json.loads(path.read_text()) for path in sorted((run.run_dir / "processes").glob("rank_*.json"))]


def said(job: int) -> str:
    return "".join((REPOSITORY / "logs" / f"slurm_{job}.{end}").read_text() for end in ("out", "err"))


@pytest.mark.slow
def test_the_update_of_two_nodes_is_that_of_the_joined_batch(
    slurm: SlurmCluster, launch: Callable[..., Launch], tmp_path: Path
) -> None:
    shown = "sbatch --nodes=2 --gres=gpu:8 --cpus-per-task=64 --mem=256G training.sh"
    words = documented(shown, FEWER, fake="the GPUs")
    job, run = submit(slurm, tmp_path, "two-nodes", *SHORT, words=words)

    slurm.wait(job, "COMPLETED", timeout=300)

    plan = json.loads((run.run_dir / "plan.json").read_text())
    assert [(process["role"], process["node"]) for process in plan["processes"]] == [
        ("server", 0),
        ("trainer", 0),
        ("trainer", 1),
    ]
    assert [record["node"] for record in read_rank_records(run)] == [0, 1]
    rows = run.rows()
    assert [row["step"] for row in rows] == [1, 2, 3]  # one curve
    assert run.processes() == []

    one_node = launch(*SHORT, "--num_processes", "2", "--run_name", "one-node", folder="one-node")
    assert one_node.wait() == 0, one_node.output
    assert [row["reward"] for row in one_node.rows()] == [row["reward"] for row in rows]
    threads = json.loads((one_node.run_dir / "plan.json").read_text())["threads"]
    assert difference(one_node, run) <= (0.0 if threads == plan["threads"] else 1e-5)

    joined = launch(*SHORT, "--num_processes", "1", "--run_name", "joined", folder="joined")
    assert joined.wait() == 0, joined.output
    # Had the ranks taken the same prompts, Adam would have moved the weights by the learning rate, 3e-4, otherwise.
    assert [row["reward"] for row in joined.rows()] == pytest.approx([row["reward"] for row in rows], abs=1e-6)
    assert difference(joined, run) < 1e-5


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("bridge", "keys"), [("file", ()), ("lora", bridge_cells.LORA), ("restart", ())])
def test_a_server_alone_on_its_node_gets_the_weights_of_the_other(
    slurm: SlurmCluster, tmp_path: Path, bridge: str, keys: tuple[str, ...]
) -> None:
    job, run = submit(slurm, tmp_path, f"apart-{bridge}", *SHORT, "--vllm_node", "own", "--weight_sync", bridge, *keys)

    slurm.wait(job, "COMPLETED", timeout=600)

    plan = json.loads((run.run_dir / "plan.json").read_text())
    assert [(process["role"], process["node"]) for process in plan["processes"]] == [("server", 0), ("trainer", 1)]
    assert plan["server_apart"] and plan["bridge"] == bridge
    rows = run.rows()
    assert len(rows) == 3 and all(row["sampling/sampling_logp_difference/mean"] < 1e-4 for row in rows)
    assert run.processes() == []


@pytest.mark.slow
def test_a_rank_killed_on_the_other_node_ends_the_run_and_is_named(slurm: SlurmCluster, tmp_path: Path) -> None:
    job, run = submit(slurm, tmp_path, "two-nodes-killed", "--max_steps", "100000")
    slurm.wait(job, "RUNNING", timeout=60)
    wait_until(lambda: run.has_run_dir() and len(run.rows()) >= 2, timeout=180)
    ranks = read_rank_records(run)
    folders = [node_folders(record["pid"]) for record in ranks]
    assert len({folder for node in folders for folder in node}) == 4, "each node has its own TMPDIR and shm folder"
    assert all(folder.is_dir() for node in folders for folder in node)

    os.kill(ranks[1]["pid"], signal.SIGKILL)

    slurm.wait(job, "FAILED", timeout=30)
    summary = run.summary()
    assert summary["cause"] == f"rank 1 (pid {ranks[1]['pid']} on node 1) was killed by signal 9", said(job)
    assert (summary["failed_rank"], summary["exit_code"]) == (1, 137)
    wait_until(lambda: not run.processes(), timeout=10)
    assert not any(folder.exists() for node in folders for folder in node)


def node_folders(pid: int) -> list[Path]:
    variables = psutil.Process(pid).environ()
    return [Path(variables["TMPDIR"]), Path(variables["GRPO_SYNC_DIR"])]


def weights(run: Launch) -> dict:
    from safetensors.torch import load_file

    return load_file(run.run_dir / "model" / "model.safetensors")


def difference(run: Launch, other: Launch) -> float:
    """Return the largest difference between the final weights of two runs."""
    run_weights, other_weights = weights(run), weights(other)
    return max(float((run_weights[name] - other_weights[name]).abs().max()) for name in run_weights)


REPLICAS = ("--vllm_data_parallel_size", "2", "--vllm_data_parallel_size_local", "1")


def server_logs(run: Launch) -> list[str]:
    plan = json.loads((run.run_dir / "plan.json").read_text())
    logs = [process["log"] for process in plan["processes"] if process["role"] == "server"]
    return [(REPOSITORY / log).read_text(errors="replace") for log in logs]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("bridge", "keys"), [("file", ()), ("lora", bridge_cells.LORA), ("restart", ())])
def test_a_server_of_two_nodes_gets_the_weights_on_both(
    slurm: SlurmCluster, tmp_path: Path, bridge: str, keys: tuple[str, ...]
) -> None:
    """The weight guard compares the weights of both replicas after each sync."""
    job, run = submit(slurm, tmp_path, f"spread-{bridge}", *SHORT, *REPLICAS, "--weight_sync", bridge, *keys)

    slurm.wait(job, "COMPLETED", timeout=800)

    plan = json.loads((run.run_dir / "plan.json").read_text())
    placed = [(process["role"], process["node"]) for process in plan["processes"]]
    assert placed == [("server", 0), ("server", 1), ("trainer", 0), ("trainer", 1)]
    assert (plan["replicas"], plan["server_nodes"]) == (2, 2)
    rows = run.rows()
    assert len(rows) == 3 and all(row["sampling/sampling_logp_difference/mean"] < 1e-4 for row in rows)
    if bridge == "file":
        assert [log.count("grpo: weights loaded") for log in server_logs(run)] == [3, 3]
    assert run.processes() == []


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_an_engine_killed_on_the_other_node_is_named_and_the_server_replaced(
    slurm: SlurmCluster, tmp_path: Path
) -> None:
    job, run = submit(slurm, tmp_path, "spread-killed", *override(SHORT, max_steps=6), *REPLICAS)
    slurm.wait(job, "RUNNING", timeout=60)
    wait_until(lambda: run.has_run_dir() and len(run.rows()) >= 1, timeout=400)
    children = psutil.Process(run.pid_of("server_1")).children(recursive=True)
    (engine,) = [child for child in children if child.name() == "VLLM::EngineCore_DP1"]

    engine.kill()

    slurm.wait(job, "COMPLETED", timeout=400)
    named = f"the vLLM engine process EngineCore_DP1 on node 1 (pid {engine.pid}) died or was killed"
    assert f"{named}: only the server is started again (1 of 2)" in said(job)
    summary = run.summary()
    assert (summary["status"], summary["server_restarts"], len(run.rows())) == ("completed", 1, 6)
    assert run.processes() == []
