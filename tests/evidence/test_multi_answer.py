"""The experiment of evidence/multi_answer.py in small: task, exact metrics, statistics, and every part."""

from __future__ import annotations

import itertools
import json
import math
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from bench.scripts import script


@pytest.fixture(scope="module")
def bench() -> Iterator[ModuleType]:
    with script("multi_answer", folder="evidence") as module:
        yield module


@pytest.fixture(scope="module")
def task(bench: ModuleType) -> ModuleType:
    return sys.modules["multi_answer_task"]


def test_equations_have_several_answers_and_every_draw_splits_them_anew(task: ModuleType) -> None:
    for draw in range(8):
        parts = task.split(draw)
        assert [len(parts[part]) for part in ("trained on", "held out", "never seen")] == [16, 5, 5]
        assert len({equation for some in parts.values() for equation in some}) == 26
        for equation in parts["trained on"]:
            assert 4 <= len(equation.solutions) <= 10
            sign, shares = "+" if equation.sign > 0 else "-", equation.shares(draw)
            assert all(eval(f"{text[0]}{sign}{text[1]}") == equation.n for text in equation.solutions)
            assert math.isclose(sum(shares), 1.0) and max(shares) > 3 * min(shares)
    assert len({task.split(draw)["trained on"] for draw in range(8)}) == 8
    assert task.split(0)["held out"][0].shares(0) != task.split(0)["held out"][0].shares(1)


@pytest.mark.parametrize("tail", ["", "..."])
def test_the_reward_takes_any_right_answer_and_nothing_else(task: ModuleType, tail: str) -> None:
    texts = ["04", "22", "40", "41", "4", "404", "+4", "\u0662\u0662", "2 2"]
    answers = [text + tail for text in texts] + ["04.", "04...."]
    completions = [[{"role": "assistant", "content": text}] for text in answers]
    count = len(answers)
    rewards = task.right(completions, sign=[1] * count, n=[4] * count, tail=[tail] * count)
    assert rewards == [1.0, 1.0, 1.0] + [0.0] * 8


def test_metrics_are_the_expectation_over_8_samples(task: ModuleType) -> None:
    chances = {"a": 0.3, "b": 0.1, "wrong": 0.6}
    expected = dict.fromkeys(("mean@8", "pass@8", "distinct@8", "coverage@8"), 0.0)
    for draw in itertools.product(chances, repeat=8):
        right = [answer for answer in draw if answer != "wrong"]
        chance = math.prod(chances[answer] for answer in draw)
        expected["mean@8"] += chance * len(right) / 8
        expected["pass@8"] += chance * bool(right)
        expected["distinct@8"] += chance * len(set(right))
        expected["coverage@8"] += chance * len(set(right)) / 2
    scores = task.scores([0.3, 0.1])
    assert {name: scores[name] for name in expected} == pytest.approx(expected)
    assert scores["modes"] == pytest.approx(math.exp(-0.75 * math.log(0.75) - 0.25 * math.log(0.25)))


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [3, 6])
def test_measured_mass_is_what_the_model_samples(task: ModuleType, tokens: int) -> None:
    torch.manual_seed(0)
    tokenizer = task.smoke.build_tokenizer()
    model = task.smoke.build_model(tokenizer)
    equation = task.split(0)["trained on"][0]
    task._pretrain(model, tokenizer, task.Pretraining(steps=20 * (tokens - 2)), 0, tokens)
    chat = tokenizer.apply_chat_template([{"role": "user", "content": equation.prompt}], add_generation_prompt=True)
    prompt = torch.tensor([chat["input_ids"]])
    sampled = model.generate(prompt, do_sample=True, max_new_tokens=tokens, num_return_sequences=4000, top_k=0)
    texts = tokenizer.batch_decode(sampled[:, prompt.shape[1] :])
    end = "." * (tokens - 3) + task.smoke.END
    share = sum(text[2:] == end and equation.solved_by(text[:2]) for text in texts) / len(texts)
    mass = task.Measure((equation,), tokens)(model)["mean@8"]
    assert 0.005 < mass == pytest.approx(share, abs=4 * math.sqrt(mass / len(texts)))


