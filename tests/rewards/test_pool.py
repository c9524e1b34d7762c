"""Rewards in real child processes: a call that hangs, dies or grows costs one score and leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from trace_spans import assert_nested, read_tracks

from grpo_recipes.process.tree import descendants, is_alive
from grpo_recipes.rewards.pool import RewardPool, count_default_workers
from grpo_recipes.rewards.score import NOT_CALLED, RewardFailed, Score
from grpo_recipes.runs.trace import Trace, write_trace

pytestmark = pytest.mark.alone

WILD = f"{Path(__file__).with_name('wild_reward.py')}:score"
TIMEOUT = 1.0


@pytest.fixture(scope="module")
def pool() -> Iterator[RewardPool]:
    with pytest.MonkeyPatch.context() as patch:
        for name in ("HF_TOKEN", "OTHER", "PYTHONOTHER", "HOME"):
            patch.setenv(name, "https://user:plantedsecret@host/")
        patch.setenv("PYTHON_API_KEY", "plantedsecret")
        with RewardPool(WILD, workers=2, timeout=TIMEOUT, memory_gib=0.4) as pool:
            judge(pool, "warm", "warm")
            yield pool


def judge(pool: RewardPool, *completions: str) -> list[Score]:
    columns = {"answer": ["yes"] * len(completions), "prompts": ["?"] * len(completions)}
    return pool.score(WILD, completions, columns)


def wait_for(condition: Any, description: str, seconds: float = 10) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, description
        time.sleep(0.01)


def pids_in(file: Path) -> list[int]:
    return [int(line) for line in file.read_text().split()] if file.exists() else []


def test_rows_with_names_stay_with_their_process_also_after_a_call_without_rows(tmp_path: Path) -> None:
    (tmp_path / "where.py").write_text(
        "import os\ndef pid(completions, **_):\n    return [os.getpid()] * len(completions)\n"
    )
    spec, names = f"{tmp_path}/where.py:pid", list("abcdefgh")
    with RewardPool(spec, workers=2, timeout=TIMEOUT) as pool:
        first = [score.value for score in pool.score(spec, names, names=names)]
        assert pool.score(spec, [], names=[]) == []
        assert [score.value for score in pool.score(spec, names, names=names)] == first


def test_each_row_gets_its_own_score_in_order(pool: RewardPool) -> None:
    completions = ["yes", "no", "none", "integer", "true", *["yes", "no"] * 300]
    values = [score.value for score in judge(pool, *completions)]
    assert values == [1.0, 0.0, None, 2.0, 1.0, *[1.0, 0.0] * 300]
    assert not any(score.unscored for score in judge(pool, "none", "yes"))
    assert judge(pool) == []


@pytest.mark.parametrize(
    ("completion", "reason"),
    [
        ("spin", "time limit"),
        ("deaf", "time limit"),
        ("sleep 100", "time limit"),
        ("8GB", "memory limit"),
        ("segfault", "its process died (SIGSEGV)"),
        ("killed", "its process died (SIGKILL, perhaps out of memory)"),
        ("exit", "its process exited (code 0)"),
        ("sys-exit", "SystemExit: 3"),
        ("raise", "ValueError: first line"),
        ("nan", "not a number: nan"),
        ("inf", "not a number: inf"),
        ("1e39", "not a number: 1e+39 is infinite in float32"),
        ("text", "wrong type: str instead of a number"),
        ("text-alone", "wrong type: returned str instead of a list"),
        ("number-alone", "wrong type: returned float instead of a list"),
        ("none-alone", "wrong type: returned NoneType instead of a list"),
        ("two", "wrong length: returned 2 entries instead of 1"),
        ("empty", "wrong length: returned 0 entries instead of 1"),
    ],
)
def test_an_unscored_completion_is_none_with_its_reason(pool: RewardPool, completion: str, reason: str) -> None:
    before, score, after = judge(pool, "yes", completion, "no")
    assert (score.value, score.reason, score.unscored) == (None, reason, True)
    assert (before.value, after.value) == (1.0, 0.0)
    assert score.by_limit == (" limit" in reason or "process" in reason)
    assert completion != "8GB" or score.seconds < 0.2  # the allocation is rejected up front


@pytest.mark.parametrize(
    ("completion", "reason"),
    [
        ("shared-memory", "memory limit"),  # the kernel does not count them as memory of a process
        ("many", "process limit (64)"),
    ],
)
def test_what_only_a_look_from_outside_sees_ends_the_reward(completion: str, reason: str) -> None:
    with RewardPool(WILD, workers=1, timeout=20, memory_gib=0.4) as patient:
        judge(patient, "warm")
        (score,) = judge(patient, completion)
    assert (score.value, score.reason, score.by_limit) == (None, reason, True)
    assert score.seconds < 10


def test_the_others_go_on_while_one_hangs(pool: RewardPool) -> None:
    started = time.monotonic()
    scores = judge(pool, "spin", *["sleep 0.08"] * 10, "spin", *["yes"] * 50, "spin", "spin")
    seconds = time.monotonic() - started
    assert [score.value for score in scores] == [None, *[1.0] * 10, None, *[1.0] * 50, None, None]
    assert all(TIMEOUT <= scores[row].seconds < 3 * TIMEOUT for row in (0, 11, 62, 63))
    assert seconds < 4 * TIMEOUT + 10 * 0.08, "one after the other"


@pytest.mark.parametrize("completion", ["leave-and-spin", "leave-and-die"])
def test_what_a_reward_started_dies_with_it(pool: RewardPool, tmp_path: Path, completion: str) -> None:
    file = tmp_path / "pids"
    (score,) = judge(pool, f"{completion} {file}")
    assert score.reason in ("time limit", "its process died (SIGSEGV)")
    assert len(pids_in(file)) == 3
    wait_for(lambda: not any(is_alive(pid) for pid in pids_in(file)), "orphans live on")


def test_a_reward_that_forks_and_returns_answers_once(pool: RewardPool) -> None:
    scores = judge(pool, *["return-twice", "yes", "no"] * 5)
    assert [score.value for score in scores] == [0.5, 1.0, 0.0] * 5


def test_what_a_reward_prints_is_no_reply(pool: RewardPool, capfd: pytest.CaptureFixture[str]) -> None:
    scores = judge(pool, "noise", "yes")
    assert [score.value for score in scores] == [1.0, 1.0]
    assert capfd.readouterr().out == ""


def test_a_child_has_no_secret_no_torch_and_one_core(pool: RewardPool) -> None:
    assert [score.value for score in judge(pool, "secrets", "torch", "cores")] == [0.0, 0.0, 1.0]


def test_a_child_is_in_a_session_of_its_own(pool: RewardPool) -> None:
    (score,) = judge(pool, "session")
    assert score.value in {float(child.pid) for child in psutil.Process().children()} - {float(os.getsid(0))}


def test_arguments_are_lists_of_one_entry() -> None:
    spec = WILD.replace(":score", ":shape")
    rows = range(20)
    columns = {
        "prompts": [f"p{row}" for row in rows],
        "completion_ids": [[row] for row in rows],
        "answer": [f"a{row}" for row in rows],
    }
    with RewardPool(spec, workers=1) as pool:
        assert pool.accepted[spec] is None
        assert [score.value for score in pool.score(spec, [str(row) for row in rows], columns)] == [1.0] * 20


def test_several_rewards_ours_and_others_in_one_pool() -> None:
    few, judged = WILD.replace(":score", ":few_arguments"), WILD.replace(":score", ":slow_judge")
    with RewardPool("math_verify", few, judged, workers=1) as pool:
        equal = pool.score("math_verify", [r"\boxed{\frac{2}{4}}", r"\boxed{3}"], {"answer": ["0.5", "4"]})
        lengths = pool.score(few, ["a", "abc"], {"answer": ["0.5", "4"], "more": [1, 2]})
        awaited = pool.score(judged, ["a"])
        assert pool.accepted[few] == ["completions"]
    assert [score.value for score in (*equal, *lengths, *awaited)] == [1.0, 0.0, 1.0, 3.0, 0.25]


def test_a_large_batch_reaches_a_child_whose_pipe_is_small(pool: RewardPool) -> None:
    long = "x" * 300_000
    assert [score.value for score in judge(pool, *[long] * 8, "yes")] == [0.0] * 8 + [1.0]


def test_a_first_call_may_take_longer() -> None:
    with RewardPool(WILD, workers=1, timeout=0.2) as pool:
        slow_first, slow_later = judge(pool, "sleep 0.5", "sleep 2")
    assert (slow_first.value, slow_later.reason) == (1.0, "time limit")


def test_known_imports_get_more_time_in_each_child(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("grpo_recipes.rewards.pace._FIRST_CALL_SECONDS", 0.1)
    with RewardPool(WILD, workers=1, timeout=0.2) as pool:
        pool.allow_imports(WILD, 5.0)
        scores = judge(pool, "sleep 1", "sleep 1", "sleep 1")  # a child that exceeds its time is replaced
    assert [score.reason for score in scores] == [None, "time limit", None]


@pytest.mark.slow
def test_first_calls_that_hang_get_less_and_less_extra_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("grpo_recipes.rewards.pace._FIRST_CALL_SECONDS", 1.6)
    with RewardPool(WILD, workers=1, timeout=0.2) as pool:
        scores = judge(pool, *["spin"] * 4)
    assert [score.reason for score in scores] == ["time limit"] * 4
    for score, extra in zip(scores, (1.6, 0.8, 0.4, 0.2), strict=True):
        assert 0.2 + extra <= score.seconds < 0.2 + 1.5 * extra + 0.1


def test_rows_handed_out_together_are_limited_singly(pool: RewardPool) -> None:
    judge(pool, *["yes"] * 200)  # fast calls: many rows are sent at once
    completions = [*["yes"] * 70, "spin", *["no"] * 70, "segfault", *["yes"] * 70]
    scores = judge(pool, *completions)
    values = {"yes": 1.0, "no": 0.0, "spin": None, "segfault": None}
    assert [score.value for score in scores] == [values[completion] for completion in completions]
    assert (scores[70].reason, scores[141].reason) == ("time limit", "its process died (SIGSEGV)")
    assert TIMEOUT <= scores[70].seconds < 2 * TIMEOUT


def test_giving_up_leaves_the_rest_uncalled(pool: RewardPool) -> None:
    columns = {"answer": ["yes"] * 400, "prompts": ["?"] * 400}
    scores = pool.score(WILD, ["raise"] * 400, columns, give_up_after=3)
    called = [score for score in scores if score.reason == "ValueError: first line"]
    uncalled = [score for score in scores if score.reason == NOT_CALLED]
    assert 4 <= len(called) < 400 and len(called) + len(uncalled) == 400
    assert [score.value for score in judge(pool, "yes")] == [1.0]


@pytest.mark.parametrize(
    ("code", "name", "message"),
    [
        ("import not_there", "score", "ModuleNotFoundError: No module named 'not_there'"),
        ("def score(completions: return", "score", "SyntaxError"),
        ("def other(completions): pass", "score", "has no 'score'"),
        ("score = 3", "score", "it is a int, not a function"),
        ("def score(texts): return [0.0]", "score", "it has no parameter 'completions'"),
        ("import sys; sys.exit('no')", "score", "SystemExit: no"),
        ("import os; os._exit(4)", "score", r"its process exited \(code 4\) while it loaded the rewards"),
    ],
)
def test_code_that_cannot_be_loaded_is_an_error_not_a_score(tmp_path: Path, code: str, name: str, message: str) -> None:
    (tmp_path / "broken.py").write_text(code)
    spec = f"{tmp_path}/broken.py:{name}"
    pool = RewardPool(spec, workers=1)
    with pytest.raises(RewardFailed, match=message) as error:
        pool.start()
    assert spec in str(error.value)
    assert pool._children == []  # `close` waits until each process is gone


@pytest.mark.parametrize(
    "reply",
    [
        '{"score": [NaN, null, 0.1, false], "row": 1}',
        '{"score": [9.0, null, 0.1, false]}',
        '{"score": [9.0, null, 0.1, false], "row": 7}',
        '{"ready": {}, "together": []}',
        '{"failed": "not a start"}',
        '{"out_of_memory": 1}',
        "null",
        "[" * 100_000,
    ],
)
def test_a_reply_that_a_reward_crafts_costs_its_own_score_alone(pool: RewardPool, reply: str) -> None:
    before, score, after = judge(pool, "yes", f"write {reply}", "no")
    assert (score.value, score.reason) == (None, "its process sent garbled replies")
    assert (before.value, after.value) == (1.0, 0.0)


def test_a_keeper_that_a_reward_stopped_does_not_hold_up_closing() -> None:
    with RewardPool(WILD, workers=1, timeout=20) as pool:
        assert judge(pool, "stop-keeper")[0].value == 1.0
        began = time.monotonic()
    assert time.monotonic() - began < 2.0


JUDGE = WILD.replace(":score", ":judge")


def test_calls_of_an_async_reward_run_at_once_each_with_its_own_limit(capfd: pytest.CaptureFixture[str]) -> None:
    completions = [*["0.5 0.5"] * 12, "1 100", "raise", *["0.25 0.5"] * 12]
    with RewardPool(JUDGE, workers=1, timeout=2.0, concurrency=8) as pool:
        assert pool.score(JUDGE, ["1"])[0].value == 1.0  # a child process starts with a single call
        began = time.monotonic()
        scores = pool.score(JUDGE, completions)
        seconds = time.monotonic() - began
        pids = [child.pid for child in pool._children]
    assert [score.value for score in scores] == [*[0.5] * 12, None, None, *[0.25] * 12]
    assert (scores[12].reason, scores[12].by_limit) == ("time limit", True)
    assert scores[13].reason == "no answer from its server (ConnectionError: the judge is down)"
    assert "Traceback" not in capfd.readouterr().err, "the reason says all; a line of the user's code is not at fault"
    assert all(0.5 <= score.seconds < 1.5 for score in scores[:12])
    assert 2.0 <= seconds < 6.0, "one after the other takes 14 s"
    assert len(pids) == 1, "a call that is over its limit ends alone"


@pytest.mark.parametrize(("completion", "reason"), [("die", "its process exited (code 1)"), ("block", "time limit")])
def test_an_async_reward_that_dies_or_blocks_costs_its_own_score_alone(completion: str, reason: str) -> None:
    with RewardPool(JUDGE, workers=1, timeout=0.5, concurrency=8) as pool:
        pool.score(JUDGE, ["1"])
        scores = pool.score(JUDGE, ["0.5", "0.5", completion, "0.5"])
    assert [score.value for score in scores] == [0.5, 0.5, None, 0.5]
    assert (scores[2].reason, scores[2].by_limit) == (reason, True)


def test_a_child_gets_the_variables_that_are_named_and_no_message_has_their_secrets(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("JUDGE_KEY", "0.125")
    monkeypatch.setenv("OTHER_KEY", "0.25")
    spec = WILD.replace(":score", ":variables")
    with RewardPool(spec, workers=1, environment=("JUDGE_KEY",)) as pool:
        handed, stripped, unset, failed = pool.score(
            spec, ["read JUDGE_KEY", "read OTHER_KEY", "read NOT_SET", "say JUDGE_KEY"]
        )
    assert handed.value == 0.125
    assert stripped.reason == (
        "KeyError: 'OTHER_KEY'; it runs isolated, without this variable: set reward_environment: [OTHER_KEY]"
    )
    assert unset.reason == "KeyError: 'NOT_SET'"
    assert failed.reason == "ValueError: 401: no key ********"
    assert "0.125" not in capfd.readouterr().err


def test_a_child_that_died_while_idle_costs_no_score(pool: RewardPool) -> None:
    judge(pool, "yes")
    for child in pool._children:
        for process in descendants(child.pid):
            process.kill()
    wait_for(lambda: not any(descendants(child.pid) for child in pool._children), "workers do not die")
    time.sleep(0.1)
    assert [score.value for score in judge(pool, *["yes"] * 4)] == [1.0] * 4


def test_bad_luck_in_starting_a_child_is_survived_and_a_lasting_fault_is_not(tmp_path: Path) -> None:
    (tmp_path / "moody.py").write_text(
        "import os, pathlib\n"
        "if pathlib.Path(__file__).with_name('broken').exists(): raise OSError('no disk')\n"
        "def score(completions):\n    if completions == ['exit']: os._exit(1)\n    return [1.0]\n"
    )
    spec = f"{tmp_path}/moody.py:score"
    with RewardPool(spec, workers=1) as pool:
        assert [score.value for score in pool.score(spec, ["exit", "a"])] == [None, 1.0]
        wait_for(lambda: pool.score(spec, ["a"]) and all(child.ready for child in pool._children), "no spare")
        (tmp_path / "broken").touch()
        pool.score(spec, ["exit"])  # a spare process is ready; its own replacement cannot start
        time.sleep(0.5)
        (tmp_path / "broken").unlink()
        assert [score.value for score in pool.score(spec, ["exit", "exit", "a"])] == [None, None, 1.0]
        (tmp_path / "broken").touch()
        with pytest.raises(RewardFailed, match="cannot be loaded: OSError: no disk"):
            pool.score(spec, ["exit"] * 5)


def test_a_column_that_cannot_travel_is_an_error(pool: RewardPool) -> None:
    with pytest.raises(RewardFailed, match=r"column 'file' cannot be sent .*reward_isolation: none"):
        pool.score(WILD, ["yes"], {"answer": ["yes"], "prompts": ["?"], "file": [lambda: 0]})


def test_closing_leaves_nothing(tmp_path: Path) -> None:
    file = tmp_path / "pids"
    with RewardPool(WILD, workers=2) as pool:
        assert judge(pool, f"leave-a-program {file}", "yes")[0].value == 1.0
        pids = [*pids_in(file), *[child.pid for child in pool._children]]
        pids += [process.pid for pid in pids for process in descendants(pid)]
        assert len(set(pids)) >= 4 and all(is_alive(pid) for pid in pids)
    assert not any(is_alive(pid) for pid in pids)


PARENT = f"""
import os, sys
from grpo_recipes.rewards.pool import RewardPool
pool = RewardPool({WILD!r}, workers=2, timeout=300)
pool.start()
columns = {{"answer": ["yes"] * 2, "prompts": ["?"] * 2}}
pool.score({WILD!r}, ["yes", "yes"], columns)
print(*[child.pid for child in pool._children], flush=True)
if sys.argv[1] == "hang":
    pool.score({WILD!r}, ["leave-and-spin " + sys.argv[2], "leave-a-program " + sys.argv[2] + ".program"], columns)
