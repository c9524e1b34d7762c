"""The examples under recipes/examples: a rule with extra columns, and a judge over HTTP (a fake judge here)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fake_judge import FakeJudge

from grpo_recipes.paths import find_code_root
from grpo_recipes.rewards.pool import RewardPool
from grpo_recipes.rewards.score import Score

pytestmark = pytest.mark.alone
EXAMPLES = find_code_root() / "recipes/examples"
JUDGE, NEAR = f"{EXAMPLES}/judge.py:graded", f"{EXAMPLES}/rule_reward.py:near"
VARIABLES = ("JUDGE_URL", "JUDGE_MODEL", "JUDGE_KEY")


@pytest.fixture(scope="module")
def fake() -> Iterator[FakeJudge]:
    with FakeJudge().running() as judge:
        yield judge


@pytest.fixture(scope="module")
def pool(fake: FakeJudge) -> Iterator[RewardPool]:
    """Start the judge's reward as in its recipe, with a shorter time limit."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in zip(VARIABLES, (fake.url, "fake", "planted"), strict=True):
            patch.setenv(name, value)
        with RewardPool(JUDGE, workers=1, timeout=3, concurrency=16, environment=VARIABLES) as judge_pool:
            grade(judge_pool, "1")
            yield judge_pool


def grade(pool: RewardPool, *replies: str) -> list[Score]:
    prompts = [[{"role": "user", "content": "1+1="}]] * len(replies)
    completions = [[{"role": "assistant", "content": reply}] for reply in replies]
    return pool.score(JUDGE, completions, {"prompts": prompts, "answer": ["2"] * len(replies)})


@pytest.mark.parametrize("name", ["rule_reward.py", "judge.py", "rule.yaml", "judge.yaml"])
def test_the_page_shows_the_files_that_users_copy(name: str) -> None:
    page = (find_code_root() / "docs/rewards.md").read_text()
    lines = (EXAMPLES / name).read_text().partition("import os" if name == "judge.py" else "\n\n")
    shown = "".join(lines[1:]) if name.endswith(".py") else lines[0].split("run_name: ")[1].partition("\n")[2]
    assert shown.strip() in page


def test_the_rule_reads_its_own_columns() -> None:
    replies = ["It is 7", "so 8.", "9", "none"]
    completions = [[{"role": "assistant", "content": reply}] for reply in replies]
    with RewardPool(NEAR, workers=1) as pool:
        scores = pool.score(NEAR, completions, {"gold": ["7"] * 4, "tolerance": [1] * 4, "answer": ["7"] * 4})
    assert [score.value for score in scores] == [1.0, 0.5, 0.0, 0.0]


def test_the_judge_is_asked_many_times_at_once_and_its_grades_are_in_order(fake: FakeJudge, pool: RewardPool) -> None:
    fake.seconds, fake.most = 0.3, 0
    scores = grade(pool, *["it is 2", "it is 3"] * 16)
    assert [score.value for score in scores] == [1.0, 0.0] * 16
    assert 8 <= fake.most <= 16, "reward_concurrency calls at once"


def test_a_judge_that_fails_is_asked_again_and_one_without_a_grade_leaves_its_completion_unscored(
    fake: FakeJudge, pool: RewardPool
) -> None:
    fake.seconds, fake.failures = 0.0, fake.requests + 2
    right, silent = grade(pool, "it is 2", "what is 2?")
    assert right.value == 1.0 and fake.requests >= fake.failures + 2
    assert silent.reason == "ValueError: no grade in 'I cannot say'"


def test_a_wrong_key_is_named_without_its_value(fake: FakeJudge, pool: RewardPool) -> None:
    fake.key = "another"
    (score,) = grade(pool, "it is 2")
    fake.key = "planted"
    assert score.reason is not None and score.reason.startswith("AuthenticationError: Error code: 401")
    assert "no such key: Bearer ********" in score.reason and "planted" not in score.reason


@pytest.mark.slow
@pytest.mark.rotating
def test_a_judge_that_hangs_costs_the_time_limit_once(fake: FakeJudge, pool: RewardPool) -> None:
    fake.seconds = 4.0
    scores = grade(pool, *["it is 2"] * 8)
    fake.seconds = 0.0
    assert [(score.reason, score.by_limit) for score in scores] == [("time limit", True)] * 8
    assert all(score.seconds < 3.9 for score in scores)
    assert grade(pool, "it is 2")[0].value == 1.0
