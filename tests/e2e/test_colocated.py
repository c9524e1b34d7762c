"""vLLM inside the training processes, on CPU: it learns, it is guarded, and processes add up to one."""

from __future__ import annotations

import importlib.util
import json
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from documented import documented
from real_runs import LEARNS, REPOSITORY, Launch, override, same_rows, weights_hash
from slurm_cluster import SlurmCluster
from test_distributed import assert_final_model_differs_from_the_first
from test_exact_ranks import copy_until
from test_two_nodes import difference, read_rank_records, submit

from grpo_recipes import smoke
from grpo_recipes.runs.rundir import read_json

COLOCATED = ("--vllm_mode", "colocate")
SMALL = ("--prompts_per_step", "8", "--num_generations", "8", "--max_steps", "3")
TWO = (*COLOCATED, *SMALL, "--num_processes", "2")


def assert_vllm_has_the_trainers_weights(run: Launch, steps: int) -> None:
    rows = run.rows()
    assert [row["step"] for row in rows] == list(range(1, steps + 1))
    assert all(0 <= row["sampling/sampling_logp_difference/mean"] < 1e-4 for row in rows)
    assert all(row["grad_norm"] > 0 for row in rows)


@pytest.mark.slow
@pytest.mark.parametrize(
    "sharing",
    [
        pytest.param(("--accelerator", "ddp"), id="ddp"),
        pytest.param(("--accelerator", "zero2"), id="zero2"),
        pytest.param(("--accelerator", "zero3"), id="zero3"),
        pytest.param(("--accelerator", "fsdp2"), id="fsdp2"),
        pytest.param(("--use_peft", "true", "--lora_target_modules", "all-linear"), id="lora"),
        pytest.param(("--vllm_tensor_parallel_size", "2"), id="tensor-parallel"),
    ],
)
def test_two_processes_sample_with_the_weights_they_train(launch: Callable[..., Launch], sharing: tuple) -> None:
    run = launch(*TWO, *sharing, "--save_steps", "2")

    assert run.wait() == 0, run.output

    assert_vllm_has_the_trainers_weights(run, 3)
    assert "Traceback" not in run.log("trainer")
    assert_final_model_differs_from_the_first(run, read_json(run.run_dir / "plan.json")["model"])


@pytest.mark.slow
def test_config_file_replaces_the_packaged_accelerate_file(launch: Callable[..., Launch], tmp_path: Path) -> None:
    spec = importlib.util.find_spec("trl")  # found, not imported: TRL changes the environment of whoever imports it
    assert spec is not None and spec.origin is not None
    mine = tmp_path / "mine.yaml"
    mine.write_text((Path(spec.origin).parent / "accelerate_configs" / "zero2.yaml").read_text())
    run = launch(*TWO, CONFIG_FILE=str(mine))

    assert run.wait() == 0, run.output

    plan = read_json(run.run_dir / "plan.json")
    assert plan["accelerator"] == "custom" and str(mine) in plan["processes"][0]["argv"]
    assert list(run.run_dir.glob("checkpoints/*/zero_to_fp32.py"))  # DeepSpeed writes it
    assert_vllm_has_the_trainers_weights(run, 3)


@pytest.mark.slow
def test_the_smoke_recipe_learns_without_a_server(launch: Callable[..., Launch]) -> None:
    shown = "grpo launch recipes/smoke/grpo.yaml --vllm_mode colocate --num_processes 2"
    words = documented(shown, {"recipes/smoke/grpo.yaml": str(REPOSITORY / "recipes/smoke/grpo.yaml")})
    run = launch(*words[2:], *LEARNS)

    assert run.wait() == 0, run.output

    summary = run.summary()
    assert summary["initial_reward"] <= 0.7 and summary["final_reward"] >= 0.85
    assert_vllm_has_the_trainers_weights(run, 30)
    assert run.processes() == []


