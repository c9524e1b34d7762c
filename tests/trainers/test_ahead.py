"""overlap_generation: the next generation is sampled during the update, one generation off-policy, and nothing is lost.

The server is a fake with completions that depend on the weights; tests/e2e/test_overlap.py has the real vLLM.
"""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from transformers import TrainerCallback

from grpo_recipes.runs.rundir import move_rows_after, stop_file
from grpo_recipes.trainers import ahead

from .fake_sampler import FakeSampler
from .stopped_runs import Moment, outcome, run
from .tiny_training import different_characters, train

GROUP = 4
# Three generations are an epoch; name -> keys, and the mean over a step's generations of how old their weights were.
SHAPES: dict[str, tuple[dict[str, int], list[float]]] = {
    "a generation a step": ({"steps_per_generation": 1, "per_device_train_batch_size": 16}, [0, 1, 1, 1, 1, 1]),
    "four steps a generation": ({"steps_per_generation": 4}, [0, 4]),
    "two generations a step": ({"steps_per_generation": 2, "gradient_accumulation_steps": 4,
                                "per_device_train_batch_size": 8}, [0, 1, 0.5, 1, 0.5, 1]),
    "two iterations": ({"steps_per_generation": 1, "per_device_train_batch_size": 16, "num_iterations": 2}, [0, 2, 2]),
}  # fmt: skip
OTHERS = ["a generation a step", "four steps a generation", "two iterations"]


def keys(server: FakeSampler, overlap: bool = True) -> dict[str, Any]:
    return {
        "use_vllm": True, "vllm_mode": "server", "vllm_server_port": int(server.url.rsplit(":", 1)[1]),
        "weight_sync": "file", "weight_guard": False, "overlap_generation": overlap, "logging_steps": 1,
        "server_request_timeout": 20.0, "vllm_server_timeout": 5.0,
    }  # fmt: skip


def asked(server: FakeSampler, group: int = GROUP) -> list[tuple[tuple[int, ...], int]]:
    """Return prompts and seeds of the training's generations in order, sorted within a generation."""
    requests = [(prompt, seed) for prompt, count, seed, _, _ in server.sampled_with if count == group]
    server.sampled_with.clear()
    return [request for start in range(0, len(requests), 4) for request in sorted(requests[start : start + 4])]


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
def test_it_asks_what_the_synchronous_run_asks_with_older_weights(
    server: FakeSampler, tmp_path: Path, shape: str
) -> None:
    shape_keys, ages = SHAPES[shape]
    train(tmp_path / "plain", **keys(server, overlap=False), **shape_keys)
    expected = asked(server)
    train(tmp_path / "overlapped", **keys(server), **shape_keys)
    assert asked(server) == expected and len(expected) > 4  # includes later epochs, and nothing after the last step
    staleness = [row["rollouts/steps_off_policy"] for row in rows(tmp_path / "overlapped")
             if "rollouts/steps_off_policy" in row]  # fmt: skip
    assert staleness == ages
    assert not any("rollouts/steps_off_policy" in row for row in rows(tmp_path / "plain"))
    assert all("sampling/importance_sampling_ratio/mean" in row for row in rows(tmp_path / "overlapped")[:1])


class Watched(TrainerCallback):
    """Let the server continue its next generation once it has started and the step's gradients exist."""

    def __init__(self, server: FakeSampler, expected: int) -> None:
        self._server, self._expected = server, expected
        self.under_way: list[int] = []

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        deadline = time.monotonic() + 10
        while self._server.under_way != self._expected and time.monotonic() < deadline and len(self.under_way) < 3:
            time.sleep(0.005)
        self.under_way.append(self._server.under_way)
        self._server.updates = len(self.under_way)


@pytest.mark.parametrize(("overlap", "under_way"), [(True, 16), (False, 0)])
def test_the_server_samples_while_the_update_runs(
    server: FakeSampler, tmp_path: Path, overlap: bool, under_way: int
) -> None:
    watched, server.updates = Watched(server, under_way), 0
    run_keys = {"steps_per_generation": 1, "per_device_train_batch_size": 16, "max_steps": 4}
    train(tmp_path / "run", callbacks=(watched,), **keys(server, overlap), **run_keys)
    # The server finishes the next generation only after the update's gradients. After the last step there is none.
    assert watched.under_way == [under_way] * 3 + [0]


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
def test_weights_come_between_generations_and_an_evaluation_has_the_newest(
    server: FakeSampler, tmp_path: Path, shape: str
) -> None:
    server.sampling_seconds = 0.05
    evaluation = {"eval_strategy": "steps", "eval_steps": 2, "num_generations_eval": 2}
    run_keys = {**SHAPES[shape][0], **evaluation, "per_device_eval_batch_size": 4}
    train(tmp_path / "run", **keys(server), **run_keys)
    assert set(server.loaded_during) == {0} and len(server.loaded_during) > 3
    assert all(before == after for *_, before, after in server.sampled_with)
    evaluated = [weights for _, count, _, weights, _ in server.sampled_with if count == 2]
    trained = [weights for _, count, _, weights, _ in server.sampled_with if count == GROUP]
    assert len(set(evaluated)) == 3
    assert not set(evaluated[-1:]) & set(trained)  # the weights of the last step


