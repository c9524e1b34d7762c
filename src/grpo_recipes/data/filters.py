"""Keep the rows of a training set that ``dataset_filter`` selects, before they become prompts.

rows = filter_rows(rows, "pass_rate in 0.1..0.9", "train.jsonl", counts)
"""

from datasets import IterableDataset

from grpo_recipes.data.problems import Counts, Rows, describing_read_errors, list_columns, require_columns
from grpo_recipes.recipe.row_filter import parse_row_filter
from grpo_recipes.recipe.shapes import root_of, value_at


def filter_rows(rows: Rows, text: str | None, source: str, counts: Counts) -> Rows:
    """Return the rows whose column has a number in the range of the filter ``text``; all rows if it is None or empty.

    A stream is filtered when it is read. For other rows, ``counts`` gets the number of dropped rows and the
    distribution of the column. Raise ConfigError if ``source`` has no such column.
    """
    row_filter = parse_row_filter(text) if text else None
    if row_filter is None:
        return rows
    names = list_columns(rows)
    require_columns(source, rows.features or dict.fromkeys(names, True), {row_filter.column: "dataset_filter"})
    if isinstance(rows, IterableDataset):
        return rows.filter(lambda row: row_filter.keeps(value_at(row, row_filter.column)))
    with describing_read_errors(source):
        columns = rows.select_columns([root_of(row_filter.column, names)])
        values = [value_at(row, row_filter.column) for row in columns]
    indices = [index for index, value in enumerate(values) if row_filter.keeps(value)]
    counts.filtered += len(rows) - len(indices)
    counts.filter_values = {row_filter.column: row_filter.count(values)}
    return rows.select(indices)
