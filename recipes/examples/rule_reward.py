"""A rule as a reward, with columns of one's own: `gold`, the number that is right, and `tolerance`, how far is near."""

import re


def near(completions, gold, tolerance, **columns):
    """1 for the right number, 0.5 for one that is near, 0 for any other, and for none at all."""
    scores = []
    for completion, right, near in zip(completions, gold, tolerance, strict=True):
        numbers = re.findall(r"-?\d+(?:\.\d+)?", completion[-1]["content"])
        error = abs(float(numbers[-1]) - float(right)) if numbers else float("inf")
        scores.append(1.0 if error == 0 else 0.5 if error <= near else 0.0)
    return scores
