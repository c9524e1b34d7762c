"""Episodes on the page of a run: speakers, roles, rewards of the actions, and the ending."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from grpo_recipes.console.report.pages import write_report
from grpo_recipes.console.report.transcripts import read_transcript

from .synthetic_runs import game_samples, make_run
from .test_pages_run import NASTY, drawn, page_of, values


def test_a_turn_has_the_seat_in_which_it_was_taken_and_what_it_was_worth() -> None:
    (sample,) = game_samples(3)
    transcript = read_transcript(sample)
    assert transcript is not None
    assert [(message.speaker, message.text) for message in transcript.opening] == [
        ("system", "You are Player 2."), ("user", "[GAME] Night falls."),
    ]  # fmt: skip
    policy = [message for message in transcript.messages if message.speaker == "policy"]
    assert [message.seat for message in policy] == [
        "Doctor, Night-Doctor",
        "Doctor, Day-Voting",
        "Doctor, Night-Doctor",
    ]
    assert list(policy[1].facts)[:2] == [("reward", "0"), ("legal", "0")]
    assert policy[1].facts[2] == ("illegal", "[7] is no target in Day-Voting; valid: [0], [1]")
    assert policy[2].facts[:2] == [("reward", "1.1"), ("legal", "1")] and policy[2].facts[3][0] == "end"
    assert transcript.facts == [("length", "3 turns"), ("won", "yes")] and transcript.problem == ""


@pytest.mark.parametrize(
    ("ended", "message"),
    [
        ({"unfinished": "environment_max_turns"}, "unfinished: reached the limit environment_max_turns"),
        ({"failed": "time limit"}, "failed: time limit"),
    ],
)
def test_why_an_episode_has_no_end_is_said(tmp_path: Path, ended: dict[str, str], message: str) -> None:
    page = page_of(make_run(tmp_path, steps=1, samples=game_samples(4, **ended)))
    assert message in page.text and "wonyes" not in page.text and "of turn 4" in page.text


def test_the_page_shows_episodes_in_place_of_prompts_and_completions(tmp_path: Path) -> None:
    folder = make_run(tmp_path, steps=3, samples=game_samples(20))
    plan = json.loads((folder / "plan.json").read_text()) | {
        "data": {"kind": "episodes", "text": "a:Game, b:Game; at most 20 turns"}
    }
    (folder / "plan.json").write_text(json.dumps(plan))
    text = page_of(folder).text
    for part in ("Episodes of textarena:SecretMafia-v0, seed 77", "You are Player 2.", "policy Doctor, Night-Doctor",
                 "length20 turns", "wonyes", "[1] of turn 1", "[0] of turn 20",
                 "reward1.1", "Environmenta:Game, b:GameTrainer", "Environment a:Game, b:Game; at most 20",
                 "eliminated all members"):  # fmt: skip
        assert part in text, part
    assert "Reference answer" not in text
    (folded, *_) = re.findall(
        r"<details class=\"more\"><summary>(\d+) more messages", (folder / "report.html").read_text()
    )
    assert int(folded) == 39 - 8


def test_a_short_episode_is_not_folded(tmp_path: Path) -> None:
    folder = make_run(tmp_path, steps=1, samples=game_samples(3))
    page_of(folder)
    assert "more messages" not in (folder / "report.html").read_text()


def test_texts_of_environments_cannot_do_anything(tmp_path: Path) -> None:
    (sample,) = game_samples(2)
    info = {NASTY: NASTY, "role": NASTY, "won": NASTY}
    turn = {"action": NASTY, "reward": NASTY, "info": info, "messages": [{"role": NASTY, "content": NASTY}]}
    nasty = {"environment": NASTY, "seed": NASTY, "info": info, "failed": NASTY, "turns": [turn] * 2}
    page = page_of(make_run(tmp_path, steps=2, samples=[{**sample, "episode": nasty}]))
    harmless = page_of(make_run(tmp_path, "plain-20261120-101501", steps=2, samples=game_samples(2)))
    assert {tag for tag, _ in page.elements} <= {tag for tag, _ in harmless.elements} | {"i"}  # marks of white space
    assert [tag for tag, _ in page.elements].count("script") == 1
    assert not [name for _, attributes in page.elements for name in attributes if name.startswith("on")]


@pytest.mark.parametrize("broken", [None, 1, {}, {"turns": 3}, {"turns": [None, {"info": [], "messages": {"a": 1}}]},
                                    {"info": "x", "messages": ["y", {}],
                                     "turns": [{"reward": "nan", "info": {"won": []}}]}])  # fmt: skip
def test_what_does_not_fit_is_left_out(tmp_path: Path, broken: Any) -> None:
    (sample,) = game_samples(2)
    assert write_report(make_run(tmp_path, steps=1, samples=[{**sample, "episode": broken}])).stat().st_size > 10_000


def test_episodes_of_two_seeds_that_begin_alike_stand_apart(tmp_path: Path) -> None:
    (sample,), (other,) = game_samples(2), game_samples(2)
    other["episode"]["seed"] = 78
    text = page_of(make_run(tmp_path, steps=1, samples=[sample, sample, other])).text
    assert text.count("seed 77") == text.count("seed 78") == 1


def test_a_users_own_number_by_the_name_of_a_share_is_drawn_as_a_number(tmp_path: Path) -> None:
    folder = make_run(tmp_path, steps=10, samples=game_samples(2))
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rows = [row | {"episodes/won": 2.0 * row["step"], "episodes/legal": -1.0 * row["step"]} for row in rows]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    page_of(folder)
    charts = drawn((folder / "report.html").read_text())
    for title, last in (("Won", "20"), ("Legal actions", "-10")):
        assert values(charts[title])[-1] == last
        assert "number from the environment" in charts[title] and " %<" not in charts[title]
    assert ">20</text>" in charts["Won"]  # the end of the axis


def test_numbers_of_episodes_are_curves(tmp_path: Path) -> None:
    folder = make_run(tmp_path, steps=10, samples=game_samples(2))
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        done = row["step"] / 10
        row |= {"episodes/won": done, "episodes/legal": done, "episodes/turns": 3.0, "episodes/useful": done / 2}
        row |= {"episodes/unfinished": 0.0, "episodes/unscored": done / 4, "episodes/odd": 4.0}
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = page_of(folder).text
    charts = drawn((folder / "report.html").read_text())
    assert values(charts["Won"])[-1] == "1" and ">100 %<" in charts["Won"]
    assert {"Legal actions", "Failed episodes"} < charts.keys()
    assert values(charts["useful"])[-1] == "0.5" and "Unfinished episodes" not in charts
    assert "Episode length" not in charts and re.search(r"Constant: .*episodes/odd 4, .*episodes/turns 3", text)


def test_an_episode_that_begins_at_its_end_is_shown() -> None:
    info = {"role": "Villager", "won": 0.0, "end": "The Mafia has won."}
    episode = {"environment": "textarena:SecretMafia-v0", "seed": 5, "reward": 0.5, "turns": [], "info": info}
    transcript = read_transcript({"episode": episode})
    assert transcript is not None
    assert transcript.facts == [
        ("length", "0 turns"), ("reward", "0.5"), ("won", "no"), ("end", "The Mafia has won."),
    ]  # fmt: skip
