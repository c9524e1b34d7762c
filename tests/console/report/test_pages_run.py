"""The page of a run shows the contents of the run's files for every ending."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import os
import re
import threading
import time
from html.parser import HTMLParser
from pathlib import Path

import pytest

from grpo_recipes.console.report.pages import try_write_report, write_report
from grpo_recipes.console.report.read import read_run
from grpo_recipes.console.report.run_charts import make_reward_chart
from grpo_recipes.runs.checkpoints import publish_checkpoint
from grpo_recipes.runs.rundir import NO_REQUEUE, write_json
from grpo_recipes.runs.trace import Trace

from .synthetic_runs import make_run

TIMES = "\u00d7"
NASTY = (
    "<script>alert(1)</script></style></pre><img src=x onerror=alert(1)>\"'`&amp; \x00 \x1b[31mred\x1b[0m "
    "\u202ereversed\u202c \u200b \ud800 \U000e0041 javascript:alert(1)"
)


class Page(HTMLParser):
    """Elements and texts of a page. ``problems`` lists closing tags without an opening tag."""

    def __init__(self, text: str):
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.problems: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        self.problems += self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in ("meta", "input", "br", "wbr"):
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        if not self._open or self._open.pop() != tag:
            self.problems.append(f"/{tag}")

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] not in ("script", "style"):
            self.texts.append(data)

    @property
    def text(self) -> str:
        return "".join(self.texts)


def page_of(folder: Path) -> Page:
    page = Page(write_report(folder).read_text(encoding="utf-8"))
    assert page.problems == []
    return page


def headings(page: Page) -> set[str]:
    return {attributes["id"] for tag, attributes in page.elements if tag == "section" and attributes.get("id")}  # type: ignore[misc]


def test_the_first_screen_says_that_a_run_learned_from_samples_of_older_weights(tmp_path: Path) -> None:
    page = page_of(make_run(tmp_path, recipe={"overlap_generation": (True, "x.yaml:3")}))
    assert re.search(r"over 60 steps, one step off-policy\.", page.text[: page.text.index("Curves")])


def test_the_first_screen_says_whether_it_worked(tmp_path: Path) -> None:
    page = page_of(make_run(tmp_path))
    first = page.text[: page.text.index("Curves")]
    assert "✓ completed" in first and "smoke" not in first
    assert re.search(r"Reward rose from 0\.2\d\d to 0\.6\d\d over 60 steps\.", first)
    assert "Training rewards in texts and tables are means of 5 steps: the first, the last or the best." in page.text
    assert "60 of 60" in first and "1 restart" in first and "9 min" in first and "512 completions per step" in first
    assert "Qwen/Qwen2.5-1.5B-Instruct" in first and "openai/gsm8k" in first and "0123456789" in first
    assert f"grpo, 7 {TIMES} cuda, completions from a vLLM server" in first and "2026-11-20 10:15" in first


@pytest.mark.parametrize(
    ("mode", "sampler"),
    [("colocate", "vLLM in the trainers"), ("transformers", "transformers"), ("external", "an external server")],
)
def test_the_first_screen_names_the_sampler(tmp_path: Path, mode: str, sampler: str) -> None:
    folder = make_run(tmp_path)
    plan = json.loads((folder / "plan.json").read_text())
    write_json(folder / "plan.json", plan | {"mode": mode})

    text = page_of(folder).text

    assert f"cuda, completions from {sampler}" in text[: text.index("Curves")]


def test_every_part_is_there(tmp_path: Path) -> None:
    page = page_of(make_run(tmp_path))
    assert headings(page) == {
        "next-steps", "curves", "rewards", "benchmarks", "completions", "time", "recipe", "plan", "versions", "files"
    }  # fmt: skip
    for title in (
        "Reward", "Single rewards", "KL divergence", "Entropy", "Completion length", "Clipped completions", "Loss",
        "Gradient norm", "Learning rate", "Server against trainer", "Unscored", "Seconds per step",
        "Reward of completions", "First against last",
    ):  # fmt: skip
        assert title in page.texts, title
    assert "<h3>tools/<wbr>calls</h3>" in (tmp_path / "math-20261120-101500/report.html").read_text()
    arithmetic = "64 prompts x 8 completions = 512 per step = 7 trainers x 8 per device x 8 accumulated"
    assert arithmetic.replace(" x ", f" {TIMES} ") in page.text
    assert "51.2 %" in page.text and "46.8 to 55.6 %" in page.text
    assert "Set by flag" in page.text and "--learning_rate" in page.text and "config_math.yaml:20" in page.text
    assert "API_KEY='********'" in page.text and "hush" not in page.text


def test_sampled_completions_stand_with_their_scores(tmp_path: Path) -> None:
    text = page_of(make_run(tmp_path)).text
    assert "Each step shows the best and the worst completions of two prompts. One was also in the first step" in text
    step = text[text.index("Step 60") :]
    assert "mean reward 0." in step and "over 64 completions" in step
    for part in ("A train has 3 cars", "Reference answer 36", "reward1.5", "advantage+0.932", "format_tags0.5",
                 "3 times 12 is 36.", "format_tagsno score", "\t3 + 12 = 15 \n<answer>15</answer>"):  # fmt: skip
        assert part in step, part


def test_a_chart_with_nothing_to_show_is_left_out(tmp_path: Path) -> None:
    folder = make_run(tmp_path, steps=5)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    edited_rows = [{**row, "completions/clipped_ratio": 0.0, "same": 3.0} for row in rows]
    (folder / "metrics.jsonl").write_text(
        "".join(json.dumps({k: v for k, v in row.items() if k != "kl"}) + "\n" for row in edited_rows)
    )
    page = page_of(folder)
    assert "KL divergence" not in page.text and "Clipped completions" not in page.text
    assert re.search(r"Constant: .*same 3", page.text)


def drawn(page: str) -> dict[str, str]:
    """Map the titles of a page's line charts to their figures."""
    figures = re.findall(r"<figure.*?</figure>", page.replace("<wbr>", ""), re.DOTALL)
    return {html.unescape(re.findall(r"<h3>(.*?)</h3>", figure)[0]): figure for figure in figures}


