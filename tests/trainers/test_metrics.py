"""Contents of a row in metrics.jsonl."""

from __future__ import annotations

import json
import math
import mmap
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from grpo_recipes.trainers.metrics import PHASES, MetricsRows, append_json, measure_memory, to_json_number

from .tiny_training import train


@pytest.mark.parametrize(
    ("value", "written"),
    [(1.5, 1.5), (math.inf, "inf"), (-math.inf, "-inf"), (math.nan, "nan"), ("text", "text"), (3, 3)],
)
def test_a_number_json_does_not_know_is_written_as_text(value, written):
    assert to_json_number(value) == written
    json.dumps(to_json_number(value), allow_nan=False)


@pytest.mark.parametrize("end", ['{"step": 1, "rew', "\0\0\0"])
def test_a_row_never_continues_a_line_that_was_cut_short(tmp_path: Path, end: str):
    """R9: after a kill or power loss, the next attempt appends rows to the remaining file."""
    file = tmp_path / "prompts.jsonl"
    file.write_text(end)
    append_json(file, {"step": 2})
    append_json(file, {"step": 3})
    assert file.read_text() == end + '\n{"step": 2}\n{"step": 3}\n'


def test_phases_have_names_for_the_progress_line():
    assert {"sample", "score", "sync"} <= set(PHASES)


def test_the_address_of_the_run_in_wandb_is_kept_for_the_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    fake_wandb = SimpleNamespace(run=SimpleNamespace(url="https://wandb.ai/team/maths/runs/abc"))
    monkeypatch.setitem(sys.modules, "wandb", fake_wandb)  # type: ignore[arg-type]
    train(tmp_path / "run", max_steps=1)
    assert json.loads((tmp_path / "run/tracked.json").read_text()) == {"wandb": fake_wandb.run.url}


def test_a_row_has_the_memory_of_the_process_and_counts_its_transfers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    block: list[mmap.mmap] = []
    began = MetricsRows.begin_update

    def begin(rows: MetricsRows) -> None:
        """Sync only before the second step, and keep 200 MB allocated from the third step on."""
        began(rows)
        step = rows._trainer.state.global_step
        if step == 1:
            with rows.phase("sync"), rows.evaluating(), rows.phase("sync"):  # an evaluation's own is none of the step's
                pass
        if step == 2:
            # Not from the heap, which may hold as much that an earlier test freed.
            block.append(mmap.mmap(-1, 200_000_000))
            block[0][:] = b"x" * len(block[0])

    monkeypatch.setattr(MetricsRows, "begin_update", begin)
    train(tmp_path / "run", max_steps=3)
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [row["syncs"] for row in rows] == [0, 1, 0]
    used, most = ([row[key] for row in rows] for key in ("memory/gb", "memory/peak_gb"))
    assert 0.15 < used[2] - used[1] < 0.4 and most == sorted(most)
    assert all(0.1 < now <= peak < 100 for now, peak in zip(used, most, strict=True))


def test_on_a_gpu_the_memory_is_what_the_process_holds_there(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 3_000_000_000 + device.index)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 5_000_000_000)
    assert measure_memory(torch.device("cuda", 1)) == {"memory/gb": 3.000000001, "memory/peak_gb": 5.0}
