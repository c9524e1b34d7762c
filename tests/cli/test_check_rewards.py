"""`grpo check-rewards` on recipes with working rewards and with broken rewards."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from grpo_recipes import cli

MINE = """
def exact(completions, answer, **columns):
    return [float(c[-1]["content"] == f"<answer>{a}</answer>") for c, a in zip(completions, answer)]

def short(completions, **columns):
    return [0.5] * len(completions)

def broken(completions, answer, **columns):
    return [columns["no such column"]]

def nan(completions, **columns):
    return [float("nan")] * len(completions)

async def later(completions, answer, **columns):
    return exact(completions, answer)
"""


@pytest.fixture
def check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """``check(rewards, answers=[...], flags=[...], KEY=VALUE)``: return the exit code, stdout and the problems."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CACHE_ROOT", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    (tmp_path / "mine.py").write_text(MINE)

    def run(
        rewards: list[str], answers: list[str] | None = None, flags: tuple[str, ...] = (), **keys: Any
    ) -> tuple[int, str, list[str]]:
        answers = answers or [str(number) for number in range(10, 22)]
        rows = [{"problem": f"problem {index}", "answer": answer} for index, answer in enumerate(answers)]
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        recipe = {
            "model_name_or_path": "Qwen/Qwen2.5-0.5B-Instruct",
            "dataset_name": "rows.jsonl",
            "reward_funcs": rewards,
            "prompts_per_step": min(4, len(answers)),
            "num_generations": 4,
            **keys,
        }
        (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
        code = cli.main(["check-rewards", "recipe.yaml", *flags])
        captured = capsys.readouterr()
        return code, captured.out, [line for line in captured.err.splitlines() if line.startswith("grpo:")]

    return run


def table(output: str) -> dict[str, list[str]]:
    """Map each reward to the cells of its line."""
    lines = output.splitlines()[1:]
    return {
        line.split()[0]: line.split()[1:]
        for line in lines[: next(i for i, x in enumerate(lines) if "grpo:" in x or not x)]
    }


def test_rewards_that_work(check):
    code, output, problems = check(
        ["pure_accuracy_math", "math_verify", "cosine_length", "format_tags", "soft_overlong"]
    )

    assert (code, problems) == (0, [])
    rows = table(output)
    assert rows["pure_accuracy_math"] == ["24", "1.000", "0", "96", "0.000", "0", "0"]
    assert rows["math_verify"] == ["36", "1.000", "0", "144", "0.000", "0", "0"]
    assert rows["cosine_length"][2] == rows["cosine_length"][5] == "0"
    assert rows["format_tags"][2] == "-"
    assert "distinguish correct from incorrect answers on 12 rows" in output
    assert "soft_overlong gives correct and incorrect answers the same" in output


def test_the_rows_tried_are_the_first(check):
    _, output, _ = check(["pure_accuracy_math"], flags=("--rows", "5"))
    assert "on 5 rows" in output


def test_solutions_with_their_reasoning_are_refused_with_the_marker_to_add(check):
    answers = [f"first this\nthen that\n#### {number}" for number in range(10, 16)]
    code, _, problems = check(["pure_accuracy_math"], answers)

    assert code == 2
    assert problems[-1].startswith("grpo: recipe.yaml: 6 of 6 reference solutions are not short answers")
    assert problems[-1].endswith(
        "set dataset_solution_marker: '####', or set dataset_solution_column to the final answer's column"
    )
    assert check(["pure_accuracy_math"], answers, dataset_solution_marker="####")[0] == 0


def test_a_cosine_that_rewards_wrong_answers_is_refused(check):
    code, output, (problem,) = check(["cosine_length"], cosine_min_value_wrong=2.0)

    assert code == 2
    assert "reward 'cosine_length' accepts 96 of 96 wrong answers as right" in problem
    assert "incorrect answer '<answer>11</answer>' gets 2" in output


def test_solutions_that_cannot_be_read_are_refused(check):
    code, output, (problem,) = check(["math_verify"], [r"\frac{", r"\sqrt{", r"\frac{1}{"])

    assert code == 2
    assert r"\frac" in output and r"\\frac" not in output
    assert "completions unscored" in problem and "it cannot read the reference solution" in problem
    assert "gets no score (it cannot read the reference solution)" in output


def test_rewards_of_ones_own(check):
    code, output, problems = check(["mine.py:exact", "mine.py:short"])

    assert (code, problems) == (0, [])
    assert table(output)["mine.py:exact"] == ["60", "1.000", "-", "240", "0.000", "-", "0"]
    assert (
        "grpo: note: mine.py:short gives right answers 0.5, like wrong answers: '10' to 'problem 0' gets 0.5" in output
    )


@pytest.mark.parametrize("isolation", ["completion", "none"])
def test_ones_own_reward_that_fails_is_refused(check, isolation):
    code, _, (problem,) = check(["mine.py:broken"], reward_isolation=isolation)

    assert code == 2
    assert "reward 'mine.py:broken'" in problem and "KeyError: 'no such column'" in problem
    assert problem.startswith("grpo: recipe.yaml:")


@pytest.mark.parametrize("isolation", ["completion", "none"])
def test_a_file_that_cannot_be_imported_is_refused(check, isolation):
    Path("mine.py").write_text("import no_such_module\n\n\ndef exact(completions, **kwargs):\n    return []\n")
    code, _, (problem,) = check(["mine.py:exact"], reward_isolation=isolation)

    assert code == 2
    assert "'mine.py:1' imports 'no_such_module', which is not installed" in problem
    Path("mine.py").write_text("raise OSError('no file')\n\n\ndef exact(completions, **kwargs):\n    return []\n")
    code, _, (problem,) = check(["mine.py:exact"], reward_isolation=isolation)
    assert "reward 'mine.py:exact'" in problem and "OSError: no file" in problem


@pytest.mark.parametrize("isolation", ["completion", "none"])
def test_a_function_that_the_import_leaves_out_is_refused(check, isolation):
    Path("mine.py").write_text("def exact(completions):\n    return []\n\n\ndel exact\n")
    code, output, (problem,) = check(["mine.py:exact"], reward_isolation=isolation)

    cause = "reward 'mine.py:exact' cannot be loaded: 'mine.py' has no 'exact'"
    assert (code, output) == (2, "")
    assert problem == f"grpo: recipe.yaml:5: {cause}. Fix: correct it, or set another reward in reward_funcs"


def test_ones_own_reward_may_be_async_and_in_the_trainer(check):
    assert check(["mine.py:later"], reward_isolation="none")[0] == 0


def test_no_number_and_no_difference_are_refused(check):
    assert "not a number: nan" in check(["pure_accuracy_math", "mine.py:nan"])[2][0]
    assert "no reward distinguishes right from wrong answers" in check(["mine.py:short"])[2][0]


def test_a_reward_that_sleeps_is_given_up_after_five_time_outs(check, tmp_path, monkeypatch):
    monkeypatch.setattr("grpo_recipes.rewards.pace._FIRST_CALL_SECONDS", 0.1)
    monkeypatch.setattr("grpo_recipes.rewards.probe._QUIET_SECONDS", 0.5)
    (tmp_path / "slow.py").write_text("import time\ndef judge(completions):\n    time.sleep(1000)\n")
    code, _, problems = check(["slow.py:judge"], reward_timeout=0.2, reward_workers=2)
    assert code == 2
    told = [line for line in problems if "Fix" in line]
    assert "reward 'slow.py:judge' exceeds reward_timeout (0.2 s) on " in told[0]
    assert 5 <= int(told[0].split(" on ")[1].split(" of ")[0]) <= 7
    assert "the others were not tried. Fix: make it faster, or raise reward_timeout" in told[0]
    assert [line for line in problems if re.search(r" completions in \d s, [1-7] over reward_timeout$", line)]


@pytest.mark.parametrize("isolation", ["completion", "none"])
def test_a_server_that_does_not_answer_is_one_message_after_a_few_calls(check, tmp_path, monkeypatch, isolation):
    monkeypatch.setenv("ASKED_URL", "http://127.0.0.1:9/v1")
    monkeypatch.setenv("ASKED_MODEL", "any")
    (tmp_path / "asks.py").write_text(
        "import os, time, urllib.request\n"
        "def judge(completions):\n    open('calls', 'a').write('x')\n    time.sleep(0.1)\n"
        "    return [float(urllib.request.urlopen(os.environ['ASKED_URL']).read())]\n"
    )
    handed = {"reward_environment": ["ASKED_URL", "ASKED_MODEL"]} if isolation == "completion" else {}
    code, output, (problem,) = check(["asks.py:judge"], reward_isolation=isolation, reward_workers=2, **handed)
    assert code == 2 and "gets no score" not in output
    assert problem.startswith("grpo: recipe.yaml:")
    assert "reward 'asks.py:judge' got no answer from its server (URLError: <urlopen error [Errno 111]" in problem
    fix = "start the server that it calls, or correct its address"
    assert problem.endswith(f"Fix: {fix}{' in ASKED_URL' if handed else ''}")
    assert 1 <= len((tmp_path / "calls").read_text()) <= 100, "of 180"


@pytest.mark.slow
def test_a_slow_reward_says_how_far_it_is(check, tmp_path, monkeypatch):
    monkeypatch.setattr("grpo_recipes.rewards.probe._QUIET_SECONDS", 0.2)
    (tmp_path / "slow.py").write_text(
        "import time\ndef judge(completions, answer):\n    time.sleep(0.1)\n"
        "    return [float('>' + answer[0] + '<' in completions[0][-1]['content'])]\n"
    )
    code, _, lines = check(["slow.py:judge"], answers=["1", "2"])
    assert code == 0
    assert [line for line in lines if line.startswith("grpo: slow.py:judge: ") and " completions in 0 s" in line]


def test_json_holds_the_findings(check):
    code, output, problems = check(["pure_accuracy_math", "mine.py:nan"], flags=("--json",))
    answer = json.loads(output)

    assert (code, problems, answer["ok"]) == (2, [], False)
    assert [finding["reward"] for finding in answer["rewards"]] == ["pure_accuracy_math", "mine.py:nan"]
    assert answer["rewards"][0]["tells_apart"] and answer["rewards"][0]["right_mean"] == 1.0
    assert answer["rewards"][1]["failures"][0]["reason"] == "not a number: nan"
    assert answer["problems"][0]["where"].startswith("recipe.yaml:")


def test_no_rows_is_refused(check):
    assert (
        "--rows: expected 1 or more, got 0. Fix: use --rows 200"
        in check(["pure_accuracy_math"], flags=("--rows", "0"))[2][0]
    )


def test_json_holds_what_is_wrong_in_the_recipe_too(check, capsys):
    code, output, problems = check(["no_such_reward"], flags=("--json",))
    answer = json.loads(output)
    assert (code, problems, answer["ok"], answer["rewards"]) == (2, [], False, [])
    assert answer["problems"][0]["what"] == "unknown reward 'no_such_reward'"