def values(figure: str) -> list[str]:
    (line,) = re.findall(r'data-y="([^"]*)"', figure)
    return line.split()


def test_the_weights_of_a_maxent_run_are_drawn(tmp_path: Path) -> None:
    folder = make_run(tmp_path, steps=10, objective="listwise")
    assert f"maxent (listwise), 7 {TIMES} cuda" in page_of(folder).text
    charts = drawn((folder / "report.html").read_text())
    assert values(charts["KL coefficient"])[-1] == "0.06"
    assert values(charts["MaxEnt temperature"])[-1] == "0.2"
    assert "MaxEnt pull to the reference" not in charts  # it never changes
    assert re.search(r"Constant: .*maxent/beta 1.5", Page((folder / "report.html").read_text()).text)
    assert values(charts["MaxEnt weight entropy"])[-1] == "1.1"
    assert 'data-band="1.12:2.07 ' in charts["MaxEnt weight entropy"]  # lowest to highest group
    assert "shaded: lowest to highest of a step" in charts["MaxEnt weight entropy"]
    assert values(charts["Effective completions"])[-1] == "3.004"
    assert values(charts["MaxEnt weight on wrong answers"])[-1] == "0.1"
    assert ">10 %<" in charts["MaxEnt weight on wrong answers"]  # a share
    assert values(charts["MaxEnt weight, right over wrong"])[-2:] == ["20", "-"]
    assert "infinite in 1 step, not drawn: no weight on wrong answers" in charts["MaxEnt weight, right over wrong"]
    assert "Notices" not in charts and "was inf or nan" not in (folder / "report.html").read_text()


def test_a_temperature_of_infinity_has_no_curve_and_is_told(tmp_path: Path) -> None:
    folder = make_run(tmp_path, steps=30, objective="tempered")
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rows = [{**row, "maxent/tau": "inf", "maxent/target_ratio": "nan", "maxent/beta": 0.0} for row in rows]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    page = page_of(folder)
    assert "MaxEnt temperature" not in page.texts and "MaxEnt pull to the reference" not in page.texts
    assert re.search(r"Constant: .*maxent/beta 0, maxent/target_ratio nan, maxent/tau inf", page.text)
    assert "maxent/target_ratio was inf or nan in 30 steps" in page.text and "maxent/tau was" not in page.text


