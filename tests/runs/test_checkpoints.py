"""Only complete checkpoints are listed, and a resume reads only unchanged files; on real files."""

from __future__ import annotations

import errno
import json
import os
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import xxhash

from grpo_recipes.errors import ConfigError
from grpo_recipes.fetch.assets import find_assets
from grpo_recipes.launch import run as launch_run
from grpo_recipes.launch.attempt import freeze_inputs
from grpo_recipes.launch.resolve import Options, choose_names, resolve_run
from grpo_recipes.launch.run import launch
from grpo_recipes.launch.submission import Submission, freeze_run
from grpo_recipes.plan.devices import Resources
from grpo_recipes.plan.plan import make_plan
from grpo_recipes.recipe.check import resolve_recipe
from grpo_recipes.recipe.keys import READ_VARIABLES, environment_keys
from grpo_recipes.runs import checkpoints
from grpo_recipes.runs.checkpoints import (
    MARKER,
    RECORD,
    add_checksum,
    compute_digest,
    find_damage,
    find_newest_complete,
    find_verified_checkpoint,
    is_complete,
    list_complete_checkpoints,
    prune_checkpoints,
    publish_checkpoint,
    recording_changes,
    verify_run_files,
)
from grpo_recipes.runs.rundir import Run

FILES = {
    "model.safetensors": b"weights" * 100,
    "trainer_state.json": b"{}",
    "global_step/rank_0.pt": b"state",
    "empty": b"",
}


def stage(folder: Path, step: int) -> Path:
    staged = folder / "partial" / f"checkpoint-{step}"
    for name, content in FILES.items():
        (staged / name).parent.mkdir(parents=True, exist_ok=True)
        (staged / name).write_bytes(content)
    return staged


def published(folder: Path, *steps: int) -> list[Path]:
    for step in steps:
        publish_checkpoint(stage(folder, step), folder, step, world_size=2)
    return [folder / f"checkpoint-{step}" for step in steps]


def test_publishing_moves_every_file_and_marks_last(tmp_path):
    (checkpoint,) = published(tmp_path, 5)
    assert is_complete(checkpoint)
    for name, content in FILES.items():
        assert (checkpoint / name).read_bytes() == content
    marker = json.loads((checkpoint / MARKER).read_text())
    assert (marker["step"], marker["world_size"]) == (5, 2)
    assert marker["files"] == {name: len(content) for name, content in FILES.items()}
    assert not (tmp_path / "partial/checkpoint-5").exists()


def test_an_unpublished_checkpoint_is_not_complete(tmp_path):
    stage(tmp_path, 5)
    assert not is_complete(tmp_path / "partial/checkpoint-5")
    assert list_complete_checkpoints(tmp_path) == [] and find_newest_complete(tmp_path) is None


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: (folder / "model.safetensors").write_bytes(b"weights"),
        lambda folder: (folder / "model.safetensors").unlink(),
        lambda folder: (folder / "global_step/rank_0.pt").unlink(),
        lambda folder: (folder / "empty").write_bytes(b"x"),
        lambda folder: (folder / MARKER).unlink(),
        lambda folder: (folder / MARKER).write_text('{"step": 5, "fi'),
        lambda folder: (folder / MARKER).write_text(""),
    ],
    ids=["truncated", "missing", "missing-nested", "grown", "no-marker", "torn-marker", "empty-marker"],
)
def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(tmp_path, damage):
    older, newest = published(tmp_path, 5, 10)
    damage(newest)
    assert not is_complete(newest)
    assert find_newest_complete(tmp_path) == older


def test_newest_is_by_number_and_not_by_time(tmp_path):
    paths = published(tmp_path, 100, 20, 3)
    for path, seconds in zip(paths, (1, 2, 3), strict=True):
        os.utime(path, (seconds, seconds))
    assert [path.name for path in list_complete_checkpoints(tmp_path)] == [
        "checkpoint-3",
        "checkpoint-20",
        "checkpoint-100",
    ]
    assert find_newest_complete(tmp_path) == tmp_path / "checkpoint-100"


