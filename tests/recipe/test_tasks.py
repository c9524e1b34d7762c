"""Which trainer a run uses: requested, or chosen by the recipe. Every command agrees."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from grpo_recipes import cli
from grpo_recipes.errors import ConfigError
from grpo_recipes.launch.attempt import Attempt, print_start
from grpo_recipes.paths import find_code_root
from grpo_recipes.plan.devices import Resources, environment_device
from grpo_recipes.plan.plan import format_plan
from grpo_recipes.plan.types import Names
from grpo_recipes.process.scratch import Scratch
from grpo_recipes.recipe import Recipe, read_frozen, read_recipe
from grpo_recipes.recipe.check import check, notes
from grpo_recipes.recipe.keys import READ_VARIABLES, environment_keys
from grpo_recipes.recipe.registry import OBJECTIVES
from grpo_recipes.recipe.tasks import RequestedTask, requested_task, require_same_task, task_of, with_task
from grpo_recipes.runs.rundir import new_run, write_json

GRPO, MAXENT = RequestedTask("grpo", "--task"), RequestedTask("maxent", "MAXENT")
SMOKE = find_code_root() / "recipes/smoke"
on_cpu = pytest.mark.skipif(environment_device() != "cpu", reason="needs a CPU environment")


@pytest.fixture
def nothing_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in {*environment_keys(), *READ_VARIABLES} - {"CACHE_ROOT", "GRPO_HOME"}:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("GRPO_DEFAULT_RECIPE", "1")
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("environment", "option", "expected"),
    [
        ({}, None, RequestedTask()),
        ({"MAXENT": ""}, None, RequestedTask()),
        ({"MAXENT": "1"}, None, RequestedTask("maxent", "MAXENT")),
        ({"MAXENT": "true"}, "maxent", RequestedTask("maxent", "--task")),
        ({"MAXENT": "0"}, None, RequestedTask("grpo", "MAXENT")),
        ({"MAXENT": "No"}, "grpo", RequestedTask("grpo", "--task")),
        ({}, "grpo", RequestedTask("grpo", "--task")),
        ({"TRAIN_ENTRYPOINT": "src/grpo.py"}, None, RequestedTask("grpo", "TRAIN_ENTRYPOINT", "src/grpo.py")),
        ({"TRAIN_ENTRYPOINT": "src/grpo.py"}, "grpo", RequestedTask("grpo", "--task", "src/grpo.py")),
        (
            {"TRAIN_ENTRYPOINT": "src/maxent-grpo.py"},
            None,
            RequestedTask("maxent", "TRAIN_ENTRYPOINT", "src/maxent-grpo.py"),
        ),
        ({"TRAIN_ENTRYPOINT": "./src//grpo.py"}, None, RequestedTask("grpo", "TRAIN_ENTRYPOINT", "src/grpo.py")),
        (
            {"TRAIN_ENTRYPOINT": str(find_code_root() / "src/maxent-grpo.py")},
            None,
            RequestedTask("maxent", "TRAIN_ENTRYPOINT", "src/maxent-grpo.py"),
        ),
        (
            {"TRAIN_ENTRYPOINT": "src/grpo_recipes/errors.py"},
            None,
            RequestedTask(entry="src/grpo_recipes/errors.py"),
        ),
        (
            {"TRAIN_ENTRYPOINT": "src/grpo_recipes/errors.py", "MAXENT": "1"},
            None,
            RequestedTask("maxent", "MAXENT", "src/grpo_recipes/errors.py"),
        ),
    ],
)
def test_who_asks_for_which_task(environment: dict[str, str], option: str | None, expected: RequestedTask) -> None:
    assert requested_task(environment, option) == expected


@pytest.mark.parametrize(
    ("environment", "option", "where"),
    [
        ({"MAXENT": "1", "TRAIN_ENTRYPOINT": "src/grpo.py"}, None, "TRAIN_ENTRYPOINT"),
        ({"MAXENT": "0", "TRAIN_ENTRYPOINT": "src/maxent-grpo.py"}, None, "TRAIN_ENTRYPOINT"),
        ({"TRAIN_ENTRYPOINT": "src/maxent-grpo.py"}, "grpo", "TRAIN_ENTRYPOINT"),
        ({"TRAIN_ENTRYPOINT": "src/grpo.py"}, "maxent", "TRAIN_ENTRYPOINT"),
        ({"MAXENT": "1"}, "grpo", "MAXENT"),
        ({"MAXENT": "0"}, "maxent", "MAXENT"),
        ({"MAXENT": "2"}, None, "MAXENT"),
        ({"TRAIN_ENTRYPOINT": "src/none.py"}, None, "TRAIN_ENTRYPOINT"),
    ],
)
def test_contradictions_and_missing_entry_scripts_are_refused(
    environment: dict[str, str], option: str | None, where: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        requested_task(environment, option)
    assert refused.value.problems[0].where == where


def test_a_switch_and_an_entry_script_that_are_both_wrong_are_told_at_once() -> None:
    with pytest.raises(ConfigError) as refused:
        requested_task({"MAXENT": "2", "TRAIN_ENTRYPOINT": "src/none.py"})
    assert [problem.where for problem in refused.value.problems] == ["MAXENT", "TRAIN_ENTRYPOINT"]


def test_a_home_without_a_repository_is_told_as_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRPO_HOME", str(tmp_path))
    with pytest.raises(ConfigError, match="GRPO_HOME: there is no repository in"):
        requested_task({})


@pytest.mark.parametrize("requested", [RequestedTask(), MAXENT])
def test_a_recipe_that_names_its_objective_is_maxents(read: Callable[..., Recipe], requested: RequestedTask) -> None:
    recipe, problems = with_task(read(maxent_objective="listwise"), requested)
    assert (task_of(recipe), recipe.entry, problems) == ("maxent", None, [])
    assert recipe["maxent_objective"] == "listwise" and recipe.source("maxent_objective").startswith("recipe.yaml:")
    recipe, problems = with_task(read(["--maxent_objective", "listwise"]), requested)
    assert (task_of(recipe), recipe.source("maxent_objective"), problems) == ("maxent", "--maxent_objective", [])


def test_a_recipe_without_an_objective_is_grpos_unless_maxent_is_asked_for(read: Callable[..., Recipe]) -> None:
    recipe, problems = with_task(read(), RequestedTask())
    assert (task_of(recipe), recipe.entry, problems) == ("grpo", None, [])
    recipe, problems = with_task(read(maxent_objective="maxrl"), RequestedTask("maxent", "MAXENT", "src/mine.py"))
    assert (task_of(recipe), recipe.entry, problems) == ("maxent", "src/mine.py", [])


@pytest.mark.parametrize("keys", [{}, {"maxent_objective": None}], ids=["absent", "null"])
def test_maxent_trains_a_recipe_that_gives_no_objective(read: Callable[..., Recipe], keys: dict[str, None]) -> None:
    """M11: MAXENT=1 selects listwise and notes that the evidence recommends no objective."""
    recipe, problems = with_task(read(maxent_tau=0.1, maxent_target_ratio=4.0, **keys), MAXENT)
    assert (task_of(recipe), recipe["maxent_objective"], problems) == ("maxent", "listwise", [])
    assert recipe.source("maxent_objective") == "MAXENT" and check(recipe, {}) == []
    assert recipe.notes[-1] == (
        "MAXENT: selects maxent_objective: listwise; the evidence recommends no objective (docs/maxent.md)"
    )
    assert [problem.where for problem in check(read(maxent_objective=None), {})] == ["recipe.yaml:2"]


def test_maxent_replaces_the_loss_of_a_grpo_recipe_and_notes_it(read: Callable[..., Recipe]) -> None:
    """M11: values that a file gives for GRPO's loss do not keep MAXENT=1 from training; a flag's do."""
    recipe, problems = with_task(read(loss_type="dapo", scale_rewards="batch"), MAXENT)
    assert (recipe["loss_type"], recipe["scale_rewards"], problems, check(recipe, {})) == ("dr_grpo", "none", [], [])
    assert "recipe.yaml:2: loss_type: dr_grpo replaces dapo; listwise fixes it" in recipe.notes
    recipe, _ = with_task(read(["--loss_type", "dapo"]), MAXENT)
    assert [problem.where for problem in check(recipe, {})] == ["--loss_type"]


SHIPPED = sorted(
    path
    for path in find_code_root().glob("recipes/**/*.yaml")
    if path.parent.name != "base" and "\ntask:" not in path.read_text()
)


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: "-".join(path.parts[-3:]))
def test_the_four_maxent_flags_of_the_guide_start_with_every_shipped_recipe(path: Path) -> None:
    """M11: MAXENT=1 and the guide's flags together pass the checks of every recipe that listwise can train."""
    flags = ["--maxent_tau", "0.3", "--maxent_q_temperature", "1.0", "--maxent_q_epsilon", "1e-6"]
    flags += ["--maxent_length_normalize_ref", "true", "--maxent_objective", "listwise"]
    flags = flags[:-2] if "maxent" not in str(path) else flags
    recipe, problems = with_task(read_recipe(path, flags), MAXENT)
    assert problems == [] and [str(problem) for problem in check(recipe, {}) if "maxent" in str(problem)] == []
    assert "--maxent_length_normalize_ref: maxent_length_normalize_ref does nothing without maxent_beta above 0" in (
        notes(recipe)
    )


