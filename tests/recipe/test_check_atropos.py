"""Check recipes that get their groups from Atropos."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from golden import compare_messages, golden_files

from grpo_recipes import cli
from grpo_recipes.errors import ConfigError
from grpo_recipes.extensions.atropos.recipe import (
    list_environments,
    make_environment_labels,
    starts_run_api,
    uses_atropos,
)
from grpo_recipes.paths import display_path
from grpo_recipes.recipe import Recipe, read_frozen, read_recipe
from grpo_recipes.recipe.check import check, notes
from grpo_recipes.recipe.sources import user_code

pytest.importorskip("atroposlib")

GROUPS = {
    "dataset_name": None, "atropos_environment": "arithmetic", "reward_funcs": ["environment"], "max_steps": 10,
}  # fmt: skip
THEIRS = {**GROUPS, "atropos_environment": None, "atropos_api_url": "http://localhost:8000"}
MIXED = {**GROUPS, "atropos_environment": None}
OWN = "class Sums: ..."
Read = Callable[..., Recipe]


def mixture(*entries: dict[str, Any]) -> dict[str, Any]:
    """Return the keys of a recipe with several environments and a batch of 12 groups of 4 sequences."""
    return {**MIXED, "atropos_mixture": {"environments": list(entries)}}


def place_of(recipe: Recipe, text: str) -> str:
    """Return the line of the recipe file that contains a text."""
    lines = recipe.path.read_text().splitlines()
    return f"{display_path(recipe.path)}:{next(number for number, line in enumerate(lines, 1) if text in line)}"


@pytest.fixture
def user_file(tmp_path: Path) -> str:
    """Write a Python file with the user's environment class."""
    (tmp_path / "own.py").write_text(OWN)
    return str(tmp_path / "own.py")


@pytest.mark.parametrize("path", golden_files(__file__, "atropos"))
def test_what_is_wrong_is_said_with_its_fix_and_right_without_it(read: Read, path: Path) -> None:
    compare_messages(path, read)


def test_a_problem_of_an_environment_is_at_its_own_line(read: Read) -> None:
    recipe = read(**mixture({"id": "arithmetic"}, {"id": "arithmetik", "args": {"group_size": 3}}))
    unknown, size = check(recipe, {})
    assert unknown.where == place_of(recipe, "arithmetik") and size.where == place_of(recipe, "args:")
    (size,) = check(recipe := read(**GROUPS, atropos_environment_args={"group_size": 8}), {})
    assert size.where == place_of(recipe, "atropos_environment_args:")


def test_without_atroposlib_it_says_how_to_install_it(read: Read, monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "atroposlib" else find_spec(name))
    for keys, key in ((GROUPS, "atropos_environment"), (mixture({"id": "arithmetic"}), "atropos_mixture")):
        (problem,) = check(read(**keys), {})
        assert problem.what == f"{key} needs the package atroposlib, which is not installed"
        assert problem.fix == "install it with: EXTRAS=environments make setup"
    assert check(read(), {}) == []


def test_the_variable_is_the_key_of_a_recipe_of_atropos(read: Read) -> None:
    variables = {"ATROPOS_API_URL": "http://here:1"}
    recipe = read(variables=variables, **GROUPS)
    assert recipe["atropos_api_url"] == "http://here:1" and not starts_run_api(recipe.__getitem__)
    assert check(recipe, variables) == []
    flagged = read(["--atropos_api_url", "http://flag:2"], variables, **GROUPS)
    assert flagged["atropos_api_url"] == "http://flag:2", "a flag wins"
    overridden = read(variables=variables, **THEIRS)
    assert overridden["atropos_api_url"] == "http://here:1" and check(overridden, variables) == []
    (problem,) = check(read(variables={"ATROPOS_API_URL": "here"}, **GROUPS), {})
    assert str(problem).startswith("ATROPOS_API_URL: 'here' is not an http or https URL")