def test_every_arm_is_tuned_with_as_many_settings(bench: ModuleType) -> None:
    grids = bench.grids()
    assert set(grids) == {bench.GRPO, *bench.report.BASELINES, bench.ENTROPY, *bench.report.CANDIDATES}
    for settings in grids.values():
        assert len({json.dumps(setting) for setting in settings}) == 18
        assert len({setting["learning_rate"] for setting in settings}) > 1
    assert len(list(bench.tuning())) == 18 * len(grids) * 3


def row(arm: str, curve: list[float], coverage: list[float], draw: int = 3, seed: int = 0, **keys: Any) -> dict:
    part = {"mean@8": curve, "coverage@8": coverage, "pass@8": coverage}
    curves = {"steps": [10 * at for at in range(len(curve))], "trained on": part, "never seen": part}
    return {"arm": arm, "draw": draw, "seed": seed, "keys": keys, "curve": curves}


def test_runs_are_read_where_their_reward_reaches_the_level(bench: ModuleType) -> None:
    run = row("GRPO", [0.4, 0.6, 0.8, 0.6, 0.9], [0.5, 0.4, 0.2, 0.9, 0.9])
    assert bench.report.at_level(run, "trained on", "coverage@8") == pytest.approx(0.3)
    assert bench.report.step_of_level(run) == pytest.approx(15)
    never = row("GRPO", [0.4, 0.6], [0.5, 0.4])
    assert bench.report.at_level(never, "trained on", "coverage@8") == 0
    assert bench.report.at_level(never, "never seen", "pass@8") == 0.4
    assert bench.report.step_of_level(never) == math.inf
    assert bench.report.at_level(row("GRPO", [0.7, 0.6], [0.5, 0.4]), "trained on", "coverage@8") == 0.5


def test_the_setting_with_the_most_coverage_at_the_level_is_chosen(bench: ModuleType) -> None:
    rows = [
        row("a", [0.4, 0.8], [0.5, end], draw, beta=beta) for beta, end in ((0.1, 0.3), (0.5, 0.4)) for draw in (0, 1)
    ]
    rows += [row("a", [0.4, 0.5], [0.9, 0.9], draw, beta=0.9) for draw in (0, 1)]
    # with more coverage, and a reward that another draw may keep below the level
    rows += [row("a", [0.4, end], [0.5, 0.5], draw, beta=1.5) for draw, end in enumerate((0.9, 0.79))]
    assert bench.report.chosen(rows) == {"a": {"beta": 0.5}}


def arms(ends: dict[str, Callable[[int, int], float]]) -> list[dict]:
    return [
        row(arm, [0.4, 1.0], [end(draw, seed)] * 2, draw, seed)
        for arm, end in ends.items()
        for draw in range(3, 8)
        for seed in range(8)
    ]


BASE = {"GRPO + KL": lambda draw, seed: 0.3 + draw / 50 + seed / 500, "MaxRL": lambda draw, seed: 0.3 + draw / 50}


def noise(draw: int, seed: int) -> float:
    return BASE["MaxRL"](draw, seed) + (-0.01 if (draw + seed) % 2 else 0.01)


def better(draw: int, seed: int) -> float:
    return 0.1 + noise(draw, seed)


def test_an_objective_earns_the_default_only_where_it_beats_both_baselines(bench: ModuleType) -> None:
    listwise, tempered = bench.report.CANDIDATES
    verdict = lambda **ends: bench.report.verdict(bench.report.contrasts(arms({**BASE, **ends})))  # noqa: E731
    assert verdict(**{listwise: better, tempered: noise}) == listwise
    assert verdict(**{listwise: noise, tempered: better}) == tempered
    assert verdict(**{listwise: better, tempered: better}) == listwise
    assert verdict(**{listwise: noise, tempered: noise}) is None
    assert verdict(**{listwise: lambda draw, seed: -0.1 + noise(draw, seed), tempered: noise}) is None


