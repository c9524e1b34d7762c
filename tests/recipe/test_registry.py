"""The names a recipe can give, and the recipe's keys bound to them."""

from __future__ import annotations

import importlib.util
import inspect
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from transformers import Trainer, TrainingArguments

from grpo_recipes.recipe.keys import catalogue
from grpo_recipes.recipe.registry import DEFAULT_ACCURACY, TRACKER_CALLBACKS, missing_package, rewards
from grpo_recipes.rewards.score import make_reward

DEFAULTS = SimpleNamespace(**{key: entry["default"] for key, entry in catalogue().items()})
COLUMNS = {
    "answer": ["7"],
    "completion_ids": [[1, 2, 3]],
    "prompts": ["?"],
    "trainer_state": None,
    "episode_reward": [0.5],
    "verification_info": [{"inputs": ["7"], "outputs": ["49"]}],
}


@pytest.mark.parametrize(
    "name", [name for name, reward in rewards().items() if not reward.judges and not reward.calls_server]
)
def test_a_reward_has_its_name_its_keys_and_takes_whatever_columns_come(name):
    reward = make_reward(name, DEFAULTS, DEFAULTS)
    parameters = inspect.signature(reward).parameters

    assert reward.__name__ == name and reward.__doc__
    assert inspect.Parameter.VAR_KEYWORD in [parameter.kind for parameter in parameters.values()]
    assert set(rewards()[name].keys) <= set(catalogue()) & set(parameters)
    (score,) = reward(completions=["<answer>7</answer>"], **COLUMNS)
    assert isinstance(score, float)


def test_every_key_of_a_reward_is_bound():
    """A key that only a reward's help names must reach it."""
    for name, reward in rewards().items():
        named = {key for key, entry in catalogue().items() if entry["help"].startswith(f"{name}:")}
        assert named <= set(reward.keys)


def test_the_recipe_decides_and_not_a_column_of_its_name():
    keys = SimpleNamespace(answer_matching="strict")
    reward = make_reward("pure_accuracy_math", keys, None)
    columns = {"answer": ["7"], "answer_matching": ["normalized"]}

    assert reward(["<answer>7.0</answer>"], **columns) == [0.0]
    assert make_reward("pure_accuracy_math", DEFAULTS, None)(["<answer>7.0</answer>"], **columns) == [1.0]


def test_keys_come_from_both_configs():
    args = SimpleNamespace(max_completion_length=10)
    reward = make_reward("soft_overlong", SimpleNamespace(soft_punish_cache=5), args)

    assert reward(["a", "a"], completion_ids=[[1] * 5, [1] * 10]) == [0.0, -1.0]


def test_a_reward_without_keys_needs_no_recipe():
    assert make_reward("math_verify", None, None)(["<answer>7</answer>"], answer=["7"]) == [1.0]


def test_the_default_reward_is_registered():
    assert set(catalogue()["reward_funcs"]["default"]) <= set(rewards())
    assert rewards()[DEFAULT_ACCURACY].accuracy and rewards()[DEFAULT_ACCURACY].one_answer


def test_the_names_are_read_without_what_is_heavy():
    heavy = ("torch", "sympy", "trl")
    code = f"import sys, grpo_recipes.recipe.registry; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout.strip() == "[]"


def test_an_exact_match_does_not_import_sympy():
    code = """
import sys
from types import SimpleNamespace
from grpo_recipes.rewards.score import make_reward
reward = make_reward("pure_accuracy_math", SimpleNamespace(answer_matching="normalized"), None)
assert reward(["<answer>7</answer>"], answer=["7"]) == [1.0]
print([m for m in ("torch", "sympy", "trl") if m in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("name", catalogue()["optim"]["choices"])
def test_an_optimizer_of_a_package_that_is_missing_is_known(name, tmp_path):
    arguments = TrainingArguments(
        output_dir=str(tmp_path), optim=name, optim_target_modules=["all-linear"], use_cpu=True
    )
    try:
        Trainer.get_optimizer_cls_and_kwargs(arguments)
    except (ImportError, ValueError) as error:
        refused = str(error)
    else:
        refused = ""

    package = missing_package("optim", name)
    assert bool(package) == bool(refused), refused


def test_a_package_that_is_installed_is_not_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    assert missing_package("use_liger_kernel", True) == "liger-kernel"
    (tmp_path / "liger_kernel.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert missing_package("use_liger_kernel", True) is None and missing_package("use_liger_kernel", False) is None


@pytest.mark.parametrize(("version", "package"), [("0.7.20", None), ("0.10.3", "swanlab<0.8")])
def test_a_version_that_does_not_work_counts_as_missing(tmp_path, monkeypatch, version, package):
    assert missing_package("report_to", ["swanlab"]) == "swanlab<0.8"
    (tmp_path / "swanlab.py").touch()
    (tmp_path / f"swanlab-{version}.dist-info").mkdir()
    (tmp_path / f"swanlab-{version}.dist-info/METADATA").write_text(f"Name: swanlab\nVersion: {version}\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert missing_package("report_to", ["swanlab"]) == package


@pytest.mark.parametrize(
    ("key", "value", "package"),
    [
        ("callbacks", ["transformers.integrations:MLflowCallback"], "mlflow"),
        ("callbacks", ["mine.py:Mine", "transformers.integrations:TrackioCallback"], "trackio"),
        ("callbacks", ["transformers:TrainerCallback"], None),
        ("report_to", ["wandb"], None),
        ("report_to", ["tensorboard", "none"], None),
        ("report_to", ["wandb", "comet_ml"], "comet-ml"),
        ("optim", "galore_adamw", "galore-torch"),
        ("use_liger_kernel", True, "liger-kernel"),
    ],
)
def test_a_package_that_a_value_needs_is_named(key, value, package):
    """R14: trackers' callbacks passed the check, and the run ended in a traceback."""
    assert missing_package(key, value) == package


def test_callbacks_of_trackers_are_classes_of_transformers():
    """R14: the table against the library."""
    source = Path(importlib.util.find_spec("transformers").origin).with_name("integrations") / "integration_utils.py"
    classes = set(re.findall(r"^class (\w+Callback)\(", source.read_text(), re.MULTILINE))
    assert {name for name, _ in TRACKER_CALLBACKS.values()} <= classes
    replaced = {"TensorBoardCallback", "WandbCallback", "KubeflowCallback"}
    assert classes - {name for name, _ in TRACKER_CALLBACKS.values()} <= replaced
