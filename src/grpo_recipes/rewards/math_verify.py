r"""Equality as the math-verify library sees it: ``\frac{\sqrt{2}}{2}`` is ``1/\sqrt{2}``.

Numbers are compared exactly and words as text; sympy compares the rest. It may never end on what a model writes, so
this is called in a child process, which is killed at the time limit (``reward_timeout``). The library's own limit is
turned off: it is an alarm signal, which outside the main thread makes every score wrong without a word.
"""

import functools
import logging
import re
from fractions import Fraction
from typing import Any

from math_verify import LatexExtractionConfig, parse, verify

from grpo_recipes.rewards import answers

for _part in ("parser", "grader", "utils"):
    logging.getLogger(f"math_verify.{_part}").setLevel(logging.ERROR)  # it warns that its alarm is off

_LATEX = (LatexExtractionConfig(boxed_match_priority=0),)
_COMMAND = re.compile(r"\\(?:begin|end)\{\w+\}|\\[A-Za-z]+|_\{\w+\}|\b(?:and|or)\b")
# sympy takes a word for the product of its letters, in which `yes` is `sey`.
_WORD = re.compile(r"[A-Za-z]{3}")
# math-verify adds numbers that are side by side, as in `1 1/2`: `2 3` is 5 to it.
_SIDE_BY_SIDE = re.compile(r"[0-9]\.?\s+\.?[0-9]")


def math_verify(completions: list[Any], answer: list[Any], **_: Any) -> list[float | None]:
    r"""Return 1.0 where the completion's answer equals the reference solution, 0.0 where not or where it is unreadable.

    The answer is in the last ``<answer>…</answer>``, without one in the last ``\boxed{…}``. Of a reference solution in
    words its last ``\boxed{…}`` counts. None where the reference solution itself cannot be read.
    """
    rows = zip(completions, answer, strict=True)
    return [_score(answers.completion_text(completion), _final(str(gold))) for completion, gold in rows]


def _final(gold: str) -> str:
    boxed = answers.last_boxed(gold)
    return boxed if boxed is not None and _is_text(answers.normal(gold)) else gold


def _score(text: str, gold: str) -> float | None:
    answer, reference = answers.last_answer(text), answers.normal(gold)
    answer = answers.last_boxed(text) if answer is None else answer
    if not _readable(reference):
        return None
    if answer is None or _is_text(reference):
        return float(answer is not None and answers.same(answer, gold))
    return float(answers.same(answer, gold) or answers.agree(reference, answers.normal(answer), _equal_items))


def _readable(answer: answers.Answer) -> bool:
    if isinstance(answer.value, tuple):
        return all(map(_readable, answer.value))
    return not isinstance(answer.value, str) or _is_text(answer) or bool(_parsed(answer.value))


def _is_text(answer: answers.Answer) -> bool:
    """Return whether the answer contains a word, which is not mathematics."""
    return _WORD.search(_COMMAND.sub(" ", _latex(answer))) is not None


def _equal_items(gold: answers.Answer, answer: answers.Answer) -> bool:
    """Return whether two answers, of which at most one has items, are equal."""
    text = isinstance(gold.value, str) or isinstance(answer.value, str)
    return answers.alike(gold, answer) or (text and _equal(_sided(gold, answer), _sided(answer, gold)))


def _sided(answer: answers.Answer, other: answers.Answer) -> str:
    """Return an answer as LaTeX, with its variable where the other has another: ``y=2x`` is ``x=y/2``, not ``x=2x``."""
    equation = other.variable or (isinstance(other.value, str) and "=" in other.value)
    named = answer.variable and equation and other.variable != answer.variable
    return f"{answer.variable}={_latex(answer)}" if named else _latex(answer)


@functools.lru_cache(maxsize=1024)  # completions of one prompt often agree
def _equal(gold: str, answer: str) -> bool:
    try:
        return verify(list(_parsed(gold)), list(_parsed(answer)), timeout_seconds=None, raise_on_error=True)
    except MemoryError:
        raise  # the limit of the child process: unscored
    except Exception:  # sympy raises what it likes on what it cannot compare
        return False


@functools.lru_cache(maxsize=1024)
def _parsed(latex: str) -> tuple[Any, ...]:
    """Return an answer as sympy sees it, empty where it cannot be read."""
    if _SIDE_BY_SIDE.search(latex):
        return ()
    return tuple(parse(rf"\boxed{{{latex}}}", _LATEX, fallback_mode="no_fallback", parsing_timeout=None))


def _latex(answer: answers.Answer) -> str:
    """Return the answer without units, variables and dress, as LaTeX."""
    value = answer.value
    if isinstance(value, tuple):
        first, last = ("\\" + bracket if bracket in "{}" else bracket for bracket in answer.brackets or ("", ""))
        return first + ", ".join(map(_latex, value)) + last
    if isinstance(value, Fraction) and value.denominator != 1:
        return rf"\frac{{{value.numerator}}}{{{value.denominator}}}"
    return str(value)
