"""An installed package adds a recipe key, a command and a source of completions, and trains."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from overlay import Overlay, make_overlay

from grpo_recipes.recipe.extensions import GROUP

INIT = """
from grpo_recipes.recipe.extensions import Extension

EXTENSION = Extension(
    "dice",
    keys="dice.arguments:DiceArguments",
    prompt_source="dice.recipe:SOURCE",
    rollouts="dice.rollouts:DiceRollouts",
    notes="dice.recipe:describe_die",
    commands={"roll": "dice.command:roll"},
)
"""
ARGUMENTS = """
from dataclasses import dataclass

from grpo_recipes.recipe.fields import key
from grpo_recipes.recipe.sections import Key, Section


@dataclass
class DiceArguments:
    dice_sides: int | None = key(None, "Sides of the die whose rolls are trained on.", min=2, max=9)


class DiceKeys(Section):
    sides = Key[int | None]("dice_sides")
"""
RECIPE = """
from dice.arguments import DiceKeys
from grpo_recipes.recipe.sources import PromptSource


class Dice(PromptSource):
    title, keys = "dice", ("dice_sides",)


SOURCE = Dice()


def describe_die(recipe):
    return [f"the die has {DiceKeys(recipe).sides} sides"]
"""
COMMAND = """
from grpo_recipes.cli import command, option


@command("roll a die", option("sides", type=int))
def roll(options):
    print(f"a die of {options.sides} sides")
    return 0
"""
ROLLOUTS = """
import random

from datasets import Dataset

from grpo_recipes.data.problems import Counts
from grpo_recipes.data.prompts import Prompts
from grpo_recipes.rollouts.source import Source


class DiceRollouts(Source):
    records = []

    def __init__(self, script_args, args, run_dir):
        self._sides, self._rows, self._ids = script_args.dice_sides, [], []

    @classmethod
    def training_prompts(cls, args, seed, least):
        rows = Dataset.from_dict({"prompt": [[{"role": "user", "content": "roll"}]] * (8 * least)})
        return Prompts(rows, Counts(read=len(rows)), "roll", "rolls of a die")

    def start_generation(self, rows, name):
        self._rows, self._name = rows, name

    def __call__(self, prompts, trainer):
        tokenizer, draw = trainer.processing_class, random.Random(self._name)
        rolls = [draw.randrange(self._sides) + 1 for _ in prompts]
        self._ids = [tokenizer(str(roll)).input_ids + [tokenizer.eos_token_id] for roll in rolls]
        prompt = tokenizer("roll").input_ids
        return {
            "prompt_ids": [prompt for _ in prompts], "completion_ids": self._ids, "logprobs": None,
            "episode_reward": [roll / self._sides for roll in rolls], "episode_failed": [None for _ in rolls],
        }

    def completions(self):
        return [[{"role": "assistant", "content": "a roll"}] for _ in self._ids]
"""
MODULES = {"__init__": INIT, "arguments": ARGUMENTS, "recipe": RECIPE, "command": COMMAND, "rollouts": ROLLOUTS}
YAML = """
model_name_or_path: smoke:sums
dice_sides: 6
reward_funcs: [environment]
max_steps: 2
num_generations: 4
prompts_per_step: 2
max_completion_length: 8
use_vllm: false
use_cpu: true
"""


@pytest.fixture
def overlay(tmp_path: Path) -> Overlay:
    """An environment into which the package ``dice`` was installed."""
    overlay = make_overlay(tmp_path)
    for name, text in MODULES.items():
        path = overlay.site / "dice" / f"{name}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    info = overlay.site / "dice-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: dice\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{GROUP}]\ndice = dice:EXTENSION\n")
    return overlay


@pytest.mark.slow
def test_an_installed_extension_adds_a_key_and_a_command_and_trains(overlay: Overlay) -> None:
    assert overlay.grpo("roll", "6").stdout == "a die of 6 sides\n"
    assert "dice_sides" in overlay.grpo("keys", "dice").stdout
    recipe = overlay.repository / "dice.yaml"
    recipe.write_text(YAML.replace("use_cpu: true\n", ""))
    too_many = overlay.grpo("check", str(recipe), "--dice_sides", "10")
    assert too_many.returncode == 2 and "dice_sides" in too_many.stderr
    assert "the die has 6 sides" in overlay.grpo("check", str(recipe)).stdout
    answer = overlay.grpo("launch", str(recipe), timeout=400)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    (run,) = (overlay.repository / "runs").iterdir()
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert len(rows) == 2 and all(0 < row["reward"] <= 1 for row in rows)


def test_an_extension_that_fails_to_import_is_named_with_its_package(overlay: Overlay) -> None:
    (overlay.site / "dice/__init__.py").write_text("import not_there\n")
    answer = overlay.grpo("check", "recipes/smoke/grpo.yaml")
    assert answer.returncode == 2 and "dice" in answer.stderr and "Fix:" in answer.stderr
    assert "Traceback" not in answer.stderr
