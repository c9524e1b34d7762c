"""Load rewards by name: shipped rewards, user rewards in child processes or in the trainer, and a run's copies."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from grpo_recipes import cli
from grpo_recipes.errors import ConfigError
from grpo_recipes.recipe.check import check, reward_notes
from grpo_recipes.recipe.keys import catalogue
from grpo_recipes.rewards.load import (
    IsolatedReward,
    LimitRecords,
    copy_reward_files,
    hash_call,
    load_rewards,
)
from grpo_recipes.rewards.pool import MOST_PROCESSES, START_SECONDS
from grpo_recipes.rewards.score import RewardFailed, RewardWrapper, Score

OWN = """
import sys, time
from pathlib import Path
import beside

def score(completions, answer, **columns):
    if completions[0] == "spin":
        with Path("calls").open("a") as file:
            file.write("x")
        while True:
            pass
    return [beside.RIGHT if text == gold else 0.0 for text, gold in zip(completions, answer)]

def wide(completions, **columns):
    return [float(len(completions)) for _ in completions]

def data(completions):
    return [float((Path(__file__).parent / "data.txt").read_text())]
"""

FLAKY = """
from pathlib import Path

def score(completions):
    with Path("calls").open("a") as file:
        file.write(completions[0] + "\\n")
    count = Path("calls").read_text().split().count(completions[0])
    if count == 1 or completions[0] == "none":
        raise OSError(f"call {count} of {completions[0]}")
    return [1.0]
"""


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Create a user's folder and make it the working folder."""
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "own.py").write_text(OWN)
    (folder / "beside.py").write_text("RIGHT = 1.0\n")
    (folder / "data.txt").write_text("0.75")
    package = folder / "pack"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "more.py").write_text("from .part import HALF\n\ndef half(completions):\n    return [HALF]\n")
    (package / "part.py").write_text("HALF = 0.5\n")
    (tmp_path / "run").mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", list(sys.path))  # a reward in this process adds the folder to sys.path
    yield folder
    for name in ("grpo_user_own", "beside"):
        sys.modules.pop(name, None)


@pytest.fixture
def load(tmp_path: Path) -> Iterator[Any]:
    """Return ``load(*names, KEY=VALUE, ...)``, which loads rewards and ends their processes after the test."""
    loaded: list[Any] = []

    def load_them(*names: str, **keys: Any) -> list[Any]:
        defaults = {
            "reward_isolation": "completion",
            "reward_workers": 1,
            "reward_environment": [],
            "reward_concurrency": 4,
            "dataset_mixture": None,
            "dataset_solution_column": "gold",
            "eval_dataset_solution_column": None,
            "reward_timeout": 1.0,
            "reward_memory_gib": 1.0,
            "answer_matching": "normalized",
        }
        script_args = SimpleNamespace(reward_funcs=list(names), **{**defaults, **keys})
        rewards = load_rewards(script_args, SimpleNamespace(max_completion_length=10, seed=1), tmp_path / "run")
        loaded.extend(rewards)
        return rewards

    yield load_them
    for reward in loaded:
        if isinstance(reward, IsolatedReward):
            reward.pool.close()


def test_ours_are_called_as_they_are_and_the_unbounded_in_children(load: Any) -> None:
    exact, verify = load("pure_accuracy_math", "math_verify")
    assert not isinstance(exact, RewardWrapper) and isinstance(verify, IsolatedReward)
    columns = {"completions": ["<answer>1/2</answer>"], "answer": ["0.5"], "prompts": ["?"], "completion_ids": [[1]]}
    assert (exact(**columns), verify(**columns)) == ([1.0], [1.0])
    assert (exact.__name__, verify.__name__) == ("pure_accuracy_math", "math_verify")
    assert load("pure_accuracy_math", answer_matching="strict")[0](**columns) == [0.0]


