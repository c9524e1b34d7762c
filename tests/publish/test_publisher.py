"""What is pushed when, with real pushing processes."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from fake_hub import FakeHub

from grpo_recipes.console.publish import publisher as module
from grpo_recipes.console.publish.publisher import Publisher, hand_over, model_files, stage, whole_checkpoint
from grpo_recipes.console.publish.push import Target
from grpo_recipes.runs.checkpoints import prune
from grpo_recipes.runs.rundir import read_json

from .conftest import MODEL, write

Checkpoint = Callable[..., Path]
Start = Callable[..., Publisher]
SUMS = ("model", "ada/sums")


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def start(
    run_dir: Path, logged_in: dict[str, str], said: list[str], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Start]:
    """``start(strategy)``: the publisher of the run, looking all the time."""
    made: list[Publisher] = []
    monkeypatch.setattr(module, "_LOOK_SECONDS", 0.0)
    monkeypatch.setattr(module, "WAITS", (0.1, 0.1))

    def start_it(strategy: str, **changes: object) -> Publisher:
        target = replace(Target("ada/sums", True, "main", strategy, False), **changes)  # type: ignore[arg-type]
        made.append(Publisher(target, run_dir, logged_in, said.append))
        return made[-1]

    yield start_it
    for publisher in made:
        if publisher._child is not None and publisher._child.poll() is None:
            publisher._child.kill()
            publisher._child.wait()


def wait_for(publisher: Publisher, said: list[str], words: str) -> None:
    deadline = time.monotonic() + 60
    while not any(words in line for line in said):
        publisher.tick()
        assert time.monotonic() < deadline, said
        time.sleep(0.05)


def test_end_pushes_the_final_model_with_its_card_alone(
    start: Start, checkpoint: Checkpoint, run_dir: Path, hub: FakeHub
) -> None:
    publisher = start("end")
    checkpoint(3)
    publisher.tick()
    assert hub.requests == []
    line = hand_over(publisher, run_dir)
    repo = hub.repos[SUMS]
    assert line == f", published in {hub.url}/ada/sums/tree/main" and repo.private
    assert repo.files().keys() == {".gitattributes", "README.md", "config.json", "model.safetensors", "tokenizer.json"}
    assert repo.files()["README.md"].startswith(b'---\nbase_model: "ada/base"\n')
    summary = read_json(run_dir / "summary.json")
    assert summary["published"]["commit"] == repo.at("main") and summary["status"] == "completed"


def test_every_save_pushes_the_model_of_each_complete_checkpoint(
    start: Start, checkpoint: Checkpoint, run_dir: Path, hub: FakeHub, said: list[str]
) -> None:
    checkpoint(1)  # of an earlier attempt
    publisher = start("every_save")
    half = checkpoint(2)
    (half / "COMPLETE").unlink()
    checkpoint(3)
    wait_for(publisher, said, "published checkpoint-3 in")
    repo = hub.repos[SUMS]
    assert repo.messages == ["initial commit", "Training in progress, step 3"]
    assert repo.files()["model.safetensors"] == b"weights 3"
    assert repo.files().keys() == {".gitattributes", "README.md", "config.json", "model.safetensors", "tokenizer.json"}
    assert not (run_dir / "publish" / "staged" / "checkpoint-3").exists()
    publisher.finish()
    assert repo.files()["model.safetensors"] == b"final weights"
    assert not (run_dir / "publish" / "staged").exists()


def test_checkpoint_keeps_the_newest_one_whole(
    start: Start, checkpoint: Checkpoint, run_dir: Path, hub: FakeHub, said: list[str]
) -> None:
    publisher = start("checkpoint")
    checkpoint(1)
    wait_for(publisher, said, "published checkpoint-1 in")
    repo = hub.repos[SUMS]
    assert repo.files()["last-checkpoint/optimizer.pt"] == b"moments"
    assert repo.files()["last-checkpoint/model.safetensors"] == b"weights 1"
    checkpoint(2)
    publisher.finish()  # before its tick came
    assert repo.files()["last-checkpoint/model.safetensors"] == b"weights 2"
    assert repo.messages == ["initial commit", "Training in progress, step 1", "Final model"]


def test_all_checkpoints_keeps_each(start: Start, checkpoint: Checkpoint, hub: FakeHub, said: list[str]) -> None:
    publisher = start("all_checkpoints")
    checkpoint(1)
    wait_for(publisher, said, "published checkpoint-1 in")
    checkpoint(2)
    publisher.finish()
    files = hub.repos[SUMS].files()
    for step in (1, 2):
        assert files[f"checkpoint-{step}/model.safetensors"] == f"weights {step}".encode()
        assert f"checkpoint-{step}/COMPLETE" in files


@pytest.mark.parametrize("always", [False, True])
def test_a_checkpoint_that_comes_during_a_push(
    start: Start, checkpoint: Checkpoint, run_dir: Path, hub: FakeHub, said: list[str], always: bool
) -> None:
    publisher = start("every_save", always=always)
    checkpoint(1)
    publisher.tick()
    checkpoint(2)
    publisher.tick()
    prune(run_dir / "checkpoints", 1)  # what is waiting is kept from the trainer's pruning
    checkpoint(3)
    prune(run_dir / "checkpoints", 1)
    publisher.tick()
    wait_for(publisher, said, "published checkpoint-3 in" if always else "published checkpoint-1 in")
    pushed = [line.split()[1] for line in said if line.startswith("published")]
    left_out = [line.split()[0] for line in said if "the push before it is not finished" in line]
    assert (pushed, left_out) == (
        (["checkpoint-1", "checkpoint-2", "checkpoint-3"], [])
        if always
        else (["checkpoint-1"], ["checkpoint-2", "checkpoint-3"])
    )
    assert len(hub.repos[SUMS].messages) == 1 + len(pushed)


def test_a_push_that_fails_is_reported_and_loses_nothing(
    start: Start, checkpoint: Checkpoint, run_dir: Path, hub: FakeHub, said: list[str]
) -> None:
    hub.failing = {"/commit/": 3}
    publisher = start("every_save")
    checkpoint(1)
    wait_for(publisher, said, "could not publish checkpoint-1: HfHubHTTPError: Server error '500")
    assert said[-1].endswith("(3 attempts); training goes on")
    hub.failing = {"/commit/": 3}
    line = hand_over(publisher, run_dir)
    assert line.startswith("; NOT published (HfHubHTTPError") and "hf upload ada/sums " in line
    assert line.endswith("/run/model --private")
    assert "500" in read_json(run_dir / "summary.json")["published"]["error"]
    assert (run_dir / "model" / "model.safetensors").read_bytes() == b"final weights"
    assert "error" not in publisher.finish()


def test_shards_are_not_published_as_a_model(start: Start, checkpoint: Checkpoint, said: list[str]) -> None:
    publisher = start("every_save")
    checkpoint(1, files={"config.json": b"{}", "pytorch_model_fsdp.bin": b"shard"})
    publisher.tick()
    assert said == ["checkpoint-1 is not published: it holds no whole model, only shards of it"]


def test_what_goes_wrong_here_never_reaches_the_run(
    start: Start, checkpoint: Checkpoint, run_dir: Path, said: list[str]
) -> None:
    publisher = start("every_save")
    (run_dir / "publish").touch()  # in the way of the folder
    checkpoint(1)
    publisher.tick()
    assert said[0].startswith("could not publish a checkpoint: ") and said[0].endswith("training goes on")


def test_a_signal_cuts_the_last_push_off(start: Start, run_dir: Path, hub: FakeHub) -> None:
    publisher = start("end")
    hub.slow["/api/repos/create"] = 60.0
    threading.Timer(1.5, os.kill, (os.getpid(), signal.SIGTERM)).start()
    before = signal.getsignal(signal.SIGTERM)
    began = time.monotonic()
    assert publisher.finish() == {"repo": "ada/sums", "error": "stopped by SIGTERM"}
    assert time.monotonic() - began < 20 and signal.getsignal(signal.SIGTERM) is before


def test_a_run_that_ends_without_a_model_leaves_no_copies(
    start: Start, checkpoint: Checkpoint, run_dir: Path, said: list[str]
) -> None:
    publisher = start("checkpoint")
    checkpoint(1)
    publisher.tick()
    assert (run_dir / "publish" / "staged" / "checkpoint-1").exists()
    publisher.abandon()
    assert said == ["checkpoint-1 may not be published: the run ended before"]
    assert not (run_dir / "publish" / "staged").exists()


def test_a_run_that_ends_names_only_what_is_not_pushed(
    start: Start, checkpoint: Checkpoint, run_dir: Path, said: list[str]
) -> None:
    publisher = start("every_save", always=True)
    checkpoint(1)
    wait_for(publisher, said, "published checkpoint-1 in")
    publisher._stage(checkpoint(2))
    publisher.abandon()
    assert said[1:] == ["checkpoint-2 may not be published: the run ended before"]
    publisher = start("every_save")
    checkpoint(3)
    publisher.tick()
    assert publisher._child is not None
    publisher._child.wait()  # it has pushed, and nobody has collected that
    publisher.abandon()
    assert len(said) == 2 and read_json(run_dir / "summary.json")["published"]["commit"]


def test_the_push_of_a_checkpoint_that_was_redone_since_does_not_count(
    start: Start, checkpoint: Checkpoint, run_dir: Path, said: list[str]
) -> None:
    (run_dir / "publish").mkdir(exist_ok=True)
    (run_dir / "publish" / "checkpoint-1.json").write_text('{"commit": "of the one before"}')
    publisher = start("every_save")
    publisher._stage(checkpoint(1))
    publisher.abandon()
    assert said == ["checkpoint-1 may not be published: the run ended before"]


def test_a_run_without_push_to_hub_has_a_card_and_no_publisher(run_dir: Path) -> None:
    assert hand_over(None, run_dir) == ""
    assert (run_dir / "model" / "README.md").read_text().startswith('---\nbase_model: "ada/base"\n')
    assert "published" not in read_json(run_dir / "summary.json")


def test_a_complete_run_does_not_fail_for_its_card(start: Start, run_dir: Path) -> None:
    (run_dir / "model" / "README.md").mkdir()  # in the way
    assert hand_over(None, run_dir).startswith("; no model card (IsADirectoryError")
    assert hand_over(start("end"), run_dir).startswith("; NOT published (IsADirectoryError")


def test_a_failed_run_reports_what_it_published_before(
    start: Start, checkpoint: Checkpoint, run_dir: Path, said: list[str]
) -> None:
    publisher = start("every_save")
    checkpoint(1)
    wait_for(publisher, said, "published checkpoint-1 in")
    publisher.abandon()
    assert read_json(run_dir / "summary.json")["published"]["repo"] == "ada/sums"


# --- what of a checkpoint is pushed --------------------------------------------------------------------------------


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_the_model_without_the_state_of_training(checkpoint: Checkpoint) -> None:
    made = checkpoint(3)
    write(made, dict.fromkeys(["order_of_data.json", "controllers.json", "zero_to_fp32.py"], b""))
    assert {path.name for path in model_files(made)} == {"config.json", "model.safetensors", "tokenizer.json"}


def staged(checkpoint: Path, folder: Path, strategy: str) -> bool:
    return stage(folder, checkpoint, whole_checkpoint(checkpoint, strategy))


@pytest.mark.parametrize(
    ("strategy", "place"),
    [("every_save", None), ("checkpoint", "last-checkpoint"), ("all_checkpoints", "checkpoint-3")],
)
def test_it_is_kept_though_the_checkpoint_is_pruned(
    checkpoint: Checkpoint, tmp_path: Path, strategy: str, place: str | None
) -> None:
    made, folder = checkpoint(3), tmp_path / "staged"
    every = names(made)
    assert staged(made, folder, strategy)
    shutil.rmtree(made)
    assert (folder / "model.safetensors").read_bytes() == b"weights 3"
    assert [path.name for path in folder.iterdir() if path.is_dir()] == ([place] if place else [])
    assert place is None or names(folder / place) == every


def test_the_files_of_a_checkpoint_stay_as_they_are(start: Start, checkpoint: Checkpoint, run_dir: Path) -> None:
    publisher = start("every_save")
    made = checkpoint(3, files={**MODEL, "README.md": b"as peft wrote it"})
    publisher.tick()
    assert (run_dir / "publish" / "staged" / "checkpoint-3" / "README.md").read_text().startswith("---\n")
    assert (made / "README.md").read_bytes() == b"as peft wrote it"


def test_templates_beside_the_main_one_belong_to_the_model(checkpoint: Checkpoint, tmp_path: Path) -> None:
    made = checkpoint(3)
    write(made / "additional_chat_templates", {"tool_use.jinja": b"x"})
    assert staged(made, tmp_path / "staged", "every_save")
    assert (tmp_path / "staged" / "additional_chat_templates" / "tool_use.jinja").exists()


@pytest.mark.parametrize("code", [errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EXDEV, errno.EMLINK])
def test_it_is_copied_where_the_file_system_makes_no_links(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "link", refuse)
    assert staged(checkpoint(3), tmp_path / "staged", "every_save")
    assert (tmp_path / "staged" / "model.safetensors").read_bytes() == b"weights 3"


def test_shards_of_fsdp_are_no_model(checkpoint: Checkpoint, tmp_path: Path) -> None:
    sharded = checkpoint(3, files={"config.json": b"{}", "pytorch_model_fsdp.bin": b"shard"})
    assert not staged(sharded, tmp_path / "staged", "every_save")
    assert not (tmp_path / "staged").exists()
    assert staged(sharded, tmp_path / "staged", "checkpoint")
    assert names(tmp_path / "staged") == {"last-checkpoint"}


@pytest.mark.parametrize("strategy", ["every_save", "checkpoint"])
def test_a_checkpoint_that_is_being_removed_is_not_pushed(
    checkpoint: Checkpoint, tmp_path: Path, strategy: str
) -> None:
    made = checkpoint(3)
    (made / "COMPLETE").unlink()
    assert not staged(made, tmp_path / "staged", strategy)
    shutil.rmtree(made)
    assert not staged(made, tmp_path / "staged", strategy)
    made.mkdir()
    assert not staged(made, tmp_path / "staged", strategy)
    assert not (tmp_path / "staged").exists()


@pytest.mark.parametrize("strategy", ["every_save", "checkpoint", "all_checkpoints"])
def test_no_half_model_is_pushed_of_a_checkpoint_pruned_at_that_moment(
    start: Start, checkpoint: Checkpoint, run_dir: Path, said: list[str], monkeypatch: pytest.MonkeyPatch, strategy: str
) -> None:
    def prune_first(folder: Path) -> list[Path]:
        (folder / "config.json").unlink()
        return model_files(folder)

    publisher = start(strategy)
    checkpoint(1)
    monkeypatch.setattr(module, "model_files", prune_first)
    publisher.tick()
    assert said == ["checkpoint-1 is not published: it holds no whole model, only shards of it"]
    assert publisher._child is None and not (run_dir / "publish" / "staged" / "checkpoint-1").exists()


def test_a_damaged_result_of_a_push_does_not_end_the_run(start: Start, run_dir: Path, hub: FakeHub) -> None:
    publisher = start("all_checkpoints")
    (run_dir / "publish").mkdir()
    (run_dir / "publish" / "checkpoint-1.json").touch()
    publisher.abandon()
    assert publisher.finish()["commit"] == hub.repos[SUMS].at("main")


def test_a_folder_without_a_whole_model_is_not_pushed(start: Start, run_dir: Path, hub: FakeHub) -> None:
    (run_dir / "model" / "model.safetensors").unlink()
    assert start("end").finish() == {"repo": "ada/sums", "error": "model/ holds no whole model"}
    assert hub.requests == [] and not (run_dir / "publish" / "staged").exists()


def test_the_final_model_is_never_copied(start: Start, run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EPERM, "no such links, and no time")

    monkeypatch.setattr(os, "link", refuse)
    monkeypatch.setattr(shutil, "copy2", refuse)
    assert "commit" in start("end").finish()
    monkeypatch.setattr(module.Publisher, "_start", refuse)
    with pytest.raises(OSError, match="no time"):
        start("end").finish()
    assert not (run_dir / "publish" / "staged").exists()
