"""`grpo sweep --search optuna`: ranges, the results that Optuna gets, and how a killed search resumes."""

from __future__ import annotations

import importlib.util
import json

import pytest

from console.sweep.conftest import SMOKE
from grpo_recipes import cli
from grpo_recipes.console.sweep.folder import read_metric_value
from grpo_recipes.console.sweep.run import SignalForwarder
from grpo_recipes.console.sweep.search import STORAGE
from grpo_recipes.console.sweep.spec import Span, read_search_space
from grpo_recipes.errors import ConfigError
from grpo_recipes.recipe import read_frozen
from grpo_recipes.runs.rundir import read_json, write_json

optuna = pytest.importorskip("optuna", reason="EXTRAS=search bash scripts/setup.sh")
SPACE = ("learning_rate=log:1e-6..1e-3", "loss_type=grpo,dapo")
FOUR = ("--search", "optuna", "--trials", "4")


class Killed(BaseException):
    """Stands in for SIGKILL: the package does not catch it."""


@pytest.mark.parametrize(
    ("word", "axis", "span"),
    [
        ("learning_rate=1e-6..1e-4", ["1e-6", "1e-4"], Span(1e-6, 1e-4, log=False, whole=False)),
        ("learning_rate=log:1e-6..1e-4", ["1e-6", "1e-4"], Span(1e-6, 1e-4, log=True, whole=False)),
        ("init_kl_coeff=-1..1", ["-1", "1"], Span(-1.0, 1.0, log=False, whole=False)),
        ("max-steps=2..9", ["2", "9"], Span(2, 9, log=False, whole=True)),
        ("max_steps=1..3,7", ["1", "2", "3", "7"], None),
        ("beta=0,0.1", ["0", "0.1"], None),
        ("system_prompt=a..b,c", ["a..b", "c"], None),
    ],
)
def test_ranges_and_lists_are_read(word: str, axis: list[str], span: Span | None) -> None:
    axes, spans = read_search_space([word], [])
    ((key, values),) = axes.items()
    assert values == axis and spans == ({} if span is None else {key: span})


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("learning_rate=1e-4..1e-6", "1e-4 is not below 1e-6"),
        ("learning_rate=fast..1", "'fast..1' is not a range of numbers"),
        ("learning_rate=log:0..1", "a log scale needs numbers above 0"),
        ("learning_rate=0..inf", "0 is not below inf"),
        ("max_steps=0.5..2", "'0.5..2' is not a range of whole numbers"),
        ("seed=1..9", "finds only the luckiest seed"),
        ("sed=1..9", "unknown key 'sed'"),
        ("run_name=a,b", "is set by the sweep"),
    ],
)
def test_a_range_that_cannot_be_drawn_from_is_refused(word: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_search_space([word], [])


@pytest.fixture
def rewards(fake_launches, monkeypatch):
    """Give each run a final reward of 1000 times its learning rate. ``rewards["kill"] = 2`` kills trial 2."""
    faults = {"kill": None, "after": None, "fail": None}

    def fake_run(forwarder, argv, environment, log):
        from pathlib import Path

        folder, number = Path(argv[-1]), len(fake_launches.started)
        if faults["kill"] == number:
            fake_launches.started.append(folder.name)
            raise Killed
        fake_launches.codes[folder.name] = int(faults["fail"] == number)
        fake_launches.rewards[folder.name] = [1000 * read_frozen(folder / "recipe.yaml")["learning_rate"]] * 3
        code = fake_launches.run(forwarder, argv, environment, log)
        if faults["after"] == number:
            raise Killed
        return code

    monkeypatch.setattr(SignalForwarder, "run", fake_run)
    return faults


def load_study(sweep):
    storage = optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(str(sweep.folder / STORAGE)))
    return optuna.load_study(study_name=None, storage=storage)


def chosen_values(sweep) -> list[dict[str, str]]:
    return [trial["values"] for trial in sweep.record["cells"]]


def test_optuna_chooses_runs_and_hears_what_they_reached(sweep, read_sweeps, rewards, fake_launches, capsys):
    rewards["fail"] = 2
    assert sweep(*SPACE, *FOUR) == 1
    (saved_sweep,) = read_sweeps()
    assert len(set(fake_launches.started)) == 4 and saved_sweep.names == fake_launches.started
    trials = load_study(saved_sweep).trials
    states = [trial.state.name for trial in trials]
    assert states == ["COMPLETE", "COMPLETE", "FAIL", "COMPLETE"] and trials[2].value is None
    for index, trial in enumerate(trials):
        rate = read_frozen(saved_sweep.trial_dir(index) / "recipe.yaml")["learning_rate"]
        assert rate == pytest.approx(trial.params["learning_rate"], rel=1e-5) and 1e-6 <= rate <= 1e-3
        assert trial.value is None or trial.value == pytest.approx(1000 * rate)
        assert read_frozen(saved_sweep.trial_dir(index) / "recipe.yaml")["loss_type"] == trial.params["loss_type"]
    output = capsys.readouterr().out
    best = max((trial for trial in trials if trial.value), key=lambda trial: trial.value).number
    assert (
        f"highest reward of 3 trials: {trials[best].value:.3g}" in output
        and f"by {saved_sweep.names[best]} (a single seed" in output
    )
    assert f"grpo: not completed: {saved_sweep.names[2]} (failed)" in output and "go on with" not in output
    assert saved_sweep.is_over()


