"""A run that was frozen for a job: the files that its first start reads, compares and counts."""

from __future__ import annotations

import dataclasses
import os
import stat
from pathlib import Path

import pytest
from dead_scratch import dead_scratch

from grpo_recipes.errors import ConfigError, config_error
from grpo_recipes.fetch.assets import find_assets
from grpo_recipes.launch.attempt import prepare_attempt
from grpo_recipes.launch.nodes import NodeWorkers
from grpo_recipes.launch.resolve import (
    Options,
    choose_names,
    create_log_folders,
    record_job,
    require_same_data_order,
    require_same_world_size,
    resolve_run,
)
from grpo_recipes.launch.submission import Submission, freeze_run, frozen_environment
from grpo_recipes.paths import find_code_root
from grpo_recipes.plan.commands import base_environment
from grpo_recipes.plan.devices import Resources
from grpo_recipes.plan.plan import make_plan
from grpo_recipes.plan.replicas import with_replicas
from grpo_recipes.plan.types import Names
from grpo_recipes.recipe import Recipe, read_frozen
from grpo_recipes.recipe.check import resolve_recipe
from grpo_recipes.recipe.keys import READ_VARIABLES, environment_keys
from grpo_recipes.runs.checkpoints import publish_checkpoint
from grpo_recipes.runs.rundir import Run, find_run, read_json, write_json
from grpo_recipes.slurm.client import read_slurm_job

SMOKE = find_code_root() / "recipes/smoke/grpo.yaml"
CPU = Resources("cpu", (), 2)
THREE = Resources("cuda", ("0", "1", "2"), 8)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in {*environment_keys(), *READ_VARIABLES} - {"GRPO_HOME"}:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CACHE_ROOT", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def frozen(*flags: str, resources: Resources = CPU) -> Run:
    recipe = resolve_recipe(str(SMOKE), None, flags, os.environ, "cpu")
    return freeze_it(recipe, choose_names(recipe), resources)


def freeze_it(recipe: Recipe, names: Names, resources: Resources) -> Run:
    sources = find_assets(recipe, os.environ)
    plan = make_plan(recipe, resources, os.environ, names, sources)
    return freeze_run(Submission(recipe, names, resources, sources, plan, os.environ))