def test_a_folder_that_does_not_exist_has_no_checkpoint(tmp_path):
    assert find_newest_complete(tmp_path / "none") is None


def test_what_stood_in_the_way_incomplete_is_replaced(tmp_path):
    (tmp_path / "checkpoint-5").mkdir()
    (tmp_path / "checkpoint-5/model.safetensors").write_bytes(b"old")
    (checkpoint,) = published(tmp_path, 5)
    assert is_complete(checkpoint) and (checkpoint / "model.safetensors").read_bytes() == FILES["model.safetensors"]


@pytest.mark.parametrize(
    ("limit", "steps"), [(1, [40]), (2, [30, 40]), (9, [10, 20, 30, 40]), (None, [10, 20, 30, 40])]
)
def test_pruning_keeps_the_newest(tmp_path, limit, steps):
    published(tmp_path, 40, 10, 30, 20)
    prune_checkpoints(tmp_path, limit)
    assert list_complete_checkpoints(tmp_path) == [tmp_path / f"checkpoint-{step}" for step in steps]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(f"checkpoint-{step}" for step in steps)


@pytest.mark.parametrize(
    ("limit", "best", "steps"),
    [
        (1, 10, [10, 40]), (2, 10, [10, 40]), (3, 10, [10, 30, 40]), (2, 40, [30, 40]), (9, 10, [10, 20, 30, 40]),
        (None, 10, [10, 20, 30, 40]), (2, 50, [30, 40]),
    ],
)  # fmt: skip
def test_pruning_keeps_the_best(tmp_path, limit, best, steps):
    published(tmp_path, 40, 10, 30, 20)
    prune_checkpoints(tmp_path, limit, tmp_path / f"checkpoint-{best}")
    assert list_complete_checkpoints(tmp_path) == [tmp_path / f"checkpoint-{step}" for step in steps]


def test_pruning_counts_complete_checkpoints_only(tmp_path):
    _, newest = published(tmp_path, 10, 20)
    (newest / MARKER).unlink()
    prune_checkpoints(tmp_path, 1)
    assert find_newest_complete(tmp_path) == tmp_path / "checkpoint-10"


def test_leftovers_of_an_interrupted_save_are_removed(tmp_path):
    published(tmp_path, 10)
    stage(tmp_path, 20)
    prune_checkpoints(tmp_path, 1)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-10"]


def test_a_pruning_that_was_cut_short_is_finished_by_the_next(tmp_path, monkeypatch):
    """A kill, or NFS, which keeps the files that a process reads."""

    def fake_busy_file(*_: object, **__: object) -> None:
        raise OSError(16, "Device or resource busy")

    published(tmp_path, 10, 20)
    with monkeypatch.context() as patch:
        patch.setattr("os.unlink", fake_busy_file)
        prune_checkpoints(tmp_path, 1)
    assert [path.name for path in list_complete_checkpoints(tmp_path)] == ["checkpoint-20"]
    assert (tmp_path / "partial/checkpoint-10/model.safetensors").exists()
    published(tmp_path, 30)
    prune_checkpoints(tmp_path, 1)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-30"]


# --- folders that are not checkpoints of this project ------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    ["checkpoint-best", "checkpoint-6.bak", "checkpoint-backup", "checkpoint-3-keep", "checkpoint-06", "checkpoint-9"],
)
def test_a_copy_under_another_name_is_neither_listed_nor_resumed_nor_pruned(tmp_path, name):
    older, newest = published(tmp_path, 3, 6)
    shutil.copytree(newest, tmp_path / name)
    assert list_complete_checkpoints(tmp_path) == [older, newest] and not is_complete(tmp_path / name)
    prune_checkpoints(tmp_path, 1)
    assert list_complete_checkpoints(tmp_path) == [newest] and (tmp_path / name / MARKER).exists()
    if name != "checkpoint-9":  # looks like a checkpoint of this project
        assert find_verified_checkpoint(tmp_path, refuse_to_speak) == newest and (tmp_path / name).exists()


