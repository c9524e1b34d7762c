"""What a recipe needs of the hub."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from grpo_recipes.fetch.assets import Wanted, assets_of, local_assets_of
from grpo_recipes.recipe import Recipe

Read = Callable[..., Recipe]


def names(assets: list[Wanted]) -> list[tuple[object, ...]]:
    return [(asset.id, asset.config, asset.split, asset.limit) for asset in assets]


def test_model_and_training_set_with_their_lines(read: Read) -> None:
    model, dataset = assets_of(read(model_revision="v2", dataset_config="main"))
    assert (model.kind, model.id, model.revision) == ("model", "Qwen/Qwen2.5-1.5B-Instruct", "v2")
    assert (dataset.kind, dataset.id, dataset.config, dataset.split) == ("dataset", "openai/gsm8k", "main", "train")
    assert model.where.startswith("recipe.yaml:") and model.where != dataset.where
    assert str(dataset) == "dataset openai/gsm8k (main, train)"


def test_the_evaluation_set_when_there_is_evaluation(read: Read) -> None:
    assert len(assets_of(read(eval_dataset_name="ada/held"))) == 2
    named = read(eval_dataset_name="ada/held", eval_dataset_config="hard", eval_strategy="steps", eval_steps=5)
    assert names(assets_of(named))[2:] == [("ada/held", "hard", "test", None)]
    own = read(eval_strategy="steps", eval_steps=5, dataset_test_split="validation")
    assert names(assets_of(own))[2:] == [("openai/gsm8k", None, "validation", None)]


def test_every_dataset_of_a_mixture(read: Read) -> None:
    entries = [{"id": "ada/one"}, {"id": "ada/two", "config": "main", "split": "rest"}, {"id": "./three.jsonl"}]
    recipe = read(without="dataset_name", dataset_mixture={"datasets": entries})
    assert names(assets_of(recipe))[1:] == [("ada/one", None, "train", None), ("ada/two", "main", "rest", None)]
    assert names(local_assets_of(recipe)) == [("./three.jsonl", None, "train", None)]


def test_benchmarks_that_are_on_the_hub(read: Read) -> None:
    recipe = read(benchmarks=["math_500", "smoke:sums"])
    assert names(assets_of(recipe))[2:] == [("HuggingFaceH4/MATH-500", None, "test", None)]


def test_a_stream_is_limited_with_rows_to_spare(read: Read) -> None:
    stream = read(dataset_streaming=True, max_train_prompts=50, eval_strategy="steps", eval_steps=5)
    assert names(assets_of(stream))[1:] == [
        ("openai/gsm8k", None, "train", 100),
        ("openai/gsm8k", None, "test", 10_000),
    ]


def test_one_dataset_used_twice_is_one_piece_with_the_most_rows(read: Read) -> None:
    twice = read(
        dataset_streaming=True,
        max_train_prompts=50,
        eval_strategy="steps",
        eval_steps=5,
        eval_dataset_name="openai/gsm8k",
        eval_dataset_split="train",
    )
    assert names(assets_of(twice))[1:] == [("openai/gsm8k", None, "train", 10_000)]


@pytest.mark.parametrize("name", ["smoke:sums", "/data/rows", "~/rows", "rows.jsonl", "sub/rows.parquet"])
def test_what_lies_here_is_not_of_the_hub(read: Read, name: str) -> None:
    assert [asset.id for asset in assets_of(read(dataset_name=name))] == ["Qwen/Qwen2.5-1.5B-Instruct"]


def test_a_folder_named_like_a_hub_id_is_the_folder(
    read: Read, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    recipe = read(model_name_or_path="ada/sums")
    assert [asset.id for asset in assets_of(recipe)] == ["ada/sums", "openai/gsm8k"]
    (tmp_path / "ada" / "sums").mkdir(parents=True)
    assert [asset.id for asset in local_assets_of(recipe)] == ["ada/sums"]