@pytest.mark.parametrize(
    ("flags", "environment", "keys", "cure"),
    [
        ([], {}, {"maxent_objective": "tempered"}, "use a GRPO recipe"),
        (["--maxent_objective", "tempered"], {}, {}, "remove --maxent_objective"),
        ([], {"MAXENT_OBJECTIVE": "tempered"}, {}, "unset MAXENT_OBJECTIVE"),
    ],
)
def test_grpo_asked_for_against_a_maxent_recipe_is_refused(
    read: Callable[..., Recipe], flags: list[str], environment: dict[str, str], keys: dict[str, str], cure: str
) -> None:
    _, (problem,) = with_task(read(flags, environment, **keys), GRPO)
    assert problem.where == "--task" and problem.fix == f"remove --task, or {cure}"


@pytest.mark.parametrize("requested", [RequestedTask(), MAXENT])
def test_the_variable_of_the_objective_overrides_a_maxent_recipe(
    read: Callable[..., Recipe], requested: RequestedTask
) -> None:
    recipe, problems = with_task(read([], {"MAXENT_OBJECTIVE": "listwise"}, maxent_objective="tempered"), requested)
    assert (recipe["maxent_objective"], recipe.source("maxent_objective"), problems) == (
        "listwise", "MAXENT_OBJECTIVE", [],
    )  # fmt: skip


