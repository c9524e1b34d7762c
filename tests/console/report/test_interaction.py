"""The interactive parts of a report in a real browser: act as a reader and read values back."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from grpo_recipes.console.report.comparison import write_comparison
from grpo_recipes.console.report.pages import write_report
from grpo_recipes.console.sweep.folder import Sweep, write_sweep_page

from .synthetic_runs import game_samples, make_run, make_sweep, token_view, two_samples
from .test_browser import CHROMIUM, run_chromium

HERE = Path(__file__).parent
RUN_ACTIONS = ("crosshair", "zoom", "redraw", "smoothing", "legend", "keyboard", "pin", "filters", "copy", "sort")

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")


def interact(folder: Path, page: Path, actions: Sequence[str], width: int = 1400) -> dict[str, Any]:
    """Open a page in Chromium once for each of these functions of interactions.js, and return their results."""
    frames = [
        f'<iframe data-name="{name}" src="{page.as_uri()}" width="{width}" height="900"></iframe>' for name in actions
    ]
    outer = folder / "outer.html"
    probe = (HERE / "interaction_probe.html").read_text().replace("FRAMES", "".join(frames))
    outer.write_text(probe.replace("ACTIONS", (HERE / "interactions.js").read_text()))
    return run_chromium(folder, outer, budget=60_000)


def rows_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    cut = {**two_samples()[0], "completion": "3 times 12 is", "reward": None, "truncated": True, "advantage": 0.0}
    folder = make_run(
        tmp_path_factory.mktemp("interaction"), steps=61, summary={"resumed_at": [20]}, samples=[*two_samples(), cut]
    )
    write_report(folder)
    return folder


@pytest.fixture(scope="module")
def results(run: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return interact(tmp_path_factory.mktemp("browser"), run / "report.html", RUN_ACTIONS)


def test_the_crosshair_is_in_every_chart_and_reads_its_value(run: Path, results: dict[str, Any]) -> None:
    reading, row = results["crosshair"], rows_of(run)[30]
    around = [row["kl"] for row in rows_of(run)[28:33]]
    assert reading["charts"] == reading["cursors"] > 12
    (tip,) = reading["tips"]
    assert tip.splitlines()[0] == "step 31"
    value, raw = map(float, re.findall(r"KL divergence: (\S+), unsmoothed (\S+)", tip)[0])
    assert value == pytest.approx(sum(around) / 5, rel=1e-3) and raw == pytest.approx(row["kl"], rel=1e-3)
    assert reading["kl"] == f"{value:g} smoothed"
    assert float(reading["rate"]) == pytest.approx(row["learning_rate"], rel=1e-2)
    assert [re.sub(r"[\d.]+", "", entry) for entry in reading["legend"]] == ["training smoothed", "evaluation"]
    assert reading["cursor"] == "M1000 0v1000"
    assert reading["after"] == [0, "0"]


def test_a_drag_zooms_every_chart_and_a_double_click_resets_it(results: dict[str, Any]) -> None:
    assert results["zoom"] == {"across": ["35", "40", "45"], "clipped": "hidden", "resumed": "", "restored": True}


def test_smoothing_axis_and_logarithm_draw_the_charts_again(run: Path, results: dict[str, Any]) -> None:
    drawn, rows = results["redraw"], rows_of(run)
    assert drawn["output"] == "none" and drawn["raw"].count("L") == 60
    assert float(drawn["tip"].split(": ")[1]) == pytest.approx(rows[30]["entropy"], rel=1e-3)
    assert drawn["restored"] is drawn["linear"] is True
    assert drawn["axes"] == ["steps", "minutes", "tokens"]
    minutes = sum(row["seconds/step"] for row in rows) / 60
    title, tip = drawn["min"]
    assert title == "minutes in steps" and float(tip.split()[1]) == pytest.approx(minutes, rel=1e-3)
    assert drawn["tokens"] == ["tokens", "tokens 2,440,000"]
    pressed, ticks = drawn["log"]
    assert pressed == "true" and len(ticks) >= 3
    assert all(1.9 < float(high) / float(low) < 2.6 for low, high in itertools.pairwise(ticks))


def test_notes_bands_and_ticks_follow_the_smoothing(run: Path, results: dict[str, Any]) -> None:
    smoothing, rows = results["smoothing"], rows_of(run)
    means = "Lines are means over 5 steps around each point, fewer at the ends."
    texts = "Training rewards in texts and tables are means of 5 steps: the first, the last or the best."
    first = f"{means} Faint: single steps. {texts}"
    assert smoothing["notes"] == [first, f"Lines are not smoothed. {texts}", first]
    assert smoothing["isMoved"] is smoothing["restored"] is True
    value, low, high = map(float, re.findall(r"training: (\S+) \((\S+) to (\S+)\)", smoothing["tip"])[0])
    assert value == pytest.approx(rows[-1]["reward"], rel=1e-3)
    assert high - value == pytest.approx(rows[-1]["reward_std"], rel=1e-2) == value - low
    smooth, raw = smoothing["last"]
    assert smooth.endswith(" smoothed") and float(raw) == pytest.approx(rows[-1]["kl"], rel=1e-3)
    assert smoothing["across"] == ["1", "20", "40", "60"]
    count = sum(row["loss"] <= 0 for row in rows)
    assert smoothing["dropped"] == [True, f"{count} values of 0 or less not drawn on the log axis", True]


def test_a_legend_hides_a_curve_in_every_chart(results: dict[str, Any]) -> None:
    assert results["legend"] == {"moved": True, "hidden": [0, 0, "false"], "dots": 1, "only": ["format_tags"]}


def test_the_keyboard_reads_zooms_and_pins(results: dict[str, Any]) -> None:
    assert results["keyboard"] == {
        "steps": ["step 61", "step 60", "step 59", "step 1", "step 61"], "zoomed": ["10", "20", "30"],
        "pins": [1, None], "restored": True, "reachable": True, "named": True,
    }  # fmt: skip


def test_a_click_shows_the_completions_of_the_step(results: dict[str, Any]) -> None:
    assert results["pin"] == {
        "before": True,
        "first": [False, "Step 1", True, "3 times 12 is 36.\n\n<answer>36</answer>"],
        "next": [False, "Step 4", True],
        "middle": [False, "Step 30 (nearest to 31)", True],
        "closed": [True, 0],
        "listed": [True, ["1"]],
        "keyed": [False, True],
        "layers": ["step", "sample:", "score:", "update:", "sync:"],  # not "save:", whose last seconds are unknown
        "hint": "read a step and its completions.",
    }


def test_completions_are_filtered(results: dict[str, Any]) -> None:
    filtered, every = results["filters"], [3, 1, ""]  # without a filter, the slider's step
    assert filtered.pop("cleared") == [*every, "", True, True]
    assert filtered.pop("kinds") == ["all", "unscored", "clipped", "advantage above 0", "advantage below 0"]
    assert filtered == {
        "all": every, "restored": every,
        "unscored": [24, 24, "24 completions"], "clipped": [24, 24, "24 completions"],
        "positive": [24, 24, "24 completions"], "reward": [24, 24, "24 completions"],
        "step": [24, 8, "24 completions"], "both": [9, 9, "9 completions"],
    }  # fmt: skip


def test_commands_and_completions_are_copied(run: Path, results: dict[str, Any]) -> None:
    copied = results["copy"]
    command, completion = copied["copied"]
    assert re.fullmatch(rf"grpo \w+ {run}/recipe.yaml .*", command)
    assert completion == copied["text"] == "3 times 12 is 36.\n\n<answer>36</answer>"
    assert copied["label"] == "Copied"


def test_a_table_is_sorted_by_any_column(run: Path, results: dict[str, Any]) -> None:
    phases = ("sample", "score", "update", "sync", "save")
    seconds = {phase: sum(row[f"seconds/{phase}"] for row in rows_of(run)) for phase in phases}
    by_time = sorted(phases, key=seconds.__getitem__)
    assert results["sort"] == {
        "names": sorted(phases), "up": [by_time, "ascending", None], "down": [by_time[::-1], "descending"], "tables": 1,
    }  # fmt: skip


def test_a_comparison_hides_a_group_in_all_charts_shows_minutes_and_does_not_rank_unequal_steps(tmp_path: Path) -> None:
    runs = [
        make_run(tmp_path, f"sum-{name}-20261120-10150{seed}", steps=steps, seed=seed, lift=lift, recipe=recipe)
        for name, steps, lift, recipe in (
            ("low", 30, 0.2, {"beta": (0.1, "x.yaml:1")}), ("high", 80, 0.7, {"beta": (0.0, "x.yaml:1")}),
        )
        for seed in (1, 2)
    ]  # fmt: skip
    page = write_comparison(runs, tmp_path / "comparison.html")
    result = interact(tmp_path, page, ["comparison"])["comparison"]
    assert result["names"] == ["low (2 seeds)", "high (2 seeds)"]
    assert result["headline"] == "low (2 seeds) against high (2 seeds)"
    unranked = "different numbers of steps, so final rewards are not ranked. low (2 seeds): 30; high (2 seeds): 80."
    assert [text for text in result["warnings"] if text.endswith(unranked)], result["warnings"]
    assert [set(labels) for labels in result["hidden"]] == [{"high (2 seeds)"}] * 3
    (tip,) = result["tip"]
    minutes = [sum(row["seconds/step"] for row in rows_of(run)) / 60 for run in runs[:2]]
    assert float(tip.splitlines()[0].removeprefix("min ")) == pytest.approx(sum(minutes) / 2, rel=1e-3)
    assert [name[:3] for name in result["sorted"]] == ["low"] * 3 + ["hig"] * 3
    means = "Lines are means over 5 steps around each point, fewer at the ends."
    assert result["smoothing"] == [means, "5 steps", "Lines are not smoothed."]
    assert result["sections"][:3] == ["Differences", "Runs", "Curves"]


def test_a_run_without_a_step_takes_no_axis_from_the_others(tmp_path: Path) -> None:
    runs = [make_run(tmp_path, name, steps=steps) for name, steps in (("none", 0), ("some", 30))]
    axes = interact(tmp_path, write_comparison(runs, tmp_path / "comparison.html"), ["axes"])["axes"]
    minutes = sum(row["seconds/step"] for row in rows_of(runs[1])) / 60
    assert axes["axes"] == ["step", "min", "tokens"] and axes["step"] == ["step 30"]
    assert float(axes["min"][0].removeprefix("min ")) == pytest.approx(minutes, rel=1e-3)


@pytest.mark.parametrize("width", [390, 1400])
def test_cards_lead_to_a_step_and_a_prompt_stands_at_its_first_and_last_step(tmp_path: Path, width: int) -> None:
    run = make_run(tmp_path, steps=30)
    rows = [row | {"kl": 2.0 + row["step"] / 10, "always/same": 0.25} for row in rows_of(run)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    samples = [{**two_samples()[0], "prompt": "1 + 1", "completion": f"answer of step {step}"} for step in range(1, 31)]
    sampled = [{"step": step, "rewards": [0.5], "samples": [sample]} for step, sample in enumerate(samples, start=1)]
    (run / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in sampled))
    write_report(run)
    read_back = interact(tmp_path, run / "report.html", ["cards", "pair"], width)
    cards, pair = read_back["cards"], read_back["pair"]
    assert cards["linked"] == "KL divergence from step 1" and cards["tip"] == "step 1"
    assert cards["opened"][1] is cards["cursors"] is True
    assert "always/same 0.25" in cards["constant"] and cards["drawn"] == []
    assert (pair.pop("isBeside"), pair.pop("isBelow")) == (width == 1400, width == 390)
    assert pair == {
        "prompts": ["1 + 1"], "steps": ["Step 1", "Step 30"], "said": [["answer of step 1"], ["answer of step 30"]],
    }  # fmt: skip


def test_a_sweep_of_two_keys_has_a_heat_map_of_means(tmp_path: Path) -> None:
    sweep = make_sweep(tmp_path / "sweep", rates=("1e-6", "3e-6"))
    record = json.loads((sweep.folder / "sweep.json").read_text())
    record["axes"]["beta"] = ["0", "0.04"]
    for index, cell in enumerate(record["cells"]):
        cell["values"]["beta"] = ("0", "0.04")[index % 2]
    (sweep.folder / "sweep.json").write_text(json.dumps(record))
    page, _ = write_sweep_page(Sweep.read(sweep.folder))
    heat = interact(tmp_path, page, ["heat"])["heat"]
    assert heat["head"] == ["", "0", "0.04"] and [row[0] for row in heat["rows"]] == ["1e-6", "3e-6"]
    for rate, *shown in heat["rows"]:
        for beta, text in zip(("0", "0.04"), shown, strict=True):
            cells = [cell["name"] for cell in record["cells"] if cell["values"] | {"learning_rate": rate, "beta": beta}
                     == cell["values"]]  # fmt: skip
            ends = [[row["reward"] for row in rows_of(sweep.folder / "cells" / name)][-5:] for name in cells]
            assert float(text) == pytest.approx(sum(map(sum, ends)) / (5 * len(ends)), rel=5e-3)
    darkest = max(range(4), key=lambda index: float(heat["colors"][index]))
    values = [float(text) for row in heat["rows"] for text in row[1:]]
    assert darkest == values.index(max(values))


@pytest.mark.parametrize("width", [390, 1400])
def test_tokens_are_colored_and_read_by_pointer_and_keyboard(tmp_path: Path, width: int) -> None:
    right, wrong = two_samples()
    texts = ["\n", "3", " <b>&", "\x0e\\", "\u4e16\U0001f600", "</s>"]
    right |= token_view(texts, "4:2 2:0", "-0.1 -1 0 nan -2.3 -0.5")
    wrong |= {**token_view(["no", "</s>"], "2:-1"), "tokens": 900}
    run = make_run(tmp_path, steps=3, samples=[right, wrong])
    write_report(run)
    found = interact(tmp_path, run / "report.html", ["tokens"], width)["tokens"]
    first, second = found["folds"]
    assert 0 < found["width"] <= width
    assert (first["summary"], second["summary"]) == ("6 tokens", "First 2 of 900 tokens")
    assert first["legend"].startswith("Green: advantage above 0.") and "Gray: masked, not trained" in first["legend"]
    assert first["tokens"] == [*texts[:3], "\\x0e\\", *texts[4:]]
    assert (first["kinds"], second["kinds"]) == (["positive"] * 4 + [""] * 2, ["negative"] * 2)
    assert first["hovered"] == '"3" \u00b7 token 2 of 6 \u00b7 advantage +2 \u00b7 log-prob -1 (37 %)'
    third, fourth, again, end, home = first["keyed"]
    assert third == again and third.startswith('" <b>&"') and third.endswith("log-prob 0 (100 %)")
    assert fourth == '"\\x0e\\" \u00b7 token 4 of 6 \u00b7 advantage +2'  # vLLM gave no log-prob
    assert end.endswith("token 6 of 6 \u00b7 advantage 0 \u00b7 log-prob -0.5 (61 %)")
    assert home.startswith('"\\n" \u00b7 token 1 of 6') and first["marked"] == [0] and first["isReached"]
    assert second["hovered"].endswith("token 2 of 2 \u00b7 advantage -1")
    grounds = [first["grounds"][0], first["grounds"][4], second["grounds"][0]]
    assert len(set(grounds)) == 3 and grounds[1] == "rgba(0, 0, 0, 0)"
    strengths = [float(re.findall(r"[\d.]+", grounds[index])[-1]) for index in (0, 2)]
    assert strengths == pytest.approx([0.42, 0.26])  # the largest advantage of the prompt is the strongest
    assert found["copied"] == [6, home]


def test_tokens_of_an_environment_are_gray_and_not_trained(tmp_path: Path) -> None:
    (game,) = game_samples(2)
    game |= token_view(["[1]", "<|end|>", "\n", "user", "[2]"], "2:0.5 2:- 1:-0.5", "-1 -1 0 0 -1")
    run = make_run(tmp_path, steps=3, samples=[game])
    write_report(run)
    (fold,) = interact(tmp_path, run / "report.html", ["tokens"])["tokens"]["folds"]
    assert fold["kinds"] == ["positive", "positive", "masked", "masked", "negative"]
    assert fold["keyed"][:2] == [
        '"\\n" \u00b7 token 3 of 5 \u00b7 masked, not trained', '"user" \u00b7 token 4 of 5 \u00b7 masked, not trained'
    ]  # fmt: skip
    assert len({*fold["grounds"]}) == 3