def test_ones_own_from_a_file_and_from_a_module(load: Any) -> None:
    score, half, data = load("own.py:score", "pack.more:half", "own.py:data")
    assert [reward.__name__ for reward in (score, half, data)] == ["score", "half", "data"]
    trl = {"prompts": ["?"] * 2, "completion_ids": [[1]] * 2, "trainer_state": object(), "log_metric": print}
    assert score(completions=["a", "b"], answer=["a", "a"], **trl) == [1.0, 0.0]
    assert half(completions=["a", "b"], **trl) == [0.5, 0.5]
    assert data(completions=["a"]) == [0.75]


def test_names_that_end_alike_are_told_apart_in_metrics(load: Any, project: Path) -> None:
    (project / "other.py").write_text("def score(completions):\n    return [0.1]\n")
    (project / "third.py").write_text("def math_verify(completions):\n    return [0.2]\n")
    names = ["own.py:score", "other.py:score", "third.py:math_verify", "math_verify"]
    assert [reward.__name__ for reward in load(*names)] == names


def test_isolation_none_calls_the_whole_batch_in_this_process(load: Any) -> None:
    (apart,) = load("own.py:wide")
    (in_process,) = load("own.py:wide", reward_isolation="none")
    assert not isinstance(in_process, IsolatedReward)
    assert apart(completions=["a"] * 3) == [1.0] * 3
    assert in_process(completions=["a"] * 3) == [3.0] * 3


def test_the_number_of_children_their_time_and_memory_are_the_recipes(load: Any) -> None:
    pool = load("own.py:score", reward_workers=3, reward_timeout=7.0, reward_memory_gib=0.5)[0].pool
    assert (pool.workers, pool.timeout, pool.memory_gib) == (3, 7.0, 0.5)


@pytest.mark.parametrize("name", ["absent.py:score", "own.py:absent", "no.such.module:score"])
def test_what_is_not_there_is_refused(load: Any, name: str) -> None:
    with pytest.raises((ConfigError, RewardFailed), match=r"absent|no module"):
        load(name)


# --- the whole batch in the trainer ----------------------------------------------------------------------------------


def test_a_function_that_is_not_there_is_refused_in_this_process_too(load: Any) -> None:
    with pytest.raises(RewardFailed, match=r"^reward 'own.py:absent' cannot be loaded: 'own.py' has no 'absent'$"):
        load("own.py:absent", reward_isolation="none")


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ([1.0], "reward 'a.py:f': wrong length: returned 1 entries instead of 2"),
        (0.5, "reward 'a.py:f': wrong type: returned float instead of a list"),
        ([0.5, "x"], "reward 'a.py:f': wrong type: str instead of a number"),
        (ValueError("no"), "reward 'a.py:f' raised ValueError: no"),
    ],
)
def test_a_batch_reward_that_breaks_its_word_is_named(returned: Any, message: str) -> None:
    def function(completions: list[str]) -> Any:
        if isinstance(returned, Exception):
            raise returned
        return returned

    with pytest.raises(RewardFailed, match=message):
        RewardWrapper(function, "a.py:f", "f")(completions=["a", "b"], answer=["a", "b"])


def test_a_batch_reward_may_know_no_number() -> None:
    reward = RewardWrapper(lambda completions, **_: [1, None, float("nan")], "a.py:f", "f")
    assert reward(completions=["a", "b", "c"]) == [1.0, None, None]
    assert [score.reason for score in reward.scores] == [None, None, "not a number: nan"]


# --- the copy a run keeps --------------------------------------------------------------------------------------------


def test_a_run_keeps_a_copy_and_goes_on_with_it(load: Any, project: Path, tmp_path: Path) -> None:
    names, run = ["own.py:score", "pack.more:half", "math_verify"], tmp_path / "run"
    assert copy_reward_files(names, run) == []
    assert (run / "rewards/own.py").read_text() == OWN
    assert {path.name for path in (run / "rewards").iterdir()} == {"own.py", "pack.more.py"}
    assert copy_reward_files(names, run) == []

    (project / "own.py").write_text("def score(completions):\n    return [9.0]\n")
    (note,) = copy_reward_files(names, run)
    assert note.startswith("own.py has changed since this run started") and note.endswith(
        "the run uses the copy; to use the file, add --update-rewards"
    )
    (score,) = load("own.py:score")
    assert score(completions=["a"], answer=["a"]) == [1.0]

    (project / "own.py").unlink()
    (note,) = copy_reward_files(names, run)
    assert note.startswith("the file of reward own.py:score is gone; this run uses its copy")
    (score,) = load("own.py:score")
    assert score(completions=["a"], answer=["a"]) == [1.0]