@pytest.mark.slow
def test_the_door_trains_the_smoke_recipe(launch: Callable[..., Launch]) -> None:
    shown = "python run_colocated_grpo.py --gpus 2"
    python = sys.executable  # the door looks for the environment itself
    door = documented(shown, {"python": python, "run_colocated_grpo.py": str(REPOSITORY / "run_colocated_grpo.py")})
    options = ("--log-level", "DEBUG", "--redirect-output", "training.log", "--max_steps", "6")
    run = launch(command=[*door, *options], by_exec=True, ENV_DIR=sys.prefix)
    run.wait_for_step(1)
    rank = psutil.Process(run.pid_of("rank_1")).environ()

    assert run.wait() == 0, run.output

    assert rank["TORCH_DISTRIBUTED_DEBUG"] == "INFO"
    assert run.output == "grpo: the output goes to training.log\n"
    printed = (run.folder / "training.log").read_text()
    assert "--num_processes 2 --log_level debug" in printed and "step 6/6" in printed
    (log,) = (run.folder / "logs").glob("*train*.log")
    assert "***** Running training *****" in log.read_text(errors="replace")  # a line that is not logged by default
    assert_vllm_has_the_trainers_weights(run, 6)
    assert run.processes() == []


@pytest.mark.slow
def test_the_door_trains_in_four_processes(launch: Callable[..., Launch]) -> None:
    shown = "python run_colocated_grpo.py --gpus 4 --dry-run"
    door = documented(shown, {"python": sys.executable, "run_colocated_grpo.py": f"{REPOSITORY}/run_colocated_grpo.py"})
    dry = launch(command=door, folder="dry", ENV_DIR=sys.prefix)
    assert dry.wait() == 0 and '"--num_processes", "4"' in dry.output and not dry.has_run_dir(), dry.output
    assert door.pop() == "--dry-run"

    run = launch(command=[*door, *override(SMALL, max_steps=2), "--save_strategy", "no"], ENV_DIR=sys.prefix)

    assert run.wait() == 0, run.output
    assert read_json(run.run_dir / "plan.json")["batch"]["world_size"] == 4
    ranks = [read_json(run.run_dir / "processes" / f"rank_{rank}.json") for rank in range(4)]
    assert len({record["pid"] for record in ranks}) == 4
    assert_vllm_has_the_trainers_weights(run, 2)
    assert run.processes() == []


@pytest.mark.slow
def test_tied_embeddings_in_files_of_another_dtype(launch: Callable[..., Launch], tmp_path: Path) -> None:
    smoke.main([str(tmp_path / "made"), "--dtype", "bfloat16", "--tie-word-embeddings"])
    run = launch(*COLOCATED, *SMALL, "--model_name_or_path", str(tmp_path / "made/model"))  # dtype: float32

    assert run.wait() == 0, run.output

    assert_vllm_has_the_trainers_weights(run, 3)


@pytest.mark.slow
def test_two_processes_give_the_update_of_one_with_the_joined_batch(launch: Callable[..., Launch]) -> None:
    from safetensors.torch import load_file

    # Plain descent: updates are as near as gradients are.
    keys = (*COLOCATED, *SMALL, "--optim", "sgd", "--learning_rate", "0.05", "--save_strategy", "no")
    single = launch(*keys, folder="single")
    assert single.wait() == 0, single.output
    double = launch(*keys, "--num_processes", "2", folder="double", by_exec=True)
    assert double.wait() == 0, double.output

    # Two processes sample the completions of the single process, with the same rewards.
    first, second = ([sample(line) for line in (run.run_dir / "samples.jsonl").open()] for run in (single, double))
    assert first == second and len(first) == 3
    assert [row["reward"] for row in single.rows()] == [row["reward"] for row in double.rows()]
    after, after_double = (load_file(run.run_dir / "model" / "model.safetensors") for run in (single, double))
    before = load_file(Path(read_json(single.run_dir / "plan.json")["model"]) / "model.safetensors")
    assert max(float((after[name] - before[name]).abs().max()) for name in after) > 1e-3
    assert max(float((after[name] - after_double[name]).abs().max()) for name in after) < 1e-6


