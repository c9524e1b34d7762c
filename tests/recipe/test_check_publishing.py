"""Reject names that the hub would reject, and a push without a model to push."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from grpo_recipes.errors import ConfigError
from grpo_recipes.recipe import Recipe
from grpo_recipes.recipe.check import check

Read = Callable[..., Recipe]


@pytest.mark.parametrize("name", ["ada/sums", "sums", "Sum-Lab/qwen2.5_1.5B-math.v2", "a/b"])
def test_names_of_repositories(read: Read, name: str) -> None:
    assert check(read(push_to_hub=True, hub_model_id=name), {}) == []


@pytest.mark.parametrize("name", ["ada/my sums", "a/b/c", "https://huggingface.co/a/b", "ada/", "-x", "a--b", "x.git"])
def test_what_is_no_name(read: Read, name: str) -> None:
    (problem,) = check(read(push_to_hub=True, hub_model_id=name), {})
    assert (
        problem.where.startswith("recipe.yaml:") and f"expected the name of a repository, got '{name}'" in problem.what
    )
    assert check(read(hub_model_id=name), {}) == []  # nothing is pushed


@pytest.mark.parametrize("branch", ["main", "run/7", "v2.0"])
def test_a_branch(read: Read, branch: str) -> None:
    assert check(read(push_to_hub=True, hub_revision=branch), {}) == []


@pytest.mark.parametrize("branch", ["0123456789" * 4, "-f", "two words"])
def test_a_push_goes_to_a_branch(read: Read, branch: str) -> None:
    (problem,) = check(read(push_to_hub=True, hub_revision=branch), {})
    assert "expected the name of a branch" in problem.what


@pytest.mark.parametrize("strategy", ["every_save", "checkpoint", "all_checkpoints"])
def test_a_push_during_training_is_rejected_with_the_strategy_to_write(read: Read, strategy: str) -> None:
    with pytest.raises(
        ConfigError, match=f"hub_strategy: '{strategy}' is not supported. Fix: set hub_strategy: end; push_to_hub"
    ):
        read(push_to_hub=True, hub_strategy=strategy)
    assert check(read(push_to_hub=True, hub_strategy="end"), {}) == []


def test_a_push_is_rejected_if_no_extension_serves_it(read: Read, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("grpo_recipes.recipe.rules.is_served", lambda key: key != "push_to_hub")
    (problem,) = check(read(push_to_hub=True), {})
    assert "push_to_hub needs the console" in problem.what and "hf upload" in problem.fix
    assert check(read(), {}) == []