def test_an_updated_reward_takes_the_place_of_its_copy_which_is_kept(load: Any, project: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    copy_reward_files(["own.py:score"], run)
    (project / "own.py").write_text("def score(completions):\n    return [9.0]\n")
    (note,) = copy_reward_files(["own.py:score"], run, update=True)
    (old,) = (run / "rewards").glob("own.????????.py")
    assert note == f"--update-rewards: the run now uses the current own.py; its previous copy is {old.name}"
    assert old.read_text() == OWN and (run / "rewards/own.py").read_text() == (project / "own.py").read_text()
    assert load("own.py:score")[0](completions=["a"], answer=["b"]) == [9.0]
    assert copy_reward_files(["own.py:score"], run, update=True) == []


def test_two_rewards_of_one_file_are_updated_together(project: Path, tmp_path: Path) -> None:
    run, names = tmp_path / "run", ["own.py:score", "own.py:other"]
    copy_reward_files(names, run)
    (project / "own.py").write_text("def score(completions):\n    return [9.0]\n\n\nother = score\n")
    (note,) = copy_reward_files(names, run, update=True)
    assert note.startswith("--update-rewards: the run now uses the current own.py")
    assert copy_reward_files(names, run) == []


def test_what_follows_a_torn_record_of_a_limit_is_read_again(tmp_path: Path) -> None:
    file, score = tmp_path / "limits_0.jsonl", Score(None, "time limit", by_limit=True)
    file.write_text('{"key": "a", "generation": 1, "reason": "time limit"}\n{"key": "b", "gen')
    LimitRecords(file).add("c", 1, score)
    reloaded = LimitRecords(file)
    assert reloaded.find("a", 1) and reloaded.find("c", 1) and reloaded.find("b", 1) is None


# --- the reference solution under other names ------------------------------------------------------------------------


@pytest.mark.parametrize("isolation", ["completion", "none"])
def test_the_solution_comes_as_answer_as_solution_and_under_its_columns_name(
    load: Any, project: Path, isolation: str
) -> None:
    (project / "names.py").write_text(
        "def trl(completions, gold):\n    return [float(g) for g in gold]\n"
        "def r1(completions, solution, **columns):\n    return [float(s) + len(columns) for s in solution]\n"
        "def theirs(completions, **columns):\n    return [float(columns['solution'][0] == 'worked')]\n"
    )
    trl, r1, both_names = load("names.py:trl", "names.py:r1", "names.py:theirs", reward_isolation=isolation)
    assert trl(completions=["a"], answer=["7"]) == [7.0]
    assert r1(completions=["a"], answer=["7"]) == [9.0], "answer and gold are there too"
    assert both_names(completions=["a"], answer=["7"], solution=["worked"]) == [1.0], (
        "the dataset's own column comes first"
    )


def test_columns_of_a_mixture_and_of_the_evaluation_are_names_of_the_solution_too(load: Any, project: Path) -> None:
    (project / "names.py").write_text(
        "def score(completions, **columns):\n    return [float(sorted(columns) == "
        "['answer', 'first', 'gold', 'second', 'solution'])]\n"
    )
    mixture = {"datasets": [{"id": "a", "columns": ["q", "first", "level"]}, {"id": "b"}]}
    (score,) = load("names.py:score", dataset_mixture=mixture, eval_dataset_solution_column="second")
    assert score(completions=["a"], answer=["7"]) == [1.0]
    (score,) = load("names.py:score", dataset_mixture=mixture, eval_dataset_solution_column="completion")
    assert score(completions=["a"], answer=["7"]) == [0.0], "a name that TRL gives a meaning of its own is none"


def test_variables_and_concurrency_are_the_recipes(load: Any, project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "0.125")
    (project / "judge.py").write_text(
        "import asyncio, os\nnow, most = 0, 0\n"
        "async def judge(completions):\n    global now, most\n    now += 1\n    most = max(most, now)\n"
        "    await asyncio.sleep(0.02)\n    now -= 1\n    return [float(os.environ['JUDGE_KEY']) + most]\n"
    )
    (judge,) = load("judge.py:judge", reward_environment=["JUDGE_KEY"], reward_concurrency=3)
    assert max(judge(completions=[str(row) for row in range(12)])) == 3.125


def test_a_module_that_is_gone_is_run_from_its_copy(load: Any, project: Path, tmp_path: Path) -> None:
    (project / "lone.py").write_text("def score(completions):\n    return [0.25]\n")
    copy_reward_files(["lone:score"], tmp_path / "run")
    (project / "lone.py").unlink()
    (score,) = load("lone:score")
    assert score(completions=["a"]) == [0.25]


# --- scores that a limit decided -----------------------------------------------------------------------------------


def calls(project: Path) -> int:
    return len((project / "calls").read_text()) if (project / "calls").exists() else 0


def list_calls(project: Path) -> list[str]:
    return (project / "calls").read_text().split()


@pytest.mark.slow
def test_a_score_by_time_limit_is_given_again_without_a_call(load: Any, project: Path) -> None:
    (score,) = load("own.py:score")
    score.generation = 4
    arguments = {"completions": ["a", "spin", "spin", "spin"], "answer": ["a", "a", "a", "b"]}
    assert score(**arguments) == [1.0, None, None, None]
    assert [result.replayed for result in score.scores] == [False] * 4
    assert calls(project) == 2, "equal arguments are one call"
    score.generation = 9
    assert score(**arguments) == [1.0, None, None, None]
    assert calls(project) == 2 and [result.replayed for result in score.scores] == [False, True, True, True]

    (resumed,) = load("own.py:score")
    resumed.generation = 4
    assert resumed(**arguments) == [1.0, None, None, None]
    assert calls(project) == 2
    assert [score.reason for score in resumed.scores] == [None, *["time limit"] * 3]
    resumed.generation = 3  # the run called the reward before the record existed
    assert resumed(**{"completions": ["warm"], "answer": ["a"]}) == [0.0]
    assert resumed(**{"completions": ["spin"], "answer": ["a"]}) == [None]
    assert calls(project) == 3

    (patient,) = load("own.py:score", reward_timeout=2.0)
    patient.generation = 9
    assert patient(**{"completions": ["warm"], "answer": ["a"]}) == [0.0]
    assert patient(**{"completions": ["spin"], "answer": ["a"]}) == [None]
    assert calls(project) == 4, "another limit is another question"


def test_equal_completions_share_a_second_call_if_the_first_one_fails(load: Any, project: Path) -> None:
    """A failed request of a judge would otherwise leave a whole group unscored."""
    (project / "flaky.py").write_text(FLAKY)
    (score,) = load("flaky.py:score")
    score.give_up_after = 0
    assert score(completions=["c", "c", "d"]) == [None] * 3
    assert list_calls(project) == ["c"], "no second call if the run ends"
    score.give_up_after = None
    assert score(completions=["a", "b", "a", "none", "none"]) == [1.0, None, 1.0, None, None]
    assert [result.reason for result in score.scores[3:]] == ["OSError: call 2 of none"] * 2
    assert list_calls(project)[1:] == ["a", "b", "none", "a", "none"], "a single completion has one call"


@pytest.mark.parametrize("end", ['{"key": "d", "gener', "\0\0\0\n", '{"key": "d"\0\0'])
def test_records_are_of_limits_alone_and_survive_a_kill(tmp_path: Path, end: str) -> None:
    """R9: also a power loss, which leaves NUL bytes."""
    file = tmp_path / "rewards" / "limits_0.jsonl"
    records = LimitRecords(file)
    records.add("a", 3, Score(None, "time limit", by_limit=True))
    records.add("b", 3, Score(None, "ValueError: x"))
    records.add("c", 3, Score(1.0))
    records.add(None, 3, Score(None, "time limit", by_limit=True))
    with file.open("a") as half:
        half.write(end)
    reloaded = LimitRecords(file)
    assert [reloaded.find(key, 3) is not None for key in ("a", "b", "c", "d", None)] == [
        True,
        False,
        False,
        False,
        False,
    ]
    assert reloaded.find("a", 2) is None
    assert [json.loads(line)["key"] for line in file.read_text().splitlines()[:1]] == ["a"]


def test_a_key_is_the_same_in_another_process_and_none_without_plain_data() -> None:
    arguments = {"completions": [{"role": "assistant", "content": "ü"}], "answer": 3.5, "ids": [1, 2]}
    code = f"from grpo_recipes.rewards.load import hash_call; print(hash_call(['a'], {arguments!r}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == hash_call(["a"], arguments)
    assert hash_call(["b"], arguments) != hash_call(["a"], arguments)
    assert hash_call(["a"], {"image": object()}) is None


# --- what `grpo check` says, without running the code ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["own.py:absent"], "'own.py' has no 'absent'. Fix: write one of "),
        (["absent.py:score"], "no file 'absent.py'"),
        (["no.such:score"], "no module 'no.such'"),
        (["pack.more.half"], "unknown reward 'pack.more.half'. Fix: write pack.more:half"),
        (["own.py"], "unknown reward 'own.py'. Fix: write own.py:function"),
        (["own.py:score", "own.py:score"], "reward 'own.py:score' is listed more than once. Fix: list it once"),
        (["own.py:score", "pack.more:half", "math_verify"], None),
    ],
)
def test_check_tells_what_is_wrong_with_a_name(read: Any, project: Path, names: list[str], message: str | None) -> None:
    (project / "own.py").write_text(OWN + "\nraise SystemExit('check has run the code')\n")
    problems = [str(problem) for problem in check(read(reward_funcs=names), {})]
    assert len(problems) == (message is not None)
    assert message is None or message in problems[0]