def test_a_search_that_ended_begins_anew_or_takes_more_trials(sweep, read_sweeps, rewards, fake_launches, monkeypatch):
    monkeypatch.setattr("grpo_recipes.console.sweep.folder.timestamp", lambda: str(len(fake_launches.started)))
    assert sweep(*SPACE, *FOUR) == 0
    assert sweep(*SPACE, "--search", "optuna", "--trials", "6") == 0
    (saved_sweep,) = read_sweeps()
    assert (
        len(fake_launches.started) == len(set(fake_launches.started)) == 6 and len(load_study(saved_sweep).trials) == 6
    )
    assert sweep(*SPACE, "--search", "optuna", "--trials", "6") == 0
    assert len(read_sweeps()) == 2 and len(fake_launches.started) == 12
    assert sweep("learning_rate=1e-6,1e-3", "loss_type=grpo,dapo") == 0  # the two ends are values, not a range
    assert len(read_sweeps()) == 3


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["kill", "after"])
def test_a_killed_search_goes_on_as_if_it_had_not_been(sweep, read_sweeps, rewards, fake_launches, capsys, moment):
    assert sweep(*SPACE, "--search", "optuna", "--trials", "14", "--name", "whole") == 0
    (whole,) = read_sweeps()
    fake_launches.started, rewards[moment] = [], 12  # from the 11th trial, the sampler uses earlier results
    with pytest.raises(Killed):
        sweep(*SPACE, "--search", "optuna", "--trials", "14", "--name", "killed")
    (killed,) = (saved for saved in read_sweeps() if saved.record["name"] == "killed")
    assert not killed.is_over() and len(fake_launches.started) == 13

    assert cli.main(["sweep", "--resume", str(killed.folder)]) == 2
    assert "run its command again" in capsys.readouterr().err
    rewards[moment] = None
    assert sweep(*SPACE, "--search", "optuna", "--trials", "14", "--name", "killed") == 0
    (killed,) = (saved for saved in read_sweeps() if saved.record["name"] == "killed")
    resumed = fake_launches.started[13:]
    assert resumed == killed.names[12:] if moment == "kill" else resumed == killed.names[13:]
    assert chosen_values(killed) == chosen_values(whole) and len({str(values) for values in chosen_values(whole)}) == 14
    assert [trial.value for trial in load_study(killed).trials] == [trial.value for trial in load_study(whole).trials]


def test_what_a_kill_left_half_done_is_put_right(sweep, read_sweeps, rewards, fake_launches):
    rewards["kill"] = 2
    with pytest.raises(Killed):
        sweep(*SPACE, *FOUR)
    (saved_sweep,) = read_sweeps()
    (saved_sweep.trial_dir(2) / "summary.json").unlink()  # killed while freezing the run
    record = read_json(saved_sweep.folder / "sweep.json")
    del record["cells"][1]["value"]  # Optuna stored it first
    write_json(saved_sweep.folder / "sweep.json", record)
    load_study(saved_sweep).ask()  # a proposal without a run
    rewards["kill"] = None
    assert sweep(*SPACE, *FOUR) == 0
    (saved_sweep,) = read_sweeps()
    assert saved_sweep.is_over() and fake_launches.started[3:] == saved_sweep.names[2:]
    assert [trial.state.name for trial in load_study(saved_sweep).trials] == ["COMPLETE"] * 3 + ["FAIL", "COMPLETE"]


def test_a_damaged_study_is_refused_and_left_alone(sweep, read_sweeps, rewards, capsys):
    rewards["kill"] = 1
    with pytest.raises(Killed):
        sweep(*SPACE, *FOUR)
    (saved_sweep,) = read_sweeps()
    text = "no JSON\n" + (saved_sweep.folder / STORAGE).read_text()
    (saved_sweep.folder / STORAGE).write_text(text)
    assert sweep(*SPACE, *FOUR) == 2
    assert f"{STORAGE}: damaged" in capsys.readouterr().err and (saved_sweep.folder / STORAGE).read_text() == text


