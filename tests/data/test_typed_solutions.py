"""S5: a solution of a typed column is compared by value, not by Python's spelling of it."""

from __future__ import annotations

from decimal import Decimal

import datasets
import pytest

from grpo_recipes.rewards.functions import pure_accuracy_math
from grpo_recipes.rewards.math_verify import math_verify


@pytest.mark.parametrize(
    ("kind", "value", "text", "completion"),
    [
        ("bool", True, "true", "True"),
        ("int64", 18, "18", "18.0"),
        ("float64", 18.0, "18", "18"),
        ("float64", 1e16, "1e+16", "10000000000000000"),
        ("float32", 0.1, "0.1", "1/10"),
        ("float16", 2.7, "2.7", "2.70"),
        ("decimal128(5, 2)", Decimal("1.50"), "1.50", "1.5"),
        ("string", "True", "True", "true"),
    ],
)
def test_parquet_solutions(load, tmp_path, kind, value, text, completion):
    """S5: the spelling is JSON's, and a float32 column has the number that was written into it."""
    features = datasets.Features({"problem": datasets.Value("string"), "answer": datasets.Value(kind)})
    rows = {"problem": ["a"], "answer": [value]}
    datasets.Dataset.from_dict(rows, features=features).to_parquet(tmp_path / "rows.parquet")
    answer = load(dataset_name=str(tmp_path / "rows.parquet")).dataset[0]["answer"]

    assert answer == text
    for reward in (pure_accuracy_math, math_verify):
        assert reward([f"<answer>{completion}</answer>"], [answer]) == [1.0]


def test_json_solutions(load):
    """S5: a JSON boolean keeps its spelling."""
    rows = [{"problem": "a", "answer": True}, {"problem": "b", "answer": False}]
    answers = {row["prompt"][0]["content"]: row["answer"] for row in load(rows).dataset}
    assert answers == {"a": "true", "b": "false"}
