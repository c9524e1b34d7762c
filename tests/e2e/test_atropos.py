"""Runs that Atropos feeds: the real run-api, vLLM, environment process and trainer, on two CPU cores."""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from statistics import fmean

import psutil
import pytest
from documented import documented
from real_runs import LEARNS, REPOSITORY, Launch, clean_environment
from runs.test_benchmark import need_right_arithmetic, parsed
from slurm_cluster import SlurmCluster
from test_knobs import free_port
from test_preemptions import wait_until

from grpo_recipes.plan.ports import port_keys

pytestmark = pytest.mark.slow
pytest.importorskip("atroposlib")
RECIPE = str(REPOSITORY / "recipes/atropos/smoke.yaml")
ENDLESS = (RECIPE, "--max_steps", "100000", "--run_name", "killed")


def took_each_step_from_groups(run: Launch) -> None:
    """The metrics of a run that waited for groups, none of them older than the recipe allows."""
    for row in run.rows():
        assert row["atropos/rejected"] == 0 and row["atropos/lost_batches"] == 0
        assert 0 <= row["atropos/staleness_mean"] <= row["atropos/staleness_max"] <= 4
        assert row["atropos/wait_seconds"] > 0 and row["atropos/tokens_per_second"] > 0


BRIDGES = {
    "file": (),
    "shared": ("--weight_sync", "shared"),
    "lora": ("--use_peft", "--weight_sync", "lora", "--learning_rate", "2e-3", "--lora_target_modules", "all-linear"),
}


@pytest.mark.timeout(900)
@pytest.mark.parametrize("flags", BRIDGES.values(), ids=BRIDGES)
def test_the_smoke_recipe_learns_from_an_environment(launch: Callable[..., Launch], flags: tuple[str, ...]) -> None:
    command = ["bash", str(REPOSITORY / "training.sh"), *flags, *LEARNS]
    run = launch(command=command, CONFIG=RECIPE, ENV_DIR=sys.prefix)
    assert run.wait(900) == 0, run.output
    summary = run.summary()
    assert summary["status"] == "completed" and summary["initial_reward"] <= 0.7
    assert summary["final_reward"] >= 0.85, run.output
    took_each_step_from_groups(run)
    trainer_log = run.log("trainer")
    assert trainer_log.count("Atropos API connectivity confirmed") == 1
    assert trainer_log.count("Trainer successfully registered with UUID: ") == 1
    run.wait_for_nothing_left()


@pytest.mark.timeout(1500)
@pytest.mark.parametrize(("mode", "first"), [("none", 9391), ("lora_restart", 9401)])
def test_a_new_server_for_each_model_serves_the_environment(
    launch: Callable[..., Launch], mode: str, first: int
) -> None:
    ports = dict(zip(port_keys(), range(first, first + 4), strict=True))
    port_flags = [word for key, port in ports.items() for word in (f"--{key}", str(port))]
    run = launch(RECIPE, "--weight_bridge_mode", mode, "--max_steps", "4", *port_flags)
    assert run.wait(1200) == 0, run.output
    assert len(run.rows()) == 4 and run.summary()["status"] == "completed"
    took_each_step_from_groups(run)
    plan = json.loads((run.run_dir / "plan.json").read_text())
    assert plan["bridge"] == "restart" and {*ports.values()} <= {*plan["ports"].values()}
    assert sum(row["syncs"] for row in run.rows()) >= 3
    assert (run.run_dir / "adapter").exists() == (mode == "lora_restart")
    run.wait_for_nothing_left()
    for port in ports.values():
        with socket.socket() as other:
            assert other.connect_ex(("127.0.0.1", port)) == errno.ECONNREFUSED, port


MIXTURE = [
    {"id": "arithmetic", "weight": 3},
    {"id": str(REPOSITORY / "recipes/examples/atropos_two_sums.py:TwoSums"), "args": {"max_tokens": 8}},
]


