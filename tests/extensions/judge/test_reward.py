"""The reward ``llm_judge``, called in child processes as in a training, with a fake judge."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_judge import FakeJudge

from grpo_recipes.extensions.judge.reward import compute_try_seconds, fill_template, read_grade, read_preference
from grpo_recipes.rewards.pool import RewardPool
from grpo_recipes.rewards.score import Score

PROMPT = "Solution: {answer}\nAnswer: {completion}"
PAIRWISE = "Solution: {first}\nAnswer: {second}"
DEFAULTS = dict(
    judge_model="judge", judge_api_key_variable="JUDGE_KEY", judge_mode="absolute", judge_prompt=PROMPT,
    judge_scale=[0, 10], judge_max_tokens=16, judge_temperature=0.0, judge_retries=0, judge_cache=None,
    reward_timeout=20.0,
)  # fmt: skip


@pytest.fixture
def judge(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeJudge]:
    monkeypatch.setenv("JUDGE_KEY", "planted")
    with FakeJudge().running() as judge:
        yield judge


def score(
    judge: FakeJudge, completions: list[str], answers: list[str], concurrency: int = 4, **keys: Any
) -> list[Score]:
    """Return the judge's scores of completions."""
    bound = {**DEFAULTS, "judge_base_url": judge.url, **keys}
    options = dict(timeout=bound["reward_timeout"], environment=["JUDGE_KEY"], concurrency=concurrency)
    chats = [[{"role": "assistant", "content": text}] for text in completions]
    columns = {"prompts": [[{"role": "user", "content": "1+1="}]] * len(chats), "answer": answers}
    with RewardPool("llm_judge", workers=1, keys={"llm_judge": bound}, **options) as pool:
        return pool.score("llm_judge", chats, columns)


def test_grades_are_scaled_and_a_reply_without_a_grade_is_unscored(judge: FakeJudge) -> None:
    scores = score(judge, ["it is 2", "it is 3", "2?"], ["2", "2", "2"], judge_scale=[-10, 10])
    assert [graded.value for graded in scores] == [1.0, 0.5, None]
    assert "no grade in the judge's reply 'I cannot say'" in str(scores[2].reason)


def test_many_requests_are_open_at_the_same_time_and_grades_keep_the_order(judge: FakeJudge) -> None:
    judge.seconds = 0.3
    scores = score(judge, ["it is 2", "it is 3"] * 16, ["2"] * 32, concurrency=16)
    assert [graded.value for graded in scores] == [1.0, 0.0] * 16
    assert 8 <= judge.most <= 16


def test_the_recipe_names_the_judge_and_limits_its_reply(judge: FakeJudge, tmp_path: Path) -> None:
    score(judge, ["2"], ["2"], judge_model="other", judge_max_tokens=7, judge_cache=str(tmp_path))
    (reply,) = tmp_path.rglob("*.json")
    request = json.loads(reply.read_text())["request"]
    assert (request["model"], request["max_tokens"]) == ("other", 7)


def test_a_failed_request_is_tried_again_as_often_as_the_recipe_says(judge: FakeJudge) -> None:
    judge.failures = 2
    (without_retries,) = score(judge, ["2"], ["2"])
    assert without_retries.value is None and "InternalServerError" in str(without_retries.reason)
    (with_retry,) = score(judge, ["2"], ["2"], judge_retries=1)
    assert with_retry.value == 1.0 and judge.requests == 3


def test_a_judge_that_hangs_costs_the_time_limit(judge: FakeJudge) -> None:
    judge.seconds = 30.0
    (late,) = score(judge, ["2"], ["2"], reward_timeout=2.0)
    assert late.value is None and late.seconds < 10, late


