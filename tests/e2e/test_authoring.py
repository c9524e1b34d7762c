"""Follow docs/recipes.md as a new user does: its commands in order, with new data and a new reward."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from real_runs import REPOSITORY, Launch, clean_environment

pytestmark = pytest.mark.slow

SUMS = [{"question": f"{a}+{b}=", "gold": str(a + b)} for a in range(10) for b in range(10)]
# What the user changes in the new recipe, whose values depend on whether the machine has a GPU.
EDITS = {
    "model_name_or_path": "smoke:sums",
    "dtype": "float32",
    "bf16": "false",
    "gradient_checkpointing": "false",
    "dataset_name": "data.jsonl",
    "dataset_prompt_column": "question",
    "dataset_solution_column": "gold",
    "reward_weights": "[1.0, 0.1]",
    "prompts_per_step": "4",
    "max_completion_length": "8",
    "learning_rate": "1.0e-4",
    "max_steps": "3",
    "vllm_max_model_length": "576",
}


def reward_of_the_docs() -> str:
    """Return the first Python example of the section on your own reward in docs/rewards.md."""
    section = (REPOSITORY / "docs/rewards.md").read_text().split("## Your own reward")[1]
    match = re.search(r"```python\n(.*?)```", section, re.DOTALL)
    assert match is not None
    return match[1]


def commands_of_the_docs() -> list[str]:
    """`grpo ...` lines of docs/recipes.md that name my.yaml, in their order."""
    lines = re.findall(r"^grpo .*my\.yaml.*$", (REPOSITORY / "docs/recipes.md").read_text(), re.MULTILINE)
    return [line for line in lines if "--from" not in line]


def test_from_an_empty_file_to_a_trained_model(launch: Callable[..., Launch], tmp_path: Path) -> None:
    commands = commands_of_the_docs()
    assert [line.split()[1] for line in commands] == ["new", "check", "check", "check-rewards", "plan", "launch"]

    def run(line: str) -> str:
        done = subprocess.run(
            [str(Path(sys.executable).with_name("grpo")), *line.split()[1:]],
            cwd=tmp_path,
            env=clean_environment(tmp_path, tmp_path.name),
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
        return done.stdout

    run(commands[0])
    recipe = tmp_path / "my.yaml"
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in SUMS))
    reward = reward_of_the_docs()
    assert len([line for line in reward.splitlines() if line]) <= 10
    name = re.findall(r"^def (\w+)", reward, re.MULTILINE)[0]
    (tmp_path / "my_rewards.py").write_text(reward)
    text = recipe.read_text()
    for key, value in (EDITS | {"reward_funcs": f"[pure_accuracy_math, my_rewards.py:{name}]"}).items():
        without_key = re.sub(rf"^{key}:.*\n", "", text, flags=re.MULTILINE)
        text = f"{without_key.rstrip()}\n{key}: {value}\n"
    recipe.write_text(text)

    outputs = {line: run(line) for line in commands[1:5]}
    assert "is valid" in outputs["grpo check my.yaml"]
    deep = outputs["grpo check my.yaml --deep"]
    assert "+" in deep and "tokens" in deep and "<|im_end|>" in deep
    run_of_it = launch("my.yaml")
    assert run_of_it.wait() == 0, run_of_it.output
    assert run_of_it.summary()["steps"] == 3
    row = run_of_it.rows()[-1]
    assert f"rewards/{name}/mean" in row and "rewards/pure_accuracy_math/mean" in row
    assert (run_of_it.run_dir / "model" / "config.json").is_file()
    assert (run_of_it.run_dir / "report.html").is_file()