@pytest.mark.timeout(900)
def test_two_environments_are_both_trained_on(launch: Callable[..., Launch]) -> None:
    """An environment of one turn and another of two. The newest groups of a step may all come from one of them."""
    environments = [{**environment, "min_allocation": 0.25} for environment in MIXTURE]
    mixture = ("--atropos_environment", "null", "--atropos_mixture", json.dumps({"environments": environments}))
    run = launch(RECIPE, *mixture, "--max_completion_length", "40", "--max_steps", "6")
    assert run.wait(600) == 0, run.output
    took_each_step_from_groups(run)
    samples = [json.loads(line)["rewards"] for line in (run.run_dir / "samples.jsonl").read_text().splitlines()]
    assert len(samples) == len(run.rows()) == 6
    learnt = {"twosums": 0, "arithmetic": 0}  # groups with different scores, and thus nonzero advantages
    for row, scores in zip(run.rows(), samples, strict=True):
        groups = [scores[first : first + 16] for first in range(0, 256, 16)]
        learnt["twosums"] += sum(0.5 in group and len(set(group)) > 1 for group in groups)  # each sum is worth half
        learnt["arithmetic"] += sum(0.5 not in group and {0.0, 1.0} == set(group) for group in groups)
        shares = {name: row.get(f"atropos/share_{name}", 0.0) for name in learnt}
        assert sum(shares.values()) in (0.0, 1.0)  # 0 before the second environment has sent a group
        means = [share * row.get(f"atropos/reward_{name}", 0.0) for name, share in shares.items()]
        assert not any(shares.values()) or sum(means) == pytest.approx(fmean(chain(*groups)))
    assert all(learnt.values()), learnt
    run.wait_for_nothing_left()


@pytest.mark.timeout(900)
def test_the_final_model_is_benchmarked_though_an_environment_would_never_rest(launch: Callable[..., Launch]) -> None:
    """On CPU, completions of benchmarks have their own seeds, which need an otherwise idle server."""
    arguments = "{max_batches_offpolicy: 10000}"
    flags = ("--server_request_timeout", "60", "--atropos_environment_args", arguments, "--benchmark")
    run = launch(RECIPE, "--benchmarks", "smoke:sums", "--max_steps", "4", *flags)
    assert run.wait(600) == 0, run.output
    (result,) = json.loads((run.run_dir / "benchmarks.json").read_text()).values()
    assert result["problems"] == 20 and result["no_verdict"] == 0 and 0 < result["pass@1"] <= 1
    rows = [json.loads(line) for line in (run.run_dir / "benchmarks/smoke_sums.jsonl").read_text().splitlines()]
    assert len(rows) == 20 and sum(row["scores"][0] for row in rows) / 20 == pytest.approx(result["pass@1"])
    assert f"benchmark smoke:sums: pass@1 {result['pass@1']:.3f}" in run.output
    assert "training is over, ending run-api and environment arithmetic" in run.output
    took_each_step_from_groups(run)
    run.wait_for_nothing_left()


@pytest.mark.timeout(900)
def test_two_processes_train_on_what_one_of_them_takes(launch: Callable[..., Launch]) -> None:
    words = documented("grpo launch recipes/atropos/smoke.yaml", {"recipes/atropos/smoke.yaml": RECIPE})
    run = launch(*words[2:], "--num_processes", "2", "--per_device_train_batch_size", "128", "--max_steps", "20")
    assert run.wait(600) == 0, run.output
    took_each_step_from_groups(run)
    assert run.log("trainer").count("Trainer successfully registered with UUID: ") == 1
    rewards = [row["reward"] for row in run.rows()]
    assert sum(rewards[-5:]) > sum(rewards[:5])


