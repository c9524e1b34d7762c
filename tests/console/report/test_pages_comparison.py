"""The page that compares runs: the best run, its margin, and differences."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from grpo_recipes.console.report.chart import Curve, make_curve
from grpo_recipes.console.report.comparison import (
    compare_groups,
    find_differing_keys,
    group_runs,
    make_comparison_headline,
    render_comparison_page,
    shorten_names,
    write_comparison,
)
from grpo_recipes.console.report.pages import render_run_page
from grpo_recipes.console.report.read import Group, Scored, read_run
from grpo_recipes.console.report.run_charts import METRICS, Metric, make_metric_chart
from grpo_recipes.stats import t_interval_half_width

from .synthetic_runs import make_run
from .test_pages_run import Page


def group_curve(group: Group, name: str) -> Curve:
    return make_curve([run.metrics for run in group.runs], name, group.label)


def runs_of(root: Path, *folders: dict[str, Any]) -> list[Any]:
    return [
        read_run(make_run(root, f"run{number}-20261120-10150{number}", **keys)) for number, keys in enumerate(folders)
    ]


def seeds(root: Path, name: str, count: int, **keys: Any) -> list[Any]:
    return [read_run(make_run(root, f"{name}-20261120-10150{seed}", seed=seed, **keys)) for seed in range(count)]


def test_runs_that_differ_in_their_seed_alone_are_one_group(tmp_path: Path) -> None:
    runs = seeds(tmp_path, "base", 3, steps=30) + seeds(
        tmp_path, "fast", 2, steps=30, recipe={"learning_rate": (2e-6, "--learning_rate")}
    )
    runs += runs_of(
        tmp_path, {"steps": 30, "recipe": {"run_root": ("elsewhere", "RUN_ROOT"), "beta": (0.0, "x.yaml:1")}}
    )
    groups = group_runs(runs)
    assert [group.label for group in groups] == ["base (3 seeds)", "fast (2 seeds)", "run0"]
    assert find_differing_keys(groups) == ["beta", "learning_rate", "run_root"]


def test_runs_with_the_same_seed_are_no_sample(tmp_path: Path) -> None:
    groups = group_runs(runs_of(tmp_path, {"steps": 5}, {"steps": 5}))
    assert [len(group.runs) for group in groups] == [1, 1]


def test_labels_are_never_the_same(tmp_path: Path) -> None:
    same = [read_run(make_run(tmp_path / place, steps=5)) for place in ("a", "b")]
    labels = [group.label for group in group_runs(same)]
    assert labels == ["a/math", "b/math"]
    later = read_run(make_run(tmp_path, "math-20261121-101500", steps=5))
    labels = [group.label for group in group_runs([same[0], later])]
    assert labels == ["20261120-101500", "20261121-101500"]


@pytest.mark.parametrize(
    ("names", "short"),
    [
        (["grpo-lr-1e-6-20261120-101500", "grpo-lr-3e-6-20261121-111500"], ["1e-6", "3e-6"]),
        (["grpo-lr-1e-6-20261120-101500", "grpo-lr-1e-5-20261121-111500"], ["1e-6", "1e-5"]),
        (["runs/a-20261120-101500", "runs/a-20261120-101501"], ["20261120-101500", "20261120-101501"]),
        (["math", "math-long"], ["math", "math-long"]),
        (["base", "other"], ["base", "other"]),
        (["same-20261120-101500"], ["same-20261120-101500"]),
        (["x_0.5", "x_0.75"], ["0.5", "0.75"]),
        (["learning_rate=1e-6,seed=1", "learning_rate=3e-6,seed=1"],) * 2,
        (["learning_rate=1e-6,seed=1", "learning_rate=1e-6,seed=2"], ["seed=1", "seed=2"]),
    ],
)
def test_names_lose_the_words_that_all_of_them_share(names: list[str], short: list[str]) -> None:
    assert shorten_names(names) == short


def test_few_seeds_are_drawn_one_by_one(tmp_path: Path) -> None:
    runs = seeds(tmp_path, "base", 4, steps=4)
    (group,) = group_runs(runs)
    curve = group_curve(group, "reward")
    assert curve.band is None
    assert list(curve.faint) == [run.metrics.column("reward") for run in runs]
    text = render_comparison_page(runs, tmp_path)
    assert text.count('<path class="faint"') >= 4 and "faint: single seeds" in text and "95 % interval" not in text
    assert f"seeds {min(group.finals):.3g} to {max(group.finals):.3g}" in text


def test_all_groups_are_smoothed_over_the_number_of_steps_that_the_page_shows(tmp_path: Path) -> None:
    runs = runs_of(tmp_path, {"steps": 30}, {"steps": 90, "recipe": {"beta": (0.0, "x.yaml:1")}})
    values = compare_groups(group_runs(runs), tmp_path)
    assert (values["window"], [clock.window for clock in values["clocks"]]) == (7, [7, 7])
    for title in ("Reward", "Reward by time"):
        (chart,) = (chart for chart in values["drawn"] if chart.title == title)
        for run, curve in zip(runs, chart.curves, strict=True):
            assert curve.line[10] == pytest.approx(sum(run.metrics.known("reward")[7:14]) / 7)
    text = Page(render_comparison_page(runs, tmp_path)).text
    assert "Lines are means over 7 steps around each point, fewer at the ends." in text
    assert "Training rewards in texts and tables are means of 5 steps: the first, the last or the best." in text


def test_a_group_is_drawn_as_mean_and_interval_over_its_seeds(tmp_path: Path) -> None:
    runs = seeds(tmp_path, "base", 5, steps=4)
    (group,) = group_runs(runs)
    curve = group_curve(group, "reward")
    assert curve.band is not None
    at_two = [run.metrics.column("reward")[1] for run in runs]
    assert curve.x == [1, 2, 3, 4]
    assert curve.line[1] == pytest.approx(sum(at_two) / 5)
    low, high = curve.band[0][1], curve.band[1][1]
    assert low is not None and high is not None
    assert (high - low) / 2 == pytest.approx(t_interval_half_width(at_two))


def test_seeds_of_different_lengths_are_averaged_where_they_are(tmp_path: Path) -> None:
    runs = [read_run(make_run(tmp_path, f"base-20261120-10150{n}", seed=n, steps=4 + 2 * n)) for n in (0, 1)]
    (group,) = group_runs(runs)
    curve = group_curve(group, "reward")
    assert len(curve.line) == 6 and curve.line[5] == runs[1].metrics.column("reward")[5]
    assert curve.faint[0][3] is not None and curve.faint[0][5] is None


def test_a_long_group_is_thinned(tmp_path: Path) -> None:
    (group,) = group_runs(seeds(tmp_path, "base", 2, steps=1000))
    curve = group_curve(group, "entropy")
    assert 100 < len(curve.line) <= 240 and curve.x[-1] == 1000


def test_the_page_says_who_ends_highest_and_what_differs(tmp_path: Path) -> None:
    runs = seeds(tmp_path, "base", 2, steps=30)
    runs += runs_of(
        tmp_path,
        {"steps": 30, "lift": 0.7, "recipe": {"beta": (0.0, "x.yaml:1"), "max_grad_norm": (0.5, "x.yaml:2")}},
        {"steps": 30, "lift": 0.0, "recipe": {"beta": (0.1, "x.yaml:1")}, "summary": {"benchmarks": {}}},
    )
    page = Page(render_comparison_page(runs, tmp_path))
    assert page.problems == []
    pattern = (
        r"highest are not distinguishable with 1 and 2 seeds: run0 ends at reward 0\.8\d*, base \(2 seeds\) at 0\.6"
    )
    assert re.search(pattern, page.text) and "ends highest" not in page.text
    for name in ("Runs", "Curves", "Benchmarks", "Differences", "Evaluation reward", "Reward by time", "KL divergence",
                 "Entropy", "Completion length"):  # fmt: skip
        assert name in page.texts, name
    table = page.text[page.text.rindex("Differences") : page.text.rindex("Curves")]
    assert page.text.rindex("Differences") < page.text.rindex("Runs") < page.text.rindex("Curves")
    assert "beta0.0400.1" in table
    assert "max_grad_norm10.51" in table  # the default for runs that do not set it
    assert "learning_rate" not in table and "seed0" not in table
    assert re.search(r"base \(2 seeds\)0\.6\d* \(seeds [\d.]+ to [\d.]+\)0\.\d+ \(seeds", page.text)
    assert "51.2 % (46.8 to 55.6)" in page.text


def test_weights_of_maxent_runs_are_drawn_beside_each_other(tmp_path: Path) -> None:
    runs = seeds(tmp_path, "list", 2, steps=20, objective="listwise")
    runs += runs_of(tmp_path, {"steps": 20, "objective": "tempered"}, {"steps": 20})
    text = render_comparison_page(runs, tmp_path)
    figures = re.findall(r"<figure.*?</figure>", text, re.DOTALL)
    (ratio,) = [figure for figure in figures if "MaxEnt weight, right over wrong" in figure]
    lines = re.findall(r'data-label="([^"]*)"', ratio)
    assert lines == ["list (2 seeds)", "run0"]  # the last run uses GRPO and has no weights
    assert "infinite in 6 steps, not drawn" in ratio  # two of each
    for title in ("KL coefficient", "MaxEnt temperature", "MaxEnt pull to the reference", "MaxEnt weight entropy",
                  "Effective completions", "MaxEnt weight on wrong answers"):  # fmt: skip
        assert [figure for figure in figures if f">{title}<" in figure], title
    assert "trainermaxentmaxentgrpo" in Page(text).text


def test_runs_of_different_lengths_are_not_ranked(tmp_path: Path) -> None:
    text = Page(render_comparison_page(runs_of(tmp_path, {"steps": 30}, {"steps": 20, "lift": 0.0}), tmp_path)).text
    assert "different numbers of steps, so final rewards are not ranked. run0: 30; run1: 20." in text
    assert "run0 against run1" in text and "distinguishable" not in text and "ends highest" not in text
    assert "finished steps" not in text  # a result, not a difference between the settings


def test_smoke_tests_uncommitted_changes_and_single_seeds_are_told(tmp_path: Path) -> None:
    runs = runs_of(tmp_path, {"steps": 5}, {"steps": 5, "summary": {"smoke": True}})
    for run in runs:
        run.identity["code"]["dirty"] = True
    text = Page(render_comparison_page(runs, tmp_path)).text
    assert "Some runs are smoke tests, not experiments: run1." in text
    assert "All runs used code with uncommitted changes." in text
    assert "Each setting has one seed, so differences may be chance." in text
    text = Page(render_comparison_page(seeds(tmp_path, "base", 2, steps=5), tmp_path)).text
    assert "smoke" not in text and "uncommitted" not in text and "one seed" not in text


def test_the_columns_of_the_table_of_runs_are_explained(tmp_path: Path) -> None:
    page = Page(render_comparison_page(runs_of(tmp_path, {"steps": 30}, {"steps": 30}), tmp_path))
    assert re.search(r"0\.\d+ at step \d+", page.text)
    assert "reward: the means of the first and the last 5 steps. evaluation: the last evaluation's reward." in page.text
    assert "best: the highest mean reward of 5 steps in a row, and the last of these steps." in page.text


def test_a_metric_with_one_value_in_all_runs_is_a_line_of_text(tmp_path: Path) -> None:
    runs = runs_of(tmp_path, {"steps": 20}, {"steps": 20})
    for run in runs:
        run.metrics.columns["kl"] = [0.5] * 20
        run.metrics.columns["entropy"] = [float(run is runs[0])] * 20
    page = render_comparison_page(runs, tmp_path)
    assert ">KL divergence<" not in page and "The same in all runs: kl 0.5" in Page(page).text
    assert ">Entropy<" in page  # constant, but not the same


def test_equal_recipes_are_called_the_same(tmp_path: Path) -> None:
    text = Page(render_comparison_page(runs_of(tmp_path, {"steps": 5}, {"steps": 5}), tmp_path)).text
    assert "Recipes, trainer, code and devices are the same." in text


def test_other_code_and_other_batches_are_told(tmp_path: Path) -> None:
    runs = runs_of(tmp_path, {"steps": 5}, {"steps": 5})
    runs[1].identity["code"]["commit"] = "fedcba9876543210"
    runs[1].plan["batch"]["completions"] = 256
    text = Page(render_comparison_page(runs, tmp_path)).text
    assert "commit0123456789fedcba9876" in text
    assert "The runs have different numbers of completions per step: compare by time. run0: 512; run1: 256." in text


def test_unlike_rewards_are_told_and_not_ranked(tmp_path: Path) -> None:
    folder = make_run(tmp_path, "other-20261120-101501", steps=5)
    rows = (folder / "metrics.jsonl").read_text().replace("rewards/format_tags/", "rewards/cosine_length/")
    (folder / "metrics.jsonl").write_text(rows)
    text = Page(render_comparison_page([read_run(make_run(tmp_path, steps=5)), read_run(folder)], tmp_path)).text
    assert "The runs have different rewards, so their totals can't be compared." in text
    assert "math: pure_accuracy_math, format_tags; other: pure_accuracy_math, cosine_length" in text
    assert "ends highest" not in text

    weighted = {"steps": 5, "recipe": {"reward_weights": ([1.0, 0.5], "x.yaml:1")}}
    text = Page(render_comparison_page(runs_of(tmp_path, {"steps": 5}, weighted), tmp_path)).text
    assert "weighted [1.0, 0.5]" in text and "ends highest" not in text


def test_more_runs_than_colours_are_told_apart(tmp_path: Path) -> None:
    runs = runs_of(tmp_path, *[{"steps": 5, "recipe": {"beta": (0.01 * n, "x.yaml:1")}} for n in range(9)])
    groups = group_runs(runs)
    assert len({(group.colour, group.kind) for group in groups}) == 9
    assert re.search(r'class="curve c2" [^>]*data-kind="line dashed"', render_comparison_page(runs, tmp_path))


def test_a_run_named_twice_counts_once(tmp_path: Path) -> None:
    folder, other = make_run(tmp_path, steps=5), make_run(tmp_path, "other-20261120-101501", steps=5)
    page = write_comparison([folder, other, folder / ".." / folder.name], tmp_path / "out.html")
    assert "2 runs compared" in page.read_text()


def test_names_link_to_the_reports_of_the_runs(tmp_path: Path) -> None:
    folder, without_report = make_run(tmp_path, steps=5), make_run(tmp_path, "other-20261120-101501", steps=5)
    (folder / "report.html").write_text("")
    (tmp_path / "pages").mkdir()
    page = write_comparison([folder, without_report], tmp_path / "pages" / "out.html").read_text()
    assert set(re.findall(r'<a href="(\.\./[^"]*)"', page)) == {f"../{folder.name}/report.html"}
    assert (tmp_path / "pages" / f"../{folder.name}/report.html").is_file()


def test_a_run_without_rows_can_be_compared(tmp_path: Path) -> None:
    missing_files = ("metrics.jsonl", "eval.jsonl", "samples.jsonl")
    runs = runs_of(tmp_path, {"steps": 5}, {"steps": 1, "without": missing_files})
    page = Page(render_comparison_page(runs, tmp_path))
    assert page.problems == [] and "run1" in page.text


def test_time_is_minutes_in_steps(tmp_path: Path) -> None:
    runs = runs_of(tmp_path, {"steps": 5}, {"steps": 3})
    rows = [json.loads(line) for line in (runs[0].folder / "metrics.jsonl").read_text().splitlines()]
    minutes = sum(row["seconds/step"] for row in rows) / 60
    figures = re.findall(r"<figure.*?</figure>", render_comparison_page(runs, tmp_path), re.DOTALL)
    (figure,) = [text for text in figures if "Reward by time" in text]
    (xs,) = re.findall(r'<figure[^>]*data-x="([^"]*)"', figure)
    assert float(xs.split()[-1]) == pytest.approx(minutes, rel=1e-3)
    assert 'data-frame="0 ' in figure and 'data-xname="min"' in figure


@pytest.mark.parametrize("interval", [{}, {"pass@1_ci": None}])
def test_a_score_without_an_interval_is_shown_without(tmp_path: Path, interval: dict[str, Any]) -> None:
    scores = {"gsm8k": {"pass@1": 0.5, **interval}}
    run = read_run(make_run(tmp_path, steps=2, summary={"benchmarks": scores}))
    assert render_run_page(run, tmp_path / "report.html").count("50 %") >= 1
    assert render_comparison_page([run, run], tmp_path).count("50 %") >= 1


def test_scores_of_modebench_stand_beside_those_of_what_knows_nothing(tmp_path: Path) -> None:
    scores = {"pass@8": 0.5, "pass@8_ci": [0.4, 0.6], "distinct@8": 1.5, "distinct@8_ci": [1.25, 1.75], "problems": 9}
    guesser = {"pass@8": 0.283, "pass@8_ci": [0.2, 0.35], "distinct@8": 0.304, "distinct@8_ci": [0.25, 0.36]}
    result = {"modebench:countdown": {**scores, "baselines": {"random": guesser, "untrained": scores | guesser}}}
    run = read_run(make_run(tmp_path, steps=2, summary={"benchmarks": result}))
    single, both = (
        Page(render_run_page(run, tmp_path / "report.html")),
        Page(render_comparison_page([run, run], tmp_path)),
    )
    for page in (single, both):
        assert page.problems == []
        table = page.text[page.text.rindex("Benchmarks") :]
        assert "50 %" in table and "28.3 %" in table
    table = single.text[single.text.rindex("Benchmarks") :]
    assert "modebench:countdown, random guesserdistinct@80.3040.25 to 0.36" in table
    assert table.index("before training") > table.index("modebench:countdowndistinct@81.51.25 to 1.75")
    table = both.text[both.text.rindex("Benchmarks") :]
    assert "before training28.3 % (20 to 35)0.304 (0.25 to 0.36)random guesser28.3 % (20 to 35)" in table


def ends(label: str, *finals: float) -> Group:
    """Return a group of runs with these final rewards; single completions have rewards from 0 to 1."""
    runs = [SimpleNamespace(outcome=SimpleNamespace(last=end), scored=[Scored(1, [0.0, 1.0])]) for end in finals]
    return Group(label, runs)


@pytest.mark.parametrize(
    ("first", "second", "sentence"),
    [
        ((0.294, 0.9, 0.1), (0.141, 0.2, 0.1), "Not distinguishable with 3 seeds: A ends at reward 0.431 (seeds"),
        ((0.9,), (0.1,), "Not distinguishable with 1 seed: A ends at reward 0.9, B at 0.1."),
        ((0.9, 0.91, 0.92), (0.1, 0.25), "Not distinguishable with 3 and 2 seeds"),
        ((0.9, 0.91, 0.92), (0.1, 0.11, 0.12), "A ends highest, at reward 0.91 (seeds 0.9 to 0.92); next is B"),
        ((0.9, 0.99, 1.0, 0.8, 1.0), (0.1, 0.0, 0.0, 0.2, 0.0), "A ends highest, at reward 0.938 (95 %: 0.829 to 1);"),
    ],
)
def test_no_setting_wins_where_intervals_overlap(
    first: tuple[float, ...], second: tuple[float, ...], sentence: str
) -> None:
    assert make_comparison_headline([ends("B", *second), ends("A", *first)], ranked=True).startswith(sentence)


def test_intervals_end_where_the_metric_does(tmp_path: Path) -> None:
    folders = [make_run(tmp_path, f"base-20261120-10150{seed}", seed=seed, steps=6) for seed in range(6)]
    for seed, folder in enumerate(folders):
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        for row in rows:
            row |= {
                "completions/clipped_ratio": float(seed % 2),
                "reward": float(seed % 2),
                "entropy": 5.0 * (seed == 0),
            }
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        scored = json.dumps({"step": 1, "rewards": [0.0, 1.0]})
        (folder / "samples.jsonl").write_text(scored + "\n")
    (group,) = group_runs([read_run(folder) for folder in folders])
    for name, low, high in (("completions/clipped_ratio", 0, 1), ("reward", 0, 1), ("entropy", 0, math.inf)):
        chart = make_metric_chart([group], name, METRICS.get(name) or Metric("Reward"))
        assert chart is not None
        (band,) = [curve.band for curve in chart.curves]
        assert band is not None and min(band[0]) == low and max(band[1]) <= high, name