def in_job(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the environment of the run's batch script."""
    for name, text in frozen_environment(run.folder, os.environ).items():
        if name != "PYTHONPATH":
            monkeypatch.setenv(name, text)


def test_its_folder_is_the_one_that_was_named(folder) -> None:
    recipe = resolve_recipe(str(SMOKE), None, [], os.environ, "cpu")
    names = dataclasses.replace(choose_names(recipe), run_dir=folder / "sweep" / "cells" / "seed=1")
    assert freeze_it(recipe, names, CPU).folder == names.run_dir
    with pytest.raises(ConfigError, match="another run has just used this name"):
        freeze_it(recipe, names, CPU)


def test_what_fails_half_way_leaves_no_folder(folder, monkeypatch) -> None:
    def fake_full_disk(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("shutil.copyfile", fake_full_disk)
    with pytest.raises(ConfigError, match=r"run_root: cannot copy code and recipe to .*No space left on device"):
        frozen()
    assert list((folder / "runs").iterdir()) == []


def test_the_users_own_code_is_frozen_with_it(folder) -> None:
    (folder / "mine.py").write_text("def reward(completions, **_):\n    return [1.0 for _ in completions]\n")
    run = frozen("--reward_funcs", "mine.py:reward")
    (copy,) = (run.folder / "rewards").glob("mine*.py")
    assert copy.read_text() == (folder / "mine.py").read_text()


def test_an_entry_script_of_the_user_is_copied(folder, monkeypatch) -> None:
    repository = folder / "repository"
    for name in ("src", "requirements", "training.sh"):
        (repository / name).parent.mkdir(exist_ok=True)
        (repository / name).symlink_to(find_code_root() / name)
    (repository / "mine.py").write_text("# an entry\n")
    monkeypatch.setenv("GRPO_HOME", str(repository))
    monkeypatch.setenv("TRAIN_ENTRYPOINT", "mine.py")
    run = frozen()
    assert (run.folder / "code/mine.py").read_text() == "# an entry\n"


def test_the_chosen_number_of_replicas_is_frozen(folder, monkeypatch) -> None:
    """A requeued job resolves its flags again, and resumes with the number of its first launch."""
    flags = ("--vllm_data_parallel_size", "auto")

    def fake_choice(recipe: Recipe, *_: object) -> Recipe:
        return with_replicas(recipe, 2)

    monkeypatch.setattr("grpo_recipes.plan.plan.choose_replicas", fake_choice)
    run = frozen(*flags)
    assert read_json(run.folder / "plan.json")["replicas"] == 2
    assert "# --vllm_data_parallel_size\nvllm_data_parallel_size: 2\n" in (run.folder / "recipe.yaml").read_text()
    monkeypatch.undo()
    monkeypatch.chdir(folder)
    for options in (Options(resume=str(run.folder)), Options(resume=str(run.folder), flags=flags)):
        _, recipe = resolve_run(options, CPU)
        assert recipe.server.data_parallel_size == 2


def test_its_start_reads_the_frozen_recipe_whatever_the_environment_says(monkeypatch) -> None:
    monkeypatch.setenv("TRAIN_SEED", "5")
    run = frozen("--seed", "3")
    in_job(run, monkeypatch)
    resolved, recipe = resolve_run(Options(resume=str(run.folder)), CPU)
    assert resolved is not None and resolved.folder == run.folder
    assert recipe["seed"] == 3 and recipe.entry == "src/grpo.py"
    assert find_code_root() == run.folder / "code"


def test_processes_import_the_frozen_code(monkeypatch) -> None:
    run = frozen()
    in_job(run, monkeypatch)
    assert base_environment(os.environ)["PYTHONPATH"] == str(run.folder / "code/src")
    monkeypatch.delenv("GRPO_CODE")
    assert "PYTHONPATH" not in base_environment(os.environ)


def test_a_resume_takes_a_changed_environment(folder, monkeypatch) -> None:
    game = "class Game:\n    def reset(self, seed): return '1+1='\n    def step(self, action): return '', {}, True\n"
    (folder / "own.py").write_text(game)
    flags = ("--environment", "own.py:Game", "--reward_funcs", "environment", "--dataset_name", "null")
    run = frozen(*flags)
    in_job(run, monkeypatch)
    options = Options(resume=str(run.folder), update_rewards=True)
    with pytest.raises(ConfigError, match=r"no reward or environment of the run has changed .* \(own.py\)"):
        resolve_run(options, CPU)
    (folder / "own.py").write_text(game.replace("{}", "1.0"))
    assert resolve_run(options, CPU)[1]["environment"] == "own.py:Game"


def test_a_resume_takes_a_changed_reward_and_run_json_says_from_which_step(folder, monkeypatch, capsys) -> None:
    (folder / "own.py").write_text("def score(completions): return [0.0]\n")
    flags = ("--reward_funcs", "own.py:score")
    run, update = frozen(*flags), {"update_rewards": True}
    in_job(run, monkeypatch)
    with pytest.raises(ConfigError, match=r"no reward or environment of the run has changed .* \(own.py\)"):
        resolve_run(Options(resume=str(run.folder), **update), CPU)
    with pytest.raises(ConfigError, match="a new run always uses the current files"):
        resolve_run(Options(recipe=str(SMOKE), **update), CPU)
    (folder / "own.py").write_text("def score(completions return")
    with pytest.raises(ConfigError, match=r"--update-rewards: 'own\.py:1' is not valid Python"):
        resolve_run(Options(resume=str(run.folder), **update), CPU)
    (folder / "own.py").write_text("def score(completions): return [1.0]\n")
    monkeypatch.setenv("SLURM_TMPDIR", str(folder))
    (folder / "logs").mkdir(exist_ok=True)
    resolved, recipe = resolve_run(Options(resume=str(run.folder), **update), CPU)
    names = choose_names(recipe, resolved)
    plan = make_plan(recipe, CPU, os.environ, names, find_assets(recipe, os.environ))
    prepare_attempt(resolved, recipe, plan, names, CPU, NodeWorkers(0), update_rewards=True).scratch.remove()
    assert (run.folder / "rewards/own.py").read_text() == (folder / "own.py").read_text()
    (updated,) = Run(run.folder).identity["updated_rewards"]
    assert updated["after_step"] == 0 and updated["notes"][0].startswith(
        "--update-rewards: the run now uses the current own.py"
    )
    assert updated["notes"][0] in Run(run.folder).plan["notes"]
    assert resolve_run(Options(resume=str(run.folder)), CPU)[0] is not None, "its record of files is of the new copy"


def test_code_that_changed_after_it_was_frozen_is_refused(monkeypatch) -> None:
    run = frozen()
    in_job(run, monkeypatch)
    (run.folder / "code/src/grpo.py").write_text("")
    with pytest.raises(ConfigError, match="were changed after the run was submitted"):
        resolve_run(Options(resume=str(run.folder)), CPU)


def test_its_first_start_is_no_restart_and_its_second_is_one(folder, monkeypatch) -> None:
    monkeypatch.setenv("SLURM_TMPDIR", str(folder))
    (folder / "logs").mkdir()
    run = frozen()
    recipe = resolve_run(Options(resume=str(run.folder)), CPU)[1]
    counts = []
    for _ in range(2):
        names = choose_names(recipe, run)
        attempt = prepare_attempt(run, recipe, make_plan(recipe, CPU, os.environ, names), names, CPU, NodeWorkers(0))
        attempt.scratch.remove()
        counts.append((read_json(run.folder / "summary.json")["restarts"], bool(attempt.resume_note)))
    assert counts == [(0, False), (1, True)]


def test_a_start_first_removes_what_dead_runs_left_on_the_node(folder, monkeypatch, capsys) -> None:
    for name in ("node", "shm", "logs"):
        (folder / name).mkdir()
    stale = dead_scratch(folder / "node", folder / "shm")
    monkeypatch.setenv("SLURM_TMPDIR", str(folder / "node"))
    run = frozen()
    recipe = resolve_run(Options(resume=str(run.folder)), CPU)[1]
    names = choose_names(recipe, run)
    attempt = prepare_attempt(run, recipe, make_plan(recipe, CPU, os.environ, names), names, CPU, NodeWorkers(0))
    assert list((folder / "node").iterdir()) == [attempt.scratch.disk]
    attempt.scratch.remove()
    (line,) = [line for line in capsys.readouterr().out.splitlines() if stale.disk.name in line]
    assert line.startswith("grpo: removed scratch of ") and "died on this node (" in line


def test_a_node_that_does_not_begin_leaves_no_scratch_and_no_running_summary(folder, monkeypatch) -> None:
    class SilentWorkers(NodeWorkers):
        def begin(self, *_: object) -> None:
            raise config_error("nodes of the job", "node 1 did not answer within 60 s", "")

    scratch = folder / "scratch"
    for directory in (scratch, folder / "logs"):
        directory.mkdir()
    monkeypatch.setenv("SLURM_TMPDIR", str(scratch))
    run = frozen()
    recipe = resolve_run(Options(resume=str(run.folder)), CPU)[1]
    names = choose_names(recipe, run)
    with pytest.raises(ConfigError, match="did not answer"):
        prepare_attempt(run, recipe, make_plan(recipe, CPU, os.environ, names), names, CPU, SilentWorkers(2))
    assert not list(scratch.iterdir())
    assert read_json(run.folder / "summary.json")["status"] == "submitted"


def test_a_job_of_another_size_than_planned_is_refused() -> None:
    run = frozen("--prompts_per_step", "16", resources=THREE)
    recipe = resolve_run(Options(resume=str(run.folder)), CPU)[1]
    plan = make_plan(recipe, Resources("cuda", ("0", "1"), 8), os.environ, choose_names(recipe, run))
    with pytest.raises(ConfigError, match=r"has 2 training processes, the plan has 1.*check the resources of the job"):
        require_same_world_size(run, plan)
    require_same_world_size(run, make_plan(recipe, THREE, os.environ, choose_names(recipe, run)))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--seed", "7"), r"--seed: seed was 42: checkpoint-5 would continue at another position"),
        (("--max_train_prompts", "8"), r"--max_train_prompts: max_train_prompts was None"),
        (("--dataset_train_split", "test"), r"--dataset_train_split: dataset_train_split was train"),
        (("--num_iterations", "2"), r"--num_iterations: num_iterations was 1"),
        (
            ("--prompts_per_step", "8"),
            r"had 16 prompts per step, 16 per generation, .* now it has 8 prompts per step",
        ),
        (
            ("--num_generations", "8"),
            r"16 completions of each, .*, 8 completions of each: .*restore the keys of the batch",
        ),
    ],
)
def test_a_resumed_run_keeps_its_place_in_the_data(flags: tuple[str, ...], message: str) -> None:
    run = frozen()

    def resumed(*flags: str) -> str:
        recipe = resolve_run(Options(resume=str(run.folder), flags=flags), CPU)[1]
        return require_same_data_order(run, recipe, make_plan(recipe, CPU, os.environ, choose_names(recipe, run)))

    resumed(*flags)  # nothing was trained yet
    staged = run.folder / "checkpoints" / "partial" / "checkpoint-5"
    staged.mkdir(parents=True)
    publish_checkpoint(staged, run.folder / "checkpoints", 5, 1)
    (run.folder / "metrics.jsonl").write_text("".join(f'{{"step": {step}}}\n' for step in range(1, 6)))
    with pytest.raises(ConfigError, match=message):
        resumed(*flags)
    assert "the epoch starts again" in resumed(*flags, "--ignore_data_skip", "true")
    harmless = ("--learning_rate", "1e-5", "--max_steps", "90", "--dataset_test_split", "train")
    assert resumed(*harmless, "--per_device_train_batch_size", "64") == ""


