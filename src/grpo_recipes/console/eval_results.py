"""Summarize the scores of `grpo eval`, and write them to a file, a page and the terminal.

scores = summarize_scores(recipe, reward_names, scored, n=8, ks=None)  # adds reward and right to ``scored``
result = {"model": name, "recipe": "gsm8k.yaml", "prompts": len(scored), "samples": 8, **scores}
write_results({**result, "seed": 0, "settings": settings}, scored, Path("evals/gsm8k"))

The page needs all of these keys. ``settings`` needs max_tokens, temperature and reward_funcs. The folder must
exist.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from grpo_recipes.paths import display_path
from grpo_recipes.process.reports import say
from grpo_recipes.recipe import Recipe
from grpo_recipes.recipe.generated import recorded_values
from grpo_recipes.runs.rundir import write_atomically, write_json

Rows = list[dict[str, Any]]


def summarize_scores(
    recipe: Recipe, names: list[str], scored: Rows, n: int, ks: Sequence[int] | None
) -> dict[str, Any]:
    """Return the scores of an evaluation by name: pass@k and others, mean rewards, length, truncated and unscored.

    ``NAME_ci`` has the 95 % interval of the score NAME. ``n`` is the number of completions per prompt, and ``ks`` has
    the values of k. Also add to each completion in ``scored`` its weighted ``reward`` (None if it is unscored) and
    whether it is ``right``.
    """
    import torch

    from grpo_recipes.evaluate.scores import (
        average_rewards,
        extract_answer,
        judge_completions,
        score_groups,
        sum_weighted_rewards,
    )

    completions = [completion for row in scored for completion in row["completions"]]
    scores = [[completion["rewards"][name] for name in names] for completion in completions]
    values = [[math.nan if score is None else score for score in row] for row in scores]
    weights = torch.tensor(recipe.rewards.weights or [1.0] * len(names), dtype=torch.float32)
    rewards = torch.tensor(values, dtype=torch.float32), names, weights
    totals = sum_weighted_rewards(rewards[0], weights).tolist()
    for completion, total, right in zip(completions, totals, judge_completions(*rewards), strict=True):
        completion.update(reward=None if math.isnan(total) else total, right=right)
    answers = [extract_answer(completion.get("messages") or completion["text"]) for completion in completions]
    at_k = score_groups(*rewards, answers, n, sorted(set(ks)) if ks else None)
    means = average_rewards(*rewards) | {name: score for name, (score, _) in at_k.items()}
    intervals = {f"{name}_ci": list(limits) for name, (_, limits) in at_k.items() if limits}
    return {
        **{name: None if math.isnan(value) else value for name, value in means.items()}, **intervals,
        "truncated": sum(completion["truncated"] for completion in completions) / len(completions),
        "mean_length": sum(completion["tokens"] for completion in completions) / len(completions),
        "no_verdict": sum(math.isnan(total) for total in totals),
        **recorded_values(scored),
    }  # fmt: skip


def write_results(result: dict[str, Any], scored: Rows, out: Path) -> None:
    """Write ``eval.json`` and ``eval.html`` into the folder ``out``, and print a table of the scores and the paths."""
    from grpo_recipes.console.report.pages import render_evaluation_page
    from grpo_recipes.stats import score_names

    write_json(out / "eval.json", result)
    write_atomically(out / "eval.html", render_evaluation_page(result, scored))
    print(f"{'score':<12}{'value':>8}  95 % interval")
    for name in [*score_names(result), "reward", "truncated", "mean_length", "no_verdict"]:
        value, limits = result[name], result.get(f"{name}_ci")
        text = "none" if value is None else str(value) if isinstance(value, int) else f"{value:.3f}"
        print(f"{name:<12}{text:>8}" + (f"  {limits[0]:.3f} to {limits[1]:.3f}" if limits else ""))
    if result.get("pass@1", 0.0) is None and result["reward"] is not None:
        say("pass@k counts rewards of at least 1, but all rewards are lower; compare mean@k and best@k instead")
    say(f"{result['prompts']} prompts x {result['samples']} completions of {result['model']}")
    say(f"scores in {display_path(out / 'eval.json')}, samples in {display_path(out / 'eval.html')}")
