"""Write the problems of an evaluation with their pass rates, so that a training can select by difficulty.

    count = write_filtered(Path("medium.jsonl"), rows, scored, (0.1, 0.9), system_prompt=None)

A recipe then trains on them with ``dataset_name: medium.jsonl``, or on a part of them with ``dataset_filter``.
"""

import json
from collections import Counter
from pathlib import Path
from typing import Any

from grpo_recipes.paths import display_path
from grpo_recipes.process.reports import plural, say
from grpo_recipes.runs.rundir import write_atomically

Rows = list[dict[str, Any]]
PASS_RATE = "pass_rate"
KEPT_RATES = "0.1..0.9"  # pass rates that are kept by default
_TRAINER_COLUMNS = ("prompt", "answer")
_BINS = ("0", "below 1/4", "below 1/2", "below 3/4", "below 1", "1")


def write_filtered(path: Path, rows: Rows, scored: Rows, limits: tuple[float, float], system_prompt: str | None) -> int:
    """Write the rows with a pass rate from ``limits[0]`` to ``limits[1]`` as JSON lines; return their number.

    Also print a table with the number of rows in each bin of pass rates.

    ``rows`` and ``scored`` are the rows of `grpo eval`, in the same order. A line has ``problem`` (text, or messages if
    there are several), ``answer``, the other columns of the row, and ``pass_rate``: the fraction of right completions
    among those that could be judged. Rows without a judged completion are left out. So is the recipe's system prompt,
    because a training adds it again.
    """
    rates: list[float | None] = []
    for row in scored:
        judged = [bool(completion["right"]) for completion in row["completions"] if completion["right"] is not None]
        rates.append(sum(judged) / len(judged) if judged else None)
    lines = []
    for row, rate in zip(rows, rates, strict=True):
        if rate is not None and limits[0] <= rate <= limits[1]:
            messages = row["prompt"]
            if system_prompt and messages[0] == {"role": "system", "content": system_prompt}:
                messages = messages[1:]
            problem = messages[0]["content"] if [message["role"] for message in messages] == ["user"] else messages
            others = {name: value for name, value in row.items() if name not in _TRAINER_COLUMNS}
            answer = {"answer": row["answer"]} if "answer" in row else {}
            line = {"problem": problem, **answer, **others, PASS_RATE: round(rate, 4)}
            lines.append(json.dumps(line, ensure_ascii=False))
    write_atomically(path, "".join(f"{line}\n" for line in lines))
    print(f"{'pass rate':<12}{'prompts':>8}")
    counts = Counter(_name_bin(rate) for rate in rates if rate is not None)
    for name in _BINS:
        print(f"{name:<12}{counts[name]:>8}")
    unknown = rates.count(None)
    left_out = f"; {plural(unknown, 'prompt')} without a judged completion left out" if unknown else ""
    say(f"{len(lines)} of {plural(len(rows), 'prompt')} written to {display_path(path)}{left_out}")
    return len(lines)


def _name_bin(rate: float) -> str:
    """Return the name of a pass rate's bin in ``_BINS``, e.g. "below 1/2" for 0.3."""
    if rate in (0, 1):
        return str(int(rate))
    return f"below {['1/4', '1/2', '3/4', '1'][int(rate * 4)]}"
