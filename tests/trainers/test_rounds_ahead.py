"""dynamic_sampling with a server: the next round is sampled while a round is scored, and a resumed run stays exact.

The server is a fake with completions that depend on the weights.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from grpo_recipes.runs.rundir import stop_file
from grpo_recipes.trainers.ahead import RoundsAhead

from .fake_sampler import FakeSampler
from .scored_trainer import make_trainer, own_rewards, scored
from .stopped_runs import Moment, outcome, rows_of, run
from .test_ahead import keys

PROMPTS, GROUP = 3, 4
EQUAL = "import time\ndef own(completions):\n    time.sleep(0.1)\n    return [0.0]\n"


def dynamic_keys(server: FakeSampler, **changes: Any) -> dict[str, Any]:
    dynamic = {"dynamic_sampling": True, "dynamic_sampling_max_rounds": 9}
    return {**keys(server, overlap=False), **dynamic, **changes}


def asked(server: FakeSampler) -> int:
    """Return the number of requests for completions that the server got so far."""
    return sum("prompt" in request for request in server.asked)


def test_the_server_samples_the_next_round_during_the_rewards(server: FakeSampler, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []

    def equal(completions: list[Any], **_: Any) -> list[float]:
        """Score all completions equally, so that every round is needed, once the server has the next round."""
        before, deadline = asked(server), time.monotonic() + 10
        expected = PROMPTS * (len(seen) + 2) if 0 < len(seen) < 3 else before
        while asked(server) < expected and time.monotonic() < deadline:
            time.sleep(0.01)
        seen.append((len(completions) // GROUP, asked(server)))
        return [0.0] * len(completions)

    trainer = make_trainer(
        tmp_path, [equal], num_generations=GROUP, **dynamic_keys(server, dynamic_sampling_max_rounds=3)
    )
    assert isinstance(trainer.rollouts, RoundsAhead)
    scored(trainer, PROMPTS, GROUP)
    # The first generation has no history: its first round waits for the rewards. The last round has no next one.
    assert seen == [(3, 3), (3, 9), (3, 12), (3, 12)]
    assert trainer._metrics["train"]["dynamic_sampling/groups_drawn"] == [12]
    trainer.state.log_history.append({name: values[-1] for name, values in trainer._metrics["train"].items()})
    scored(trainer, PROMPTS, GROUP)
    assert asked(server) == 24 and seen[4][0] == 3
    assert trainer.rollouts.pending_generation is None


def test_a_round_that_is_not_needed_is_aborted(server: FakeSampler, tmp_path: Path) -> None:
    def differ(completions: list[Any], **_: Any) -> list[float]:
        deadline = time.monotonic() + 10
        while asked(server) < PROMPTS + 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        return [float(number % 2) for number in range(len(completions))]

    server.sampling_seconds = 1.0
    trainer = make_trainer(tmp_path, [differ], num_generations=GROUP, **dynamic_keys(server))
    history = {"dynamic_sampling/groups_drawn": 3.0, "dynamic_sampling/groups_dropped": 1.5}
    trainer.state.log_history.append(history)
    scored(trainer, PROMPTS, GROUP)
    assert "/pause?mode=abort" in server.calls and trainer.rollouts.pending_generation is None
    assert trainer._metrics["train"]["dynamic_sampling/groups_drawn"] == [PROMPTS]


@pytest.mark.alone
def test_a_slow_reward_and_sampling_share_their_time(
    server: FakeSampler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twelve completions of 0.1 s in two children are 0.6 s a round, as long as sampling a round."""
    server.sampling_seconds = 0.6
    rewards = own_rewards(tmp_path, EQUAL, reward_workers=2)
    seconds = {}
    for ahead in (True, False):
        monkeypatch.setattr(RoundsAhead, "samples_rounds", ahead)
        trainer = make_trainer(
            tmp_path, rewards, num_generations=GROUP, **dynamic_keys(server, dynamic_sampling_max_rounds=4)
        )
        trainer.state.log_history.append({"dynamic_sampling/groups_drawn": 4.0, "dynamic_sampling/groups_dropped": 4.0})
        began = time.monotonic()
        scored(trainer, PROMPTS, GROUP)
        seconds[ahead] = time.monotonic() - began
    print(json.dumps(seconds))
    assert seconds[True] < 0.8 * seconds[False]


@pytest.mark.slow
@pytest.mark.parametrize(("phase", "step", "generation"), [("score", 3, 2), ("update", 3, 1)])
def test_a_stopped_run_equals_an_uninterrupted_run(
    server: FakeSampler, tmp_path: Path, phase: str, step: int, generation: int
) -> None:
    server.sampling_seconds = 0.02
    run_keys = dynamic_keys(server, max_completion_length=2, report_samples=100, log_completions=False)
    expected = outcome(tmp_path / "whole", run(tmp_path / "whole", **run_keys)[0])
    rows = rows_of(tmp_path / "whole" / "metrics.jsonl")
    assert any(row["dynamic_sampling/rounds"] > 0 for row in rows)

    folder = tmp_path / "stopped"
    folder.mkdir()
    _, stopped = run(folder, Moment(stop_file(folder).touch, phase, step, generation), **run_keys)
    assert stopped is not None
    trainer, stopped = run(folder, **run_keys)
    assert stopped is None and outcome(folder, trainer) == expected
