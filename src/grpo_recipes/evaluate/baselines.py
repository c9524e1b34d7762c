"""Scores without knowledge: of a random guesser, and of the same answer every time. Exact, without sampling.

    python -m grpo_recipes.evaluate.baselines

prints both for the test splits of the default keys.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from grpo_recipes.modebench import countdown, graph_coloring
from grpo_recipes.modebench.dataset import TASKS, Settings, rows
from grpo_recipes.modebench.verify import Scores, problem_of, right_answers, summed_up
from grpo_recipes.recipe.keys import catalogue
from grpo_recipes.stats import reported_ks, score_names


def baselines(answers: Sequence[str], samples: int) -> dict[str, Scores]:
    """Return the scores of ``random`` and ``constant`` on some problems.

    ``answers`` are the problems as JSON, of ``dataset.rows``; ``samples``, the completions of each, is the largest k.
    """
    return {"random": random_guesser(answers, samples), "constant": constant_answer(answers, samples)}


def random_guesser(answers: Sequence[str], samples: int) -> Scores:
    """Return the mean scores over all guesses.

    Countdown: every order of the numbers, every way of putting brackets and every operator is as likely. Graph: every
    colour of every hidden vertex is.
    """
    chances = [_chances(answer) for answer in answers]
    estimates = {f"pass@{k}": [1 - (1 - sum(one)) ** k for one in chances] for k in reported_ks(samples)}
    distinct = [sum(1 - (1 - chance) ** samples for chance in one) for one in chances]
    estimates |= {f"mean@{samples}": [sum(one) for one in chances], f"distinct@{samples}": distinct}
    estimates[f"coverage@{samples}"] = [count / len(one) for count, one in zip(distinct, chances, strict=True)]
    return summed_up(estimates)


def constant_answer(answers: Sequence[str], samples: int) -> Scores:
    """Return the scores of the best single answer to all problems, and that answer under ``answer``."""
    right = [right_answers(answer) for answer in answers]
    counts = Counter(text for texts in right for text in texts)
    best = min(counts, key=lambda text: (-counts[text], text))
    hits = [float(best in texts) for texts in right]
    estimates = {f"pass@{k}": hits for k in reported_ks(samples)}
    estimates |= {f"mean@{samples}": hits, f"distinct@{samples}": hits}
    estimates[f"coverage@{samples}"] = [hit / len(texts) for hit, texts in zip(hits, right, strict=True)]
    return {**summed_up(estimates), "answer": best}


def _chances(answer: str) -> list[float]:
    """Return the chance of each mode."""
    problem = problem_of(answer)
    if problem["task"] == "countdown":
        numbers = tuple(problem["numbers"])
        every = countdown.written(len(numbers))
        return [count / every for count in countdown.ways(numbers, problem["target"]).values()]
    hidden = problem["partial"].count(graph_coloring.HIDDEN)
    return [float(len(graph_coloring.COLORS)) ** -hidden] * problem["modes"]


def main(samples: int = 8) -> None:
    """Print what both score on the test splits of the default keys, up to pass@``samples``."""
    settings = Settings.read(lambda key: catalogue()[key]["default"])
    for task in TASKS:
        answers = [row["answer"] for row in rows(task, "test", settings)]
        for name, scores in baselines(answers, samples).items():
            line = ", ".join(f"{key} {scores[key]:.3f}" for key in score_names(scores))
            print(f"{task:<25} {name:<9} {line}")


if __name__ == "__main__":
    main()
