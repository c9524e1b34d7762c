"""Groups of a run-api are kept in a file, and posted again to a run-api as a trainer takes them."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from documented import documented
from waiting import wait_for

from atropos.groups import group, of_version
from atropos.run_api import REGISTRATION, RunApi
from grpo_recipes import cli
from grpo_recipes.extensions.atropos.client import AtroposClient
from grpo_recipes.extensions.atropos.group import Group
from grpo_recipes.extensions.atropos.replay import Recording

NOWHERE = "http://127.0.0.1:9"
SENT = "grpo: Successfully submitted scored data for step"


def recording(folder: Path, *batches: tuple[int, list[Group]]) -> Path:
    file = folder / "groups.jsonl"
    file.unlink(missing_ok=True)
    made = Recording(file, 0)
    for step, groups in batches:
        made.add(step, groups)
    return file


def three_steps(folder: Path) -> Path:
    """Two groups in each step, of which the first is as new as it can be; of environments that nobody registers."""
    steps = (1, 2, 3)
    return recording(folder, *((step, [of_version(step - 1, env_id=3), of_version(0)]) for step in steps))


def grpo(*words: Any) -> int:
    return cli.main(["atropos", *map(str, words)])


def replay(file: Path, api: RunApi | str, *more: Any) -> int:
    return grpo("replay", file, "--api-url", api if isinstance(api, str) else api.url, "--wait", 20, *more)


@contextlib.contextmanager
def in_background(*words: Any) -> Iterator[list[int]]:
    """A command in a thread; the list has its exit code once it ended, which it does within the block."""
    codes: list[int] = []
    thread = threading.Thread(target=lambda: codes.append(grpo(*words)), daemon=True)
    thread.start()
    try:
        yield codes
    finally:  # also where the block failed: what the thread posts later would reach another test
        thread.join(30)
    assert not thread.is_alive()


@contextlib.contextmanager
def replaying(file: Path, api: RunApi, *more: Any) -> Iterator[list[int]]:
    with in_background("replay", file, "--api-url", api.url, "--wait", 20, *more) as codes:
        yield codes


def trainer(api: RunApi, *, slow: bool = False, **changes: Any) -> AtroposClient:
    """Return the client of a trainer that has registered.

    The registration ends with a first look for a batch, which a slow one finds already: it is in ``counts``.
    """
    client = AtroposClient(api.url, delay=0.01, max_wait=20.0, say=lambda _: time.sleep(0.3 * slow))
    client.register({**REGISTRATION, **changes})
    return client


# --- record ----------------------------------------------------------------------------------------------------------


def test_a_recorder_stands_in_the_place_of_a_trainer(api: RunApi, tmp_path: Path, capfd: Any) -> None:
    file = tmp_path / "groups.jsonl"
    command = "grpo atropos record groups.jsonl --groups 16 --group-size 16 --max-tokens 40 --batches 10"
    words = documented(command, {"16": "2", "40": "9", "10": "2", "groups.jsonl": str(file)})
    made = [of_version(7), group(first=30, env_id=0), group(first=40), group(first=50)]
    with in_background(*words[2:], "--api-url", api.url, "--wait", "20") as codes:
        wait_for(lambda: api.get("/info").json()["batch_size"] == 4, "a registration")
        assert api.get("/info").json()["max_token_len"] == 10
        wait_for(lambda: "env_id" in api.post("/register-env", ENVIRONMENT).json(), "environments may join")
        too_long = group(first=60, tokens=[[1] * 20, [1] * 20], masks=[[-100] * 19 + [1]] * 2,
            inference_logprobs=[[1.0] * 19 + [-1.0]] * 2)  # fmt: skip
        assert api.post("/scored_data_list", [too_long.as_wire(), group(first=70).as_wire()]).ok
        wait_for(lambda: api.get("/status").json()["queue_size"] == 0, "the first batch")
        assert api.post("/scored_data_list", [one.as_wire() for one in made]).ok
    assert codes == [0]
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2]
    kept = [Group.of_wire(plain) for row in rows for plain in row["groups"]]
    assert len(kept) == 4 and all(one in [*made, group(first=70)] for one in kept)
    out = capfd.readouterr().out
    assert "is not trained on: trajectory 0: 20 tokens where at most 9 are allowed" in out
    assert "grpo: batch 2 of 2 is in" in out


ENVIRONMENT = {"max_token_length": 64, "desired_name": "sums", "weight": 1.0, "group_size": 2}
SIZES = ("--groups", 2, "--group-size", 2, "--max-tokens", 9, "--batches", 2)


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("record", "new.jsonl"), "--groups: is missing. Fix: write --groups N, at least 1: groups of a batch"),
        (("record", "new.jsonl", *SIZES[:-1], 0), "--batches: is 0. Fix: write --batches N"),
        (("record", "there.jsonl", *SIZES), "there.jsonl: is there already. Fix: name a new file"),
        (("record", "no/folder.jsonl", *SIZES), "no/folder.jsonl: cannot be written (No such file"),
        (("record", "new.jsonl", *SIZES, "--without-versions"), "--without-versions: does nothing with record"),
        (("replay", "there.jsonl", "--batches", 2), "--batches: does nothing with replay"),
        (("replay", "there.jsonl", "--wait", 0), "--wait: is 0. Fix: write seconds above 0"),
        (("replay", "there.jsonl", "--wait", "nan"), "--wait: is nan"),
        (("replay", "there.jsonl", "--api-url", "localhost:8000"), "--api-url: 'localhost:8000' is not an http or"),
        (("again", "there.jsonl"), "action: invalid choice: 'again'"),
        (("replay",), "FILE: is missing"),
    ],
)
def test_a_wrong_command_line_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, words: tuple[Any, ...], problem: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("there.jsonl").write_text("")
    assert grpo(words[0], *words[1:]) == 2
    assert f"grpo: {problem}" in capsys.readouterr().err
    assert not Path("new.jsonl").exists()


def test_a_recorder_without_environments_ends_by_its_deadline(api: RunApi, tmp_path: Path, capsys: Any) -> None:
    assert grpo("record", tmp_path / "new.jsonl", *SIZES, "--api-url", api.url, "--wait", 0.5) == 1
    assert "Maximum wait time (0.5s) exceeded: no environment has joined" in capsys.readouterr().err


# --- replay ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("slow", [False, True])
def test_the_groups_of_a_step_come_once_those_before_were_taken(
    api: RunApi, tmp_path: Path, capfd: Any, slow: bool
) -> None:
    file = three_steps(tmp_path)
    words = documented(
        "grpo atropos replay runs/first/atropos_groups.jsonl", {"runs/first/atropos_groups.jsonl": str(file)}
    )
    with in_background(*words[2:], "--api-url", api.url) as codes:
        time.sleep(0.3)
        assert api.get("/status").json() == {"current_step": 0, "queue_size": 0}  # nothing before the registration
        client = trainer(api, slow=slow)
        assert client.counts["batches"] == 1 or not slow
        for step in (1, 2, 3):
            wait_for(lambda: client.status()["queue_size"] == 2, "groups of a step")
            time.sleep(0.3)
            handed_out = client.counts["batches"]
            assert client.status() == {"current_step": handed_out, "queue_size": 2} and handed_out in {step - 1, 1}
            assert len(codes) == (handed_out == 2)
            keys = {"size": 2, "longest": 64, "vocabulary": 1000, "current": step - 1, "max_staleness": None}
            assert client.take(2, **keys) == [of_version(step - 1, env_id=3), of_version(0)]
    assert codes == [0] and client.counts["rejected"] == 0
    assert [line for line in capfd.readouterr().out.splitlines() if line.startswith(SENT)] == [
        f"{SENT} {step}" for step in (1, 2, 3)
    ]


def test_a_training_that_goes_on_after_a_checkpoint_gets_the_steps_from_there(api: RunApi, tmp_path: Path) -> None:
    with replaying(three_steps(tmp_path), api) as codes:
        client = trainer(api, starting_step=2)
        assert client.next_batch() == [of_version(2, env_id=3), of_version(0)]
    assert codes == [0] and client.status() == {"current_step": 3, "queue_size": 0}


def test_groups_without_their_versions_fit_any_weights(api: RunApi, tmp_path: Path, capsys: Any) -> None:
    of_other_weights = recording(tmp_path, (1, [of_version(5), group(generation_params={"temperature": 0.5})]))
    client = trainer(api)
    assert replay(of_other_weights, api) == 2
    told = capsys.readouterr().err
    assert "groups.jsonl:1: the trainer would reject a group in step 1: weights of step 5 sampled it" in told
    assert client.status() == {"current_step": 0, "queue_size": 0}
    assert replay(of_other_weights, api, "--without-versions") == 0
    (first, second) = client.next_batch()
    assert (first.generation_params, second.generation_params) == ({}, {"temperature": 0.5})
    assert first.tokens == of_version(5).tokens


@pytest.mark.parametrize(
    ("begins", "step", "problem"),
    [
        (1, 3, "ends with step 3, and the training begins after step 3. Fix: replay a longer recording"),
        (
            4,
            1,
            "begins with step 4, and the training after step 1. Fix: start the training from the checkpoint of step 3",
        ),
    ],
)
def test_a_recording_of_other_steps_is_refused(
    api: RunApi, tmp_path: Path, capsys: Any, begins: int, step: int, problem: str
) -> None:
    steps = range(begins, begins + 3)
    file = recording(tmp_path, *((number, [of_version(0), of_version(0)]) for number in steps))
    client = trainer(api, starting_step=step)
    assert replay(file, api) == 2
    assert problem in capsys.readouterr().err
    assert client.status() == {"current_step": step, "queue_size": 0}


@pytest.mark.parametrize(
    ("registered", "problem"),
    [
        ({"batch_size": 8}, ":1: the batch has 4 sequences, and the trainer registered 8. Fix: train with prompts_per"),
        (
            {"max_token_len": 5},
            ":1: a trajectory has 5 tokens, and the trainer takes at most 4. Fix: raise max_prompt_l",
        ),
    ],
)
def test_a_recording_of_other_sizes_is_refused(
    api: RunApi, tmp_path: Path, capsys: Any, registered: dict[str, int], problem: str
) -> None:
    client = trainer(api, **registered)
    assert replay(three_steps(tmp_path), api) == 2
    assert problem in capsys.readouterr().err
    assert client.status()["queue_size"] == 0


GOOD = json.dumps({"step": 4, "groups": [group().as_wire()]})
ROW = json.dumps(group(masks=[[0, 0, 0, 1], [-100, -100, -100, 20, 21]]).as_wire())


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (None, ": cannot be read (No such file or directory). Fix: name the atropos_groups.jsonl of a run"),
        ("", ": holds no groups. Fix: name the atropos_groups.jsonl"),
        ("{}\n", ":1: has no step with a list of groups. Fix: remove the line"),
        (f"{GOOD}\nnothing\n{GOOD}\n", ":2: is no JSON"),
        (f"{GOOD}\n\xff\n", ":2: is no JSON"),
        ("[" * 100_000 + "\n", ":1: is no JSON"),
        ('{"step": true, "groups": []}\n', ":1: has no step"),
        ('{"step": 1, "groups": []}\n', ":1: has no groups"),
        ('{"step": 0, "groups": []}\n', ":1: step 0 stands after step 0"),
        (f"{GOOD}\n{GOOD.replace('4', '3', 1)}\n", ":2: step 3 stands after step 4"),
        ('{"step": 1, "groups": [3]}\n', ":1: a scored group is a mapping with the lists tokens, masks and scores"),
        (f'{{"step": 1, "groups": [{ROW}]}}\n', ":1: group 0 cannot be trained on: trajectory 0: mask 0 at token 4"),
        (
            '{"step": 1, "groups": [{"tokens": [], "masks": [], "scores": []}]}\n',
            ":1: group 0 cannot be trained on: 0 tra",
        ),
    ],
)
def test_a_wrong_file_is_refused_before_anybody_is_asked(
    tmp_path: Path, capsys: Any, text: str | None, problem: str
) -> None:
    file = tmp_path / "groups.jsonl"
    if text is not None:
        file.write_text(text, encoding="latin-1")
    assert replay(file, NOWHERE) == 2
    (told,) = capsys.readouterr().err.splitlines()
    assert f"groups.jsonl{problem}" in told and ". Fix: " in told


def test_a_folder_is_no_recording(tmp_path: Path, capsys: Any) -> None:
    assert replay(tmp_path, NOWHERE) == 2
    assert "cannot be read (Is a directory)" in capsys.readouterr().err


def test_a_last_line_that_a_kill_cut_short_is_left_out(api: RunApi, tmp_path: Path, capsys: Any) -> None:
    file = recording(tmp_path, (1, [group(), group()]))
    file.write_text(file.read_text() + GOOD[:-20])
    client = trainer(api)
    assert replay(file, api) == 0
    assert "groups.jsonl:2 is cut short, and left out" in capsys.readouterr().out
    assert client.next_batch() == [group(), group()]


def test_a_run_api_to_which_others_post_is_refused(api: RunApi, tmp_path: Path, capsys: Any) -> None:
    trainer(api)
    assert api.post("/scored_data", group().as_wire()).ok
    assert replay(three_steps(tmp_path), api) == 2
    assert "groups of something else are in the queue of run-api already (1)" in capsys.readouterr().err


# --- waits -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.rotating
@pytest.mark.parametrize("there", [True, False])
def test_nobody_who_trains_is_waited_for_as_long_as_asked(
    api: RunApi, tmp_path: Path, capsys: Any, there: bool
) -> None:
    url = api.url if there else NOWHERE
    assert grpo("replay", three_steps(tmp_path), "--api-url", url, "--wait", 0.3) == 1
    why = "no trainer has registered, for 0.3 s" if there else "Atropos API not reachable"
    told = capsys.readouterr().err
    assert f"nothing is posted to {url}: {why}" in told and "Fix: start the training, with atropos_api_url" in told
    if there:
        assert api.get("/status").json() == {"current_step": 0, "queue_size": 0}


def test_groups_that_nobody_takes_end_the_replay(api: RunApi, tmp_path: Path, capsys: Any) -> None:
    trainer(api)
    assert grpo("replay", three_steps(tmp_path), "--api-url", api.url, "--wait", 0.3) == 1
    found = capsys.readouterr()
    assert f"nobody took the groups of step 1 from {api.url} within 0.3 s: the training ended" in found.err
    assert found.out.count(SENT) == 1


@pytest.mark.slow
@pytest.mark.rotating
def test_a_run_api_that_goes_away_ends_the_replay(api: RunApi, tmp_path: Path, capfd: Any) -> None:
    with replaying(three_steps(tmp_path), api) as codes:
        client = trainer(api)
        client.next_batch()
        wait_for(lambda: client.status()["queue_size"] == 2, "groups of a step")
        api.stop()
    assert codes == [1]
    assert "Atropos API not reachable" in capfd.readouterr().err


@pytest.mark.parametrize("slow", [False, True])
def test_a_run_api_that_is_started_again_gets_nothing_more(api: RunApi, tmp_path: Path, capfd: Any, slow: bool) -> None:
    with replaying(recording(tmp_path, *((step, [of_version(0)] * 2) for step in range(1, 6))), api) as codes:
        client = trainer(api, slow=slow, starting_step=1)
        wait_for(lambda: client.status()["queue_size"] == 2, "groups of a step")
        api.restart()
    assert codes == [1]
    assert f"was started again after step {2 + client.counts['batches']}" in capfd.readouterr().err
    assert api.get("/status").json() == {"current_step": 0, "queue_size": 0}


# --- the recording of a run ------------------------------------------------------------------------------------------


def test_what_a_killed_attempt_recorded_after_its_checkpoint_is_removed(tmp_path: Path) -> None:
    file = recording(tmp_path, *((step, [of_version(step)]) for step in (1, 3, 5, 7)))
    file.write_text(file.read_text() + '{"step": 9, "gro')
    again = Recording(file, 5)
    again.add(6, [of_version(40)])
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 3, 5, 6]
    assert Group.of_wire(rows[-1]["groups"][0]) == of_version(40)
    file.write_text(file.read_text() + '{"step": 6, "gro')  # cut short in the same step
    Recording(file, 6)
    assert [json.loads(line)["step"] for line in file.read_text().splitlines()] == [1, 3, 5, 6]
    Recording(file, 0)
    assert file.read_text() == ""
