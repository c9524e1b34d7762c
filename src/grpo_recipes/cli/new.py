"""`grpo new`: a recipe to start from, whose editor knows the keys."""

from __future__ import annotations

import argparse
import os
import re
import shlex
from pathlib import Path

from grpo_recipes.errors import config_error
from grpo_recipes.paths import shown
from grpo_recipes.plan.plan import choose_recipe
from grpo_recipes.recipe.schema import schema_line

HELP = "write a recipe to start from"
TAKES_RECIPE = False
_SCHEMA_LINE = re.compile(r"\A# yaml-language-server: .*\n")
_START = """\
# Every key: grpo keys WORD. Before a job: grpo check --deep, grpo check-rewards, grpo fetch.
model_name_or_path: Qwen/Qwen2.5-0.5B-Instruct
dtype: bfloat16

dataset_name: data.jsonl # a local file or a hub id
dataset_prompt_column: problem
dataset_solution_column: answer
max_prompt_length: 512
system_prompt: Think step by step, then give the final answer alone inside <answer> and </answer>.

reward_funcs: [pure_accuracy_math]

prompts_per_step: 105 # the same batch on 1, 3, 6, 7 or 15 trainers
num_generations: 8
max_completion_length: 1024
learning_rate: 1.0e-6
max_steps: 200

use_vllm: true
vllm_max_model_length: 2048
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The file, and the recipe to copy."""
    parser.add_argument("file", metavar="FILE", help="the recipe to write, e.g. my.yaml")
    parser.add_argument("--from", dest="source", metavar="RECIPE", help="the recipe to copy")


def run(options: argparse.Namespace, _: list[str]) -> int:
    """Write a recipe to start from.

    Returns:
        0.

    Raises:
        ConfigError: the file is there already or cannot be written, or the recipe to copy does not exist.
    """
    for where, name in (("FILE", options.file), ("--from", options.source)):
        if name == "":
            raise config_error(where, "is empty", "name a file")
    path = Path(options.file)
    if os.path.lexists(path):
        raise config_error(options.file, "is there already", "name another file")
    text = _START
    if options.source:
        text = _SCHEMA_LINE.sub("", choose_recipe(options.source, {}, "grpo", "cpu").read_text(encoding="utf-8"))
    try:
        path.write_text(f"{schema_line(path)}\n{text}", encoding="utf-8")
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        what = f"cannot be written ({getattr(error, 'strerror', None) or error})"
        raise config_error(options.file, what, "name a file in a folder of yours") from None
    print(f"grpo: {shown(path)} is written; edit it, then: grpo check {shlex.quote(shown(path))}")
    return 0
