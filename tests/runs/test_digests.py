"""A byte that changed in what a resume reads of a run directory is noticed, named, and taken only on purpose."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from grpo_recipes.errors import ConfigError
from grpo_recipes.fetch.assets import find_assets
from grpo_recipes.launch.attempt import freeze_inputs
from grpo_recipes.launch.resolve_run import Options, names_of, resolve_run
from grpo_recipes.launch.run import launch
from grpo_recipes.launch.submission import freeze
from grpo_recipes.paths import home
from grpo_recipes.plan.devices import Resources
from grpo_recipes.plan.plan import make_plan
from grpo_recipes.recipe.check import checked_recipe
from grpo_recipes.recipe.keys import ENVIRONMENT_KEYS, READ_VARIABLES
from grpo_recipes.recipe.tasks import RequestedTask
from grpo_recipes.runs.checkpoints import RECORD, is_complete, need_same_files, publish, rewriting
from grpo_recipes.runs.rundir import Run

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
    """A submitted run with a reward, a callback and an accelerate file of the user's own."""
    for name in {*ENVIRONMENT_KEYS, *READ_VARIABLES} - {"GRPO_HOME"}:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CACHE_ROOT", str(tmp_path / "cache"))
    monkeypatch.setenv("CONFIG_FILE", str(tmp_path / "mine.yaml"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "mine.yaml").write_text("distributed_type: 'NO'\n")
    flags = ["--reward_funcs", "mine.py:reward", "--callbacks", "mine.py:Quiet"]
    recipe = checked_recipe(home() / "recipes/smoke/grpo.yaml", flags, os.environ, RequestedTask())
    names, sources = names_of(recipe), find_assets(recipe, os.environ)
    plan = make_plan(recipe, CPU, os.environ, names, sources=sources)
    return freeze(recipe, plan, sources, names, CPU, os.environ)


def resume(run: Run, allow: bool = False) -> None:
    resolve_run(Options(resume=str(run.folder), allow_changed_code=allow), CPU)


def flip(path: Path, bit: int) -> None:
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


def test_every_file_that_a_resume_reads_is_recorded(run, capsys) -> None:
    kept = {str(path.relative_to(run.folder)) for path in run.folder.rglob("*") if path.is_file()}
    code = {name for name in kept if name.startswith("code/")}  # has a hash of its own, in run.json
    assert kept - code == {*READ, RECORD, "code.patch", "summary.json"}
    resume(run)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("name", READ)
@pytest.mark.parametrize("place", [0.0, 0.5, 1.0])
def test_a_flipped_bit_is_refused_by_name_and_taken_on_purpose(run, name, place) -> None:
    path = run.folder / name
    before = path.read_bytes()
    flip(path, round(place * (len(before) * 8 - 1)))
    with pytest.raises(ConfigError) as refused:
        need_same_files(run.folder, allow_changed=False)
    (problem,) = refused.value.problems
    assert problem.where.endswith(name) and problem.what == "was changed since the run wrote it"
    assert "put it back" in problem.fix and "--allow-changed-code" in problem.fix
    with pytest.raises(ConfigError):
        resume(run)

    (note,) = need_same_files(run.folder, allow_changed=True)
    assert f"{name} was changed since the run wrote it; this attempt goes on with it" in note

    path.write_bytes(before)
    resume(run)


def test_no_bit_of_the_record_itself_can_flip_unnoticed(run) -> None:
    content = (run.folder / RECORD).read_bytes()
    for bit in range(len(content) * 8):
        (run.folder / RECORD).write_bytes(content)
        flip(run.folder / RECORD, bit)
        try:
            need_same_files(run.folder, allow_changed=False)
        except ConfigError as refused:
            assert refused.problems[0].where.endswith(RECORD)
        else:
            assert not content[bit // 8 : bit // 8 + 1].strip()  # a blank that became another one


def test_an_edited_recipe_is_not_applied_without_a_word(run, capsys) -> None:
    recipe = run.folder / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace("max_steps: 60", "max_steps: 5"))
    with pytest.raises(ConfigError, match=r"recipe\.yaml: was changed .*give the change as a flag \(--KEY VALUE\), or"):
        resume(run)
    resume(run, allow=True)
    assert "recipe.yaml was changed since the run wrote it" in capsys.readouterr().out


def test_a_flag_of_a_resume_changes_the_recipe_and_its_record(run) -> None:
    found, recipe, entry = resolve_run(Options(resume=str(run.folder), flags=("--learning_rate", "1e-6")), CPU)
    assert found is not None
    freeze_inputs(found, recipe, make_plan(recipe, CPU, os.environ, names_of(recipe, found), entry))
    assert resolve_run(Options(resume=str(run.folder)), CPU)[1]["learning_rate"] == 1e-6


def test_a_missing_and_a_strange_file_are_named_together(run) -> None:
    (run.folder / "plan.json").unlink()
    (run.folder / "rewards" / "other.py").write_text("")
    with pytest.raises(ConfigError) as refused:
        resume(run)
    assert [(Path(one.where).name, one.what) for one in refused.value.problems] == [
        ("other.py", "was not written by this run"),
        ("plan.json", "cannot be read (No such file or directory)"),
    ]


def test_a_run_of_an_earlier_version_goes_on_with_a_note(run, capsys) -> None:
    (run.folder / RECORD).unlink()
    resume(run)
    said = capsys.readouterr().out
    assert "note: cannot verify that recipe and plan are unchanged: runs/" in said and f"has no {RECORD}" in said


def test_a_kill_between_our_own_writes_leaves_no_record_that_is_wrong(run, capsys) -> None:
    with pytest.raises(KeyboardInterrupt), rewriting(run.folder):
        (run.folder / "recipe.yaml").write_text((run.folder / "recipe.yaml").read_text() + "# new\n")
        raise KeyboardInterrupt
    resume(run)
    assert f"has no {RECORD}" in capsys.readouterr().out


def test_a_resume_without_an_intact_checkpoint_is_refused_before_anything_begins(run) -> None:
    folder, before = run.folder / "checkpoints", (run.folder / "summary.json").read_bytes()
    (folder / "partial" / "checkpoint-3").mkdir(parents=True)
    (folder / "partial" / "checkpoint-3" / "model.safetensors").write_bytes(b"weights")
    publish(folder / "partial" / "checkpoint-3", folder, 3, 1)
    flip(folder / "checkpoint-3" / "model.safetensors", 5)
    with pytest.raises(
        ConfigError, match=r"checkpoints: holds no checkpoint that can be resumed: checkpoint-3 \(model"
    ):
        launch(Options(resume=str(run.folder), allow_changed_code=True))
    assert (run.folder / "summary.json").read_bytes() == before and is_complete(folder / "checkpoint-3")