@pytest.mark.slow
@pytest.mark.parametrize(
    ("phase", "step", "generation", "saved"),
    [
        ("sample", 2, 1, 1),
        ("score", 3, 2, 2),
        ("evaluate", 2, 1, 2),
        ("update", 3, 1, 3),
        ("save", 4, 1, 4),
    ],
)
def test_a_stopped_run_goes_on_as_if_left_alone(
    server: FakeSampler, tmp_path: Path, phase: str, step: int, generation: int, saved: int
) -> None:
    server.sampling_seconds = 0.02
    expected = outcome(tmp_path / "whole", run(tmp_path / "whole", **keys(server))[0])
    folder = tmp_path / "stopped"
    folder.mkdir()
    moment = Moment(stop_file(folder).touch, phase, step, generation)
    trainer, stopped = run(folder, moment, **keys(server))
    assert str(stopped) == f"stopped on request after step {saved}, state saved"
    trainer, stopped = run(folder, **keys(server))
    assert stopped is None
    assert outcome(folder, trainer) == expected


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["two generations a step", *OTHERS])
def test_a_killed_run_goes_on_from_a_checkpoint_as_if_left_alone(
    server: FakeSampler, tmp_path: Path, shape: str
) -> None:
    server.sampling_seconds = 0.02
    run_keys = {**keys(server), **SHAPES[shape][0], "save_strategy": "steps", "save_steps": 1}
    trainer, _ = train(tmp_path / "whole", **run_keys)
    for step in (1, 3, 5):
        folder = tmp_path / f"from-{step}"
        shutil.copytree(tmp_path / "whole", folder)
        for checkpoint in (folder / "checkpoints").glob("checkpoint-*"):
            if int(checkpoint.name.rsplit("-", 1)[1]) > step:
                shutil.rmtree(checkpoint)
        move_rows_after(folder, step)
        server.weights = -1  # another server: unfinished requests are not repeated
        continued, _ = train(folder, **run_keys)
        mine, its = ([p.tolist() for p in run.model.parameters()] for run in (continued, trainer))
        assert mine == its, f"from step {step}"


def test_a_generation_sampled_for_nothing_is_given_up_when_the_run_is_stopped(
    server: FakeSampler, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    server.sampling_seconds = 0.5
    _, stopped = run(folder, Moment(stop_file(folder).touch, "score", 3), **keys(server))
    assert stopped is not None
    assert "/pause?mode=abort" in server.calls


class LosesServer(TrainerCallback):
    """Request a stop and end the server during a generation, like a signal to all processes of a job."""

    def __init__(self, server: FakeSampler, folder: Path) -> None:
        self._server, self._folder = server, folder

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        stop_file(self._folder).touch()
        self._server.close()


def test_a_stopped_run_saves_without_a_generation_that_its_server_cannot_give(
    server: FakeSampler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ahead, "_LOST_SECONDS", 0.3)
    server.updates = 0  # the second generation is never sampled
    folder = tmp_path / "run"
    folder.mkdir()
    run_keys = {"steps_per_generation": 1, "per_device_train_batch_size": 16}
    trainer, stopped = train(folder, callbacks=(LosesServer(server, folder),), **keys(server), **run_keys)
    server.updates = None
    assert str(stopped) == "stopped on request after step 1, state saved"
    assert "lost with the server" in capsys.readouterr().out
    assert trainer.rollouts.pending_generation is None


class LeavesEpoch(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_epoch_stop = state.global_step == 1


def test_prompts_that_were_not_foreseen_are_sampled_when_they_come(server: FakeSampler, tmp_path: Path) -> None:
    run_keys = {"steps_per_generation": 1, "per_device_train_batch_size": 16, "max_steps": 6}  # two epochs
    train(tmp_path / "run", callbacks=(LeavesEpoch(),), **keys(server), **run_keys)
    assert [row["rollouts/steps_off_policy"] for row in rows(tmp_path / "run")] == [0, 0, 1, 1]


def test_a_reward_sees_what_the_older_weights_sampled(server: FakeSampler, tmp_path: Path) -> None:
    run_keys = {"steps_per_generation": 1, "per_device_train_batch_size": 16, "max_steps": 4}
    train(tmp_path / "run", different_characters, **keys(server), **run_keys)
    order = list(dict.fromkeys(weights for _, count, _, weights, _ in server.sampled_with if count == GROUP))
    of_generation = [server.sampled_with[place][3] for place in range(0, 16, 4)]
    assert of_generation == [order[0], order[0], order[1], order[2]]  # two of the first weights
