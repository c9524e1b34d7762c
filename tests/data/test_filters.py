"""``dataset_filter`` keeps the training rows with a number in a range, in files, saved sets and streams."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from grpo_recipes.data import Prompts
from grpo_recipes.errors import ConfigError
from grpo_recipes.recipe.row_filter import RowFilter, parse_row_filter

RATES = [0.0, 0.1, 0.5, 0.9, 1.0, None]
ROWS = [{"problem": f"{index}+1=", "answer": str(index + 1), "pass_rate": rate} for index, rate in enumerate(RATES)]


@pytest.mark.parametrize(
    ("text", "row_filter"),
    [
        ("pass_rate in 0.1..0.9", RowFilter("pass_rate", 0.1, 0.9)),
        (" info.level in -2..1e3 ", RowFilter("info.level", -2, 1000)),
        ("level in 3..3", RowFilter("level", 3, 3)),
        ("pass_rate", None), ("pass_rate in 0.9..0.1", None), ("pass_rate in 0.1", None), ("pass_rate in a..b", None),
        ("pass_rate > 0.5", None),
    ],
)  # fmt: skip
def test_a_filter_names_a_column_and_a_range(text: str, row_filter: RowFilter | None) -> None:
    assert parse_row_filter(text) == row_filter


def test_only_numbers_in_the_range_are_kept() -> None:
    values = [0.1, 0.9, 1, "0.95", -0.1, None, "1.5", "", "a", "nan", True, float("nan")]
    assert list(map(RowFilter("x", 0.1, 1.0).keeps, values)) == [True, True, True, True, *[False] * 8]


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "saved"])
def test_other_rows_are_dropped_and_counted(write: Callable[..., str], load: Callable[..., Prompts], kind: str) -> None:
    prompts = load(dataset_name=write(ROWS, kind=kind), dataset_filter="pass_rate in 0.1..0.9")
    assert prompts.dataset["answer"][:] == ["2", "3", "4"] and prompts.dataset["pass_rate"][:] == [0.1, 0.5, 0.9]
    assert prompts.counts.filtered == 3 and "3 outside of dataset_filter dropped" in str(prompts)
    rows = [(0.0, 1, False), (0.1, 1, True), (0.5, 1, True), (0.9, 1, True), (1.0, 1, False)]
    assert prompts.counts.filter_values == {"pass_rate": rows}


def test_a_csv_file_has_numbers_as_text(write: Callable[..., str], load: Callable[..., Prompts]) -> None:
    rows = [{**row, "pass_rate": str(row["pass_rate"])} for row in ROWS]
    prompts = load(dataset_name=write(rows, kind="csv"), dataset_filter="pass_rate in 0.1..0.9")
    assert prompts.dataset["answer"][:] == ["2", "3", "4"] and prompts.counts.filtered == 3
    assert [number for number, _, _ in prompts.counts.filter_values["pass_rate"]] == RATES[:5]


def test_many_numbers_are_counted_in_steps() -> None:
    counts = RowFilter("level", 50, 75).count([*range(101), None, "text"])
    assert [start for start, _, _ in counts] == [5.0 * step for step in range(20)]
    assert [rows for _, rows, _ in counts] == [5] * 19 + [6]  # the last step has its end
    assert [start for start, _, is_kept in counts if is_kept] == [50, 55, 60, 65, 70, 75]


def test_the_rows_of_a_stream_are_filtered(write: Callable[..., str], load: Callable[..., Prompts]) -> None:
    keys: dict[str, Any] = {"dataset_streaming": True, "max_train_prompts": 2}
    prompts = load(dataset_name=write(ROWS), dataset_filter="pass_rate in 0.5..1", **keys)
    assert prompts.dataset["answer"][:] == ["3", "4"]


def test_a_column_inside_a_column_is_read(load: Callable[..., Prompts]) -> None:
    rows = [{"problem": row["problem"], "answer": row["answer"], "info": {"rate": row["pass_rate"]}} for row in ROWS]
    assert load(rows, dataset_filter="info.rate in 0.9..1").dataset["answer"][:] == ["4", "5"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rate in 0..1", r"has no column 'rate'. Fix: write one of problem, answer, pass_rate"),
        ("pass_rate in 2..3", r"0 of 0 prompts are left, one step needs 1; 6 outside of dataset_filter dropped. "
         r"Fix: widen dataset_filter or lower prompts_per_step"),
    ],
)  # fmt: skip
def test_a_filter_that_fits_no_row_is_an_error(load: Callable[..., Prompts], text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(ROWS, dataset_filter=text)