@pytest.mark.parametrize(
    ("metric", "value"),
    [("reward", 0.5), ("eval_reward", 0.25), ("eval_pass@1", None), ("toy/pass@1", 0.75), ("toy/pass@2", None)],
)
def test_a_metric_is_the_last_of_the_run(tmp_path, metric, value):
    rows = [{"step": step, "reward": reward} for step, reward in enumerate([0.0, 0.0, 0.5, 0.5, 0.5, 0.5, 0.5], 1)]
    evaluations = [{"step": 1, "eval_reward": 0.9, "eval_pass@1": "nan"}, {"step": 2, "eval_reward": 0.25}]
    for name, lines in (("metrics", rows), ("eval", evaluations)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    write_json(tmp_path / "run.json", {"run_name": "x"})
    write_json(tmp_path / "summary.json", {"status": "completed", "benchmarks": {"toy": {"pass@1": 0.75}}})
    assert read_metric_value(tmp_path, metric) == value


def test_no_run_is_made_twice(sweep, read_sweeps, rewards, fake_launches, capsys):
    words = ("max_steps=2,3", "loss_type=grpo,dapo", *FOUR)
    assert sweep(*words) == 0
    assert len({json.dumps(values) for values in chosen_values(read_sweeps()[0])}) == len(fake_launches.started) == 4
    assert len(load_study(read_sweeps()[0]).trials) > 4  # some proposals repeat existing runs
    assert "go on with" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((*SPACE, "--search", "grid", "--trials", "4"), "--search: invalid choice: 'grid'"),
        ((*SPACE, "--search", "optuna"), "--search: needs the number of runs. Fix: add --trials N"),
        ((*SPACE, "--search", "optuna", "--trials", "0"), "--trials: expected 1 to 1,000, got 0. Fix: use 1 to 1,000"),
        ((*SPACE, "--search", "optuna", "--trials", "many"), "--trials: invalid int value"),
        ((*SPACE, *FOUR, "--slurm", "--profile", "cpu"), "--search: can't be combined with --slurm: each run depends"),
        ((*SPACE, *FOUR, "--metric", "eval_rewrd/"), "--metric eval_rewrd/"),
        (
            (*SPACE, *FOUR, "--metric", "accuracy"),
            "--metric accuracy: these runs have no such metric. Fix: use reward",
        ),
        ((*SPACE, *FOUR, "--metric", "math_500/pass@1"), "--metric math_500/pass@1: these runs have no such metric"),
        (
            (*SPACE, *FOUR, "--metric", "eval_reward", "--eval_strategy", "no"),
            "--metric eval_reward: the runs do not eval",
        ),
        (("loss_type=grpo,dapo", *FOUR), "--trials: 4 is more than the 2 combinations"),
        (("learning_rate=log:1e-6..1e-3",), "add --search optuna --trials N to search a range"),
        (("seed=1..2", "--trials", "4"), "--trials: does nothing without --search"),
        (("seed=1..2", "--metric", "reward"), "--metric: does nothing without --search"),
        (("seed=1..9", *FOUR), "seed=1..9: a search over seeds finds only the luckiest seed"),
        (("temperature=-1..1", *FOUR), "temperature"),
        (("--resume", "last", *FOUR), "--resume: a sweep continues with its recipe and keys"),
        (("cosine_max_len=100..200", *FOUR), "'cosine_max_len' changes nothing in any run"),
    ],
)
def test_a_search_that_cannot_be_is_refused_and_nothing_is_made(sweep, folder, capsys, words, message):
    assert sweep(*words) == 2
    assert message in capsys.readouterr().err
    assert list(folder.iterdir()) == []


def test_without_optuna_the_fix_is_named_and_nothing_is_made(sweep, folder, capsys, monkeypatch):
    real_find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *arguments: None if name == "optuna" else real_find_spec(name, *arguments),
    )
    assert sweep(*SPACE, *FOUR) == 2
    error = capsys.readouterr().err
    assert error == "grpo: --search optuna: Optuna is not installed. Fix: install it with: EXTRAS=search make setup\n"
    assert list(folder.iterdir()) == []


def test_changed_code_begins_no_new_trials(sweep, read_sweeps, rewards, capsys, monkeypatch):
    rewards["kill"] = 1
    with pytest.raises(Killed):
        sweep(*SPACE, *FOUR)
    monkeypatch.setattr("grpo_recipes.console.sweep.run.read_code_state", lambda: {"commit": "another"})
    assert sweep(*SPACE, *FOUR) == 2
    assert "the search needs new trials, and the code has changed since the sweep started" in capsys.readouterr().err


def test_a_dry_run_lists_and_makes_nothing(sweep, folder, capsys):
    assert sweep(*SPACE, *FOUR, "--dry-run") == 0
    output = capsys.readouterr().out
    assert "4 runs would start in runs/sweeps, chosen from:" in output
    assert "learning_rate=1e-6 to 1e-3" in output and "loss_type=grpo, dapo" in output
    assert cli.main(["sweep", SMOKE, "seed=1..2", "--dry-run"]) == 0
    assert "2 runs would start" in capsys.readouterr().out
    assert list(folder.iterdir()) == []
