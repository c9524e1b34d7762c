"""ModeBench as a benchmark of a tiny model: scores, files, and the model before its first step, once."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from trainers import tiny_training

from grpo_recipes.evaluate.benchmarks import (
    StoppedInBenchmarks,
    UntrainedBenchmarks,
    load_problems,
    make_recipe_scorer,
    run_benchmarks,
)
from grpo_recipes.extensions.problems.modebench.dataset import compute_mode_scores, find_mode, list_right_answers
from grpo_recipes.recipe.configs import ScriptArguments
from grpo_recipes.rollouts.backends import problem_seed
from grpo_recipes.runs.rundir import finish_summary
from grpo_recipes.stats import pass_at_k_table, score_names
from grpo_recipes.trainers.grpo import GRPOTrainer

GRAPH = "modebench:graph_coloring"
SMALL = {"modebench_prompts": 4, "modebench_test_prompts": 6}


def arguments(**keys: Any) -> ScriptArguments:
    defaults = {"dataset_name": "x", "benchmarks": [GRAPH], "benchmark_samples": 4, "benchmark_temperature": 1.0}
    return ScriptArguments(**{**defaults, "reward_funcs": ["different_characters"], **SMALL, **keys})


def never() -> bool:
    return False


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return tiny_training.train(tmp_path_factory.mktemp("trained"), max_steps=1, max_completion_length=6)[0]


@pytest.fixture
def answering(monkeypatch: pytest.MonkeyPatch, trainer: Any) -> None:
    """Sample two correct answers, the first answer again, and a wrong answer for each prompt."""
    golds = {
        problem_seed(trainer.args.seed, GRAPH, drawn.index): drawn.gold
        for drawn in load_problems(GRAPH, arguments(), 0)
    }

    def tokens(text: str) -> list[int]:
        return [*trainer.processing_class(text).input_ids, *trainer.eos_token_ids]

    def sample(prompts: Any, how: Any) -> list[list[list[int]]]:
        pairs = [list_right_answers(golds[prompt.seed])[:2] for prompt in prompts]
        boxed = [
            [rf"\boxed{{{first}}}", rf"\boxed{{{second}}}", rf"or \boxed{{{first}}}", r"\boxed{4}"]
            for first, second in pairs
        ]
        return [[tokens(text) for text in texts] for texts in boxed]

    monkeypatch.setattr(trainer.rollouts, "sample", sample)


def result_in(run: Path, file: str = "benchmarks.json") -> dict[str, Any]:
    return json.loads((run / file).read_text())[GRAPH]


def test_scores_modes_and_baselines(trainer: Any, answering: None, tmp_path: Path) -> None:
    run_benchmarks(trainer, arguments(), tmp_path, never)

    result = result_in(tmp_path)
    file = tmp_path / "benchmarks" / "modebench_graph_coloring.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert len(rows) == 6
    for row in rows:
        assert row["scores"] == [1.0, 1.0, 1.0, 0.0]
        assert row["modes"] == [find_mode(text, row["gold"]) for text in row["completions"]]
    expected = {**pass_at_k_table([row["scores"] for row in rows]), "reward": "modebench", "problems": 6, "samples": 4}
    expected |= compute_mode_scores([row["modes"] for row in rows], [json.loads(row["gold"])["modes"] for row in rows])
    assert result.items() >= expected.items()
    assert (result["pass@1"], result["mean@4"], result["distinct@4"]) == (0.75, 0.75, 2.0)
    assert result["baselines"].keys() == {"random", "constant"}
    assert all(score_names(scores) == score_names(result) for scores in result["baselines"].values())
    assert finish_summary(tmp_path, status="completed")["benchmarks"][GRAPH] == result


def test_its_reward_alone_judges_it_and_judges_nothing_else(trainer: Any, answering: None, tmp_path: Path) -> None:
    run_benchmarks(trainer, arguments(reward_funcs=["pure_accuracy_math"]), tmp_path, never)
    assert (result_in(tmp_path)["reward"], result_in(tmp_path)["pass@1"]) == ("modebench", 0.75)
    assert make_recipe_scorer(["modebench"], [None], arguments(), None).name == "pure_accuracy_math"


def test_other_problems_are_another_benchmark(trainer: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    counts: list[int] = []
    answer = [[[1]]]
    monkeypatch.setattr(
        trainer.rollouts, "sample", lambda prompts, how: counts.append(len(prompts)) or answer * len(prompts)
    )
    for keys, runs in (({}, 1), ({}, 1), ({"modebench_seed": 1}, 2), ({"modebench_test_prompts": 3}, 3)):
        run_benchmarks(trainer, arguments(benchmark_samples=1, **keys), tmp_path, never)
        assert len(counts) == runs
    assert counts == [6, 6, 3]


def begin(trainer: Any, args: ScriptArguments, run: Path, step: int = 0, stop: Callable[[], bool] = never) -> None:
    state: Any = SimpleNamespace(global_step=step)
    UntrainedBenchmarks(trainer, args, run, stop).on_train_begin(trainer.args, state, trainer.control)


def test_the_untrained_model_is_benchmarked_once_and_quoted_after_training(
    trainer: Any, answering: None, tmp_path: Path
) -> None:
    names = [GRAPH, "smoke:sums"]  # only ModeBench runs before training
    begin(trainer, arguments(benchmarks=names), tmp_path)
    before = result_in(tmp_path, "benchmarks/untrained.json")
    assert (tmp_path / "benchmarks" / "untrained_modebench_graph_coloring.jsonl").exists()
    assert not (tmp_path / "benchmarks.json").exists() and "baselines" not in before
    stamp = (tmp_path / "benchmarks" / "untrained.json").stat().st_mtime_ns

    begin(trainer, arguments(benchmarks=names), tmp_path)
    assert (tmp_path / "benchmarks" / "untrained.json").stat().st_mtime_ns == stamp

    run_benchmarks(trainer, arguments(), tmp_path, never)
    untrained = result_in(tmp_path)["baselines"]["untrained"]
    assert untrained == {key: value for key, value in before.items() if "@" in key} and untrained["pass@1"] == 0.75


def test_a_resumed_run_and_one_without_modebench_do_nothing(trainer: Any, tmp_path: Path) -> None:
    begin(trainer, arguments(), tmp_path, step=3)
    begin(trainer, arguments(benchmarks=["smoke:sums"]), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_stop_before_training_says_that_nothing_is_trained(trainer: Any, tmp_path: Path) -> None:
    with pytest.raises(StoppedInBenchmarks, match="nothing is trained yet") as stopped:
        begin(trainer, arguments(), tmp_path, stop=lambda: True)
    assert stopped.value.code == 75


@pytest.mark.slow
def test_it_leaves_no_trace_in_the_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights and all metrics except times are equal in a run with and without the benchmark."""
    runs = []
    for trainer_class in (GRPOTrainer, Benchmarked):
        folder = tmp_path / trainer_class.__name__
        monkeypatch.setattr(tiny_training, "GRPOTrainer", trainer_class)
        trainer, _ = tiny_training.train(folder, max_steps=2)
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        runs.append((trainer.model.state_dict(), [{**row, **dict.fromkeys(timed(row))} for row in rows]))
    assert (tmp_path / "Benchmarked" / "benchmarks" / "untrained.json").exists()
    (weights, metrics), (other_weights, other_metrics) = runs
    assert metrics == other_metrics
    assert all(torch.equal(weights[key], other_weights[key]) for key in weights)


def timed(row: dict[str, Any]) -> list[str]:
    return [
        key for key in row if key.startswith(("seconds/", "tokens_per_second", "step_time", "time", "memory/", "syncs"))
    ]


class Benchmarked(GRPOTrainer):
    """A trainer with the callback of the entry script."""

    def train(self, *args: Any, **kwargs: Any) -> Any:
        run = Path(self.args.output_dir).parent
        self.add_callback(UntrainedBenchmarks(self, arguments(modebench_test_prompts=1), run, never))
        return super().train(*args, **kwargs)