def test_the_recipe_is_named_where_a_variable_overrides_its_objective_and_grpo_is_asked_for(
    read: Callable[..., Recipe],
) -> None:
    _, (problem,) = with_task(read([], {"MAXENT_OBJECTIVE": "listwise"}, maxent_objective="tempered"), GRPO)
    assert problem.what.startswith("requests GRPO, but recipe.yaml:") and problem.fix.endswith("use a GRPO recipe")


def test_the_variable_of_the_objective_alone_chooses_nothing(read: Callable[..., Recipe]) -> None:
    recipe = read([], {"MAXENT_OBJECTIVE": "listwise"})
    settled, (problem,) = with_task(recipe, RequestedTask())
    assert task_of(settled) == "grpo" and "set MAXENT=1 too, or unset MAXENT_OBJECTIVE" in problem.fix
    settled, problems = with_task(recipe, MAXENT)
    assert (task_of(settled), settled["maxent_objective"], problems) == ("maxent", "listwise", [])
    over, problems = with_task(read([], {"MAXENT_OBJECTIVE": "listwise"}, maxent_objective="tempered"), MAXENT)
    assert (over["maxent_objective"], problems) == ("listwise", [])


def test_a_frozen_recipe_says_its_task_by_itself(read: Callable[..., Recipe], tmp_path: Path) -> None:
    recipe, _ = with_task(read([], {"MAXENT_OBJECTIVE": "listwise"}), MAXENT)
    (tmp_path / "frozen.yaml").write_text(recipe.as_yaml())
    reread = read_frozen(tmp_path / "frozen.yaml")
    assert task_of(reread) == "maxent" and reread.source("maxent_objective") == "MAXENT_OBJECTIVE"
    require_same_task(reread, RequestedTask(), "maxent")
    require_same_task(reread, MAXENT, "maxent")
    with pytest.raises(ConfigError, match="--task: requests GRPO, but this run is MaxEnt"):
        require_same_task(reread, GRPO, "maxent")
    with pytest.raises(ConfigError, match="MAXENT: requests MaxEnt, but this run is GRPO"):
        require_same_task(read(), MAXENT, "grpo")
    with pytest.raises(ConfigError, match="--maxent_objective: 'maxent_objective' would turn this run into"):
        require_same_task(read(["--maxent_objective", "listwise"]), RequestedTask(), "grpo")