def sample(line: str) -> tuple[int, list[float]]:
    row = json.loads(line)
    return row["step"], row["rewards"]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_resumed_run_is_the_uninterrupted_one(launch: Callable[..., Launch]) -> None:
    evaluated = ("--eval_strategy", "steps", "--eval_steps", "2", "--eval_dataset_name", "smoke:sums",
                 "--eval_subsample", "1.0", "--eval_max_prompts", "7", "--num_generations_eval", "4",
                 "--per_device_eval_batch_size", "6")  # fmt: skip
    tested = ("--benchmarks", "smoke:sums", "--benchmark_samples", "2", "--benchmark_temperature", "1")
    saved = override(TWO, max_steps=4, save_steps=1, save_total_limit=4)
    alone = launch(*saved, *evaluated, *tested, folder="alone")
    assert alone.wait() == 0, alone.output
    assert_vllm_has_the_trainers_weights(alone, 4)
    evaluations = [json.loads(line) for line in (alone.run_dir / "eval.jsonl").open()]
    assert [row["step"] for row in evaluations] == [2, 4]
    assert alone.summary()["benchmarks"]["smoke:sums"]["samples"] == 2

    copy = copy_until(alone, 2, alone.folder.parent / "continued")
    continued = launch("--resume", str(copy), folder="continued", by_exec=True)

    assert continued.wait() == 0, continued.output
    assert same_rows(continued, alone) and weights_hash(continued) == weights_hash(alone)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_stopped_at_any_moment_goes_on_as_if_it_had_not_been(launch: Callable[..., Launch]) -> None:
    keys = override(TWO, prompts_per_step=32, max_steps=20, run_name="stopped")
    stopped = launch(*keys, folder="stopped")
    stopped.wait_for_step(3)

    stopped.process.terminate()

    assert stopped.wait(30) == 75, stopped.output
    assert stopped.processes() == [] and 3 <= len(stopped.rows()) < 20
    resumed = launch("--resume", str(stopped.run_dir), folder="stopped", by_exec=True)
    assert resumed.wait() == 0, resumed.output
    alone = launch(*keys, folder="alone")
    assert alone.wait() == 0, alone.output
    assert same_rows(resumed, alone) and weights_hash(resumed) == weights_hash(alone)


@pytest.mark.slow
def test_two_nodes_add_up_to_one(slurm: SlurmCluster, launch: Callable[..., Launch], tmp_path: Path) -> None:
    job, run = submit(slurm, tmp_path, "colocated-nodes", *COLOCATED, *SMALL, "--save_strategy", "no")

    slurm.wait(job, "COMPLETED", timeout=300)

    plan = read_json(run.run_dir / "plan.json")
    assert [(process["role"], process["node"]) for process in plan["processes"]] == [("trainer", 0), ("trainer", 1)]
    assert [record["node"] for record in read_rank_records(run)] == [0, 1]
    assert_vllm_has_the_trainers_weights(run, 3)
    assert run.processes() == []
    one_node = launch(*TWO, "--save_strategy", "no", folder="one-node")
    assert one_node.wait() == 0, one_node.output
    assert [row["reward"] for row in one_node.rows()] == [row["reward"] for row in run.rows()]
    threads = read_json(one_node.run_dir / "plan.json")["threads"]
    assert difference(one_node, run) <= (0.0 if threads == plan["threads"] else 1e-5)


THEIRS = """
model_name: "smoke:sums"
vllm_config: {max_model_len: 256, gpu_memory_utilization: 0.4, disable_log_stats: true}
fsdp_config: {sharding_strategy: "FULL_SHARD", cpu_offload: false, mixed_precision: true}
learning_rate: 1e-5
batch_size: 64
max_iterations: 3
dataset_name: smoke:sums
reward_funcs: [pure_accuracy_math]
max_completion_length: 8
"""


