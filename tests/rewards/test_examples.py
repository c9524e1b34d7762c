"""The examples under recipes/examples that docs/rewards.md shows."""

from __future__ import annotations

import pytest

from grpo_recipes.paths import find_code_root
from grpo_recipes.rewards.pool import RewardPool

EXAMPLES = find_code_root() / "recipes/examples"
NEAR = f"{EXAMPLES}/rule_reward.py:near"


@pytest.mark.parametrize("name", ["rule_reward.py", "rule.yaml", "judge.yaml"])
def test_the_page_shows_the_files_that_users_copy(name: str) -> None:
    page = (find_code_root() / "docs/rewards.md").read_text()
    lines = (EXAMPLES / name).read_text().partition("\n\n")
    shown = "".join(lines[1:]) if name.endswith(".py") else lines[0].split("run_name: ")[1].partition("\n")[2]
    assert shown.strip() in page


def test_the_rule_reads_its_own_columns() -> None:
    replies = ["It is 7", "so 8.", "9", "none"]
    completions = [[{"role": "assistant", "content": reply}] for reply in replies]
    with RewardPool(NEAR, workers=1) as pool:
        scores = pool.score(NEAR, completions, {"gold": ["7"] * 4, "tolerance": [1] * 4, "answer": ["7"] * 4})
    assert [score.value for score in scores] == [1.0, 0.5, 0.0, 0.0]