def test_a_default_is_what_both_reports_give(bench: ModuleType) -> None:
    listwise, tempered = bench.report.CANDIDATES
    ends = {**BASE, listwise: noise, tempered: noise}
    reports = [arms(ends | changes) for changes in ({}, {listwise: better}, {tempered: better})]
    nothing, first, second = bench.report.given_by(reports)
    assert (nothing, first, second) == (None, listwise, tempered)
    assert bench.report.settled([first, first]) == listwise
    for other in (nothing, second):
        assert bench.report.settled([first, other]) is bench.report.settled([other, first]) is None
    assert bench.report.settled([nothing, nothing]) is None


def test_readme_says_what_the_recorded_reports_settle(bench: ModuleType) -> None:
    recorded = [bench.report.rows_of(part) for part in bench.report.REPORTS]
    first, second = ({record["machine"]["cpu"] for record in rows} for rows in recorded)
    assert not first & second and recorded[0][0]["known_by"] == recorded[1][0]["known_by"]
    assert bench.report.settled(bench.report.given_by(recorded)) is None
    told = (Path(__file__).parents[2] / "README.md").read_text()
    assert "No objective is recommended" in " ".join(told.replace("**", "").split())


def test_more_coverage_at_the_price_of_what_was_never_seen_is_no_default(bench: ModuleType) -> None:
    listwise, tempered = bench.report.CANDIDATES
    rows = arms({**BASE, listwise: lambda draw, seed: 0.6, tempered: BASE["MaxRL"]})
    for record in rows:
        if record["arm"] == listwise:
            record["curve"]["never seen"] = {"pass@8": [0.1, 0.1]}
    assert bench.report.verdict(bench.report.contrasts(rows)) is None


def test_intervals_widen_with_the_spread_between_draws(bench: ModuleType) -> None:
    report = bench.report
    seeds = np.linspace(-0.1, 0.1, 8)
    alike = np.tile(0.2 + seeds, (5, 1))
    apart = alike + np.array([-0.3, -0.1, 0.0, 0.1, 0.3])[:, None]
    narrow, wide = report.interval(alike), report.interval(apart)
    assert narrow["mean"] == pytest.approx(wide["mean"])
    assert wide["high"] - wide["low"] > 3 * (narrow["high"] - narrow["low"])
    # of means of independent draws: the normal interval
    assert narrow["high"] - narrow["low"] == pytest.approx(2 * 1.96 * seeds.std() / 40**0.5, rel=0.1)


def test_contrasts_are_corrected_in_holms_order(bench: ModuleType) -> None:
    report = bench.report
    listwise, tempered = report.CANDIDATES
    near = lambda draw, seed: BASE["MaxRL"](draw, seed) + seed / 90 - 0.03  # noqa: E731
    rows = arms({**BASE, listwise: lambda draw, seed: 0.9 + seed / 100, tempered: near})
    contrasts = report.contrasts(rows)
    for index, contrast in enumerate(contrasts):
        at = partial(report._at, report.PRIMARY[contrast["measure"]])
        difference = report.values_of(rows, contrast["arm"], at) - report.values_of(rows, contrast["minus"], at)
        expected = report.interval(difference, 0.05 / (6 - index))
        assert {name: contrast[name] for name in expected} == expected, index
        assert index == 5 or expected != report.interval(difference), "wider than without the correction"
    assert contrasts[0]["clear"] and not contrasts[-1]["clear"]


def test_what_is_clear_of_0_at_5_percent_alone_is_not_clear_among_six(bench: ModuleType) -> None:
    report = bench.report
    noise = np.random.default_rng(1).normal(size=(5, 8))
    noise = (noise - noise.mean()) / noise.std()
    small = 0.0037 + 0.01 * noise  # 2.3 standard errors from 0
    small -= (small.mean(1) - small.mean())[:, None]  # which are those of the seeds alone
    assert report.interval(small)["low"] > 0 > report.interval(small, 0.05 / 6)["low"]
    name = report.CANDIDATES[0]
    ends = {
        **BASE,
        name: lambda draw, seed: BASE["MaxRL"](draw, seed) + small[draw - 3, seed],
        "tempered": BASE["MaxRL"],
    }
    contrasts = {(row["arm"], row["minus"]): row for row in report.contrasts(arms(ends))}
    of = contrasts[name, "MaxRL"]
    assert not of["clear"]


