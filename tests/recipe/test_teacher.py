"""A teacher that does not fit the trained model is found in the files of both, before anything starts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from grpo_recipes.recipe import Recipe
from grpo_recipes.recipe.check import check

Read = Callable[..., Recipe]
WORDS = {"a": 0, "b": 1}
END = [{"id": 2, "content": "<end>"}]


def save(folder: Path, vocabulary: object = WORDS, added: object = END, size: int = 8) -> str:
    """Write a model folder without weights, and return its name."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"vocab_size": size}))
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}, "added_tokens": added}))
    return str(folder)


def list_problems(read: Read, model: str, teacher: str, environment: dict[str, str] | None = None) -> list[str]:
    recipe = read(model_name_or_path=model, teacher_model_name_or_path=teacher, chat_template="{{ messages }}")
    problems = check(recipe, environment or {})
    return [str(problem).partition(": ")[2] for problem in problems if "teacher" in problem.what]


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, []),
        ({"vocabulary": [["a", -1.5], ["b", -2.5]]}, []),  # Unigram
        ({"added": [*END, {"id": 3, "content": "<more>"}], "size": 9}, []),
        ({"vocabulary": {"a": 1, "b": 0}}, ["the teacher's tokenizer has no or another id for 2 of 3 tokens"]),
        ({"added": None}, ["the teacher's tokenizer has no or another id for 1 of 3 tokens, for example '<end>'"]),
        ({"size": 7}, ["the teacher has 7 embeddings, but the trained model has 8"]),
        ({"vocabulary": 3, "size": "x"}, []),  # unreadable: the tokenizer may load in another way
    ],
)
def test_a_folder_is_compared_with_the_model(
    tmp_path: Path, read: Read, keys: dict[str, object], expected: list[str]
) -> None:
    problems = list_problems(read, save(tmp_path / "model"), save(tmp_path / "teacher", **keys))  # type: ignore[arg-type]
    assert len(problems) == len(expected)
    for problem, text in zip(problems, expected, strict=True):
        assert problem.startswith(text) and problem.endswith(
            "Fix: set a teacher with the tokenizer of the trained model"
        )


def test_downloaded_models_are_compared_and_others_are_not(tmp_path: Path, read: Read) -> None:
    save(tmp_path / "hub/models--a--teacher/snapshots/1234", {"a": 5})
    model, environment = save(tmp_path / "model"), {"HF_HOME": str(tmp_path)}
    (problem,) = list_problems(read, model, "a/teacher", environment)
    assert "no or another id for 2 of 3 tokens" in problem
    assert list_problems(read, model, "a/other", environment) == []
    assert list_problems(read, "a/model", "a/teacher", environment) == []