def test_a_wrong_key_leaves_completions_unscored_without_its_value(
    judge: FakeJudge, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_KEY", "wrong-secret")
    (unscored,) = score(judge, ["2"], ["2"])
    assert unscored.value is None and "AuthenticationError" in str(unscored.reason)
    assert "wrong-secret" not in str(unscored.reason)


@pytest.mark.parametrize(("mode", "text"), [("absolute", "<think>The answer has 5 parts"), ("pairwise", "Better: A")])
def test_a_reply_that_was_cut_off_has_no_grade(
    judge: FakeJudge, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, mode: str, text: str
) -> None:
    choice = {"index": 0, "finish_reason": "length", "message": {"role": "assistant", "content": text}}
    reply = {"id": "1", "object": "chat.completion", "created": 1, "model": "judge", "choices": [choice]}
    monkeypatch.setattr(judge, "answer", lambda *_: (200, reply))
    prompt = PAIRWISE if mode == "pairwise" else PROMPT
    (unscored,) = score(judge, ["2"], ["2"], judge_mode=mode, judge_prompt=prompt, judge_cache=str(tmp_path))
    assert unscored.value is None, unscored
    assert str(unscored.reason).endswith("reply was cut off at judge_max_tokens 16; raise judge_max_tokens")
    assert not list(tmp_path.rglob("*.json"))


def test_equal_requests_are_answered_from_the_cache(judge: FakeJudge, tmp_path: Path) -> None:
    cache = str(tmp_path / "replies")
    assert [graded.value for graded in score(judge, ["2", "3"], ["2", "2"], judge_cache=cache)] == [1.0, 0.0]
    assert judge.requests == 2
    assert [graded.value for graded in score(judge, ["2", "3"], ["2", "2"], judge_cache=cache)] == [1.0, 0.0]
    assert judge.requests == 2
    other_temperature = score(judge, ["2"], ["2"], judge_cache=cache, judge_temperature=0.5)
    assert other_temperature[0].value == 1.0 and judge.requests == 3
    (reply, *_) = (json.loads(path.read_text())["reply"] for path in Path(cache).rglob("*.json"))
    assert reply in ("0", "10")


def test_a_comparison_is_made_in_both_orders(judge: FakeJudge, monkeypatch: pytest.MonkeyPatch) -> None:
    replies = {("good", "poor"): "Better: A", ("poor", "good"): "Better: B"}

    def answer(path: str, authorization: str | None, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        order = tuple(line.partition(": ")[2] for line in body["messages"][0]["content"].splitlines())
        message = {"role": "assistant", "content": replies.get(order, "Better: A")}  # equal answers: prefers A
        choice = {"index": 0, "finish_reason": "stop", "message": message}
        return 200, {"id": "1", "object": "chat.completion", "created": 1, "model": "judge", "choices": [choice]}

    monkeypatch.setattr(judge, "answer", answer)
    pairs = dict(judge_mode="pairwise", judge_prompt=PAIRWISE)
    scores = score(judge, ["good", "poor", "same"], ["poor", "good", "same"], **pairs)
    assert [graded.value for graded in scores] == [1.0, 0.0, 0.5]


@pytest.mark.parametrize(
    ("reply", "grade"),
    [("Grade: 7", 0.7), ("**Grade:** 7.5/10", 0.75), ("First a 3. Grade: 10", 1.0), ("8", 0.8),
     ("Grade (0-10): 8", 0.8), ("**Grade** (of 10) = **7**", 0.7), ("Grade: (6)", 0.6), ('{"grade": 5}', 0.5),
     ("Grade: .5", 0.05), ("Grade:\n[[4]]", 0.4), ("Grade 3", 0.3), ("Grade: 9\nThe grade, 1 above 8, fits.", 0.9),
     ("<think>Grade: 1</think>Grade: 2", 0.2), ("about 3 of 10", None), ("Grade: 11", None), ("-1", None), ("", None)],
)  # fmt: skip
def test_grades_are_read_from_the_end_of_a_reply(reply: str, grade: float | None) -> None:
    if grade is None:
        with pytest.raises(ValueError, match="grade"):
            read_grade(reply, 0, 10)
    else:
        assert read_grade(reply, 0, 10) == grade


def test_preferences_are_read_from_the_end_of_a_reply() -> None:
    replies = ["Better: A", "Better: B at first. **Better: b**", "better: equal", '{"better": "A"}']
    assert list(map(read_preference, replies)) == [1.0, 0.0, 0.5, 1.0]
    replies = ["Better: B\n\nB is better. A lacks a step.", "Better (A or B): B", "**Better:** B"]
    assert list(map(read_preference, replies)) == [0.0] * 3
    for reply in ("A is nice", "B is better. A lacks a step."):
        with pytest.raises(ValueError, match="no preference"):
            read_preference(reply)


def test_placeholders_inside_a_completion_are_not_replaced() -> None:
    texts = {"completion": r"{answer} \frac{a}{b}", "answer": "42"}
    assert fill_template("{x} {completion} {answer}", texts) == r"{x} {answer} \frac{a}{b} 42"


def test_all_tries_fit_into_the_time_limit() -> None:
    assert compute_try_seconds(90, 2) * 3 + 0.5 + 1.0 <= 90
    assert compute_try_seconds(5, 0) <= 5