def test_five_draws_that_differ_are_no_evidence_though_a_bootstrap_of_them_is_clear(bench: ModuleType) -> None:
    report = bench.report
    name = report.CANDIDATES[0]
    of_draw = {3: 0.01, 4: 0.3, 5: 0.02, 6: 0.01, 7: 0.25}
    ends = {**BASE, name: lambda draw, seed: BASE["MaxRL"](draw, seed) + of_draw[draw], "tempered": BASE["MaxRL"]}
    contrasts = {(row["arm"], row["minus"]): row for row in report.contrasts(arms(ends))}
    of = contrasts[name, "MaxRL"]
    assert of["low"] > 0 > of["t_low"] and not of["clear"]
    assert [round(report.t_quantile(1 - 0.025 / k), 3) for k in (1, 6)] == [2.776, 4.851]


def test_runs_of_two_settings_of_an_arm_are_refused(bench: ModuleType) -> None:
    rows = [row("a", [0.4, 0.8], [0.5, 0.5], seed=0, beta=0.1), row("a", [0.4, 0.8], [0.5, 0.5], seed=1, beta=0.2)]
    with pytest.raises(ValueError, match="a has runs of several settings"):
        bench.report.values_of(rows, "a", bench.report.step_of_level)


def test_the_report_waits_for_the_whole_tuning_and_a_record_holds_the_protocols_steps(
    bench: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench.report, "rows_of", lambda _: [])
    with pytest.raises(SystemExit):
        bench.report_arms()
    assert "0 of the tuning's 324 runs are recorded; run its rest first" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", ["multi_answer.py", "tuning", "--steps", "2"])
    with pytest.raises(SystemExit):
        bench.main()
    assert "--steps makes runs that are not the protocol's; name another file with --out" in capsys.readouterr().err