@pytest.mark.parametrize(
    ("objective", "masses", "told"),
    [
        ("weighted_mle", [0.7] * 18 + [0.3] * 12, True),
        ("listwise", [0.7] * 18 + [0.3] * 12, True),
        ("listwise", [0.7] * 12 + [0.3] * 18, False),
        ("tempered", [0.7] * 30, False),  # it pushes away from wrong answers at any weight
    ],
)
def test_weight_on_wrong_answers_is_told(tmp_path: Path, objective: str, masses: list[float], told: bool) -> None:
    folder = make_run(tmp_path, steps=30, objective=objective)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rows = [{**row, "maxent/incorrect_mass": mass} for row, mass in zip(rows, masses, strict=True)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    notice = "More than half of the MaxEnt weight was on wrong answers in 60 % of the steps, and " + objective
    assert (notice in page_of(folder).text) == told


def test_no_metric_is_hidden(tmp_path: Path) -> None:
    folder = make_run(tmp_path, steps=30)
    text = write_report(folder).read_text().replace("<wbr>", "")
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    shown = {
        "step", "max_steps", "num_tokens", "loss", "grad_norm", "learning_rate", "reward", "reward_std", "kl",
        "entropy", "frac_reward_zero_std", "tokens_per_second", "rewards/pure_accuracy_math/mean",
        "rewards/format_tags/mean", "rewards/math_verify/no_verdict", "sampling/sampling_logp_difference/mean",
        *[key for key in rows[0] if key.startswith(("completions/", "seconds/")) and key != "seconds/step"],
    }  # fmt: skip
    for name in rows[0].keys() - shown:
        assert f">{name}<" in text, name


@pytest.mark.parametrize(
    ("summary", "parts"),
    [
        (
            {"status": "failed", "exit_code": 137, "failed_rank": 3, "cause": "killed by signal 9"},
            ["✕ failed", "Failed. Reward", "Exit code 137: killed by signal 9 (rank 3 failed first)",
             "Log of the trainer: logs/liv_train_math.log",
             "No complete checkpoint was saved: fix the cause, then start a new run: grpo launch "],
        ),
        (
            {"status": "stopped", "exit_code": 75, "cause": "stopped on request"},
            ["■ stopped", "Stopped. Reward", "Exit code 75: stopped on request"],
        ),
        (
            {"status": "requeued", "exit_code": 75, "cause": "stopped on request"},
            ["↻ requeued", "Waiting to continue. Reward"],
        ),
        ({"status": "running"}, ["● running", "Running. Reward"]),
        ({"smoke": True}, ["smoke test, not an experiment"]),
    ],
)  # fmt: skip
def test_how_it_ended_and_what_to_do(tmp_path: Path, summary: dict, parts: list[str]) -> None:
    text = page_of(make_run(tmp_path, steps=12, summary=summary)).text
    for part in parts:
        assert part in text, part


def test_a_stopped_run_names_grpo_stop_if_it_was_called(tmp_path: Path) -> None:
    cause = "stopped on request after step 12; checkpoint saved"
    folder = make_run(tmp_path, steps=12, summary={"status": "stopped", "exit_code": 75, "cause": cause})
    assert "grpo stop" not in page_of(folder).text
    (folder / NO_REQUEUE).touch()
    assert f"Exit code 75: {cause} (requested by grpo stop)" in page_of(folder).text


def test_with_a_checkpoint_a_failed_run_names_the_command_that_continues_it(tmp_path: Path) -> None:
    folder = make_run(tmp_path, steps=12, summary={"status": "failed", "exit_code": 1, "cause": "x"})
    (folder / "checkpoints").mkdir()
    staged = tmp_path / "checkpoint-10"
    staged.mkdir()
    publish_checkpoint(staged, folder / "checkpoints", 10, 1)
    assert f"grpo launch --resume {folder}" in page_of(folder).text


def test_a_run_that_runs_and_was_silent_for_long_is_told(tmp_path: Path) -> None:
    folder = make_run(tmp_path, steps=12, summary={"status": "running"})
    assert "may have been killed" not in page_of(folder).text
    hour_ago = time.time() - 3600
    os.utime(folder / "metrics.jsonl", (hour_ago, hour_ago))
    assert "No step for 1 h 00 min: it may have been killed" in page_of(folder).text


def test_a_run_that_runs_says_the_time_that_is_left(tmp_path: Path) -> None:
    folder = make_run(tmp_path, steps=100, summary={"status": "running"})
    lines = (folder / "metrics.jsonl").read_text().splitlines()[:50]
    lines[0] = json.dumps(
        {**json.loads(lines[0]), "seconds/step": 1e5}
    )  # the first step compiles kernels and is left out of the estimate
    (folder / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
    assert re.search(r"50 of 100.*33 min \d\d s per step, 7 min \d\d s left", page_of(folder).text)


def test_a_run_without_a_step_has_a_page(tmp_path: Path) -> None:
    missing_files = ("metrics.jsonl", "eval.jsonl", "samples.jsonl")
    folder = make_run(
        tmp_path, steps=1, summary={"status": "failed", "exit_code": 1, "cause": "no"}, without=missing_files
    )
    page = page_of(folder)
    assert "Failed. No step was finished." in page.text
    assert headings(page) == {"recipe", "plan", "versions", "files", "benchmarks"}


def test_a_single_evaluation_has_no_change(tmp_path: Path) -> None:
    folder = make_run(tmp_path)
    first_row = (folder / "eval.jsonl").read_text().splitlines()[0]
    (folder / "eval.jsonl").write_text(first_row + "\n")
    tile = page_of(folder).text.split("Evaluation")[1].split("Steps")[0]
    assert "1 evaluation" in tile and "→" not in tile


def test_the_best_evaluation_is_named(tmp_path: Path) -> None:
    folder = make_run(tmp_path)
    assert "; best" not in page_of(folder).text.split("Evaluation")[1].split("Steps")[0]
    assert "→" in page_of(folder).text.split("Evaluation")[1].split("Steps")[0]
    best = {"best_step": 1040, "best_eval_reward": 0.75, "evaluations_since_best": 2, "stopped_early": True}
    write_json(folder / "best.json", best)
    assert "evaluations; best 0.75 at step 1,040, stopped early" in page_of(folder).text
    write_json(folder / "best.json", {"best_step": 1040, "best_eval_reward": 0.75})  # without early_stopping_patience
    assert "evaluations; best 0.75 at step 1,040Steps" in page_of(folder).text


def test_a_change_within_the_noise_is_called_little(tmp_path: Path) -> None:
    assert "No clear trend in the reward, from" in page_of(make_run(tmp_path, lift=0.0)).text
    assert "Reward fell" in page_of(make_run(tmp_path, "down-20261120-101501", lift=-0.3)).text
    text = page_of(make_run(tmp_path, "short-20261120-101502", steps=2)).text
    assert re.search(r"Mean reward 0\.\d+ over 2 steps, too few for a trend\.\s+Mean reward0\.\d+Evaluation", text)


def test_what_is_worth_a_look_is_said(tmp_path: Path) -> None:
    folder = make_run(tmp_path, steps=30)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        row |= {
            "completions/clipped_ratio": 0.4,
            "frac_reward_zero_std": 0.9,
            "entropy": 2.0 if row["step"] < 9 else 0.01,
        }
    rows[4]["grad_norm"] = "nan"
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + "broken\n")
    text = page_of(folder).text
    for notice in ("40 % of completions are clipped at max_completion_length", "90 % of groups get one reward",
                 "Entropy fell from 2 to 0.01", "grad_norm was inf or nan in 1 step",
                 "1 line of metrics.jsonl could not be read"):  # fmt: skip
        assert notice in text, notice
    assert "Notices" not in page_of(make_run(tmp_path, "good-20261120-101501", steps=60)).text


def test_texts_of_models_cannot_do_anything(tmp_path: Path) -> None:
    sample = {"prompt": NASTY, "completion": NASTY, "answer": NASTY, "rewards": {NASTY: None}, "advantage": 1.0}
    folder = make_run(
        tmp_path,
        steps=3,
        samples=[sample],
        summary={"status": "failed", "cause": NASTY, "benchmarks": {NASTY: {"pass@1": 1}}},
        recipe={"system_prompt": (NASTY.replace("\ud800", ""), "x.yaml:1")},
    )
    page = page_of(folder)
    harmless = page_of(make_run(tmp_path, "plain-20261120-101501", steps=3, summary={"status": "failed"}))
    assert {tag for tag, _ in page.elements} <= {tag for tag, _ in harmless.elements}
    assert [tag for tag, _ in page.elements].count("script") == 1
    assert not [name for _, attributes in page.elements for name in attributes if name.startswith("on")]
    assert "<script>alert(1)</script></style></pre><img src=x onerror=alert(1)>" in page.text
    text = (folder / "report.html").read_text()
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b\u202a-\u202e\u2066-\u2069]", text)
    assert "\\x1b" in page.text and "U+202E" in page.text and "U+D800" in page.text