def requeued_job(**variables: str) -> Resources:
    job = {"SLURM_JOB_ID": "9", "SLURM_CLUSTER_NAME": "c", "SLURM_RESTART_COUNT": "1", **variables}
    return dataclasses.replace(CPU, job=read_slurm_job(job))


def run_in_job(job: str, command: str, monkeypatch: pytest.MonkeyPatch, *flags: str) -> Run:
    """Return a new run with its own name that a job started with a command."""
    monkeypatch.setattr("sys.argv", ["grpo", *command.split()])
    run = frozen("--run_name", f"run-{len(list(Path().glob('runs/*')))}", *flags)
    record_job(run.folder, read_frozen(run.folder / "recipe.yaml"), job)
    return run


def test_a_requeued_task_of_an_array_finds_its_run() -> None:
    resources = requeued_job(SLURM_ARRAY_JOB_ID="7", SLURM_ARRAY_TASK_ID="2")
    run = frozen()
    assert resolve_run(Options(recipe=str(SMOKE)), resources)[0] is None
    Path("runs/.jobs").mkdir()
    Path("runs/.jobs/c-7_2").write_text(str(run.folder))
    assert resolve_run(Options(recipe=str(SMOKE)), resources)[0] == find_run(Path("runs"), "last")


def test_a_requeued_job_with_resume_last_continues_its_own_run(monkeypatch) -> None:
    run = run_in_job("c-9", "launch", monkeypatch)
    newer = frozen("--run_name", "another")
    assert resolve_run(Options(resume="last"), CPU)[0] == newer
    assert resolve_run(Options(resume="last"), requeued_job())[0] == run