@pytest.mark.timeout(900)
def test_an_unmodified_environment_from_its_own_terminal_is_trained_on(launch: Callable[..., Launch]) -> None:
    """R11: atroposlib's VLLMServer and ManagedServer, by the command that the launch prints."""
    port, program = str(free_port()), str(Path(sys.executable).with_name("run-api"))
    words = documented("run-api --host 127.0.0.1 --port 8000", {"run-api": program, "8000": port})
    processes = [subprocess.Popen(words, stdin=subprocess.DEVNULL)]
    try:
        command = (
            "grpo launch recipes/atropos/smoke.yaml --atropos_environment null --atropos_api_url http://127.0.0.1:8000 "
            "--vllm_server_port 9001"
        )
        url, api_url = "http://127.0.0.1:8000", f"http://127.0.0.1:{port}"
        words = documented(command, {"recipes/atropos/smoke.yaml": RECIPE, url: api_url, "9001": str(free_port())})
        run = launch(*words[2:], "--max_steps", "10")  # the environment evaluates now and then
        run.wait_for(lambda: "start your environments with: " in run.output, "the command", timeout=120)
        line = next(line for line in run.output.splitlines() if "start your environments with: " in line)
        serve = line.partition("start your environments with: python ENVIRONMENT.py ")[2].split()
        settings = run.run_dir / "atropos_serve.yaml"
        token = (run.run_dir / "environment_token").read_text()
        file = REPOSITORY / "tests/atropos/envs/by_hand.py"
        argv = [sys.executable, str(file), "sums", *serve[:-1], str(settings), "--env.use_wandb=False"]
        log = run.folder / "environment.log"
        with log.open("wb") as out:
            processes.append(subprocess.Popen(argv, stdout=out, stderr=out, env={**os.environ, "HF_HUB_OFFLINE": "1"}))
        assert run.wait(600) == 0, run.output
    finally:
        for process in reversed(processes):
            process.kill()
            process.wait()
    assert len(run.rows()) == 10 and all(row["atropos/rejected"] == 0 for row in run.rows())
    # The log-probs that /generate gave are the trainer's own, as long as the weights are the same.
    assert run.rows()[0]["sampling/sampling_logp_difference/max"] < 1e-3
    assert "evaluation 1: '<answer>" in log.read_text()
    assert not settings.exists() and not (run.run_dir / "environment_token").exists()
    texts = (path.read_text(errors="replace") for path in run.run_dir.rglob("*") if path.suffix in (".json", ".log"))
    assert not any(token in text for text in texts) and token not in run.output
    run.wait_for_nothing_left()


def pid_of(run: Launch, role: str) -> int:
    return run.pid_of({"trainer": "rank_0"}.get(role, role))


@pytest.mark.timeout(900)
@pytest.mark.parametrize("role", ["run-api", "environment-arithmetic", "server"])
def test_a_part_that_is_killed_is_started_again_and_the_run_goes_on(launch: Callable[..., Launch], role: str) -> None:
    run = launch(*ENDLESS, "--save_steps", "2")
    run.wait_for_step(3)
    pid, steps = pid_of(run, role), len(run.rows())
    psutil.Process(pid).send_signal(signal.SIGKILL)
    run.wait_for(lambda: f"(pid {pid})" in run.output, "word of the loss", timeout=60)
    run.wait_for(lambda: len(run.rows()) > steps + 3, "steps after the loss", timeout=300)
    assert (": only " in run.output) == (role != "run-api"), run.output
    summary = run.summary()
    assert summary["server_restarts"] == 1 if role == "server" else summary["process_restarts"] == {role: 1}
    run.process.send_signal(signal.SIGTERM)
    assert run.wait(60) in (75, 143), run.output
    run.wait_for_nothing_left()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("role", ["run-api", "environment-arithmetic", "trainer"])
def test_without_restarts_a_killed_part_ends_the_run_with_its_name(launch: Callable[..., Launch], role: str) -> None:
    run = launch(*ENDLESS, "--server_restarts", "0")
    run.wait_for_step(2)
    pid = pid_of(run, role)
    psutil.Process(pid).send_signal(signal.SIGKILL)
    killed = time.monotonic()
    assert run.wait(30) == 137, run.output
    run.wait_for_nothing_left()
    assert time.monotonic() - killed < 30
    summary = run.summary()
    assert summary["status"] == "failed" and f"(pid {pid}) was killed by signal 9" in summary["cause"]


@pytest.mark.timeout(600)
def test_an_environment_that_sends_nothing_ends_the_run_at_the_deadline(launch: Callable[..., Launch]) -> None:
    run = launch(RECIPE, "--atropos_batch_max_wait_time", "12.0", "--server_restarts", "0", "--max_steps", "100000")
    run.wait_for_step(2)
    psutil.Process(run.pid_of("environment-arithmetic")).send_signal(signal.SIGSTOP)
    stopped = time.monotonic()
    assert run.wait(120) == 1, run.output
    assert time.monotonic() - stopped < 60
    log = run.log("trainer")
    assert "Maximum wait time (12.0s) exceeded" in log
    assert "Failed to retrieve batch from Atropos after all retry attempts" in log
    assert "/status" in log and "/info" in log
    run.wait_for_nothing_left()


