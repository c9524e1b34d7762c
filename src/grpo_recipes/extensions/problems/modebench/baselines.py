"""ModeBench scores without a model: a random guesser and the best constant answer, computed exactly without sampling.

Print them for the test splits of the default keys:

    python -m grpo_recipes.extensions.problems.modebench.baselines
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from grpo_recipes.extensions.problems.modebench import countdown, dataset, graph_coloring
from grpo_recipes.extensions.problems.modebench.dataset import (
    TASKS,
    Settings,
    list_right_answers,
    parse_problem,
    summarize,
)
from grpo_recipes.recipe.keys import catalogue
from grpo_recipes.stats import reported_ks, score_names


def baselines(answers: Sequence[str], samples: int) -> dict[str, dict[str, Any]]:
    """Return the scores of a random guesser ("random") and of the best constant answer ("constant").

    ``answers`` are problems of ``dataset.make_rows`` as JSON. The scores go up to pass@k with k = ``samples``.
    """
    return {"random": score_random_guesser(answers, samples), "constant": score_constant_answer(answers, samples)}


def score_random_guesser(answers: Sequence[str], samples: int) -> dict[str, Any]:
    """Compute the expected pass@k, mean, distinct and coverage of a model that guesses uniformly, without sampling.

    Each score is a mean over problems, with its 95 % interval. In countdown the model guesses orders, brackets and
    operators, in graph coloring the hidden colors. ``answers`` is the column ``answer`` of the dataset: problems as
    JSON. ``samples`` is the number of guesses for each problem.
    """
    mode_chances = [_compute_mode_chances(answer) for answer in answers]
    right = [sum(chances) for chances in mode_chances]
    estimates = {f"pass@{k}": [1 - (1 - chance) ** k for chance in right] for k in reported_ks(samples)}
    distinct = [sum(1 - (1 - chance) ** samples for chance in chances) for chances in mode_chances]
    estimates |= {f"mean@{samples}": right, f"distinct@{samples}": distinct}
    estimates[f"coverage@{samples}"] = [
        count / len(chances) for count, chances in zip(distinct, mode_chances, strict=True)
    ]
    return summarize(estimates)


def score_constant_answer(answers: Sequence[str], samples: int) -> dict[str, Any]:
    """Find the text that is a correct answer to the most problems; return the scores of always giving it.

    The result has this text as ``answer``. ``answers`` are problems as JSON, and ``samples`` is k.
    """
    right = [list_right_answers(answer) for answer in answers]
    counts = Counter(text for texts in right for text in texts)
    best = min(counts, key=lambda text: (-counts[text], text))
    hits = [float(best in texts) for texts in right]
    estimates = {f"pass@{k}": hits for k in reported_ks(samples)}
    estimates |= {f"mean@{samples}": hits, f"distinct@{samples}": hits}
    estimates[f"coverage@{samples}"] = [hit / len(texts) for hit, texts in zip(hits, right, strict=True)]
    return {**summarize(estimates), "answer": best}


def _compute_mode_chances(answer: str) -> list[float]:
    """Return the chance that one uniform guess gives a correct answer, for each distinct correct answer (mode)."""
    problem = parse_problem(answer)
    if problem["task"] == "countdown":
        numbers = tuple(problem["numbers"])
        total = countdown.count_expressions(len(numbers))
        return [count / total for count in countdown.count_modes(numbers, problem["target"]).values()]
    hidden = problem["partial"].count(graph_coloring.HIDDEN)
    return [float(len(graph_coloring.COLORS)) ** -hidden] * problem["modes"]


def main(samples: int = 8) -> None:
    """Print the scores of both baselines on the test splits of the default keys, up to pass@``samples``."""
    settings = Settings.read(lambda key: catalogue()[key]["default"])
    for task in TASKS:
        answers = [row["answer"] for row in dataset.make_rows(task, "test", settings)]
        for name, scores in baselines(answers, samples).items():
            line = ", ".join(f"{key} {scores[key]:.3f}" for key in score_names(scores))
            print(f"{task:<25} {name:<9} {line}")


if __name__ == "__main__":
    main()