def test_a_plan_shows_what_is_optimised(planned: Callable, read: Callable[..., Recipe]) -> None:
    plan = planned(maxent_objective="listwise", maxent_tau=0.25, maxent_beta=1)
    assert (plan.task, plan.entry) == ("maxent", "src/maxent-grpo.py")
    assert any(word.endswith("/src/maxent-grpo.py") for word in plan.process("trainer").argv)
    weight = "with rewards of 0 and 1, a correct answer weighs {} an incorrect one"
    line = f"objective  listwise, tau 0.25, maxent_beta 1, loss_type dr_grpo; {weight.format('2.23 times')}"
    assert line in format_plan(plan).splitlines()
    sums = planned(maxent_objective="weighted_mle", maxent_length_normalize_policy=False).as_json()["maxent"]
    assert sums == {
        "objective": "weighted_mle",
        "tau": OBJECTIVES["weighted_mle"].tau,
        "beta": 0.0,
        "loss_type": "dr_grpo",
        "ratio": "4.85e+08 times",
    }
    plan = planned(flags=["--maxent_objective", "tempered", "--maxent_tau", "inf"])
    assert (
        f"objective  tempered, tau inf, loss_type dr_grpo; {weight.format('1 times')}" in format_plan(plan).splitlines()
    )
    varied = planned(environment={"MAXENT_TAU": "0.125"}, maxent_objective="tempered")
    line = f"objective  tempered, tau 0.125, loss_type dr_grpo; {weight.format('2.98e+03 times')}"
    assert line in format_plan(varied).splitlines()
    facts = json.loads(json.dumps(plan.as_json(), allow_nan=False))["maxent"]
    assert facts == {"objective": "tempered", "tau": "inf", "beta": None, "loss_type": "dr_grpo", "ratio": "1 times"}
    plan = planned()
    assert (plan.task, plan.entry, plan.maxent) == ("grpo", "src/grpo.py", None) and "objective" not in format_plan(
        plan
    )