@pytest.mark.timeout(1200)
def test_a_job_that_slurm_preempts_goes_on_and_learns(slurm: SlurmCluster, tmp_path: Path) -> None:
    environment = clean_environment(tmp_path, "atropos-slurm", ENV_DIR=sys.prefix, CONFIG=RECIPE)
    job = slurm.sbatch("training.sh", *LEARNS, cwd=REPOSITORY, env=environment)
    run = Launch(None, tmp_path, REPOSITORY, "atropos-slurm")  # type: ignore[arg-type]
    wait_until(lambda: run.has_run_dir() and len(run.rows()) >= 10, "tenth step")
    slurm.scancel(job, "--signal=USR1", "--batch")
    slurm.start_requeued(job, timeout=60)
    slurm.wait(job, "COMPLETED", timeout=600)
    summary = run.summary()
    assert summary["restarts"] == 1 and len(run.rows()) == 30
    assert summary["initial_reward"] <= 0.7 and summary["final_reward"] >= 0.85
    took_each_step_from_groups(run)


# Lines of transformers about a loaded model at its log level INFO.
OF_LOADING = ("loading configuration file ", "loading weights file ", "Model config Qwen2Config {")
SHORT = ("--environment", "arithmetic", "--seq-len", "40", "--max-model-len", "256")


@pytest.mark.timeout(600)
def test_flags_of_the_example_trainer_train_an_adapter(launch: Callable[..., Launch], tmp_path: Path) -> None:
    """The flags and variables that only have an effect in a run: folders, logs and arguments of the server."""
    flags = (
        "--weight-bridge-mode", "lora_only", "--training-steps", "4", "--batch-size", "16",
        "--gradient-accumulation-steps", "4", "--lr", "2e-3", "--lora-r", "4", "--lora-alpha", "12",
        "--lora-target-modules", "q_proj", "v_proj", "--vllm-port", "9377",
        "--save-path", str(tmp_path / "runs"), "--benchmark", "--debug-loading", *SHORT,
    )  # fmt: skip
    command = [sys.executable, str(REPOSITORY / "src/atropos_grpo.py"), *flags]
    run = launch(command=command, MODEL="smoke:sums", LOGDIR=str(tmp_path / "logs"), ENV_DIR=sys.prefix)
    assert run.wait(400) == 0, run.output
    rows, plan = run.rows(), json.loads((run.run_dir / "plan.json").read_text())
    assert len(rows) == 4 and plan["ports"]["server"] == 9377 and rows[-1]["num_tokens"] > 0
    adapter = json.loads((run.run_dir / "adapter/adapter_config.json").read_text())
    assert (adapter["r"], adapter["lora_alpha"], set(adapter["target_modules"])) == (4, 12, {"q_proj", "v_proj"})
    logs = {path.name.split("_")[1] for path in (tmp_path / "logs").iterdir()}
    assert logs == {"run-api", "vllm", "train", "env-arithmetic"}
    assert "registers 64 sequences" in run.output
    printed = parsed(run.output)
    need_right_arithmetic(printed)
    assert (printed.mode, printed.total_steps) == ("lora_only", 4)
    log = (tmp_path / "logs" / Path(run.log_path("trainer")).name).read_text()
    assert "Successfully retrieved batch with " in log and all(line in log for line in OF_LOADING)
    run.wait_for_nothing_left()


@pytest.mark.timeout(600)
def test_the_script_of_verls_integration_trains_by_its_variables(launch: Callable[..., Launch], tmp_path: Path) -> None:
    variables = {
        "MODEL_PATH": "smoke:sums",
        "OUTPUT_DIR": str(tmp_path / "runs"),
        "BATCH_SIZE": "64",
        "MAX_EPOCHS": "3",
    }
    command = ["bash", str(REPOSITORY / "run_atropos_grpo.sh"), *SHORT]
    run = launch(command=command, ENV_DIR=sys.prefix, **variables)
    assert run.wait(400) == 0, run.output
    assert len(run.rows()) == 3 and run.summary()["status"] == "completed"
    assert not (run.run_dir / "adapter").exists()
    assert not any(line in run.log("trainer") for line in OF_LOADING)  # without --debug-loading
    run.wait_for_nothing_left()