def test_long_texts_are_cut(tmp_path: Path) -> None:
    long = {"prompt": "p" * 20_000, "completion": "c" * 20_000, "answer": "a" * 20_000, "rewards": {"r": 1}}
    folder = make_run(tmp_path, steps=40, samples=[long] * 4)
    page = page_of(folder)
    assert "p" * 2500 + "… 17,500 more" in page.text and "p" * 2501 not in page.text
    assert (folder / "report.html").stat().st_size < 1_200_000


def test_texts_full_of_marks_do_not_make_a_large_page(tmp_path: Path) -> None:
    marks = {"prompt": "<", "completion": "<\x1b" * 2000, "rewards": {"r": 1}}
    folder = make_run(tmp_path, steps=40, samples=[marks] * 16)
    page = page_of(folder)
    assert "Step 40" in page.text and "Step 20" not in page.text
    assert (folder / "report.html").stat().st_size < 2_000_000


def test_five_thousand_steps_make_a_small_page_in_seconds(tmp_path: Path) -> None:
    folder = make_run(tmp_path, steps=5000)
    began = time.process_time()
    page = write_report(folder)
    assert time.process_time() - began < 15
    assert page.stat().st_size < 500_000
    assert "24 of 5,000 steps" in page.read_text() and "Step 5,000" in page.read_text()


