"""Each way for weights to reach the real server, on CPU: after every step its log-probs are the trainer's."""

from __future__ import annotations

from collections.abc import Callable

import bridge_cells
import pytest
from real_runs import Launch

SHORT = ("--max_steps", "3", "--prompts_per_step", "8", "--num_generations", "8", "--save_steps", "100")


@pytest.mark.slow
@pytest.mark.rotating
@pytest.mark.parametrize("cell", bridge_cells.RUNS, ids="-".join)
def test_the_server_has_the_weights_of_every_step(launch: Callable[..., Launch], cell: tuple[str, str]) -> None:
    run = launch("--weight_sync", cell[0], *SHORT, *bridge_cells.RUNS[cell])

    assert run.wait() == 0, run.output

    rows = run.rows()
    assert len(rows) == 3 and all(row["grad_norm"] > 0 for row in rows)
    assert all(row["sampling/sampling_logp_difference/mean"] < 1e-4 for row in rows)
    assert run.summary()["status"] == "completed"
