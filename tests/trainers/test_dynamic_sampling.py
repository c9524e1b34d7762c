"""Dynamic sampling replaces groups of equal rewards, keeps the values of a completion together, and resumes exactly."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from rank_processes import run_ranks

from grpo_recipes.runs import stop_request as stop_module
from grpo_recipes.runs.rundir import stop_file

from .stopped_runs import Moment, outcome, rows_of, run
from .tiny_training import different_characters

ROOT = Path(__file__).resolve().parents[2]
GROUP = 4
SHORT = {
    "max_completion_length": 2,
    "max_steps": 4,
    "report_samples": 100,
    "log_completions": False,
}  # two characters often give a group equal rewards
DYNAMIC = {**SHORT, "dynamic_sampling": True, "dynamic_sampling_max_rounds": 50}


def count_equal_groups(folder: Path) -> int:
    """Count the groups in ``samples.jsonl`` in which all scored completions have the same reward."""
    totals = [total for row in rows_of(folder / "samples.jsonl") for total in row["rewards"]]
    groups = [totals[start : start + GROUP] for start in range(0, len(totals), GROUP)]
    return sum(len({total for total in group if total is not None}) < 2 for group in groups)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run with dynamic sampling."""
    folder = tmp_path_factory.mktemp("whole")
    (folder / "outcome.json").write_text(json.dumps(outcome(folder, run(folder, **DYNAMIC)[0])))
    return folder


def test_groups_with_equal_rewards_are_replaced(tmp_path: Path, uninterrupted: Path) -> None:
    run(tmp_path, **SHORT)
    assert count_equal_groups(tmp_path) > 2
    assert count_equal_groups(uninterrupted) == 0

    rows = rows_of(uninterrupted / "metrics.jsonl")
    assert all(row["frac_reward_zero_std"] == row["dynamic_sampling/groups_equal"] == 0 for row in rows)
    for row in rows:
        drawn, dropped = (row[f"dynamic_sampling/groups_{name}"] for name in ("drawn", "dropped"))
        assert drawn >= 2 + dropped and row["dynamic_sampling/rounds"] <= dropped + 1
        tokens = row["dynamic_sampling/tokens_per_useful_group"]
        assert GROUP <= tokens <= drawn * GROUP * 2  # a completion has one or two tokens
    assert any(row["dynamic_sampling/rounds"] > 0 for row in rows)
    assert not any("dynamic" in key for row in rows_of(uninterrupted / "eval.jsonl") for key in row)


def test_prompt_completion_answer_and_reward_stay_together(uninterrupted: Path) -> None:
    samples = [sample for row in rows_of(uninterrupted / "samples.jsonl") for sample in row["samples"]]
    assert len(samples) > 20
    for sample in samples:
        first, _, second = sample["prompt"].removeprefix("[user]\n").rstrip("=").partition("+")
        assert int(sample["answer"]) == int(first) + int(second)
        (expected,) = different_characters([[{"content": sample["completion"]}]])
        assert sample["reward"] == expected
        tokens = re.sub(r"<\|\w+\|>", "", sample["token_view"]["text"])
        assert tokens.startswith(sample["completion"]) or "\ufffd" in tokens


def test_the_rounds_are_limited(tmp_path: Path) -> None:
    keys = {**DYNAMIC, "max_completion_length": 1, "dynamic_sampling_max_rounds": 3, "eval_strategy": "no"}
    run(tmp_path, Moment(lambda: None, "never", 0), temperature=1e-6, **keys)  # all completions of a prompt are equal
    (row, *_) = rows_of(tmp_path / "metrics.jsonl")
    assert row["dynamic_sampling/rounds"] == 3
    assert row["dynamic_sampling/groups_equal"] == 2 and row["dynamic_sampling/groups_drawn"] == 8
    assert row["grad_norm"] == 0


@pytest.mark.parametrize(("phase", "step", "generation"), [("sample", 3, 2), ("score", 2, 1), ("update", 3, 1)])
def test_a_stopped_run_equals_an_uninterrupted_run(
    tmp_path: Path, uninterrupted: Path, monkeypatch: pytest.MonkeyPatch, phase: str, step: int, generation: int
) -> None:
    monkeypatch.setattr(stop_module, "POLL_SECONDS", 0.0)
    _, stopped = run(tmp_path, Moment(stop_file(tmp_path).touch, phase, step, generation), **DYNAMIC)

    assert stopped is not None
    trainer, stopped = run(tmp_path, **DYNAMIC)
    assert stopped is None and outcome(tmp_path, trainer) == json.loads((uninterrupted / "outcome.json").read_text())


@pytest.mark.parametrize("options", [(), ("ahead",)])
def test_two_ranks_replace_the_same_groups_as_one(tmp_path: Path, options: tuple[str, ...]) -> None:
    for ranks in (1, 2):
        run_ranks("trainers.dynamic_ranks", str(tmp_path / f"of-{ranks}"), *options, count=ranks)

    def read(ranks: int) -> list[dict[str, Any]]:
        files = [Path(f"{tmp_path / f'of-{ranks}'}-{rank}.json") for rank in range(ranks)]
        results = [json.loads(file.read_text()) for file in files]
        assert all(result["rewards"] == results[0]["rewards"] for result in results)
        columns = {name: [value for result in results for value in result[name]] for name in results[0]["columns"]}
        return [columns, *(results[0][name] for name in ("rewards", "metrics", "started", "used"))]

    of_one, of_two = read(1), read(2)
    tokens = "dynamic_sampling/tokens_per_useful_group"
    assert of_two[2].pop(tokens) > of_one[2].pop(tokens)  # of an odd number of groups, one is sampled twice
    assert of_one == of_two
    rounds = of_one[2]["dynamic_sampling/rounds"]
    assert rounds > 1
    if options:  # 6 prompts, of which a fraction of 9/12 was dropped before; only the last rounds may be unused
        assert of_one[3]["0/0/round-1"] == 5
        assert of_one[4] == list(of_one[3])[: len(of_one[4])] and len(of_one[4]) == rounds
    else:
        assert not of_one[3]


def test_a_stream_is_rejected(tmp_path: Path) -> None:
    from grpo_recipes.trainers.dynamic_sampling import DynamicSampling

    class Trainer:
        train_dataset = Dataset.from_list([{"prompt": "1"}]).to_iterable_dataset()

    with pytest.raises(ValueError, match=r"the other prompts of a stream are unknown\. Fix: pass a Dataset"):
        DynamicSampling(Trainer())  # type: ignore[arg-type]