@pytest.mark.parametrize(
    "text",
    [
        "null",
        "[]",
        "3",
        "{}",
        '{"files": {}}',
        '{"files": 3, "step": 6, "world_size": 2}',
        '{"files": {"model.safetensors": null}, "step": 6, "world_size": 2}',
        '{"files": {"' + "x" * 9999 + '": 1}, "step": 6, "world_size": 2}',
        '{"files": {}, "step": 6}',
        '{"files": {}, "world_size": 2}',
        '{"files": {}, "step": 6, "world_size": null}',
        '{"files": {}, "step": 6, "world_size": 2, "digests": null}',
        '{"files": {}, "step": 6, "world_size": 2, "checksum": 7}',
        '{"files": {"mod',
        "[" * 100_000,
        "\udcff",
    ],
)
def test_a_marker_that_is_not_ours_is_not_complete(tmp_path, text):
    older, newest = published(tmp_path, 3, 6)
    (newest / MARKER).write_text(text, errors="surrogateescape")
    assert not is_complete(newest) and list_complete_checkpoints(tmp_path) == [older]
    messages = []
    assert find_verified_checkpoint(tmp_path, messages.append) == older
    assert len(messages) == 1 and messages[0].startswith("checkpoint-6 is damaged: ")


def test_a_file_in_the_place_of_the_checkpoints_is_refused(tmp_path):
    (tmp_path / "checkpoints").write_text("")
    with pytest.raises(ConfigError, match=r"checkpoints: is not a folder, .* Fix: move it away"):
        find_verified_checkpoint(tmp_path / "checkpoints", refuse_to_speak)


# --- bytes that changed at the same size -------------------------------------------------------------------------


def refuse_to_speak(text: str) -> None:
    raise AssertionError(text)


def flip(path: Path, bit: int) -> None:
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


def test_the_marker_holds_a_digest_of_each_file_and_of_itself(tmp_path):
    (checkpoint,) = published(tmp_path, 5)
    marker = json.loads((checkpoint / MARKER).read_text())
    assert marker["digests"] == {name: xxhash.xxh3_128(content).hexdigest() for name, content in FILES.items()}
    other = marker | {"world_size": 3}
    assert add_checksum(marker) == marker and add_checksum(other) != other


def test_an_undamaged_checkpoint_is_verified_without_a_word(tmp_path):
    assert find_verified_checkpoint(tmp_path / "none", refuse_to_speak) is None
    stage(tmp_path, 1)  # a killed save
    assert find_verified_checkpoint(tmp_path, refuse_to_speak) is None
    _, newest = published(tmp_path, 3, 6)
    assert find_verified_checkpoint(tmp_path, refuse_to_speak) == newest


