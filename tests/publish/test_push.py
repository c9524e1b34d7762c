"""One push: the real client against the fake hub."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from fake_hub import WRITER, FakeHub

from grpo_recipes.publish.push import Job, stale
from grpo_recipes.runs.rundir import read_json, write_json

from .conftest import MODEL, write


@pytest.fixture
def push(tmp_path: Path, logged_in: dict[str, str]):
    """``push(folders, ...)``: the exit code, what the process printed, and the result it left."""

    def push_it(folders: dict[str, str], **changes: Any) -> tuple[int, str, dict[str, Any]]:
        result = tmp_path / "result.json"
        facts = {"repo": "ada/sums", "private": True, "branch": "main", "message": "Final model", "waits": (0.0, 0.0)}
        job = Job(**{**facts, "folders": folders, "result": str(result), **changes})
        write_json(tmp_path / "job.json", asdict(job))
        command = [sys.executable, "-m", "grpo_recipes.publish.push", str(tmp_path / "job.json")]
        done = subprocess.run(command, env=logged_in, capture_output=True, text=True, timeout=60, check=False)
        return done.returncode, done.stdout + done.stderr, read_json(result)

    return push_it


def test_a_private_repository_gets_everything_in_one_commit(push, hub: FakeHub, tmp_path: Path) -> None:
    write(tmp_path / "model", MODEL)
    write(tmp_path / "checkpoint-5", {"optimizer.pt": b"moments", "training_args.bin": b"!"})
    code, _, result = push({str(tmp_path / "model"): "", str(tmp_path / "checkpoint-5"): "last-checkpoint"})
    repo = hub.repos["model", "ada/sums"]
    assert code == 0 and repo.private and repo.messages == ["initial commit", "Final model"]
    assert result == {
        "repo": "ada/sums", "revision": "main", "commit": repo.at("main"), "url": f"{hub.url}/ada/sums/tree/main"
    }  # fmt: skip
    assert repo.files() == {
        ".gitattributes": b"",
        **{name: content for name, content in MODEL.items() if name != "training_args.bin"},
        "last-checkpoint/optimizer.pt": b"moments",
        "last-checkpoint/training_args.bin": b"!",
    }


def test_what_would_be_read_together_with_the_new_files_goes(push, hub: FakeHub, tmp_path: Path) -> None:
    before = {"model.safetensors": b"old", "notes.md": b"mine", "last-checkpoint/global_step1/a.pt": b"old"}
    hub.add("model", "ada/sums", before)
    shards = {"model-00001-of-00001.safetensors": b"new", "model.safetensors.index.json": b"{}"}
    write(tmp_path / "model", shards)
    write(tmp_path / "state", {"b.pt": b"new"})
    assert push({str(tmp_path / "model"): "", str(tmp_path / "state"): "last-checkpoint"})[0] == 0
    assert hub.repos["model", "ada/sums"].files() == {**shards, "notes.md": b"mine", "last-checkpoint/b.pt": b"new"}


def test_a_branch_is_made_and_the_main_one_left_alone(push, hub: FakeHub, tmp_path: Path) -> None:
    write(tmp_path / "model", MODEL)
    for message in ("first", "second"):
        write(tmp_path / "model", {"config.json": message.encode()})
        code, said, _ = push({str(tmp_path / "model"): ""}, branch="run-7", message=message)
        assert code == 0, said
    repo = hub.repos["model", "ada/sums"]
    assert repo.files("main") == {".gitattributes": b""} and repo.files("run-7")["config.json"] == b"second"


@pytest.mark.parametrize(("failures", "code"), [(2, 0), (3, 1)])
def test_it_is_tried_three_times(push, hub: FakeHub, tmp_path: Path, failures: int, code: int) -> None:
    write(tmp_path / "model", MODEL)
    hub.failing = {"/commit/": failures}
    ended, said, result = push({str(tmp_path / "model"): ""})
    assert ended == code and hub.asked("/commit/") == 3
    assert said.count("grpo: push to ada/sums failed: HfHubHTTPError: Server error '500") == failures
    assert ("error" in result) is bool(code) and (not code or "(3 attempts)" in result["error"])
    assert WRITER not in said


def test_a_login_that_has_gone_bad_is_told(push, hub: FakeHub, tmp_path: Path) -> None:
    write(tmp_path / "model", MODEL)
    del hub.users[WRITER]
    code, said, result = push({str(tmp_path / "model"): ""}, waits=())
    assert code == 1 and "401" in result["error"] and WRITER not in said


@pytest.mark.parametrize(
    ("there", "new", "roots", "gone"),
    [
        (["model.safetensors", "a.md"], ["model-00001-of-00002.safetensors"], [""], ["model.safetensors"]),
        (["model.safetensors"], ["model.safetensors"], [""], []),
        (["sub/model.safetensors", "pytorch_model.bin"], ["model.safetensors"], [""], ["pytorch_model.bin"]),
        (["model.safetensors", "checkpoint-1/x"], ["checkpoint-2/x"], ["checkpoint-2"], []),
        (
            ["last-checkpoint/x", "last-checkpoint2/x"],
            ["last-checkpoint/y"],
            ["last-checkpoint"],
            ["last-checkpoint/x"],
        ),
    ],
)
def test_stale_files(there: list[str], new: list[str], roots: list[str], gone: list[str]) -> None:
    assert stale(there, new, roots) == gone