@pytest.fixture
def rows(project: Path) -> dict[str, str]:
    (project / "rows.jsonl").write_text('{"question": "1+1", "gold": "2", "level": 3, "answer": "x"}\n' * 12)
    return {"dataset_name": "rows.jsonl", "dataset_prompt_column": "question", "dataset_solution_column": "gold"}


@pytest.mark.parametrize(
    ("parameters", "keys", "message"),
    [
        ("completions, gold", {}, None),
        ("completions, answer, solution, prompts, completion_ids, level, **columns", {}, None),
        ("completions, /, level, missing=3, *rest", {}, None),
        ("completions, steps", {}, "'mine.py:score' needs 'steps', which no reward gets. Fix: take one of "
                                   "completions, prompts, completion_ids, answer, solution, gold, level, or give"),
        ("completions, *, steps", {}, "needs 'steps'"),
        ("completions, question", {}, "take prompts: the prompt column comes under this name, as chat messages"),
        ("completions, trainer_state", {}, "write reward_isolation: none"),
        ("completions, trainer_state", {"reward_isolation": "none"}, None),
        ("completions, steps", {"dataset_name": "not/downloaded"}, None),
        ("completions, level", {"eval_strategy": "epoch", "eval_dataset_name": "eval.jsonl"}, "needs 'level'"),
        ("completions, source", {}, "needs 'source'"),
    ],
)  # fmt: skip
def test_check_refuses_a_parameter_that_nobody_supplies(
    read: Any, project: Path, rows: dict, parameters: str, keys: dict, message: str | None
) -> None:
    (project / "mine.py").write_text(f"def score({parameters}):\n    return [0.0]\n\nraise SystemExit('ran')\n")
    (project / "eval.jsonl").write_text('{"question": "1+1", "gold": "2"}\n')
    problems = [str(problem) for problem in check(read(reward_funcs=["mine.py:score"], **rows | keys), {})]
    assert len(problems) == (message is not None), problems
    assert message is None or message in problems[0]


