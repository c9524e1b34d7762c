"""What a row of metrics.jsonl holds."""

from __future__ import annotations

import json
import math

import pytest

from grpo_recipes.trainers.metrics import PHASES, json_number


@pytest.mark.parametrize(
    ("value", "written"),
    [(1.5, 1.5), (math.inf, "inf"), (-math.inf, "-inf"), (math.nan, "nan"), ("text", "text"), (3, 3)],
)
def test_a_number_json_does_not_know_is_written_as_text(value, written):
    assert json_number(value) == written
    json.dumps(json_number(value), allow_nan=False)


def test_phases_have_names_for_the_progress_line():
    assert {"sample", "score", "sync"} <= set(PHASES)