def test_a_requeued_job_of_several_launches_continues_the_run_of_each(monkeypatch) -> None:
    """A loop over a key in one batch script."""
    runs = {rate: run_in_job("c-9", f"launch my.yaml --learning_rate {rate}", monkeypatch) for rate in ("1e-6", "2e-6")}
    run_in_job("c-8", "launch my.yaml --learning_rate 3e-6", monkeypatch)
    for rate in ("1e-6", "2e-6", "3e-6"):
        monkeypatch.setattr("sys.argv", ["grpo", "launch", "my.yaml", "--learning_rate", rate])
        run, _ = resolve_run(Options(recipe=str(SMOKE), flags=("--learning_rate", rate)), requeued_job())
        assert run == runs.get(rate), "the third was not started before the requeue"


@pytest.mark.parametrize(("status", "continues"), [("requeued", True), ("running", True), ("completed", False)])
def test_a_requeued_job_whose_flags_changed_continues_its_only_run(monkeypatch, status: str, continues: bool) -> None:
    """A batch script with ``--run_name mine-$(date +%F-%H%M)``. The next launch of a script starts its own run."""
    run = run_in_job("c-9", "launch my.yaml --run_name mine-1", monkeypatch)
    write_json(run.folder / "summary.json", {**run.summary, "status": status})
    monkeypatch.setattr("sys.argv", ["grpo", "launch", "my.yaml", "--run_name", "mine-2"])
    resolved, _ = resolve_run(Options(recipe=str(SMOKE)), requeued_job())
    assert resolved == (run if continues else None)


@pytest.mark.parametrize("text", [None, "learning_rate: wrong\n", "run_root: [\n", "no_such_key: 1\n"])
def test_a_requeued_job_continues_though_its_recipe_was_edited_or_removed(folder, monkeypatch, text) -> None:
    run = run_in_job("c-9", "launch mine.yaml", monkeypatch)
    if text is not None:
        (folder / "mine.yaml").write_text(text)
    options = Options(recipe="mine.yaml")
    resolved, recipe = resolve_run(options, requeued_job())
    assert resolved == run and recipe["learning_rate"] == run.recipe["learning_rate"]
    with pytest.raises(ConfigError):
        resolve_run(options, CPU)


def test_users_who_share_run_root_can_all_record_their_jobs(folder, read) -> None:
    shared, recipe = folder / "shared", read(run_root=str(folder / "shared"))
    shared.mkdir()
    shared.chmod(0o1777)
    record_job(folder, recipe, "c-7")
    assert stat.S_IMODE((shared / ".jobs").stat().st_mode) == 0o1777
    (shared / ".jobs/c-8").mkdir()  # cannot be written
    with pytest.raises(
        ConfigError, match=r"run_root: cannot write shared/.jobs/c-8 \(Is a directory\). Fix: set run_r"
    ):
        record_job(folder, recipe, "c-8")


def test_logs_are_where_logdir_says_and_slurms_where_the_command_is_run(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LOGDIR", str(tmp_path / "deep/er"))
    create_log_folders()
    assert (tmp_path / "deep/er").is_dir() and (tmp_path / "logs").is_dir()
    (tmp_path / "file").touch()
    monkeypatch.setenv("LOGDIR", "file")
    with pytest.raises(
        ConfigError, match=r"LOGDIR: cannot create 'file' \(File exists\)\. Fix: set LOGDIR to a folder"
    ):
        create_log_folders()
