r"""Labelled pairs of reference solution and answer: notation must not decide, and wrong answers stay wrong (S6)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from grpo_recipes.rewards import math_verify as math_verify_module
from grpo_recipes.rewards.functions import pure_accuracy_math
from grpo_recipes.rewards.math_verify import math_verify

PAIRS: dict[str, list[tuple[str, str, bool]]] = yaml.safe_load(
    (Path(__file__).parent / "answer_pairs.yaml").read_text()
)
SHARED = Path(__file__).parents[3] / "shared" / "data" / "answers" / "pairs.jsonl"


def disagreements(pairs: list[tuple[str, str, bool]]) -> list[tuple[str, str, bool]]:
    """Return the pairs that math_verify judges differently inside an answer tag."""
    scores = math_verify([f"<answer>{answer}</answer>" for _, answer, _ in pairs], [gold for gold, _, _ in pairs])
    return [pair for pair, score in zip(pairs, scores, strict=True) if score != float(pair[2])]


@pytest.mark.parametrize("kind", PAIRS)
def test_math_verify_agrees_with_every_label(kind):
    """S6: plain-text mathematics, bases, repeating decimals, boxes, chains, multiple choice and their neighbors."""
    assert disagreements(PAIRS[kind]) == []


@pytest.mark.parametrize(
    ("gold", "answer", "right"),
    [
        (r"\frac{\infty}{2}", "5", 0.0),
        ("5", r"\frac{\infty}{2}", 0.0),
        (r"\infty", r"\frac{\infty}{2}", 1.0),
        (r"\infty", r"-\infty", 0.0),
        ("0", r"\frac{1}{\infty}", 1.0),
        ("0", r"\infty-\infty", 0.0),
    ],
)
def test_an_infinite_number_is_judged_without_chance(
    gold: str, answer: str, right: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sympy compares infinity divided by two with 5 at random points. In 1% of calls they seem equal."""
    monkeypatch.setattr(math_verify_module, "verify", lambda *_, **__: True)
    math_verify_module._are_equal_latex.cache_clear()
    assert math_verify([f"<answer>{answer}</answer>"], [gold]) == [right]


@pytest.mark.parametrize("kind", PAIRS)
def test_the_exact_reward_accepts_no_wrong_answer(kind):
    wrong = [(gold, answer) for gold, answer, equal in PAIRS[kind] if not equal]
    scores = pure_accuracy_math([f"<answer>{answer}</answer>" for _, answer in wrong], [gold for gold, _ in wrong])
    assert [pair for pair, score in zip(wrong, scores, strict=True) if score] == []


@pytest.mark.skipif(not SHARED.is_file(), reason="no labelled pairs next to the repository")
def test_math_verify_agrees_with_the_shared_pairs():
    """S6: at least 0.96 of the pairs collected from graders' tests and from answers in the style of contests."""
    rows = [json.loads(line) for line in SHARED.read_text().splitlines()]
    pairs = [(row["gold"], row["answer"], row["equal"]) for row in rows]
    assert len(disagreements(pairs)) <= 0.04 * len(pairs)


@pytest.mark.parametrize("text", [r"\fbox{42}", r"so $\boxed 42$.", r"\boxed{41}, no, \fbox{42}", r"\boxed{\,42\,}"])
def test_every_box_is_read(text):
    """S6: ``\\fbox{42}`` and ``\\boxed 42`` scored 0."""
    assert math_verify([text, text], ["42", "41"]) == [1.0, 0.0]


@pytest.mark.parametrize("gold", [r"$$3+5=\boxed{8}$$", r"Sum: \boxed{8}.", r"\fbox{8}", r"x=\boxed{8}"])
@pytest.mark.parametrize("reward", [math_verify, pure_accuracy_math])
def test_the_last_box_of_a_reference_solution_counts(reward, gold):
    """S6: a short solution that ends in a box made ``\\boxed{8}`` wrong."""
    completions = ["<answer>8</answer>", r"<answer>\boxed{8}</answer>", "<answer>7</answer>"]
    assert reward(completions, [gold] * 3) == [1.0, 1.0, 0.0]


UNREADABLE = [r"\frac{", r"0.\overline{3}", "?!", "1 000", r"\begin{cases} x", "¿", r"a \equiv 3 \pmod 5", "{}, 5"]


@pytest.mark.parametrize("gold", UNREADABLE)
@pytest.mark.parametrize("reward", [math_verify, pure_accuracy_math])
def test_the_same_text_is_right_before_any_parsing(reward, gold):
    """S5: answers are right if they are the reference solution up to surrounding white space."""
    assert reward([f"<answer>\n {gold} </answer>"], [f" {gold}"]) == [1.0]


def test_the_examples_of_the_docs_hold_for_math_verify():
    page = (Path(__file__).parents[2] / "docs/rewards.md").read_text()
    lines = page.split("except numbers and words:")[1].split("```")[1].splitlines()[1:]
    assert len(lines) >= 5
    for line in lines:
        gold, *spellings = (part.strip() for part in line.split("  |  "))
        assert math_verify([f"<answer>{other}</answer>" for other in spellings], [gold] * len(spellings)) == [
            1.0
        ] * len(spellings)