def test_the_variable_alone_does_not_make_a_recipe_one_of_atropos(read: Read) -> None:
    (problem,) = check(read(variables={"ATROPOS_API_URL": "http://here:1"}), {})
    assert problem.where == "ATROPOS_API_URL"
    assert problem.what == "'atropos_api_url' changes nothing in a run without Atropos"
    assert problem.fix.startswith("unset ATROPOS_API_URL, or add atropos_environment")


def test_a_frozen_recipe_says_by_itself_that_its_groups_come_from_there(read: Read, tmp_path: Path) -> None:
    recipe = read(variables={"ATROPOS_API_URL": "http://here:1"}, **THEIRS)
    frozen = tmp_path / "frozen.yaml"
    frozen.write_text(recipe.as_yaml())
    reread = read_frozen(frozen)
    assert reread.source("atropos_api_url") == "ATROPOS_API_URL" and check(reread, {}) == []


def test_a_broken_key_is_reported_once_and_hides_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "broken.yaml"
    keys = {"model_name_or_path": "a/b", **GROUPS, "use_vllm": True, "atropos_port": "none", "max_steps": -1}
    keys["max_prompt_length"] = 9
    path.write_text(yaml.safe_dump(keys))
    assert cli.main(["check", str(path)]) == 2
    told = capsys.readouterr().err.splitlines()
    assert (
        len(told) == 2
        and any("atropos_port: expected" in line for line in told)
        and any("max_steps" in line for line in told)
    )


def test_an_environment_of_the_users_is_read_and_kept_with_its_reward(
    read: Read, user_file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = {"reward": f"{user_file}:score"}
    recipe = read(**mixture({"id": f"{user_file}:Sums"}, {"id": "dataset", "args": args}))
    (problem,) = check(recipe, {})
    assert problem.where == place_of(recipe, "args:") and "has no 'score'" in problem.what
    (tmp_path / "own.py").write_text(f"{OWN}\ndef score(completions): ...")
    assert check(recipe, {}) == []
    assert user_code(recipe.__getitem__) == ["environment", f"{user_file}:Sums", f"{user_file}:score"]


def test_environments_have_short_names_of_their_own(read: Read) -> None:
    ids = ["arithmetic", "my_own.py:Two Sums!", "a.b:arithmetic", "arithmetic", "x:Ä", f"x:{'l' * 99}"]
    recipe = read(**mixture(*({"id": name} for name in ids)))
    labels = make_environment_labels(recipe.__getitem__)
    assert labels == ["arithmetic", "two-sums", "arithmetic-2", "arithmetic-3", "environment", "l" * 40]


def test_weights_and_least_shares_come_from_the_mixture(read: Read) -> None:
    entries = [{"id": "arithmetic", "weight": 3, "min_allocation": 0.25}, {"id": "dataset", "args": {"seed": 1}}]
    first, second = list_environments(read(**mixture(*entries)).__getitem__)
    assert (first.weight, first.min_allocation, first.args) == (3.0, 0.25, {})
    assert (second.weight, second.min_allocation, second.args) == (1.0, None, {"seed": 1})
    assert not uses_atropos(read().__getitem__)


def test_variables_may_be_handed_to_environments_of_atropos(read: Read) -> None:
    recipe = read(**GROUPS, reward_environment=["JUDGE_KEY"])
    assert notes(recipe) == [] and check(recipe, {"JUDGE_KEY": "x"}) == []


def test_maxent_and_more_iterations_are_allowed(read: Read) -> None:
    assert check(read(**GROUPS, maxent_objective="tempered", num_iterations=2), {}) == []
    keys = {**GROUPS, "prompts_per_step": None, "steps_per_generation": 8, "per_device_train_batch_size": 4}
    assert check(read(**keys), {}) == []


def test_a_check_needs_no_torch_and_names_the_line(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text("model_name_or_path: a/b\ndataset_name: a/b\natropos_port: 70000\n")
    with pytest.raises(ConfigError, match=r"recipe.yaml:3: atropos_port: expected at most 65535, got 70000"):
        read_recipe(path)
