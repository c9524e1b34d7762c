"""`grpo check-rewards`: show the rewards right and wrong answers before a job does."""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from grpo_recipes.cli.recipes import add_recipe_arguments, chosen_recipe
from grpo_recipes.errors import EXIT_CONFIG_ERROR, ConfigError, Problem
from grpo_recipes.paths import shown
from grpo_recipes.plan.environment import hub_environment
from grpo_recipes.recipe import Recipe

if TYPE_CHECKING:
    from grpo_recipes.rewards.probe import Failure, Finding

HELP = "see that right answers get their reward and wrong ones do not"
TAKES_RECIPE = True
ROWS = 200
_WIDTH = 60


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """--rows and --json, beside the recipe's."""
    add_recipe_arguments(parser)
    parser.add_argument("--rows", type=int, default=ROWS, help=f"rows of the dataset that are tried (default {ROWS})")
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")


def run(options: argparse.Namespace, flags: list[str]) -> int:
    """Print a table of the rewards on right and wrong answers, and the calls that failed.

    Returns:
        0, or with ``--json`` 2 where something is wrong.

    Raises:
        ConfigError: the recipe is wrong, or a reward does not tell right from wrong.
    """
    if options.rows < 1:
        raise ConfigError(Problem("--rows", f"{options.rows} rows try nothing", "write 1 or more"))
    if options.json:
        return _run_json(options, flags)
    recipe = chosen_recipe(options, flags)
    rows, findings, problems = _look(recipe, options.rows)
    _print_table(findings)
    for finding in findings:
        _print_failures(finding)
        if finding.missed is None and finding.right_mean is not None and not finding.tells_apart:
            print(f"grpo: note: {finding.reward} gives right and wrong answers the same")
    if problems:
        raise ConfigError(*problems)
    print(f"grpo: the rewards of {shown(recipe.path)} tell right from wrong on {len(rows)} rows")
    return 0


def _run_json(options: argparse.Namespace, flags: list[str]) -> int:
    rows: list[dict[str, Any]] = []
    findings: list[Finding] = []
    try:
        recipe = chosen_recipe(options, flags)
        rows, findings, problems = _look(recipe, options.rows)
        name = str(recipe.path)
    except ConfigError as refused:
        problems, name = refused.problems, options.recipe or options.config
    answer = {
        "ok": not problems,
        "recipe": name,
        "rows": len(rows),
        "rewards": [asdict(finding) | {"tells_apart": finding.tells_apart} for finding in findings],
        "problems": [asdict(problem) for problem in problems],
    }
    print(json.dumps(answer, indent=1))
    return EXIT_CONFIG_ERROR if problems else 0


def _look(recipe: Recipe, most: int) -> tuple[list[dict[str, Any]], list[Finding], list[Problem]]:
    os.environ.update(hub_environment(os.environ))
    # TRL and datasets come with these, which takes seconds.
    from grpo_recipes.doctor.reward_probe import probe_rewards, problems_of, sample_rows

    rows = sample_rows(recipe, most, os.environ)
    if not rows:
        raise ConfigError(Problem(recipe.path.name, "the dataset has no rows with a solution", "look at its columns"))
    findings = probe_rewards(recipe, rows)
    return rows, findings, problems_of(recipe, rows, findings)


def _print_table(findings: list[Finding]) -> None:
    head = ["reward", "right", "mean", "missed", "wrong", "mean", "taken", "no verdict"]
    lines = [head, *[[str(cell) for cell in _cells(finding)] for finding in findings]]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for first, *rest in lines:
        numbers = "  ".join(cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True))
        print(f"{first.ljust(widths[0])}  {numbers}")


def _cells(finding: Finding) -> list[Any]:
    def mean(value: float | None) -> str:
        return "-" if value is None else f"{value:.3f}"

    missed, taken = ("-" if count is None else count for count in (finding.missed, finding.taken))
    right = [finding.right, mean(finding.right_mean), missed]
    return [finding.reward, *right, finding.wrong, mean(finding.wrong_mean), taken, finding.no_verdict]


def _print_failures(finding: Finding) -> None:
    if finding.failures:
        print(f"\n{finding.reward} on")
    for failure in finding.failures:
        print(_failure(finding.reward, failure))


def _failure(name: str, failure: Failure) -> str:
    from grpo_recipes.rewards.probe import why

    given = f"no verdict ({why(name, failure.reason)})" if failure.value is None else f"{failure.value:.4g}"
    kind = "right" if failure.right else "wrong"
    return f"  {_short(failure.prompt)!r}: {kind} answer {_short(failure.completion)!r} gets {given}"


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= _WIDTH else text[: _WIDTH - 1] + "…"
