"""The push at the end of a run and the model card, with real pushing processes and the fake hub."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from fake_hub import FakeHub

from grpo_recipes.console.publish import publisher as module
from grpo_recipes.console.publish.publisher import publish_model
from grpo_recipes.console.publish.push import Target
from grpo_recipes.runs.rundir import read_json

TARGET = Target("ada/sums", True, "main")
SUMS = ("model", "ada/sums")


@pytest.fixture
def publish(run_dir: Path, logged_in: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Callable[[], str]:
    """``publish()``: push the run's model with short waits and return the end of the launcher's last line."""
    monkeypatch.setattr(module, "WAITS", (0.1, 0.1))
    return lambda: publish_model(TARGET, run_dir, logged_in)


def published(run_dir: Path) -> dict[str, str]:
    return read_json(run_dir / "summary.json")["published"]


def test_the_final_model_and_its_card_are_pushed_once(
    publish: Callable[[], str], run_dir: Path, hub: FakeHub, capsys: pytest.CaptureFixture[str]
) -> None:
    (run_dir / "checkpoints" / "checkpoint-3").mkdir(parents=True)
    (run_dir / "checkpoints" / "checkpoint-3" / "model.safetensors").write_bytes(b"weights 3")
    assert publish() == f", published in {hub.url}/ada/sums/tree/main"
    repo = hub.repos[SUMS]
    assert repo.private and repo.messages == ["initial commit", "Final model"]
    assert repo.files().keys() == {".gitattributes", "README.md", "config.json", "model.safetensors", "tokenizer.json"}
    assert repo.files()["model.safetensors"] == b"final weights"
    assert repo.files()["README.md"].startswith(b'---\nbase_model: "ada/base"\n')
    assert published(run_dir)["commit"] == repo.at("main")
    assert read_json(run_dir / "summary.json")["status"] == "completed"
    assert "grpo: publishing the model in ada/sums" in capsys.readouterr().out


def test_a_push_that_fails_is_reported_and_can_be_repeated(
    publish: Callable[[], str], run_dir: Path, hub: FakeHub
) -> None:
    hub.failing = {"/commit/": 3}
    line = publish()
    assert line.startswith("; NOT published (HfHubHTTPError: Server error '500") and "(3 attempts)" in line
    assert "hf upload ada/sums " in line and line.endswith("/run/model --private")
    assert "500" in published(run_dir)["error"]
    assert (run_dir / "model" / "model.safetensors").read_bytes() == b"final weights"
    assert publish().startswith(", published in ") and "error" not in published(run_dir)


def test_a_signal_ends_the_push(publish: Callable[[], str], run_dir: Path, hub: FakeHub) -> None:
    hub.slow["/api/repos/create"] = 60.0
    threading.Timer(1.5, os.kill, (os.getpid(), signal.SIGTERM)).start()
    before, began = signal.getsignal(signal.SIGTERM), time.monotonic()
    assert publish().startswith("; NOT published (stopped by SIGTERM). Publish it with: hf upload ada/sums ")
    assert published(run_dir) == {"repo": "ada/sums", "error": "stopped by SIGTERM"}
    assert time.monotonic() - began < 20 and signal.getsignal(signal.SIGTERM) is before


def test_a_push_has_a_time_limit(
    publish: Callable[[], str], run_dir: Path, hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_MAX_PUSH", 1.5)
    hub.slow["/api/repos/create"] = 60.0
    began = time.monotonic()
    assert publish().startswith("; NOT published (not finished after ")
    assert time.monotonic() - began < 20 and "not finished" in published(run_dir)["error"]


def test_the_result_of_an_earlier_push_does_not_count(
    publish: Callable[[], str], run_dir: Path, hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish()
    monkeypatch.setattr(module, "module_command", lambda *_: ["false"])
    assert "NOT published (the push process died)" in publish()


@pytest.mark.parametrize("damage", [Path.touch, Path.mkdir])
def test_a_damaged_result_is_replaced_or_reported(
    publish: Callable[[], str], run_dir: Path, damage: Callable[[Path], None]
) -> None:
    (run_dir / "publish").mkdir()
    damage(run_dir / "publish" / "result.json")
    line = publish()
    assert line.startswith(", published in " if damage is Path.touch else "; NOT published (")


def test_a_folder_without_a_whole_model_is_not_pushed(publish: Callable[[], str], run_dir: Path, hub: FakeHub) -> None:
    (run_dir / "model" / "model.safetensors").unlink()
    assert publish().startswith("; NOT published (model/ contains no complete model)")
    assert hub.requests == []


def test_a_run_without_push_to_hub_has_a_card(run_dir: Path) -> None:
    assert publish_model(None, run_dir, {}) == ""
    assert (run_dir / "model" / "README.md").read_text().startswith('---\nbase_model: "ada/base"\n')
    assert "published" not in read_json(run_dir / "summary.json")


def test_a_complete_run_does_not_fail_for_its_card(publish: Callable[[], str], run_dir: Path) -> None:
    (run_dir / "model" / "README.md").mkdir()  # the card cannot be written here
    assert publish_model(None, run_dir, {}).startswith("; no model card (IsADirectoryError")
    assert publish().startswith("; NOT published (IsADirectoryError")
