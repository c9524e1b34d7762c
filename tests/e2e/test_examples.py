"""The examples that users copy, in whole runs: a rule with own data, and a judge that is a real vLLM server."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from documented import documented
from real_runs import REPOSITORY, Launch, clean_environment, override

from grpo_recipes.plan.commands import server_environment
from grpo_recipes.smoke import smoke_command

pytestmark = pytest.mark.slow
KEY = "sk-" + "plantedjudgekey" * 2
SHORT = (
    *("--max_steps", "3", "--prompts_per_step", "4", "--num_generations", "8"),
    *("--per_device_train_batch_size", "32", "--save_steps", "1"),
)


@pytest.fixture
def examples(tmp_path: Path) -> Path:
    """A user's copy of the folder, in the folder of a launch."""
    return shutil.copytree(REPOSITORY / "recipes/examples", tmp_path / "recipes/examples")


def test_a_rule_with_own_data_and_columns_trains(launch: Callable[..., Launch], examples: Path) -> None:
    places = {"recipes/examples/rule.yaml": str(examples / "rule.yaml")}
    run = launch(*documented("grpo launch recipes/examples/rule.yaml", places)[2:], *SHORT)
    assert run.wait() == 0, run.output
    rows = run.rows()
    assert len(rows) == 3 and all(0 < row["rewards/near/mean"] <= 1 for row in rows)
    assert all(row["rewards/no_verdict"] == 0 for row in rows)
    assert (run.run_dir / "report.html").is_file() and (run.run_dir / "model/config.json").is_file()


@pytest.fixture
def judge(tmp_path: Path) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """A vLLM server of the smoke model that requires a key: its address and its process."""
    folder, command = smoke_command("smoke:sums", os.environ)
    if not (folder / "COMPLETE").exists():
        subprocess.run(command, check=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    argv = [sys.executable, "-m", "vllm.entrypoints.launchers.api_server.entry", "--model", str(folder / "model")]
    argv += ["--served-model-name", "judge", "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32"]
    argv += ["--enforce-eager", "--max-model-len", "512"]
    variables = {**clean_environment(tmp_path, "judge"), **server_environment("cpu", None, {}), "VLLM_API_KEY": KEY}
    variables["VLLM_PLUGINS"] = ""
    with (tmp_path / "judge.log").open("wb") as log:
        process = subprocess.Popen(argv, env=variables, stdout=log, stderr=log, start_new_session=True)
    try:
        deadline = time.monotonic() + 400
        while process.poll() is None and time.monotonic() < deadline:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2)
                break
            except OSError:
                time.sleep(0.5)
        assert process.poll() is None, (tmp_path / "judge.log").read_text()[-3000:]
        yield f"http://127.0.0.1:{port}", process
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def test_a_judge_that_is_a_real_server_grades_and_its_death_leaves_completions_unscored(
    launch: Callable[..., Launch], examples: Path, judge: tuple[str, subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    address, server = judge
    variables = {"JUDGE_KEY": KEY}
    # The smoke model grades with arbitrary text. A completion is unscored if it is not a number of the scale.
    flags = override(SHORT, max_steps=100, reward_max_no_verdict=0.95, judge_base_url=f"{address}/v1")
    flags = [*flags, "--judge_scale", "[0, 1000]"]
    places = {"recipes/examples/judge.yaml": str(examples / "judge.yaml")}
    run = launch(*documented("grpo launch recipes/examples/judge.yaml", places)[2:], *flags, **variables)
    run.wait_for(lambda: run.has_run_dir() and len(run.rows()) >= 2, "step 2", timeout=600)  # beside another server
    os.killpg(server.pid, signal.SIGKILL)
    assert run.wait(600) == 1, run.output

    rows = run.rows()
    shares = [row["rewards/llm_judge/no_verdict"] for row in rows]
    assert shares[0] < 0.95, "the judge's grades were taken"
    assert all(0 <= row["rewards/llm_judge/mean"] <= 1 for row in rows[:1])
    assert all(row["seconds/score"] < 60 for row in rows), "the calls of a step run at once"
    cause = run.summary()["cause"]
    assert "TooManyWithoutVerdict" in cause and "llm_judge' gave no score for 32 of 32" in cause
    assert "APIConnectionError: Connection error." in cause
    assert "next    start the server that llm_judge calls, or correct its address" in run.output
    slow = [json.loads(line) for line in (run.run_dir / "slow_rewards.jsonl").read_text().splitlines()]
    assert "no answer from its server (APIConnectionError: Connection error.)" in {row["reason"] for row in slow}
    for path in (path for path in run.run_dir.rglob("*") if path.is_file()):
        assert KEY.encode() not in path.read_bytes(), path
    assert KEY not in run.output + run.log("trainer")