@pytest.mark.parametrize("name", [name for name, content in FILES.items() if content])
def test_a_flipped_bit_is_named_and_the_checkpoint_before_is_resumed(tmp_path, name):
    bits = len(FILES[name]) * 8
    for bit in {0, bits // 2, bits - 1}:
        folder = tmp_path / str(bit)
        older, newest = published(folder, 3, 6)
        flip(newest / name, bit)
        assert find_newest_complete(folder) == newest  # listing does not read the bytes
        messages = []
        assert find_verified_checkpoint(folder, messages.append) == older == find_newest_complete(folder)
        assert messages == [
            f"checkpoint-6 is damaged: {name} was changed since the run wrote it; renamed to checkpoint-6.damaged, "
            "resuming from checkpoint-3"
        ]
        assert (folder / "checkpoint-6.damaged" / name).exists()  # nothing is deleted


def test_no_bit_of_the_marker_can_flip_and_change_what_is_resumed(tmp_path):
    older, newest = published(tmp_path, 3, 6)
    marker = (newest / MARKER).read_bytes()
    meant = json.loads(marker)
    for bit in range(len(marker) * 8):
        (newest / MARKER).write_bytes(marker)
        flip(newest / MARKER, bit)
        if is_complete(newest):  # a space became other whitespace
            assert json.loads((newest / MARKER).read_text()) == meant
        else:
            assert find_newest_complete(tmp_path) == older
            assert find_damage(newest, refuse_to_speak) == "COMPLETE is damaged"


def test_every_damaged_one_is_named_and_a_second_time_too(tmp_path):
    oldest, older, newest = published(tmp_path, 3, 6, 9)
    (tmp_path / "checkpoint-9.damaged").mkdir()
    (newest / "trainer_state.json").unlink()
    flip(older / "model.safetensors", 99)
    messages = []
    assert find_verified_checkpoint(tmp_path, messages.append) == oldest
    assert [line.split(",")[0] for line in messages] == [
        "checkpoint-9 is damaged: trainer_state.json is missing; renamed to checkpoint-9.damaged-2",
        "checkpoint-6 is damaged: model.safetensors was changed since the run wrote it; "
        "renamed to checkpoint-6.damaged",
    ]


def test_where_none_can_be_resumed_a_person_decides(tmp_path):
    older, newest = published(tmp_path, 3, 6)
    (older / MARKER).unlink()
    (newest / "model.safetensors").write_bytes(b"weights")
    with pytest.raises(ConfigError) as refused:
        find_verified_checkpoint(tmp_path, refuse_to_speak)
    (problem,) = refused.value.problems
    assert problem.what == (
        "contains no checkpoint that can be resumed: checkpoint-6 (model.safetensors has 7 of 700 bytes), "
        "checkpoint-3 (COMPLETE is missing)"
    )
    assert problem.fix.startswith("start a new run with grpo launch RECIPE, or move this folder away")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-3", "checkpoint-6", "partial"]


def test_a_checkpoint_of_an_earlier_version_is_resumed_with_a_note(tmp_path):
    (checkpoint,) = published(tmp_path, 5)
    marker = json.loads((checkpoint / MARKER).read_text())
    (checkpoint / MARKER).write_text(json.dumps({key: marker[key] for key in ("step", "world_size", "files")}))
    messages = []
    assert find_verified_checkpoint(tmp_path, messages.append) == checkpoint
    assert len(messages) == 1 and messages[0].startswith("note: checkpoint-5 was saved without digests")


def test_a_file_that_the_disk_does_not_give_back_is_damage(tmp_path):
    older, newest = published(tmp_path, 3, 6)
    (newest / "empty").unlink()
    (newest / "empty").symlink_to("/proc/self/mem")  # reading it raises an input/output error
    assert find_damage(newest, refuse_to_speak) == "empty cannot be read (Input/output error)"
    assert find_verified_checkpoint(tmp_path, [].append) == older


def test_publishing_reads_back_only_what_it_has_no_digest_of(tmp_path, monkeypatch):
    staged = stage(tmp_path, 5)
    known = {"global_step/rank_0.pt": compute_digest(staged / "global_step/rank_0.pt"), "gone.pt": "0" * 32}
    read = []
    monkeypatch.setattr(checkpoints, "compute_digest", lambda path, *_: read.append(path.name) or compute_digest(path))
    publish_checkpoint(staged, tmp_path, 5, 2, known)
    assert sorted(read) == ["empty", "model.safetensors", "trainer_state.json"]
    monkeypatch.undo()
    assert find_verified_checkpoint(tmp_path, refuse_to_speak) == tmp_path / "checkpoint-5"


def test_a_disk_that_fails_ends_a_save_at_once_and_leaves_nothing_open(tmp_path, monkeypatch):
    staged, read = stage(tmp_path, 5), []
    for number in range(60):
        (staged / f"more-{number}").touch()

    def fake_slow_digest(path: Path) -> str:
        read.append(path)
        time.sleep(0.05)
        return ""

    def fake_failing_disk(_: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(checkpoints, "compute_digest", fake_slow_digest)
    monkeypatch.setattr(os, "fsync", fake_failing_disk)
    opened = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="Input/output error"):
        publish_checkpoint(staged, tmp_path, 5, 2)
    assert len(read) < 20 and len(os.listdir("/proc/self/fd")) == opened
    assert not (tmp_path / "checkpoint-5").exists()


# --- files of a run directory that a resume reads ------------------------------------------------------------------


CPU = Resources("cpu", (), 2)
READ = [
    "accelerate.yaml", "callbacks/mine.py", "plan.json", "recipe.yaml", "rewards/mine.py", "run.json", "sources.json"
]  # fmt: skip
MINE = """from transformers import TrainerCallback
class Quiet(TrainerCallback): pass
def reward(completions, **_): return [1.0 for _ in completions]
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Create a submitted run with a user's reward, callback and accelerate file."""
    for name in {*environment_keys(), *READ_VARIABLES} - {"GRPO_HOME"}:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CACHE_ROOT", str(tmp_path / "cache"))
    monkeypatch.setenv("CONFIG_FILE", str(tmp_path / "mine.yaml"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "mine.yaml").write_text("distributed_type: 'NO'\n")
    flags = ["--reward_funcs", "mine.py:reward", "--callbacks", "mine.py:Quiet"]
    recipe = resolve_recipe("recipes/smoke/grpo.yaml", None, flags, os.environ, "cpu")
    names, sources = choose_names(recipe), find_assets(recipe, os.environ)
    plan = make_plan(recipe, CPU, os.environ, names, sources=sources)
    return freeze_run(Submission(recipe, names, CPU, sources, plan, os.environ))


def resume(run: Run, allow: bool = False) -> None:
    resolve_run(Options(resume=str(run.folder), allow_changed_code=allow), CPU)


def test_every_file_that_a_resume_reads_is_recorded(run, capsys) -> None:
    names = {str(path.relative_to(run.folder)) for path in run.folder.rglob("*") if path.is_file()}
    code = {name for name in names if name.startswith("code/")}  # run.json contains a separate hash of the code
    assert names - code == {*READ, RECORD, "code.patch", "summary.json"}
    resume(run)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("name", READ)
@pytest.mark.parametrize("place", [0.0, 0.5, 1.0])
def test_a_flipped_bit_is_refused_by_name_and_taken_on_purpose(run, name, place) -> None:
    path = run.folder / name
    before = path.read_bytes()
    flip(path, round(place * (len(before) * 8 - 1)))
    with pytest.raises(ConfigError) as refused:
        verify_run_files(run.folder, allow_changed=False)
    (problem,) = refused.value.problems
    assert problem.where.endswith(name) and problem.what == "was changed since the run wrote it"
    assert "restore the file that the run wrote" in problem.fix and "--allow-changed-code" in problem.fix
    with pytest.raises(ConfigError):
        resume(run)

    (note,) = verify_run_files(run.folder, allow_changed=True)
    assert f"{name} was changed since the run wrote it; this attempt uses the changed file" in note

    path.write_bytes(before)
    resume(run)


def test_a_record_that_cannot_be_read_counts_as_damaged(run, capsys) -> None:
    (run.folder / RECORD).unlink()
    (run.folder / RECORD).mkdir()
    with pytest.raises(ConfigError, match=rf"{RECORD}: is damaged"):
        resume(run)
    resume(run, allow=True)
    assert f"{RECORD} is damaged" in capsys.readouterr().out


@pytest.mark.slow
def test_no_bit_of_the_record_itself_can_flip_unnoticed(run) -> None:
    content = (run.folder / RECORD).read_bytes()
    for bit in range(len(content) * 8):
        (run.folder / RECORD).write_bytes(content)
        flip(run.folder / RECORD, bit)
        try:
            verify_run_files(run.folder, allow_changed=False)
        except ConfigError as refused:
            assert refused.problems[0].where.endswith(RECORD)
        else:
            assert not content[bit // 8 : bit // 8 + 1].strip()  # a space became other whitespace


def test_an_edited_recipe_is_not_applied_without_a_word(run, capsys) -> None:
    recipe = run.folder / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace("max_steps: 60", "max_steps: 5"))
    with pytest.raises(
        ConfigError, match=r"recipe\.yaml: was changed .*change the recipe with a flag \(--KEY VALUE\), or"
    ):
        resume(run)
    resume(run, allow=True)
    assert "recipe.yaml was changed since the run wrote it" in capsys.readouterr().out


def test_a_flag_of_a_resume_changes_the_recipe_and_its_record(run) -> None:
    resumed_run, recipe = resolve_run(Options(resume=str(run.folder), flags=("--learning_rate", "1e-6")), CPU)
    assert resumed_run is not None
    freeze_inputs(resumed_run, recipe, make_plan(recipe, CPU, os.environ, choose_names(recipe, resumed_run)))
    assert resolve_run(Options(resume=str(run.folder)), CPU)[1]["learning_rate"] == 1e-6


def test_a_missing_and_a_strange_file_are_named_together(run) -> None:
    (run.folder / "plan.json").unlink()
    (run.folder / "rewards" / "other.py").write_text("")
    with pytest.raises(ConfigError) as refused:
        resume(run)
    assert [(Path(problem.where).name, problem.what) for problem in refused.value.problems] == [
        ("other.py", "was not written by this run"),
        ("plan.json", "cannot be read (No such file or directory)"),
    ]


def test_a_run_of_an_earlier_version_goes_on_with_a_note(run, capsys) -> None:
    (run.folder / RECORD).unlink()
    resume(run)
    output = capsys.readouterr().out
    assert "note: cannot verify that recipe and plan are unchanged: runs/" in output and f"has no {RECORD}" in output


def test_a_kill_between_our_own_writes_leaves_no_record_that_is_wrong(run, capsys) -> None:
    with pytest.raises(KeyboardInterrupt), recording_changes(run.folder):
        (run.folder / "recipe.yaml").write_text((run.folder / "recipe.yaml").read_text() + "# new\n")
        raise KeyboardInterrupt
    resume(run)
    assert f"has no {RECORD}" in capsys.readouterr().out


def test_a_resume_without_an_intact_checkpoint_is_refused_and_leaves_the_summary(run, monkeypatch) -> None:
    monkeypatch.setattr(launch_run, "make_smoke_task", lambda *_: None)
    folder, before = run.folder / "checkpoints", (run.folder / "summary.json").read_bytes()
    (folder / "partial" / "checkpoint-3").mkdir(parents=True)
    (folder / "partial" / "checkpoint-3" / "model.safetensors").write_bytes(b"weights")
    publish_checkpoint(folder / "partial" / "checkpoint-3", folder, 3, 1)
    flip(folder / "checkpoint-3" / "model.safetensors", 5)
    with pytest.raises(
        ConfigError, match=r"checkpoints: contains no checkpoint that can be resumed: checkpoint-3 \(model"
    ):
        launch(Options(resume=str(run.folder), allow_changed_code=True))
    assert (run.folder / "summary.json").read_bytes() == before and is_complete(folder / "checkpoint-3")
    assert not (run.folder / "processes" / "trainer.json").exists()


def test_few_bytes_are_read_back_without_a_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without memory, Python waits forever for a thread that cannot start, so the save would never return."""
    started: list[object] = []
    new_thread_pool = checkpoints._make_thread_pool

    def threads() -> ThreadPoolExecutor:
        started.append(None)
        return new_thread_pool()

    monkeypatch.setattr(checkpoints, "_make_thread_pool", threads)
    for step, few in ((1, 64), (2, 3)):
        monkeypatch.setattr(checkpoints, "_FEW_BYTES", few)
        staged = tmp_path / "staged" / f"checkpoint-{step}"
        staged.mkdir(parents=True)
        (staged / "model.safetensors").write_bytes(b"some")
        checkpoints.publish_checkpoint(staged, tmp_path, step, 1)
        assert is_complete(tmp_path / f"checkpoint-{step}") and len(started) == step - 1
    marker = json.loads((tmp_path / "checkpoint-2" / checkpoints.MARKER).read_text())
    assert marker["digests"] == {
        "model.safetensors": checkpoints.compute_digest(tmp_path / "checkpoint-1/model.safetensors")
    }