def test_the_page_loads_nothing_and_its_policy_forbids_it(tmp_path: Path) -> None:
    text = write_report(make_run(tmp_path)).read_text()
    page = Page(text)
    assert not [attributes for _, attributes in page.elements if "src" in attributes or "style" in attributes]
    links = [attributes["href"] for _, attributes in page.elements if "href" in attributes]
    assert links and all(link and not re.match(r"\w+:|//", link) for link in links)
    assert "url(" not in text and "@import" not in text
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]*)"', text)
    for name in ("style", "script"):
        (inside,) = re.findall(rf"<{name}>(.*?)</{name}>", text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()
        assert f"{name}-src 'sha256-{digest}'" in html.unescape(policy)
    assert html.unescape(policy).startswith("default-src 'none'") and "unsafe" not in policy


def test_links_lead_to_files_beside_the_page(tmp_path: Path) -> None:
    folder = make_run(tmp_path, steps=3)
    beside = {a["href"] for _, a in page_of(folder).elements if "href" in a and not str(a["href"]).startswith("#")}
    assert {"metrics.jsonl", "recipe.yaml", "summary.json"} <= beside
    assert all((folder / str(name)).exists() for name in beside)
    elsewhere = Page(write_report(folder, tmp_path / "copy.html").read_text())
    assert all(str(a["href"]).startswith("#") for _, a in elsewhere.elements if "href" in a)


def test_the_report_at_the_end_of_a_run_never_fails_the_run(tmp_path: Path) -> None:
    folder = make_run(tmp_path, steps=3)
    assert try_write_report(folder) == f"report in {folder}/report.html"
    assert (folder / "report.html").exists()
    (folder / "plan.json").write_text('{"batch": 3, "processes": 4}')
    assert try_write_report(folder).startswith("report not written (")
    (folder / "plan.json").write_text("{")
    assert "is damaged" in try_write_report(folder)


@pytest.mark.parametrize(
    ("status", "reloads"), [("running", True), ("requeued", True), ("completed", False), ("failed", False)]
)
def test_the_page_of_a_run_that_goes_on_loads_itself_again(tmp_path: Path, status: str, reloads: bool) -> None:
    text = write_report(make_run(tmp_path, summary={"status": status})).read_text()
    (head, _) = text.split("<style>", 1)
    assert ('<noscript><meta http-equiv="refresh"' in head) == reloads
    assert bool(re.search(r'class="live" data-written="\d{10}"', text)) == reloads


def test_resumes_are_marked(tmp_path: Path) -> None:
    text = write_report(make_run(tmp_path, steps=60, summary={"resumed_at": [20, 40]})).read_text()
    (reward,) = [figure for figure in re.findall(r"<figure.*?</figure>", text, re.DOTALL) if ">Reward<" in figure]
    places = [int(place) for place in re.findall(r'class="resumed" data-step="\d+" d="M(\d+) 0v1000"', reward)]
    assert places == [round(2000 * (step - 1) / 59) for step in (20, 40)]
    assert "the run was resumed after step 20, 40" in Page(text).text
    assert 'class="resumed"' not in write_report(make_run(tmp_path / "other")).read_text()


def test_rewards_of_zero_or_one_have_a_standard_error(tmp_path: Path) -> None:
    folder = make_run(tmp_path, steps=10)
    rows = [json.dumps({"step": step, "rewards": [0.0, 1.0, 1.0, None, 0.0]}) for step in range(1, 11)]
    (folder / "samples.jsonl").write_text("\n".join(rows) + "\n")
    run = read_run(folder)
    chart = make_reward_chart(run)
    assert chart is not None and chart.curves[0].band is not None
    (low, *_), (high, *_) = chart.curves[0].band
    assert low is not None and high is not None
    assert (high - low) / 2 == pytest.approx(run.metrics.column("reward_std")[0] / 2)  # four completions have a score
    assert "shaded: ± one standard error of a step's mean" in chart.note
    wide = make_reward_chart(read_run(make_run(tmp_path / "other", steps=10)))
    assert wide is not None and "one standard deviation" in wide.note


def test_the_page_says_how_many_prompts_were_dropped(tmp_path: Path) -> None:
    folder, notice = make_run(tmp_path), "62 of 200 prompts were longer than max_prompt_length and dropped"
    (folder / "prompts.jsonl").write_text('{"step": 0, "said": [], "read": 200, "too_long": 0}\n')
    assert "and dropped" not in write_report(folder).read_text()
    (folder / "prompts.jsonl").write_text('{"step": 0, "said": [], "read": 200, "too_long": 62}\n')
    assert notice in write_report(folder).read_text()


def test_the_page_shows_which_rows_the_dataset_filter_keeps(tmp_path: Path) -> None:
    folder = make_run(tmp_path)
    assert "Training rows by" not in write_report(folder).read_text()
    values = [[0.0, 40, False], [0.5, 50, True], [1.0, 1200, False]]
    row = {"step": 0, "said": [], "filter_values": {"pass_rate": values}}
    (folder / "prompts.jsonl").write_text(json.dumps(row) + "\n")

    page = write_report(folder).read_text()

    assert "Training rows by pass_rate" in page
    assert "50 rows of 1,290 are in the range of dataset_filter" in page
    bars = re.findall(r'<td>([\d.]+)</td><td>([\d,]+)</td><td><svg[^>]*aria-label="([a-z ]+)"', page)
    assert bars == [("0", "40", "left out"), ("0.5", "50", "kept"), ("1", "1,200", "left out")]


def test_the_page_names_the_run_in_wandb(tmp_path: Path) -> None:
    folder = make_run(tmp_path)
    assert "W&amp;B" not in write_report(folder).read_text()
    write_json(folder / "tracked.json", {"wandb": "https://wandb.ai/team/maths/runs/abc"})
    assert '<a href="https://wandb.ai/team/maths/runs/abc" rel="noreferrer">' in write_report(folder).read_text()
    write_json(folder / "tracked.json", {"wandb": "javascript:alert(1)"})
    assert "javascript:" not in write_report(folder).read_text()


def test_a_page_that_is_being_written_does_not_take_the_place_of_the_last(tmp_path: Path, monkeypatch) -> None:
    from grpo_recipes.console.report import pages

    folder, begun, go_on = make_run(tmp_path, steps=2), threading.Event(), threading.Event()
    write = pages.write_report

    def slow(folder: Path) -> Path:
        page = pages.render_run_page(pages.read_run(folder), folder / "report.html")
        begun.set()
        go_on.wait(30)
        (folder / "report.html").write_text(page)
        return folder / "report.html"

    monkeypatch.setattr(pages, "write_report", slow)
    earlier = threading.Thread(target=try_write_report, args=(folder,))
    earlier.start()
    begun.wait(30)
    monkeypatch.setattr(pages, "write_report", write)
    summary = json.loads((folder / "summary.json").read_text())
    (folder / "summary.json").write_text(json.dumps({**summary, "status": "failed", "cause": "the last word"}))
    threading.Timer(0.2, go_on.set).start()
    assert try_write_report(folder).startswith("report in ")
    earlier.join()
    assert "the last word" in (folder / "report.html").read_text()


def test_a_run_on_groups_of_atropos_shows_where_they_came_from_and_how(tmp_path: Path) -> None:
    folder = make_run(tmp_path, steps=10)
    plan = json.loads((folder / "plan.json").read_text()) | {
        "data": {"kind": "groups", "text": "sums, maze; 8 sequences a batch"}
    }
    (folder / "plan.json").write_text(json.dumps(plan))
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        row |= {"atropos/wait_seconds": row["step"], "atropos/staleness_mean": row["step"] / 10}
        row["atropos/queue"] = 3.0 + row["step"]
        row |= {"atropos/stale": float(row["step"] == 10), "atropos/rejected": 0.0, "atropos/reward_sums": row["step"]}
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = page_of(folder).text
    charts = drawn((folder / "report.html").read_text())
    assert "Environmentsums, mazeTrainer" in text
    assert values(charts["Staleness"])[-1] == "1" and values(charts["Groups too old"])[-1] == "1"
    assert {"Wait for groups", "Queue of run-api", "atropos/reward_sums"} < charts.keys()
    assert "Groups rejected" not in charts  # there were none


def test_a_failed_reward_has_its_advice_on_the_page(tmp_path: Path) -> None:
    cause = "rank 0: RewardFailed: reward 'own.py:score' raised ValueError: no"
    folder = make_run(tmp_path / "my run", steps=3, summary={"status": "failed", "cause": cause})
    recipe = f"&#39;{folder}/recipe.yaml&#39;"  # quoted for the shell, because the path has a space
    edit = f"Fix own.py (not the run&#39;s copy) and test it with <code>grpo check-rewards {recipe}</code>"
    launch = f"which copies it again, since there is no checkpoint: <code>grpo launch {recipe}</code>"
    assert f"<p>{edit}, then start a new run, {launch}</p>" in write_report(folder).read_text()


def test_the_save_and_the_evaluation_after_the_last_step_count_in_the_time(tmp_path: Path) -> None:
    folder = make_run(tmp_path, steps=3)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        row["seconds/evaluate"] = 40.0 * (row["step"] == 3)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert "evaluations40.0 s" in page_of(folder).text
    trace = Trace("rank_0", folder)
    for name, start, end, step in (("evaluate", 0, 40, 3), ("evaluate", 100, 120, 4), ("sample", 101, 102, 4)):
        trace.add(name, start, end, step=step)
    assert "evaluations1 min 00 s" in page_of(folder).text
    assert (
        'data-label="evaluate" data-kind="layer" data-clock="0" data-y="0 40 20"'
        in (folder / "report.html").read_text()
    )
