"""S2: names in atropos_environment_args are checked by the source of the environment, before it is imported."""

from __future__ import annotations

from pathlib import Path

import pytest

from grpo_recipes.extensions.atropos.fields import read_configuration
from grpo_recipes.extensions.atropos.rules import find_unchecked_arguments
from grpo_recipes.recipe.check import check

pytest.importorskip("atroposlib")

GROUPS = {"dataset_name": None, "reward_funcs": ["environment"], "max_steps": 10}
OURS = "from grpo_recipes.extensions.atropos.environments import RecipeEnv, RecipeEnvConfig\n"
THEIRS = "from atroposlib.envs.base import BaseEnv, BaseEnvConfig\n"
FIELDS = "class Fields({base}):\n    problems: int = 3\n"


def write(folder: Path, text: str) -> str:
    (folder / "own.py").write_text(text)
    return f"{folder / 'own.py'}:Env"


def problems_of(read, environment: str, args: dict) -> list[str]:
    recipe = read(**GROUPS, atropos_environment=environment, atropos_environment_args=args)
    return [str(problem) for problem in check(recipe, {}) if "atropos_environment_args." in problem.what]


def test_the_fields_of_shipped_environments_are_those_of_their_classes() -> None:
    from grpo_recipes.extensions.atropos.serve import SHIPPED as CLASSES

    for name, kind in CLASSES.items():
        config = kind.env_config_cls
        assert read_configuration(name) == (config.__name__, frozenset(config.model_fields))


@pytest.mark.parametrize("environment", ["arithmetic", "dataset"])
def test_an_unknown_name_is_rejected_without_deep(read, environment: str) -> None:
    (problem,) = problems_of(read, environment, {"sed": 3, "seed": 3})
    assert "recipe.yaml:" in problem and "atropos_environment_args.sed: " in problem
    assert "has no field 'sed'. Fix: use 'seed'" in problem
    assert problems_of(read, environment, {"seed": 3}) == []
    (problem,) = problems_of(read, environment, {"temperature": 1.0})
    assert "is set by the launch. Fix: remove it, and set temperature" in problem


@pytest.mark.parametrize(
    ("text", "name"),
    [
        (f"{OURS}class Env(RecipeEnv): ...", "RecipeEnvConfig"),
        (f"{OURS}{FIELDS.format(base='RecipeEnvConfig')}class Env(RecipeEnv):\n    env_config_cls = Fields", "Fields"),
        (f"{THEIRS}{FIELDS.format(base='BaseEnvConfig')}class Env(BaseEnv):\n    env_config_cls = Fields\n", "Fields"),
        (f"{OURS}{FIELDS.format(base='RecipeEnvConfig')}class First(RecipeEnv):\n    env_config_cls: type = Fields\n"
         "class Env(First): ...", "Fields"),
        ("from atroposlib.envs.base import BaseEnv as Base\nclass Env(Base): ...", "BaseEnvConfig"),
    ],
)  # fmt: skip
def test_the_fields_of_ones_own_environment_are_read(read, tmp_path: Path, text: str, name: str) -> None:
    environment = write(tmp_path, text)
    (problem,) = problems_of(read, environment, {"problms": 4})
    assert f"{name} has no field 'problms'" in problem and ("use 'problems'" in problem) == (name == "Fields")
    assert bool(problems_of(read, environment, {"problems": 4})) == (name != "Fields")
    recipe = read(**GROUPS, atropos_environment=environment, atropos_environment_args={"steps_per_eval": 4})
    assert problems_of(read, environment, {"steps_per_eval": 4}) == [] == [*find_unchecked_arguments(recipe)]


@pytest.mark.parametrize(
    "text",
    [
        f"{THEIRS}class Env(BaseEnv):\n    @classmethod\n    def config_init(cls): return Other(), []\n",
        f"{THEIRS}class Env(BaseEnv):\n    env_config_cls = make()\n",
        f"{THEIRS}{FIELDS.format(base='BaseEnvConfig')}    model_config = {{'extra': 'allow'}}\n"
        "class Env(BaseEnv):\n    env_config_cls = Fields\n",
        "import atroposlib\nclass Env(atroposlib.envs.base.BaseEnv): ...",
        "class Env(Env): ...",
        f"{OURS}class Mixin: ...\nclass Env(Mixin, RecipeEnv): ...",
        f"{OURS}@decorated\nclass Env(RecipeEnv): ...",
    ],
)
def test_fields_that_the_source_does_not_show_are_left_to_deep_with_a_note(read, tmp_path: Path, text: str) -> None:
    environment = write(tmp_path, text)
    assert problems_of(read, environment, {"problms": 4}) == []
    keys = {**GROUPS, "atropos_environment": environment}
    (note,) = find_unchecked_arguments(read(**keys, atropos_environment_args={"problms": 4}))
    assert f"'{environment}' does not show its fields: run grpo check --deep to check them" in note
    assert [*find_unchecked_arguments(read(**keys))] == []