os._exit(1) if sys.argv[1] == "exit" else sys.exit(0)
"""


@pytest.mark.parametrize("how", ["hang", "exit", "leave"])
def test_nothing_outlives_the_trainer(tmp_path: Path, how: str) -> None:
    file = tmp_path / "pids"
    command = [sys.executable, "-c", PARENT, how, str(file)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pids = [int(word) for word in parent.stdout.readline().split()]
        assert len(pids) == 2
        try:
            if how == "hang":
                wait_for(lambda: len(pids_in(file)) == 3 and pids_in(Path(f"{file}.program")), "nothing to leave")
                pids += [child.pid for pid in pids for child in descendants(pid)]
                parent.send_signal(signal.SIGKILL)
            parent.wait(20)
        finally:
            parent.kill()
    pids += pids_in(file) + pids_in(Path(f"{file}.program"))
    wait_for(lambda: not any(is_alive(pid) for pid in pids), "children outlive their parent")


def test_a_keeper_that_is_killed_costs_a_score(pool: RewardPool) -> None:
    spinning = subprocess.Popen(
        [sys.executable, "-c", f"import os, time; time.sleep(0.2); os.kill({pool._children[0].pid}, 9)"]
    )
    scores = judge(pool, *["sleep 0.3"] * 4, "yes")
    spinning.wait(10)
    assert [score.value for score in scores].count(1.0) == 4
    assert {score.reason for score in scores} == {None, "its process died"}


def test_workers_share_the_cores_of_a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for cores, ranks, workers in ((2, 1, 1), (4, 1, 2), (64, 1, 8), (64, 8, 4), (8, 8, 1)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, cores=cores: set(range(cores)))
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
        assert count_default_workers() == workers


def test_the_trace_has_the_calls_of_each_child_also_of_a_killed_one(tmp_path: Path) -> None:
    trace = Trace("rank_0", tmp_path)
    with RewardPool(WILD, workers=1, timeout=0.5, trace=trace) as pool:
        judge(pool, "yes")
        judge(pool, "sleep 100")
    write_trace(tmp_path)
    tracks = read_tracks(tmp_path)
    for spans in tracks.values():
        assert_nested(spans)
    first = tracks["rank 0", "reward child 1"]
    assert [(span["name"], span["args"]["rows"]) for span in first[:2]] == [("load rewards", 0), (WILD, 1)]
    spans = [span for track in tracks.values() for span in track if span["name"] == WILD]
    assert [span["args"]["rows"] for span in spans] == [1, 1] and max(span["dur"] for span in spans) >= 0.5e6
