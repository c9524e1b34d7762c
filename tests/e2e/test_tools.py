"""Tools in whole runs, through a real vLLM server: a tiny model learns to look prices up and to multiply."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from documented import documented
from real_runs import (
    REPOSITORY,
    Launch,
    clean_environment,
    marked_processes,
    same_rows,
    stop_and_resume,
    weights_hash,
)
from shop import SHOP

pytestmark = pytest.mark.slow
FOLDER = REPOSITORY / "recipes/environments"
INSIDE = ("--vllm_mode", "colocate")  # without a server, a run takes half of the time
CLASS = f"""{SHOP}
    def reset(self, **row):
        assert row["solution"] and row["prompt"]

def calls(completions, environments):
    return [environment.calls / 10 for environment in environments]
"""


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    """The shipped recipe with absolute paths, because each launch of a test has its own folder."""
    text = (FOLDER / "tools_smoke.yaml").read_text().replace("recipes/environments/", f"{FOLDER}/")
    recipe = tmp_path / "shop.yaml"
    recipe.write_text(text.replace("../smoke", str(FOLDER.parent / "smoke")))
    return recipe


def evaluations(run: Launch) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run.run_dir / "eval.jsonl").read_text().splitlines()]


@pytest.mark.timeout(1500)  # its smoke model is made first, which takes minutes
def test_a_model_learns_to_call_tools(launch: Callable[..., Launch], shop: Path) -> None:
    run = launch(str(shop), *INSIDE)
    assert run.wait(1300) == 0, run.output
    before, after = evaluations(run)  # seen with a server: right answers 0.43 and 0.94, calls 0.86 and 1.91
    assert before["eval_reward"] < 0.6 and after["eval_reward"] > 0.8
    assert before["eval_episodes/tool_calls"] < 1.5 < after["eval_episodes/tool_calls"]
    rows = run.rows()
    assert max(row["sampling/sampling_logp_difference/mean"] for row in rows) < 1e-4
    assert all(row["episodes/unscored"] == 0 for row in rows)
    samples = [json.loads(line) for line in (run.run_dir / "samples.jsonl").read_text().splitlines()]
    messages = [
        message
        for sample in samples[-1]["samples"]
        for turn in sample["episode"]["turns"]
        for message in turn.get("messages", [])
    ]
    assert messages and {message["role"] for message in messages} == {"tool"}


@pytest.mark.timeout(1500)
def test_an_evaluation_without_a_training_calls_the_tools(shop: Path, tmp_path: Path) -> None:
    mark = f"tools-{tmp_path.name}"
    command = [*documented("grpo eval last", {"last": str(shop)}), "--num-generations", "4", "--out", "out"]
    environment = clean_environment(tmp_path, mark)
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=1400)
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "out/eval.json").read_text())
    rows = [json.loads(line) for line in (tmp_path / "out/scores.jsonl").read_text().splitlines()]
    completions = [completion for row in rows for completion in row["completions"]]
    solved = [completion for completion in completions if completion["rewards"]["pure_accuracy_math"] == 1]
    assert result["pass@1"] == pytest.approx(len(solved) / len(completions)) and 0.2 < result["pass@1"] < 0.7
    called = [sum(message["role"] == "tool" for message in completion["messages"]) for completion in solved]
    assert sum(count == 2 for count in called) > 0.8 * len(solved)  # a guess is rarely right
    assert marked_processes(mark) == []


@pytest.mark.timeout(1500)
def test_without_tools_the_model_only_guesses(launch: Callable[..., Launch], shop: Path, tmp_path: Path) -> None:
    """Prices are only in the table, so that held-out questions stay unanswered."""
    recipe = tmp_path / "guess.yaml"
    text = shop.read_text()
    lines = [line for line in text.splitlines() if not line.startswith(("tools:", "max_tool", "environment_"))]
    recipe.write_text("\n".join(lines) + "\n")
    run = launch(str(recipe), *INSIDE)
    assert run.wait(1300) == 0, run.output
    _, after = evaluations(run)  # seen: 0.04 and 0.03
    assert after["eval_reward"] < 0.3


@pytest.mark.timeout(1500)
@pytest.mark.parametrize("kind", ["tools", "class"])
def test_a_run_stopped_among_tool_calls_continues_bit_for_bit(
    launch: Callable[..., Launch], shop: Path, kind: str
) -> None:
    if kind == "class":
        (own := shop.with_name("own.py")).write_text(CLASS)
        lines = [line for line in shop.read_text().splitlines() if not line.startswith("tools:")]
        lines += [f"environment: {own}:Shop", f"environment_args: {{file: {FOLDER}/prices.json}}"]
        shop.write_text("\n".join([*lines, f"reward_funcs: [pure_accuracy_math, environment, '{own}:calls']", ""]))
    flags = (str(shop), "--max_steps", "4", "--save_steps", "2", "--eval_steps", "4", "--eval_on_start", "false")
    whole = launch(*flags, folder="whole")
    assert whole.wait(900) == 0, whole.output
    assert max(row["sampling/sampling_logp_difference/mean"] for row in whole.rows()) < 1e-4
    assert max(row["episodes/tool_calls"] for row in whole.rows()) > 0.5
    if kind == "class":
        for row in whole.rows():
            worked = row["episodes/tool_calls"] - row["episodes/tool_failures"]
            assert row["rewards/calls/mean"] == row["rewards/environment/mean"] == pytest.approx(worked / 10, abs=0.1)

    resumed = stop_and_resume(launch, *flags)
    assert same_rows(resumed, whole) and weights_hash(resumed) == weights_hash(whole)
