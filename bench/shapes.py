"""Count the different shapes of forward passes, with and without pad_to_multiple_of. No model runs.

    python bench/shapes.py

Compiled kernels and attention plans of a GPU are made once per shape. Rows have prompts of 40 to 300 tokens and
completions of lognormal lengths (mean about 780, at most 2,048). A step has 64 rows on a rank. ``passes.py`` orders and
trims them as in training. ``new shapes`` counts those that the steps 101 to 200 use for the first time: of the input,
and of the input with the number of tokens that get logits. ``fed`` is the number of fed tokens per real token.
"""

from __future__ import annotations

import argparse
import random
import statistics
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from made_by import begin, write_record

from grpo_recipes.paths import find_code_root
from grpo_recipes.trainers.passes import compute_in_trimmed_passes

ROWS, STEPS, LONGEST, SEEDS = 64, 200, 2048, 3
MULTIPLES = (None, 64, 128)
MICRO_BATCHES = (4, 8, 16)


def main() -> None:
    """Count the shapes of each case and write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=find_code_root() / "bench/results/shapes.json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    origin = begin(options.out)
    cases = [
        {"rows of a micro-batch": rows, "pad_to_multiple_of": multiple, **count_shapes(rows, multiple)}
        for rows in MICRO_BATCHES
        for multiple in MULTIPLES
    ]
    for case in cases:
        print(case)
    write_record(options.out, {"steps": STEPS, "rows of a step": ROWS, "seeds": SEEDS, "cases": cases}, origin)


def count_shapes(micro_batch: int, multiple: int | None) -> dict[str, Any]:
    """Return medians over the seeds: new shapes of the second half of the steps, and fed tokens per real token."""
    inputs, with_logits, fed = [], [], []
    for seed in range(SEEDS):
        shapes_by_step, real = [], 0
        draw = random.Random(seed)
        for _ in range(STEPS):
            rows = sorted((draw_lengths(draw) for _ in range(ROWS)), key=sum, reverse=True)
            real += sum(map(sum, rows))
            shapes_by_step.append(list_shapes(rows, micro_batch, multiple))
        half = STEPS // 2
        inputs.append(count_new([[shape[:2] for shape in step] for step in shapes_by_step], half))
        with_logits.append(count_new(shapes_by_step, half))
        fed.append(sum(rows * length for step in shapes_by_step for rows, length, _ in step) / real)
    return {
        "new shapes": {"input": statistics.median(inputs), "with logits": statistics.median(with_logits)},
        "fed": round(statistics.median(fed), 3),
    }


def draw_lengths(draw: random.Random) -> tuple[int, int]:
    """Return the tokens of a prompt and of its completion."""
    return draw.randint(40, 300), min(LONGEST, max(1, round(0.3 * LONGEST * draw.lognormvariate(0.0, 0.7))))


def list_shapes(rows: list[tuple[int, int]], micro_batch: int, multiple: int | None) -> list[tuple[int, int, int]]:
    """Return rows, length and tokens with logits of each forward pass of a step, for sorted rows."""
    shapes: list[tuple[int, int, int]] = []

    def record_shape(model: Any, ids_bL: torch.Tensor, mask: torch.Tensor, computed: int, *_: Any, **__: Any) -> Any:
        shapes.append((*ids_bL.shape, computed))
        return torch.zeros(len(ids_bL), computed), None, None

    settings = SimpleNamespace(padding_free=False, pad_to_multiple_of=multiple)
    trainer = SimpleNamespace(args=settings, accelerator=SimpleNamespace(num_processes=1))
    unit = multiple or 1  # TRL pads the prompts and the completions of a generation to multiples of it, too
    prompt_width, completion_width = (-(-max(lengths) // unit) * unit for lengths in zip(*rows, strict=True))
    for start in range(0, len(rows), micro_batch):
        mask_bL = torch.zeros(micro_batch, prompt_width + completion_width, dtype=torch.long)
        for row, (prompt, completion) in enumerate(rows[start : start + micro_batch]):
            mask_bL[row, prompt_width - prompt : prompt_width + completion] = 1
        compute_in_trimmed_passes(trainer, record_shape, None, mask_bL, mask_bL, completion_width)  # type: ignore[arg-type]
    return shapes


def count_new(shapes_by_step: list[list[Any]], first: int) -> int:
    """Return how many shapes appear in the steps from ``first`` on, and not before."""
    earlier = {shape for step in shapes_by_step[:first] for shape in step}
    return len({shape for step in shapes_by_step[first:] for shape in step} - earlier)


if __name__ == "__main__":
    main()
