"""Every reference answer of GSM8K in every way of writing it, and nothing else, scores 1."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from grpo_recipes.rewards.functions import pure_accuracy_math
from grpo_recipes.rewards.math_verify import math_verify

GSM8K = Path(__file__).parents[3] / "shared" / "data" / "gsm8k"
pytestmark = pytest.mark.skipif(not GSM8K.is_dir(), reason="no GSM8K beside the repository")

WRITINGS: dict[str, Callable[[str, int], str]] = {
    "as it is": lambda gold, number: f"<answer>{gold}</answer>",
    "leading newline": lambda gold, number: f"so\n<answer>\n{gold}\n</answer>",
    "spaces": lambda gold, number: f"<answer>   {gold}  </answer> ",
    "plain digits": lambda gold, number: f"<answer>{number}</answer>",
    "thousands": lambda gold, number: f"<answer>{number:,}</answer>",
    "boxed": lambda gold, number: rf"<answer>\boxed{{{gold}}}</answer>",
    "boxed formula": lambda gold, number: rf"<answer>$\boxed{{{number}}}$</answer>",
    "formula": lambda gold, number: f"<answer>${gold}$</answer>",
    "parentheses": lambda gold, number: rf"<answer>\({gold}\)</answer>",
    "dollars": lambda gold, number: f"<answer>${gold}</answer>",
    "escaped dollars": lambda gold, number: rf"<answer>\${number}</answer>",
    "unit": lambda gold, number: f"<answer>{gold} dollars</answer>",
    "unit in text": lambda gold, number: rf"<answer>{number}\text{{ miles}}</answer>",
    "percent": lambda gold, number: f"<answer>{gold}%</answer>",
    "decimals": lambda gold, number: f"<answer>{gold}.00</answer>",
    "full stop": lambda gold, number: f"<answer>{gold}.</answer>",
    "fraction": lambda gold, number: rf"<answer>\frac{{{number}}}{{1}}</answer>",
    "division": lambda gold, number: f"<answer>{3 * number}/3</answer>",
    "variable": lambda gold, number: f"<answer>x = {gold}</answer>",
    "several tags": lambda gold, number: f"<answer>{number}1</answer> no: <answer>{gold}</answer>",
}

CORRUPTIONS: dict[str, Callable[[str, int], str]] = {
    "one more": lambda gold, number: f"{number + 1}",
    "one less": lambda gold, number: f"{number - 1:,}",
    "digit appended": lambda gold, number: f"{gold}1",
    "digit in front": lambda gold, number: f"1{number}",
    "digit removed": lambda gold, number: f"{number}"[:-1],
    "sign changed": lambda gold, number: f"{-number if number else 1}",
    "decimal part": lambda gold, number: f"{gold}.5",
    "fraction": lambda gold, number: rf"\frac{{{number + 1}}}{{1}}",
    "power of ten": lambda gold, number: f"{number or 1} thousand",
    "unit alone": lambda gold, number: "dollars",
    "empty": lambda gold, number: "",
}


def golds() -> list[tuple[str, int]]:
    """Return the reference answers of both files, as text and as numbers."""
    lines = [line for name in ("train", "test") for line in (GSM8K / f"{name}.jsonl").read_text().splitlines()]
    answers = [json.loads(line)["answer"].rpartition("####")[2].strip() for line in lines]
    return [(answer, int(answer.replace(",", ""))) for answer in answers]


GOLDS = golds() if GSM8K.is_dir() else []
# For math_verify: all answers with a comma or a sign, and a sample of the other answers.
SAMPLE = [gold for gold in GOLDS if not gold[0].isdigit()] + GOLDS[::200]


@pytest.mark.parametrize(("reward", "rows"), [(pure_accuracy_math, GOLDS), (math_verify, SAMPLE)])
def test_every_writing_of_every_answer_is_right(reward, rows):
    assert len(rows) > (4_000 if rows is GOLDS else 60)
    for writing, write in WRITINGS.items():
        completions = [write(*row) for row in rows]
        rewards = reward(completions, [gold for gold, _ in rows])
        assert [text for text, score in zip(completions, rewards, strict=True) if score != 1] == [], writing


@pytest.mark.parametrize(("reward", "rows"), [(pure_accuracy_math, GOLDS), (math_verify, SAMPLE)])
def test_no_corrupted_answer_is_right(reward, rows):
    for corruption, corrupt in CORRUPTIONS.items():
        wrong = [f"<answer>{corrupt(*row)}</answer>" for row in rows]
        rewards = reward(wrong, [gold for gold, _ in rows])
        accepted = [(text, row) for text, row, score in zip(wrong, rows, rewards, strict=True) if score != 0]
        assert accepted == [], corruption


def test_no_answer_of_another_problem_is_right():
    pairs = [(other, gold) for (other, b), (gold, a) in zip(GOLDS[1:], GOLDS, strict=False) if a != b]
    rewards = pure_accuracy_math([f"<answer>{other}</answer>" for other, _ in pairs], [gold for _, gold in pairs])

    assert len(pairs) > 4_000 and set(rewards) == {0.0}
