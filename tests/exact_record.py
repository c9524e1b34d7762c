"""Write a line to the file GRPO_EXACT_RESULT for each continued run: does it equal the uninterrupted run?"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "bench"))
from made_by import append_record, begin

FILE = os.environ.get("GRPO_EXACT_RESULT")
ORIGIN = begin(Path(FILE), target="exact") if FILE else {}
_COLUMNS = ("sampler", "accelerator", "ranks", "shape", "from", "ignore_data_skip", "weights", "left alone", "equal")


def record(
    sampler: str,
    accelerator: str,
    ranks: int,
    shape: str,
    begins: int | str,
    ignore_data_skip: bool,
    weights: str,
    alone: str,
) -> None:
    """Append a line if GRPO_EXACT_RESULT is set.

    Args:
        sampler: the sampling library, transformers or vllm.
        accelerator: how the ranks share the model.
        ranks: number of ranks.
        shape: name of the generation window's shape in the test.
        begins: the step of the checkpoint; "stops" for a run that was stopped more than once.
        ignore_data_skip: the recipe's key: a resumed epoch starts again.
        weights: hash of the final weights.
        alone: hash of the uninterrupted run's final weights.
    """
    if not FILE:
        return
    facts = (sampler, accelerator, ranks, shape, begins, ignore_data_skip, weights[:16], alone[:16], weights == alone)
    append_record(Path(FILE), dict(zip(_COLUMNS, facts, strict=True)), ORIGIN)


def table(file: Path) -> str:
    """The lines of a file as a table, one row for each run that was continued."""
    rows = [[str(json.loads(line)[name]) for name in _COLUMNS] for line in file.read_text().splitlines()]
    widths = [max(len(row[column]) for row in [_COLUMNS, *rows]) for column in range(len(_COLUMNS))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in [list(_COLUMNS), *rows]
    )


if __name__ == "__main__":
    if sys.argv[1:] == ["new"]:
        Path(os.environ["GRPO_EXACT_RESULT"]).unlink(missing_ok=True)
    else:
        print(table(Path(os.environ["GRPO_EXACT_RESULT"])))
