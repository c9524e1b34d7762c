"""Tools on two ranks: the update and the counts equal a single rank's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from rank_processes import run_ranks

from . import tool_ranks
from .fixed_completions import rows_of
from .test_tools import schemas  # noqa: F401  # a fixture

NAMES = ("reward", "grad_norm", "episodes/tool_calls", "episodes/tool_failures", "episodes/turns")


@pytest.mark.slow
def test_two_ranks_equal_one(tmp_path: Path, model: str, schemas: dict[str, object]) -> None:  # noqa: F811
    """Three groups of four on two ranks, each with half of the second group."""
    (described := tmp_path / "schemas.json").write_text(json.dumps(schemas))
    run_ranks("trainers.tool_ranks", str(tmp_path / "two"), model, str(described), "6")
    alone = tool_ranks.train(tmp_path / "one", model, described, 12)
    two = torch.load(tmp_path / "two/weights.pt")
    for name, weight in alone.items():
        assert torch.allclose(two[name], weight, rtol=0, atol=1e-6), name
    one_rows, two_rows = rows_of(tmp_path / "one"), rows_of(tmp_path / "two")
    for row, other in zip(one_rows, two_rows, strict=True):
        assert row["episodes/tool_calls"] > 1 and row["episodes/tool_failures"] > 0 and row["grad_norm"] > 1e-3
        assert [other[name] for name in NAMES] == pytest.approx([row[name] for name in NAMES], rel=1e-4)