@pytest.mark.slow
def test_the_yaml_of_a_co_located_trainer_trains_with_fsdp(launch: Callable[..., Launch], tmp_path: Path) -> None:
    (tmp_path / "theirs.yaml").write_text(THEIRS)
    door = [sys.executable, str(REPOSITORY / "run_colocated_grpo.py"), "--gpus", "2"]

    run = launch(command=[*door, "--config", str(tmp_path / "theirs.yaml")], ENV_DIR=sys.prefix)

    assert run.wait() == 0, run.output
    plan, rows = read_json(run.run_dir / "plan.json"), run.rows()
    assert plan["batch"]["world_size"] == 2 and plan["batch"]["completions"] == 64
    (trainer,) = plan["processes"]
    assert any(word.endswith("/fsdp2.yaml") for word in trainer["argv"])
    # The trainer computes in bfloat16 with weights in float32, which vLLM has.
    assert len(rows) == 3 and all(1e-4 < row["sampling/sampling_logp_difference/mean"] < 0.02 for row in rows)
    assert_final_model_differs_from_the_first(run, plan["model"])


@pytest.mark.slow
def test_the_door_trains_on_two_nodes(slurm: SlurmCluster, tmp_path: Path) -> None:
    interfaces = psutil.net_if_addrs().values()
    addresses = [entry.address for entries in interfaces for entry in entries if entry.family == socket.AF_INET]
    address = next((address for address in addresses if not address.startswith("127.")), None)
    if address is None:
        pytest.skip("this machine has no address but the loopback's")
    door = f"{sys.executable} {REPOSITORY}/run_colocated_grpo.py --gpus 1 --nodes 2 --node-rank 0"
    script = tmp_path / "job.sh"
    script.write_text(f'#!/bin/bash\n{door} --master-addr {address} "$@"\n')
    words = ("", "--nodes=2", f"--output={tmp_path}/job.log", str(script))

    job, run = submit(slurm, tmp_path, "door-nodes", *SMALL, "--save_strategy", "no", words=words)
    slurm.wait(job, "COMPLETED", timeout=300)

    trainers = read_json(run.run_dir / "plan.json")["processes"]
    assert [(trainer["role"], trainer["node"]) for trainer in trainers] == [("trainer", 0), ("trainer", 1)]
    assert all(address in trainer["argv"] for trainer in trainers)  # where they meet
    assert_vllm_has_the_trainers_weights(run, 3)
    assert "NETWORK_INTERFACE=" in (tmp_path / "job.log").read_text() and run.processes() == []


DROPS = """
import os
from transformers import TrainerCallback
from vllm.model_executor.models.qwen2 import Qwen2ForCausalLM

class Drop(TrainerCallback):
    def on_step_end(self, args, state, control, **_):
        if os.environ["RANK"] == "1" and state.global_step == 2:
            Qwen2ForCausalLM.load_weights = lambda self, weights: set()
"""


@pytest.mark.slow
def test_a_load_that_one_vllm_drops_stops_every_process(launch: Callable[..., Launch], tmp_path: Path) -> None:
    (tmp_path / "drops.py").write_text(DROPS)
    run = launch(*override(TWO, max_steps=4, callbacks=f"{tmp_path}/drops.py:Drop", save_steps=1))

    assert run.wait() == 1, run.output

    causes = [read_json(run.run_dir / "processes" / f"rank_{rank}.json")["cause"] for rank in (0, 1)]
    for cause in causes:
        assert "WeightsDiffer: weights did not reach the server through the 'colocate' bridge" in cause
        assert cause.endswith("step 2 was not taken")
    assert [row["step"] for row in run.rows()] == [1, 2]


@pytest.mark.slow
def test_a_killed_process_ends_the_run_and_leaves_nothing(launch: Callable[..., Launch]) -> None:
    memory = set(Path("/dev/shm").iterdir())
    run = launch(*override(TWO, max_steps=100000))
    run.wait_for_step(2)
    pid = run.pid_of("rank_1")
    connections = [entry for process in run.processes() for entry in process.net_connections("tcp")]
    assert {entry.laddr.ip for entry in connections if entry.status == "LISTEN"} == {"127.0.0.1"}  # vLLM opens no port

    psutil.Process(pid).send_signal(signal.SIGKILL)

    killed = time.monotonic()
    assert run.wait(30) == 137, run.output
    run.wait_for_nothing_left()
    assert time.monotonic() - killed < 30
    assert run.summary()["cause"] == f"rank 1 (pid {pid}) was killed by signal 9"
    assert set(Path("/dev/shm").iterdir()) <= memory