@pytest.mark.parametrize("code", ["score = wrap(score)", "@wrap\ndef score(steps): pass", "class score: pass"])
def test_check_is_silent_where_the_source_does_not_show_the_parameters(
    read: Any, project: Path, rows: dict, code: str
) -> None:
    before = "" if code.startswith(("@", "class")) else "def score(steps):\n    return [0.0]\n\n"
    (project / "mine.py").write_text(before + code + "\n")
    assert check(read(reward_funcs=["mine.py:score"], **rows), {}) == []


def test_check_refuses_a_variable_that_is_not_set(read: Any, project: Path) -> None:
    recipe = read(reward_funcs=["own.py:score"], reward_environment=["JUDGE_KEY"])
    (problem,) = check(recipe, {})
    assert "environment variable JUDGE_KEY is not set. Fix: export JUDGE_KEY first" in str(problem)
    assert check(recipe, {"JUDGE_KEY": "sk-planted"}) == []


LEN_REWARD = """
def len_reward(completions, solution, **kwargs):
    contents = [completion[0]["content"] for completion in completions]
    lengths = [len(content) for content in contents]
    longest = max(lengths)
    return [1 - length / longest for length in lengths]
"""
ALONE = """
def alone(completions, answer, **kwargs):
    text = completions[0][-1]["content"]
    numbers = [float(word) for word in text.split()]
    return [max(numbers) + sum(len(word) for word in text) for c in completions]
"""


