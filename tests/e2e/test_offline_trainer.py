"""Whole runs of the offline trainer, real vLLM server included: iterations, learning, the last weights, a kill."""

from __future__ import annotations

import json
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from documented import documented
from real_runs import REPOSITORY, Launch, same_rows, weights_hash
from test_evaluation import benchmark_rows, greedy_answers

pytest.importorskip("hydra")
pytestmark = pytest.mark.slow
PLACES = {"python": sys.executable} | {
    name: str(REPOSITORY / name)
    for name in ("run_offline_grpo.py", "smoke_test.py", "run_tests.py", "test_gpu_integration.py")
}


def replace_places(words: list[str]) -> list[str]:
    """Return a command of the page for this repository and environment."""
    return [PLACES.get(word, word) for word in words]


def start_offline_trainer(
    launch: Callable[..., Launch], words: list[str], *flags: str, folder: str = ".", by_exec: bool = False
) -> Launch:
    """Start the offline trainer with its server at a free port. ``Launch.run_dir`` is the run in ``runs``."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return launch(
        command=[*replace_places(words), f"generation.base_url=http://127.0.0.1:{port}", *flags],
        folder=folder, by_exec=by_exec, ENV_DIR=sys.prefix,
    )  # fmt: skip


def metrics(folder: Path) -> dict[str, dict[str, Any]]:
    return {path.name: json.loads(path.read_text()) for path in sorted((folder / "metrics").iterdir())}


def test_the_first_command_of_the_page_leaves_what_the_page_says(launch: Callable[..., Launch]) -> None:
    shown = (
        "python run_offline_grpo.py model.train_id=smoke:sums data.problems=sums train.iterations=3 "
        "generation.max_new_tokens=8"
    )
    quick = ("data.problems_per_iteration=2", "checkpoint.keep_last_k=2")
    run = start_offline_trainer(launch, documented(shown), *quick, by_exec=True)
    assert run.wait() == 0, run.output
    (folder,) = (run.folder / "outputs").glob("????-??-??/??-??-??")
    results = metrics(folder)
    assert list(results) == [f"{kind}_iter_00{number}.json" for kind in ("eval", "train") for number in range(3)]
    for number in range(3):
        trained = results[f"train_iter_00{number}.json"]
        assert trained["problem_seeds"] == [1000 + 2 * number, 1001 + 2 * number] and trained["steps"] == [number + 1]
        assert {"loss_total", "loss_pg", "loss_kl", "loss_entropy", "kl_divergence", "grad_norm"} <= trained.keys()
        assert {"pass@1", "mean@1", "pass@4", "mean@4"} <= results[f"eval_iter_00{number}.json"].keys()
    links = sorted((folder / "checkpoints").iterdir())
    assert [link.name for link in links] == ["iter_001", "iter_002"] and all(
        (link / "COMPLETE").exists() for link in links
    )
    assert {path.name for path in (folder / ".hydra").iterdir()} == {"config.yaml", "hydra.yaml", "overrides.yaml"}
    assert "data.problems_per_iteration=2" in (folder / ".hydra/overrides.yaml").read_text()
    assert run.processes() == []


def test_ten_iterations_learn_and_the_server_ends_with_the_trainers_weights(launch: Callable[..., Launch]) -> None:
    shown = (
        "python run_offline_grpo.py model.train_id=smoke:sums data.problems=sums train.iterations=10 train.lr=1e-4 "
        "train.kl_coef=0 train.batch_size=64 data.problems_per_iteration=16 data.rollouts_per_problem=16 "
        "generation.max_new_tokens=8 generation.temperature=1 generation.top_p=1 generation.top_k=0 "
        "generation.repetition_penalty=1 eval.num_ids=64 eval.replicates=16 eval.batch_size=64"
    )
    flags = ("--eval_on_start", "--dtype=float32", "--bf16=false", "--vllm_max_model_length=256")
    greedy = ("--benchmarks", "smoke:sums", "--benchmark_temperature", "0", "--benchmark_samples", "1")
    run = start_offline_trainer(launch, documented(shown), "hydra.run.dir=runs", *flags, *greedy)
    assert run.wait() == 0, run.output

    results = metrics(run.folder / "runs")
    rates = [results[f"eval_iter_{number:03}.json"]["pass@1"] for number in range(10)]
    before = run.summary()["initial_eval_reward"]
    # 30 problems of 16 completions each: the standard error of a rate is at most 0.03. The rates come from the server,
    # so a higher rate shows that it serves trained weights. The greedy answers of the smoke model do not change.
    assert 0.35 < before < 0.6 and fmean(rates[-3:]) > max(0.7, before + 0.2), rates

    answers = {row["problem"]: row["completions"] for row in benchmark_rows(run)}
    assert len(answers) == 20 and answers == greedy_answers(run.run_dir / "model", answers)


def test_killed_and_started_again_it_ends_as_if_it_had_not_been(launch: Callable[..., Launch]) -> None:
    words = ["python", "run_offline_grpo.py", "model.train_id=smoke:sums", "data.problems=sums", "train.iterations=8"]
    flags = (
        "train.lr=1e-4", "generation.max_new_tokens=8", "eval.num_ids=8", "eval.interval=2",
        "checkpoint.save_interval=2", "hydra.run.dir=runs", "--dtype=float32", "--bf16=false",
    )  # fmt: skip
    whole = start_offline_trainer(launch, words, *flags, folder="whole")
    assert whole.wait() == 0, whole.output

    killed = start_offline_trainer(launch, words, *flags, folder="killed")
    killed.wait_for_step(9)
    killed.process.send_signal(signal.SIGKILL)
    killed.process.wait()
    killed.wait_for_nothing_left()
    assert not (killed.run_dir / "model").exists() and (killed.folder / "runs/metrics/train_iter_003.json").exists()

    continued = start_offline_trainer(launch, words, *flags, folder="killed", by_exec=True)  # with other string hashes
    assert continued.wait() == 0, continued.output
    assert continued.run_dir == killed.run_dir
    results = metrics(continued.folder / "runs")
    assert results == metrics(whole.folder / "runs")
    evaluated = [f"eval_iter_{number:03}.json" for number in (1, 3, 5, 7)]
    assert list(results) == [*evaluated, *(f"train_iter_{number:03}.json" for number in range(8))]
    assert same_rows(continued, whole) and weights_hash(continued) == weights_hash(whole)


def test_the_smoke_test_trains_without_a_server_and_prints_its_metrics(launch: Callable[..., Launch]) -> None:
    run = launch(command=replace_places(documented("python smoke_test.py")), ENV_DIR=sys.prefix)
    assert run.wait() == 0, run.output
    trained, evaluated = run.output.splitlines()
    assert trained.startswith("Train metrics: {'loss_total': ") and "'kl_divergence': 0.0" in trained
    assert "'loss_total': 0.0," not in trained and evaluated.startswith("Eval metrics: {'pass@1': 0.0, 'mean@1': -")


def test_seven_tests_of_the_door_pass(launch: Callable[..., Launch]) -> None:
    run = launch(command=replace_places(documented("python run_tests.py")), ENV_DIR=sys.prefix)
    assert run.wait() == 0, run.output
    assert run.output.splitlines()[-1] == "7/7 tests passed"


def test_the_checks_with_a_server_pass_on_the_cpu(launch: Callable[..., Launch]) -> None:
    run = launch(command=replace_places(documented("python test_gpu_integration.py --cpu")), ENV_DIR=sys.prefix)
    assert run.wait() == 0, run.output
    assert run.output.splitlines()[-1] == "4/4 passed"
