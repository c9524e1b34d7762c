"""The page of a trained model."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from grpo_recipes.console.publish.publisher import render_card
from grpo_recipes.runs.rundir import write_json

Card = Callable[..., str]

SECRET = "hf_" + "planted" * 4


def front_matter(card: str) -> dict[str, Any]:
    _, facts, _ = card.split("---\n", 2)
    return yaml.safe_load(facts)


@pytest.fixture
def card(tmp_path: Path) -> Callable[..., str]:
    """``card(identity=..., summary=..., plan=..., rows=..., recipe=...)``: the card of a run with these files."""

    def card_with(rows: Sequence[dict[str, Any]] = (), recipe: str = "seed: 1", **files: dict[str, Any]) -> str:
        for name in ("identity", "summary", "plan"):
            write_json(tmp_path / f"{'run' if name == 'identity' else name}.json", files.get(name, {}))
        (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (tmp_path / "recipe.yaml").write_text(recipe)
        return render_card(tmp_path)

    return card_with


def source(kind: str, name: str, revision: str | None = "main", licence: str | None = None) -> dict[str, Any]:
    return {"kind": kind, "id": name, "revision": revision, "commit": "c" * 40, "licence": licence}


def test_the_card_says_what_a_model_was_made_from_and_the_result(run_dir: Path) -> None:
    text = render_card(run_dir)
    assert front_matter(text) == {
        "base_model": "ada/base",
        "datasets": ["ada/rows"],
        "library_name": "transformers",
        "license": "mit",
        "pipeline_tag": "text-generation",
        "tags": ["grpo", "trl"],
    }
    for line in (
        "# sums",
        "[ada/base](https://huggingface.co/ada/base) trained with GRPO on "
        "[ada/rows](https://huggingface.co/datasets/ada/rows): 5 optimizer steps.",
        "| reward, first 5 steps | 0.3 |",
        "| reward, last 5 steps | 0.3 |",
        "| gsm8k | pass@1 0.500 (0.400 to 0.600); 8 problems |",
        "| 5 | 0.5 |",
        "- grpo-recipes at commit 0123abc",
        "- command: `grpo launch recipe.yaml`",
        "- a step: 4 prompts x 8 completions on 2 training process(es), cuda",
        f"- dataset ada/rows (train) at {'c0ffee' * 6}c0de",
        "- trl 1.16.0",
        "```yaml\n# recipe.yaml:1\nmodel_name_or_path: ada/base\ndataset_name: ada/rows\n```",
    ):
        assert f"{line}\n" in text, line


def test_nothing_is_said_that_is_not_known(card: Card) -> None:
    local = [source("model", "/home/ada/model/", None), source("dataset", "/home/ada/rows.jsonl", None)]
    text = card(identity={"sources": local}, recipe="dataset_name: /home/ada/rows.jsonl")
    assert front_matter(text).keys() == {"library_name", "pipeline_tag", "tags"}
    assert "`model` trained with GRPO on `rows.jsonl`: 0 optimizer steps." in text
    assert "/home/ada" not in text.split("## Recipe")[0] and "Results" not in text and "None" not in text
    unlicensed = card(identity={"sources": [source("model", "ada/base")]})
    assert front_matter(unlicensed)["base_model"] == "ada/base" and "license" not in front_matter(unlicensed)


@pytest.mark.parametrize(
    ("recipe", "trained_on"),
    [
        ({"dataset_name": "ada/rows", "eval_dataset_name": "ada/held-out"}, ["ada/rows"]),
        ({"dataset_mixture": {"datasets": [{"id": "ada/rows"}, {"id": "eve/rows"}]}}, ["ada/rows", "eve/rows"]),
    ],
)
def test_what_it_was_only_measured_on_is_not_said_to_be_trained_on(
    card: Card, recipe: dict[str, Any], trained_on: list[str]
) -> None:
    names = ["ada/rows", "eve/rows", "ada/held-out", "HuggingFaceH4/MATH-500"]
    sources = [source("dataset", name) for name in names if name != "eve/rows" or name in trained_on]
    text = card(identity={"sources": sources}, recipe=yaml.safe_dump({**recipe, "benchmarks": ["math_500"]}))
    assert front_matter(text)["datasets"] == trained_on
    (opening,) = [line for line in text.splitlines() if "trained with GRPO on" in line]
    assert [name for name in names if name in opening] == trained_on
    assert f"- dataset HuggingFaceH4/MATH-500 at {'c' * 40}" in text


def test_training_that_goes_on_and_smoke_tests_say_so(card: Card) -> None:
    rows = [{"step": 1, "max_steps": 9, "reward": 0.5}]
    assert "1 of 9 optimizer steps so far" in card(summary={"status": "running"}, rows=rows)
    assert "This is a smoke test on CPU, not an experiment." in card(plan={"smoke": True})
    assert "with uncommitted changes" in card(identity={"code": {"commit": "a", "dirty": True}})


def test_a_long_run_has_a_short_curve_of_means(card: Card) -> None:
    rows = [{"step": step, "max_steps": 100, "reward": float(step)} for step in range(1, 101)]
    rows[0]["reward"] = "nan"  # the spelling in metrics.jsonl
    text = card(rows=rows)
    curve = text.split("## Reward by step\n\n")[1].split("\n\n")[0].splitlines()[2:]
    assert len(curve) == 11 and curve[0] == "| 10 | 6 |" and curve[-1] == "| 100 | 96 |"


def test_secrets_are_masked_and_a_fence_cannot_be_closed(card: Card) -> None:
    recipe = "system_prompt: |\n  ```\n  # not a heading\n  ````"
    text = card(identity={"command": f"grpo launch x.yaml --name {SECRET}"}, recipe=recipe)
    assert SECRET not in text and "********" in text
    assert text.endswith(f"`````yaml\n{recipe}\n`````\n")


def test_evaluations_and_what_benchmarks_are_compared_with_are_listed(card: Card) -> None:
    scores = {"pass@8": 0.4, "pass@8_ci": [0.25, 0.5], "problems": 30}
    summary = {"final_eval_reward": 0.25, "benchmarks": {"aime24": {**scores, "baselines": {"random guesser": scores}}}}
    text = card(summary=summary, rows=[{"step": 1, "reward": 1.0}])
    assert "| final eval reward | 0.25 |" in text and "initial eval reward" not in text
    assert "The weights are from step" not in text
    summary |= {"best_step": 1, "best_eval_reward": 0.5}
    text = card(summary=summary, rows=[{"step": 1, "reward": 1.0}], recipe="load_best_model_at_end: true")
    assert "The weights are from step 1, which had the largest evaluation reward." in text
    assert "| best eval reward | 0.5 |" in text
    assert "| aime24 | pass@8 0.400 (0.250 to 0.500); 30 problems; random guesser pass@8 0.400 |" in text


def test_a_benchmark_of_which_little_is_known_does_not_cost_the_card(card: Card) -> None:
    text = card(summary={"benchmarks": {"gsm8k": {"pass@1": 0.5}}}, rows=[{"step": 1, "reward": 1.0}])
    assert "| gsm8k | pass@1 0.500" in text
