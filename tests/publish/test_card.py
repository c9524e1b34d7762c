"""The page of a trained model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from grpo_recipes.publish.card import card_of, model_card

SECRET = "hf_" + "planted" * 4


def front_matter(card: str) -> dict[str, Any]:
    _, facts, _ = card.split("---\n", 2)
    return yaml.safe_load(facts)


def card(**changes: Any) -> str:
    facts: dict[str, Any] = {"identity": {}, "summary": {}, "rows": [], "plan": {}, "recipe": "seed: 1"}
    return model_card(**{**facts, **changes})


def source(kind: str, name: str, revision: str | None = "main", licence: str | None = None) -> dict[str, Any]:
    return {"kind": kind, "id": name, "revision": revision, "commit": "c" * 40, "licence": licence}


def test_the_card_says_what_a_model_was_made_from_and_the_result(run_dir: Path) -> None:
    text = card_of(run_dir)
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
        "| reward, first 3 steps | 0.2 |",
        "| reward, last 5 steps | 0.3 |",
        "| gsm8k pass@1 | 0.5 |",
        "| 5 | 0.5 |",
        "- grpo-recipes at commit 0123abc",
        "- command: `grpo launch recipe.yaml`",
        "- a step: 4 prompts x 8 completions on 2 training process(es), cuda",
        f"- dataset ada/rows (train) at {'c0ffee' * 6}c0de",
        "- trl 1.16.0",
        "```yaml\n# recipe.yaml:1\nmodel_name_or_path: ada/base\ndataset_name: ada/rows\n```",
    ):
        assert f"{line}\n" in text, line


def test_nothing_is_said_that_is_not_known() -> None:
    local = [source("model", "/home/ada/model", None), source("dataset", "/home/ada/rows.jsonl", None)]
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
    recipe: dict[str, Any], trained_on: list[str]
) -> None:
    names = ["ada/rows", "eve/rows", "ada/held-out", "HuggingFaceH4/MATH-500"]
    sources = [source("dataset", name) for name in names if name != "eve/rows" or name in trained_on]
    text = card(identity={"sources": sources}, recipe=yaml.safe_dump({**recipe, "benchmarks": ["math_500"]}))
    assert front_matter(text)["datasets"] == trained_on
    (opening,) = [line for line in text.splitlines() if "trained with GRPO on" in line]
    assert [name for name in names if name in opening] == trained_on
    assert f"- dataset HuggingFaceH4/MATH-500 at {'c' * 40}" in text


def test_training_that_goes_on_and_smoke_tests_say_so() -> None:
    rows = [{"step": 1, "max_steps": 9, "reward": 0.5}]
    assert "so far 1 of 9 optimizer steps; training goes on" in card(summary={"status": "running"}, rows=rows)
    assert "This is a smoke test on CPU, not an experiment." in card(plan={"smoke": True})
    assert "with uncommitted changes" in card(identity={"code": {"commit": "a", "dirty": True}})


def test_a_long_run_has_a_short_curve_of_means() -> None:
    rows = [{"step": step, "max_steps": 100, "reward": float(step)} for step in range(1, 101)]
    rows[0]["reward"] = "nan"  # as metrics.jsonl writes it
    text = card(rows=rows)
    curve = text.split("## Reward by step\n\n")[1].split("\n\n")[0].splitlines()[2:]
    assert len(curve) == 11 and curve[0] == "| 10 | 6 |" and curve[-1] == "| 100 | 96 |"


def test_secrets_are_masked_and_a_fence_cannot_be_closed() -> None:
    recipe = "system_prompt: |\n  ```\n  # not a heading\n  ````"
    text = card(identity={"command": f"grpo launch x.yaml --name {SECRET}"}, recipe=recipe)
    assert SECRET not in text and "********" in text
    assert text.endswith(f"`````yaml\n{recipe}\n`````\n")


def test_numbers_of_any_depth_are_listed() -> None:
    summary = {
        "final_eval_reward": 0.25,
        "benchmarks": {"aime24": {"pass": {"1": 0.1, "8": 0.4}, "problems": 30, "ok": True}},
    }
    text = card(summary=summary, rows=[{"step": 1, "reward": 1.0}])
    for line in ("| final eval reward | 0.25 |", "| aime24 pass 8 | 0.4 |", "| aime24 problems | 30 |"):
        assert line in text
    assert "ok" not in json.dumps(text.split("## How")[0])
