"""A stop request while rank 0 waits for the server: it gives up at once, and a server that is gone is no failure."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from grpo_recipes.runs.rundir import stop_file
from grpo_recipes.runs.stop_request import Stopped, StopRequest
from grpo_recipes.trainers import preemption
from grpo_recipes.trainers.preemption import Preemption

pytestmark = pytest.mark.alone

ANSWER = {"prompt_ids": [[1]], "completion_ids": [[5, 6]], "logprobs": [[[0.1], [0.2]]], "logprob_token_ids": None}


class FakeClient:
    """Answers, hangs until it is aborted, or fails."""

    def __init__(self, does: str, on_call: Callable[[], None] = lambda: None):
        self._does, self._on_call = does, on_call
        self.aborted = threading.Event()
        self.asked = 0

    def generate(self, prompts: list[Any], n: int = 1, **_: Any) -> dict[str, Any]:
        self.asked += 1
        self._on_call()
        if self._does == "hangs":
            self.aborted.wait(30)
        if self._does != "answers":
            raise ConnectionError("the server is gone")
        return ANSWER

    def update_named_params(self, metadata: Any, named_params: Iterator[Any]) -> None:
        self._on_call()
        next(named_params)
        if self._does == "hangs":
            self.aborted.wait(30)
        if self._does != "answers":
            raise ConnectionError("the server is gone")
        list(named_params)

    def reset_prefix_cache(self) -> None:
        if self._does != "answers":
            raise ConnectionError("the server is gone")

    def abort(self) -> None:
        self.aborted.set()


class Trainer:
    """What ``Preemption`` reads of TRL's trainer, and a turn of sampling as ``GRPOTrainer`` takes it."""

    def __init__(self, *, run_dir: Path, client: Any):
        self.is_in_train = True
        self.control = SimpleNamespace(should_training_stop=False)
        self.state = SimpleNamespace(global_step=0, max_steps=2)
        self.args = SimpleNamespace(device="cpu")
        self.model_wrapped = SimpleNamespace(generate=None)
        self.accelerator = SimpleNamespace(unwrap_model=lambda model: SimpleNamespace(generate=lambda: None))
        self.left: list[Any] = []
        self._client = client
        self._preemption = Preemption(self, StopRequest(run_dir))
        self._preemption.interrupt(client)

    def sample(self) -> dict[str, Any]:
        params = iter([("a", 1), ("b", 2), ("c", 3)])
        with self._preemption.sampling():
            self._client.update_named_params([], params)
            self.left = list(params)
            self._client.reset_prefix_cache()
            answer = self._client.generate(prompts=[[1], [2]], n=2, temperature=1.0)
        self._preemption.stop_if_agreed()
        return answer


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preemption, "_SIGNAL_SECONDS", 0.3)
    monkeypatch.setattr(preemption, "_ABORT_SECONDS", 0.3)


def test_without_a_request_the_client_is_as_before(tmp_path: Path) -> None:
    trainer = Trainer(run_dir=tmp_path, client=FakeClient("answers"))
    assert trainer.sample() == ANSWER


def test_a_failure_without_a_request_is_a_failure(tmp_path: Path) -> None:
    trainer = Trainer(run_dir=tmp_path, client=FakeClient("fails"))
    with pytest.raises(ConnectionError, match="the server is gone"):
        trainer.sample()


@pytest.mark.parametrize("aborts", [True, False], ids=["aborted", "hung"])
def test_generations_in_flight_are_given_up(tmp_path: Path, aborts: bool) -> None:
    client = FakeClient("answers")
    trainer = Trainer(run_dir=tmp_path, client=client)
    client._does = "answers"
    sent = client.update_named_params
    client.update_named_params = lambda *args: (sent(*args), setattr(client, "_does", "hangs"))
    client.reset_prefix_cache = lambda: None
    if not aborts:
        client.abort = lambda: time.sleep(30)
    threading.Timer(0.2, stop_file(tmp_path).touch).start()
    began = time.monotonic()
    with pytest.raises(Stopped):
        trainer.sample()
    assert time.monotonic() - began < 2 and client.aborted.is_set() == aborts


def test_a_server_that_is_lost_with_the_request_is_no_failure(tmp_path: Path) -> None:
    client = FakeClient("fails", on_call=lambda: threading.Timer(0.1, stop_file(tmp_path).touch).start())
    trainer = Trainer(run_dir=tmp_path, client=client)
    with pytest.raises(Stopped):
        trainer.sample()
    assert trainer.left == []  # the other ranks gather every parameter
    assert client.asked == 0


def test_a_wait_for_another_server_during_a_sync_ends(tmp_path: Path) -> None:
    client = FakeClient("hangs", on_call=stop_file(tmp_path).touch)
    trainer = Trainer(run_dir=tmp_path, client=client)
    began = time.monotonic()
    with pytest.raises(Stopped):
        trainer.sample()
    assert time.monotonic() - began < 2 and client.aborted.is_set()


def test_after_training_a_request_does_not_touch_the_server(tmp_path: Path) -> None:
    trainer = Trainer(run_dir=tmp_path, client=FakeClient("answers"))
    trainer.is_in_train = False
    stop_file(tmp_path).touch()
    assert trainer.sample() == ANSWER