def test_a_launch_says_what_is_optimised(
    planned: Callable, read: Callable[..., Recipe], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = new_run(tmp_path / "runs" / "mine-stamp", "mine", "stamp", Resources("cpu", (), 2, None).facts())
    assert run is not None
    for keys, count in (({"maxent_objective": "weighted_mle", "maxent_tau": 0.2, "maxent_beta": 0.5}, 1), ({}, 0)):
        plan = planned(**keys)
        names = Names(run.folder, "mine", "mine-abcd", "stamp")
        print_start(Attempt(run, read(**keys), plan, names, Scratch(tmp_path, tmp_path), {}, "", workers=None))
        told = capsys.readouterr().out
        assert (
            told.count("grpo: objective weighted_mle, tau 0.2, maxent_beta 0.5, loss_type grpo; with rewards") == count
        )
        assert told.count("objective weighted_mle") == count


@on_cpu
@pytest.mark.parametrize(
    ("words", "variables", "recipe", "task"),
    [
        ([], {}, "grpo.yaml", "grpo"),
        ([], {"MAXENT": "1"}, "maxent.yaml", "maxent"),
        ([], {"TRAIN_ENTRYPOINT": "src/maxent-grpo.py"}, "maxent.yaml", "maxent"),
        (["--task", "maxent"], {}, "maxent.yaml", "maxent"),
        ([str(SMOKE / "maxent.yaml")], {}, "maxent.yaml", "maxent"),
        ([str(SMOKE / "grpo.yaml")], {"MAXENT": "1", "MAXENT_OBJECTIVE": "maxrl"}, "grpo.yaml", "maxent"),
    ],
)
def test_commands_agree_on_the_task(
    nothing_set: None,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
    variables: dict[str, str],
    recipe: str,
    task: str,
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert cli.main(["plan", *words, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert (Path(plan["recipe"]).name, plan["task"]) == (recipe, task)
    assert (plan["maxent"] is not None) == (task == "maxent")
    assert cli.main(["launch", "--dry-run", *words]) == 0
    assert f"/{recipe} ({task}, src/{'maxent-grpo' if task == 'maxent' else 'grpo'}.py)" in capsys.readouterr().out
    assert cli.main(["check", *words]) == 0 and recipe in capsys.readouterr().out


@on_cpu
def test_maxent_trains_the_smoke_recipe_of_grpo(
    nothing_set: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """M11: check, plan and launch accept a GRPO recipe with MAXENT=1, and print which objective is used."""
    monkeypatch.setenv("MAXENT", "1")
    for words in (["check"], ["plan"], ["launch", "--dry-run"]):
        assert cli.main([words[0], str(SMOKE / "grpo.yaml"), *words[1:]]) == 0
        assert "selects maxent_objective: listwise; the evidence recommends no" in capsys.readouterr().out


@on_cpu
@pytest.mark.parametrize("command", ["check", "plan", "launch", "fetch", "doctor", "check-rewards"])
def test_every_command_refuses_a_maxent_recipe_with_maxent_off(
    nothing_set: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.setenv("MAXENT", "0")
    assert cli.main([command, str(SMOKE / "maxent.yaml")]) == 2
    told = capsys.readouterr()
    assert f"MAXENT: requests GRPO, but {SMOKE}/maxent.yaml:5 requests MaxEnt-GRPO" in told.out + told.err


@pytest.mark.parametrize("task", ["grpo", "maxent"])
def test_a_resumed_run_keeps_its_task(
    nothing_set: None, capsys: pytest.CaptureFixture[str], tmp_path: Path, task: str
) -> None:
    run = new_run(tmp_path / "runs" / "mine-stamp", "mine", "stamp", Resources("cpu", (), 2, None).facts())
    assert run is not None
    smoke = "model_name_or_path: smoke:sums\ndataset_name: smoke:sums\nprompts_per_step: 4\n"
    objective = "# MAXENT\nmaxent_objective: tempered\n" if task == "maxent" else ""
    lines = "".join(f"# x.yaml:1\n{line}\n" for line in smoke.splitlines())
    (run.folder / "recipe.yaml").write_text(objective + lines)
    write_json(run.folder / "plan.json", {"task": task, "entry": "src/mine.py"})
    resume = ["launch", "--resume", str(run.folder), "--allow-changed-code", "--dry-run"]
    other = "maxent" if task == "grpo" else "grpo"
    assert cli.main([*resume, "--task", other]) == 2
    assert "a resumed run keeps its task" in capsys.readouterr().err
    assert cli.main([*resume, "--use_vllm", "false"]) == 0
    assert f"({task}, src/mine.py)" in capsys.readouterr().out


@on_cpu
def test_the_last_run_is_resumed_with_keys_that_its_own_recipe_reads(
    nothing_set: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run = new_run(tmp_path / "runs" / "mine-stamp", "mine", "stamp", Resources("cpu", (), 2, None).facts())
    assert run is not None
    (run.folder / "recipe.yaml").write_text(read_recipe(SMOKE / "maxent.yaml").as_yaml())
    write_json(run.folder / "plan.json", {"task": "maxent", "entry": "src/maxent-grpo.py"})
    resume = ["launch", "--resume", "last", "--allow-changed-code", "--dry-run"]
    assert cli.main([*resume, "--maxent_tau", "0.3"]) == 0
    assert "objective  listwise, tau 0.3" in capsys.readouterr().out
    monkeypatch.setenv("MAXENT_TAU", "0.4")
    assert cli.main(resume) == 0
    assert "objective  listwise, tau 0.4" in capsys.readouterr().out
    assert cli.main([*resume, "--maxent_utilty", "advantage"]) == 2
    assert capsys.readouterr().err.splitlines() == [
        "grpo: --maxent_utilty: unknown key 'maxent_utilty'. Fix: write --maxent_utility advantage"
    ]