@pytest.mark.parametrize(
    "part",
    [pytest.param(part, marks=pytest.mark.slow) for part in ("report", "lengths", "graph")] + ["tuning"],
)
def test_each_part_in_small_and_where_it_was_stopped(
    bench: ModuleType, task: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    monkeypatch.setenv("CACHE_ROOT", str(tmp_path))
    plan = task.Pretraining(steps=2)
    monkeypatch.setattr(task, "Pretraining", lambda: plan)
    graphs = sys.modules["graph_task"]
    small = graphs.Pretraining(steps=2)
    monkeypatch.setattr(graphs, "Pretraining", lambda: small)
    for name, value in {"per_device_train_batch_size": 16, "num_generations": 8}.items():
        monkeypatch.setitem(bench.SETTINGS, name, value)
        monkeypatch.setitem(graphs.KEYS, name, value)
    tuned = [row(arm, [0.4, 0.8], [0.5, 0.5], **keys) for arm, some in bench.grids().items() for keys in some]
    monkeypatch.setattr(bench.report, "rows_of", lambda _: 3 * tuned)
    out = tmp_path / "rows.jsonl"
    for runs in ("1", "2"):
        monkeypatch.setattr(
            sys, "argv", ["multi_answer.py", part, "--steps", "2", "--workers", "1", "--out", str(out), "--runs", runs]
        )
        bench.main()
    rows = bench.report.read(out)
    jobs = itertools.islice(bench.PARTS[part](), 2)
    assert [record["known_by"] for record in rows] == [list(job.known_by) for job in jobs]
    for record in rows:
        assert record["curve"]["steps"] == [0, 2] and record["commit"] and record["cpu_seconds"] > 0
        assert all(len(values) == 2 for values in record["curve"]["trained on"].values())


@pytest.mark.slow
@pytest.mark.parametrize("part", ["report", "replication", "lengths", "graph"])
def test_the_first_steps_of_a_recorded_run_come_out_again(bench: ModuleType, part: str) -> None:
    """From an equal model of the start, all numbers are equal, up to rounding of the last digit.

    On another processor, sums differ in their last bits, and samples soon after. Then rewards are nearly the same.
    """
    row = bench.report.rows_of(part)[0]
    job = bench.Job(*(row[name] for name in ("part", "arm", "keys", "seed", "draw", "tokens")))
    curve, recorded = bench.run(job, bench.STEPS[job.part] // 4)["curve"], row["curve"]
    steps = len(curve["steps"])
    assert curve.keys() == recorded.keys() and curve["steps"][:-1] == recorded["steps"][: steps - 1] and steps > 3
    starts = [{name: of[name][0] for name in of} for of in (curve["trained on"], recorded["trained on"])]
    if starts[0] == starts[1]:
        for name in curve.keys() - {"steps"}:
            for metric, values in recorded[name].items():
                expected = pytest.approx(values[: steps - 1], abs=1.5e-4)
                assert curve[name][metric][: steps - 1] == expected, (row["known_by"], name, metric)
    assert curve["trained on"]["mean@8"] == pytest.approx(recorded["trained on"]["mean@8"][:steps], abs=0.1)


def test_a_table_waits_for_all_runs_of_the_protocol(bench: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    tuned = [row(arm, [0.4, 0.8], [0.5, 0.5], **keys) for arm, some in bench.grids().items() for keys in some]
    report = bench.report
    monkeypatch.setattr(report, "rows_of", lambda _: 3 * tuned)
    counts = {part: len(list(jobs())) for part, jobs in bench.PARTS.items()}
    assert counts | {"replication": counts["report"]} == report.RUNS
    monkeypatch.setattr(report, "rows_of", lambda _: tuned)
    assert (
        report.TABLES["tuning"]() == "*108 of 324 runs are recorded so far; the table follows with the last of them.*"
    )
    assert report.figures() == []
    monkeypatch.setattr(report, "rows_of", lambda _: tuned * 3)
    lines = report.TABLES["tuning"]().splitlines()
    assert len(lines) == 2 + len(bench.grids()) and all("0.500 | 54 |" in line for line in lines[2:])


def test_every_table_and_figure_is_made_from_rows_such_as_the_runs_leave(
    bench: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = bench.report
    parts = ("trained on", "held out", "never seen")
    metrics = {"mean@8": [0.4, 0.8], "pass@8": [0.9, 1.0], "coverage@8": [0.5, 0.3], "modes": [4.0, 2.0]}

    def made(part: str) -> list[dict]:
        lines = []
        for job in bench.PARTS[part]():
            curve = {"steps": [0, 80], **{place: metrics for place in parts}}
            lines.append(
                {
                    "arm": job.arm,
                    "keys": job.keys,
                    "seed": job.seed,
                    "draw": job.draw,
                    "tokens": job.tokens,
                    "curve": curve,
                    "machine": {"cpu": "a CPU"},
                }
            )
        return lines

    rows = {"tuning": made("tuning")}
    monkeypatch.setattr(report, "rows_of", lambda part: rows[part])
    rows |= {part: made(part) for part in ("report", "lengths", "graph")}
    rows["replication"] = rows["report"]
    tables = {name: table() for name, table in report.TABLES.items()}
    assert tables["contrasts"].startswith("No objective is clear of both baselines. Clearly more coverage: nothing.")
    assert tables["verdict"].startswith("**No objective earns the default**: both reports have to give it.")
    assert "| first | a CPU | none | 320 |\n| replication | a CPU | none | 320 |" in tables["verdict"]
    assert all(tables[f"replicated {name}"] == tables[name] for name in ("contrasts", "primary"))
    assert tables["contrasts"].count("| +0.000 [+0.000, +0.000] | [+0.000, +0.000] | 1.0000 | no | +0.000 |") == 6
    assert tables["primary"].count("| 0.350 [0.350, 0.350] | 0.975 [0.975, 0.975] | 60 | 40 of 40 |") == 8
    assert tables["ends"].count("| 0.800 | 0.300 | 2.000 | 0.800 | 1.000 | 0.300 | 1.000 |") == 8
    assert tables["lengths"].count("| 0.350 | 0.800 " * 3 + "|") == 6 and "30 tokens" in tables["lengths"]
    assert tables["graph"].count("0.800 [0.800, 0.800]") == 12
    drawn = report.figures()
    assert [name for name, _, _ in drawn] == ["maxent_multi_answer", "maxent_graph"]
    assert {line.label for line in drawn[0][1][0].lines} == set(report.SHOWN)
