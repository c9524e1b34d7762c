"""The comparison at the end: intervals over seeds, curves, and trials that did not complete."""

from __future__ import annotations

import errno
import fcntl
import math
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from console.report.synthetic_runs import make_sweep
from console.report.test_pages_run import Page
from grpo_recipes import cli
from grpo_recipes.console.sweep import folder
from grpo_recipes.console.sweep.folder import format_table, read_results, write_sweep_page
from grpo_recipes.errors import ConfigError
from grpo_recipes.runs.rundir import write_json


def finals(sweep, rate):
    return [
        sum(result.run.metrics.column("reward")[-5:]) / 5
        for result in read_results(sweep)
        if result.values["learning_rate"] == rate
    ]


def test_means_have_students_interval(tmp_path):
    sweep = make_sweep(tmp_path, seeds=(1, 2, 3, 4, 5))
    ends = finals(sweep, "3e-6")
    mean = sum(ends) / 5
    # 97.5 % point of Student's t with 4 degrees of freedom.
    half = 2.776 * math.sqrt(sum((end - mean) ** 2 for end in ends) / 4) / math.sqrt(5)
    *lines, last = format_table(sweep, read_results(sweep)).splitlines()
    (line,) = [line for line in lines if "3e-6 (5 seeds)" in line]
    assert last.startswith("learning_rate=3e-6 (5 seeds) ends highest, at reward")
    told, low, high = re.findall(r"(\d\.\d+) \(95 %: (\d\.\d+) to (\d\.\d+)\)", line)[0]
    assert float(told) == pytest.approx(mean, rel=1e-2)
    assert (float(high) - float(low)) / 2 == pytest.approx(half, rel=1e-1)


def test_the_text_table_has_every_trial(tmp_path):
    sweep = make_sweep(tmp_path, statuses={"learning_rate=1e-6,seed=2": "failed"})
    lines = format_table(sweep, read_results(sweep)).splitlines()
    assert lines[0].split() == ["learning_rate", "seed", "status", "steps", "reward", "evaluation"]
    assert lines[2].split()[:4] == ["1e-6", "2", "failed", "30"]
    assert "learning_rate=1e-6 (2 seeds)" in lines[9]  # the failed trial is not a sample


def test_without_seeds_there_are_no_means(tmp_path):
    sweep = make_sweep(tmp_path)
    sweep.record["axes"] = {"learning_rate": ["1e-6"]}
    assert "mean of" not in format_table(sweep, read_results(sweep))


def test_the_page_has_a_curve_and_a_band_for_each_setting(tmp_path):
    page, _ = write_sweep_page(make_sweep(tmp_path))
    text = page.read_text()
    parsed = Page(text)
    assert parsed.problems == []
    figures = re.findall(r"<figure.*?</figure>", text, re.DOTALL)
    (reward,) = [figure for figure in figures if ">Reward<" in figure]
    labels = re.findall(r'data-label="([^"]*)"', reward)
    assert labels == ["learning_rate=1e-6 (3 seeds)", "learning_rate=3e-6 (3 seeds)"]
    assert len(re.findall(r"<path class=\"faint[^\"]*\"", reward)) == 6  # each seed; no band of three
    assert "learning_rate=3e-6 (3 seeds) ends highest" in parsed.text
    assert "6 of 6 completed" in parsed.text


def test_what_did_not_complete_is_named_and_no_sample(tmp_path):
    statuses = {"learning_rate=1e-6,seed=2": "failed", "learning_rate=3e-6,seed=3": "running"}
    sweep = make_sweep(tmp_path, statuses=statuses)
    shutil.rmtree(sweep.trial_dir(0))
    text = Page(write_sweep_page(sweep)[0].read_text()).text
    assert "learning_rate=1e-6,seed=2 failed: a cause" in text
    assert "3 of 6 completed" in text
    assert "learning_rate=3e-6 (2 seeds)" in text and "learning_rate=1e-6 ends" not in text
    assert re.search(r"1e-61gone", text) and re.search(r"3e-63runninga cause", text)


def test_links_lead_to_the_reports_of_the_trials(tmp_path):
    sweep = make_sweep(tmp_path / "a sweep", seeds=(1, 2))
    (sweep.trial_dir(0) / "report.html").write_text("")
    text = write_sweep_page(sweep, tmp_path / "out.html")[0].read_text()
    links = set(re.findall(r'href="([^"#]*)"', text))  # in the list of trials, and in the table of runs
    (link,) = links
    assert link == "a%20sweep/cells/learning_rate%3D1e-6%2Cseed%3D1/report.html"


def test_a_sweep_of_which_nothing_has_run_has_a_page(tmp_path):
    statuses = {f"learning_rate={rate},seed={seed}": "submitted" for rate in ("1e-6", "3e-6") for seed in (1, 2, 3)}
    page = Page(write_sweep_page(make_sweep(tmp_path, statuses=statuses))[0].read_text())
    assert page.problems == [] and "No trial has completed yet." in page.text


def test_a_lock_that_is_held_is_waited_for_a_minute_and_none_is_no_obstacle(tmp_path, monkeypatch):
    sweep, waits = make_sweep(tmp_path), []
    monkeypatch.setattr(folder, "time", SimpleNamespace(sleep=waits.append))  # only in this module: threads sleep too
    with (sweep.folder / "page.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert write_sweep_page(sweep)[0].is_file() and waits == 60 * [1]

    def fake_no_locks(*_):
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr(folder, "fcntl", SimpleNamespace(**{**vars(fcntl), "flock": fake_no_locks}))
    assert write_sweep_page(sweep, tmp_path / "other.html")[0].is_file() and len(waits) == 60


def test_grpo_report_shows_the_same(tmp_path, capsys):
    sweep = make_sweep(tmp_path)
    assert cli.main(["report", str(tmp_path)]) == 0
    output = capsys.readouterr().out
    assert output == f"{format_table(sweep, read_results(sweep))}\ngrpo: {tmp_path}/sweep.html\n"
    assert cli.main(["report", str(tmp_path), "--out", str(tmp_path / "x.html")]) == 0
    assert (tmp_path / "x.html").is_file()


def test_a_sweep_that_is_removed_while_the_newest_is_looked_for_is_passed_over(tmp_path, monkeypatch):
    make_sweep(tmp_path / "there", seeds=(1,))
    records = [tmp_path / name / folder.RECORD for name in ("gone", "there")]
    monkeypatch.setattr(Path, "glob", lambda *_: records)
    assert folder.find_sweep(tmp_path, "last").folder == tmp_path / "there"


@pytest.mark.parametrize(
    ("key", "value"),
    [*((key, None) for key in ("name", "timestamp", "command", "fingerprint", "axes", "jobs", "cells")),
     ("cells", [3]), ("cells", [{"name": "a"}]), ("cells", [{"name": "a", "values": {"seed": "1"}}]),
     ("cells", [{"name": "a", "values": {"learning_rate": 1e-6, "seed": "1"}}])],
)  # fmt: skip
def test_a_record_that_lacks_a_part_is_damaged(tmp_path, key, value):
    sweep = make_sweep(tmp_path, rates=("1e-6",), seeds=("1",))
    assert folder.Sweep.read(sweep.folder).record == sweep.record
    partial_record = {name: part for name, part in sweep.record.items() if name != key}
    write_json(sweep.folder / folder.RECORD, partial_record if value is None else {**partial_record, key: value})
    with pytest.raises(ConfigError, match=rf"damaged: '{key}' has an unexpected value"):
        folder.Sweep.read(sweep.folder)
