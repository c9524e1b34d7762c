r"""The rewards ``modebench`` and ``satisfiability``, which accept any correct answer of a problem.

They have the same arguments as the rewards in ``grpo_recipes.rewards.functions``. For `grpo check-rewards`,
``modebench_answers`` and ``satisfiability_answers`` return correct and incorrect answers of a row.
"""

from collections.abc import Mapping
from typing import Any

from grpo_recipes.extensions.problems.modebench.dataset import (
    find_mode,
    is_problem,
    list_right_answers,
    list_wrong_answers,
)
from grpo_recipes.extensions.problems.seeded import list_assignments, parse_clauses, satisfies
from grpo_recipes.rewards.answers import extract_final_text, extract_last_answer

_WRONG = 3  # number of incorrect assignments of all variables to try
_MOST_VARIABLES = 12  # seeded:sat has at most 8


def modebench(completions: list[Any], answer: list[Any], **_: Any) -> list[float | None]:
    r"""Return 1.0 if the last ``\boxed{...}`` has any correct answer of a ModeBench problem, else 0.0.

    ``answer`` has the problems as JSON; the reward of a row without a ModeBench problem is None.
    """
    return [
        float(find_mode(extract_final_text(completion), problem) is not None) if is_problem(problem) else None
        for completion, problem in zip(completions, map(str, answer), strict=True)
    ]


def satisfiability(completions: list[Any], clauses: list[Any], **_: Any) -> list[float | None]:
    """Return 1.0 if the last answer tag contains any assignment that makes every clause true, else 0.0.

    ``clauses`` has the problems as JSON; the reward of a row without clauses is None.
    """
    rewards: list[float | None] = []
    for completion, text in zip(completions, clauses, strict=True):
        try:
            rewards.append(
                float(satisfies(extract_last_answer(extract_final_text(completion)) or "", parse_clauses(text)))
            )
        except ValueError:
            rewards.append(None)
    return rewards


def modebench_answers(row: Mapping[str, Any]) -> tuple[list[str], list[str]] | None:
    """Return all correct answers (one per mode) and some incorrect ones; None if the row has no ModeBench problem."""
    answer = row.get("answer", "")
    return (list_right_answers(answer), list_wrong_answers(answer)) if is_problem(answer) else None


def satisfiability_answers(row: Mapping[str, Any]) -> tuple[list[str], list[str]] | None:
    """Return all correct assignments, the reference first, and incorrect answers.

    Return None if the column ``clauses`` is missing or has other content, or too many variables to try all assignments.
    """
    try:
        clauses = parse_clauses(row.get("clauses"))
    except ValueError:
        return None
    if max(abs(part) for clause in clauses for part in clause) > _MOST_VARIABLES:
        return None
    answer, candidates = row.get("answer", ""), list(list_assignments(clauses))
    right = [*filter(None, [answer]), *(text for text, satisfied in candidates if satisfied and text != answer)]
    wrong = [text for text, satisfied in candidates if not satisfied][:_WRONG]
    return right, [*wrong, answer.partition(",")[0], ""]
