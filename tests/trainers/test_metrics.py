"""What a row of metrics.jsonl holds."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from grpo_recipes.trainers.metrics import PHASES, json_number

from .tiny_training import train


@pytest.mark.parametrize(
    ("value", "written"),
    [(1.5, 1.5), (math.inf, "inf"), (-math.inf, "-inf"), (math.nan, "nan"), ("text", "text"), (3, 3)],
)
def test_a_number_json_does_not_know_is_written_as_text(value, written):
    assert json_number(value) == written
    json.dumps(json_number(value), allow_nan=False)


def test_phases_have_names_for_the_progress_line():
    assert {"sample", "score", "sync"} <= set(PHASES)


def test_the_address_of_the_run_in_wandb_is_kept_for_the_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    fake_wandb = SimpleNamespace(run=SimpleNamespace(url="https://wandb.ai/team/maths/runs/abc"))
    monkeypatch.setitem(sys.modules, "wandb", fake_wandb)  # type: ignore[arg-type]
    train(tmp_path / "run", max_steps=1)
    assert json.loads((tmp_path / "run/tracked.json").read_text()) == {"wandb": fake_wandb.run.url}