def test_check_notes_a_reward_that_compares_completions_which_it_gets_singly(read: Any, project: Path) -> None:
    (project / "mine.py").write_text(LEN_REWARD + ALONE)
    (note,) = reward_notes(read(reward_funcs=["mine.py:alone", "mine.py:len_reward"]))
    assert (
        "'mine.py:len_reward' compares completions (max, line 5), but gets one at a time. To pass all at once, set"
        in note
    )
    assert list(reward_notes(read(reward_funcs=["mine.py:len_reward"], reward_isolation="none"))) == []


def test_grpo_check_prints_that_note(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (project / "mine.py").write_text(LEN_REWARD)
    text = "model_name_or_path: a/b\ndataset_name: a/b\nreward_funcs: [mine.py:len_reward]\n"
    (project / "recipe.yaml").write_text(text)
    assert cli.main(["check", "recipe.yaml"]) == 0
    assert "grpo: note: " in (out := capsys.readouterr().out) and "compares completions (max, line 5)" in out


def test_check_of_a_resumed_run_is_content_with_its_copy(read: Any, project: Path, tmp_path: Path) -> None:
    recipe = read(reward_funcs=["own.py:score"])
    run = recipe.path.parent
    copy_reward_files(["own.py:score"], run)
    (project / "own.py").unlink()
    assert len(check(recipe, {})) == 1, "a folder that happens to be called rewards is no run's"
    (run / "run.json").write_text("{}")
    assert check(recipe, {}) == []


# --- the page --------------------------------------------------------------------------------------------------------


def test_the_reward_of_the_page_works_and_the_page_tells_the_defaults(load: Any, project: Path) -> None:
    page = (Path(__file__).parents[2] / "docs/rewards.md").read_text()
    code = page.split("```python\n# my_reward.py\n")[1].split("```")[0]
    (project / "my_reward.py").write_text(code)
    (reward,) = load("my_reward.py:last_number")
    completions = [[{"role": "assistant", "content": text}] for text in ("it is 12", "12 or 13", "no")]
    assert reward(completions=completions, answer=["12"] * 3, prompts=["?"] * 3) == [1.0, 0.2, 0.0]
    told = dict(re.findall(r"^\| `(reward_\w+)` \| ([0-9.]+) \|", page, re.MULTILINE))
    assert {name: catalogue()[name]["default"] for name in told} == {name: float(text) for name, text in told.items()}
    assert set(told) == {"reward_timeout", "reward_memory_gib", "reward_max_no_verdict", "reward_concurrency"}
    assert f"A child may have {MOST_PROCESSES} processes" in page and START_SECONDS == 5 * 60


def test_loading_imports_no_torch() -> None:
    code = "import sys, grpo_recipes.rewards.load; print(*{'torch', 'transformers', 'trl'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env={**os.environ})
    assert done.stdout.strip() == ""
