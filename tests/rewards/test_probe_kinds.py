"""Reports of the reward check: every fault, correct answers with score 0, and slow rewards with fewer completions."""

from __future__ import annotations

import pytest

from grpo_recipes.errors import ConfigError
from grpo_recipes.recipe.check import check
from grpo_recipes.rewards.probe import find_problems, probe_reward, probe_rewards
from grpo_recipes.rewards.score import make_reward

ROWS = [
    {"prompt": [{"role": "user", "content": f"{n}+1="}], "answer": str(n + 1)} for n in range(12)
]  # fmt: skip
CODE = """
import time

def accuracy(completions, answer):
    return [0.0 for _ in completions]

def by_column(completions, **columns):
    return [0.0 for _ in columns["answer"]]

def style(completions):
    return [0.002 * ("<answer>" in c[-1]["content"]) + 0.001 * ("11" in c[-1]["content"]) for c in completions]

def slow(completions, answer):
    time.sleep(0.2)
    return [float(a in c[-1]["content"].split()) for c, a in zip(completions, answer)]

def broken(completions):
    raise KeyError("lost")
"""


@pytest.fixture
def recipe(read, tmp_path, monkeypatch):
    """Return a function that builds a recipe with these rewards of a file."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(CODE)

    def with_rewards(*names, **keys):
        return read(reward_funcs=[f"mine.py:{name}" for name in names], **keys)

    return with_rewards


@pytest.mark.parametrize("name", ["accuracy", "by_column"])
def test_right_answers_that_get_nothing_are_reported_although_another_reward_differs(recipe, name):
    """M6: with an example of a right answer that gets 0."""
    probed_recipe = recipe(name, "style")
    problems = find_problems(probed_recipe, ROWS, probe_rewards(probed_recipe, ROWS))
    (problem,) = [finding for finding in problems if f"mine.py:{name}" in finding.what]
    assert "gives right answers 0, like wrong answers: '" in problem.what and "' to '0+1=' gets 0" in problem.what
    assert not [finding for finding in problems if "mine.py:style" in finding.what], "it takes no solution"


def test_rows_without_a_solution_are_tried_without_right_answers():
    rows = [{"prompt": row["prompt"]} for row in ROWS]
    result = probe_reward("format_tags", make_reward("format_tags"), rows)
    assert (result.right, result.faults) == (0, [])


def test_the_only_reward_is_reported_with_an_example(recipe):
    """M6: the example of a missed right answer."""
    probed_recipe = recipe("accuracy")
    (problem,) = find_problems(probed_recipe, ROWS, probe_rewards(probed_recipe, ROWS))
    assert "both get the same on average, e.g. " in problem.what and "gets 0" in problem.what


def test_every_reward_that_cannot_be_loaded_is_reported(recipe, tmp_path):
    """M6: the failing import of a reward does not hide the failing import of another reward."""
    for name in ("one", "two"):
        (tmp_path / f"{name}.py").write_text(f"raise OSError('no {name}')\ndef score(completions):\n    return []\n")
    probed_recipe = recipe("style").with_value("reward_funcs", recipe("style").values["reward_funcs"])
    probed_recipe["reward_funcs"][:] = ["one.py:score", "two.py:score"]
    with pytest.raises(ConfigError) as refused:
        probe_rewards(probed_recipe, ROWS)
    assert sorted(problem.what.split("no ")[1][:3] for problem in refused.value.problems) == ["one", "two"]


@pytest.mark.slow
def test_a_slow_reward_is_shown_fewer_completions(recipe, monkeypatch):
    """M19: at most some seconds for one reward, with all ways of writing an answer."""
    monkeypatch.setattr("grpo_recipes.rewards.probe._MOST_SECONDS", 2.0)
    (result,) = probe_rewards(recipe("slow", reward_workers=2), ROWS)
    assert result.skipped > 0 and result.right + result.wrong >= 80
    assert result.distinguishes and not result.faults


def test_a_package_that_is_not_installed_is_named(recipe, tmp_path):
    """R4: a reward file with a failing import."""
    (tmp_path / "judge.py").write_text("import json\nimport no_such_pkg\ndef score(completions):\n    return [0.0]\n")
    probed_recipe = recipe("style")
    probed_recipe["reward_funcs"][:] = ["judge.py:score"]
    (problem,) = check(probed_recipe, {})
    assert "'judge.py:2' imports 'no_such_pkg', which is not installed" in problem.what
    (tmp_path / "no_such_pkg.py").write_text("")
    assert check(probed_recipe, {}) == []
