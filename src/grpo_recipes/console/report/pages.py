"""The page of one run, and the page of an evaluation."""

import re
import statistics
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from grpo_recipes.console.report import run_charts
from grpo_recipes.console.report.chart import choose_window, make_clock, make_histogram, split_rows
from grpo_recipes.console.report.next_steps import find_collapse, make_cards
from grpo_recipes.console.report.page import (
    BASELINES,
    SMOKE_BADGE,
    Polling,
    format_number,
    render,
    render_fragment,
)
from grpo_recipes.console.report.read import RunRecord, read_rows, read_run
from grpo_recipes.console.report.samples import pair_prompts, render_steps
from grpo_recipes.console.report.tokens import read_tokens
from grpo_recipes.errors import EXIT_STOPPED
from grpo_recipes.paths import display_path, shell_path
from grpo_recipes.process.reports import plural
from grpo_recipes.runs.checkpoints import find_newest_complete
from grpo_recipes.runs.commands import format_launch_command
from grpo_recipes.runs.endings import find_reward_fix
from grpo_recipes.runs.health import AVERAGED_STEPS, Notice, find_notices, finite_number, percent
from grpo_recipes.runs.rundir import BEST, NO_REQUEUE, TRACKED, Run, read_json, write_atomically
from grpo_recipes.stats import compare_ends, score_names

# Status -> its symbol, and the start of the sentence about the reward.
_STATUSES = {
    "completed": ("✓", ""),
    "running": ("●", "Running. "),
    "stopped": ("■", "Stopped. "),
    "requeued": ("↻", "Waiting to continue. "),
    "failed": ("✕", "Failed. "),
}
_WRITING = threading.Lock()
UNFINISHED = ("running", "requeued")  # statuses of a run that will write its page again
_SILENT_SECONDS = 900.0  # a run that is silent for this time and for ten usual steps was probably killed


def write_report(folder: Path, path: Path | None = None) -> Path:
    """Write the report of a running or ended run, by default to ``report.html`` in its directory; return the path.

    Raise ConfigError if the folder is not a run directory, and OSError if the page can't be written.
    """
    run = read_run(folder)
    path = path or run.folder / "report.html"
    write_atomically(path, render_run_page(run, path))
    return path


def try_write_report(folder: Path) -> str:
    """Write ``report.html`` of a run and return a line with its path, or with the error if that fails.

    It never raises an exception, so a failure does not change the exit code of the run. Only one thread writes at a
    time.
    """
    try:
        with _WRITING:
            return f"report in {display_path(write_report(folder))}"
    except Exception as error:
        return f"report not written ({type(error).__name__}: {error}). Try again with: grpo report {shell_path(folder)}"


def render_run_page(
    run: RunRecord, path: Path | None, folder: Path | None = None, polling: Polling | None = None
) -> str:
    """Return the report of a run as HTML.

    Args:
        run: the run.
        path: the file for the page, because links to the run's files depend on it; None: no links.
        folder: the run directory to show, if ``run`` was read from a copy of it.
        polling: how a served page stays current.
    """
    folder, samples_file = folder or run.folder, run.folder / "samples.jsonl"
    kind = run.status if run.status in _STATUSES else "unknown"
    badges = [(f"{_STATUSES.get(run.status, '?')[0]} {run.status}", kind)]
    stamp = str(run.identity.get("timestamp", ""))
    timed = {name: run.metrics.known(f"seconds/{name}") for name in run_charts.PHASES}
    totals = {name: sum(times) + run.last_seconds.get(name, 0.0) for name, times in timed.items() if times}
    charts, same = run_charts.make_other_charts(run)
    rows, newest_file = len(run.metrics.steps), run.folder / "metrics.jsonl"
    if not newest_file.exists():
        newest_file = run.folder / "run.json"
    silent = time.time() - newest_file.stat().st_mtime
    usual = statistics.median_high(run.metrics.known("seconds/step") or [0.0])
    probably_killed = run.status == "running" and silent >= max(_SILENT_SECONDS, 10 * usual)
    return render(
        "run.html.j2",
        run=run, title=f"{folder.name}: {run.status}", name=folder.name, headline=make_headline(run), kind=kind,
        badges=[*badges, SMOKE_BADGE] if run.summary.get("smoke") else badges,
        reward_fix=find_reward_fix(Run(folder), str(run.summary.get("cause") or "")),
        launch_command=format_launch_command(Run(folder)),
        folder=folder, shown_folder=display_path(folder), silent=silent if probably_killed else 0.0,
        stop_requested=run.summary.get("exit_code") == EXIT_STOPPED,
        has_stop_command=run.status == "stopped" and (run.folder / NO_REQUEUE).exists(),
        checkpoint=find_newest_complete(run.folder / "checkpoints"),
        started=re.sub(r"^(\d{4})(\d\d)(\d\d)-(\d\d)(\d\d)\d\d$", r"\1-\2-\3 \4:\5", stamp),
        notices=describe_gaps(run), cards=make_cards(run, folder, collect_notices(run)),
        reward=run_charts.make_reward_chart(run),
        curves=run_charts.make_curve_charts(run), rows=rows, points=len(split_rows(rows)), window=choose_window(rows),
        others=charts, same=same, histogram=make_histogram(run.scored), baselines=BASELINES,
        steps=render_steps(samples_file, len(run.scored) - 1), pairs=pair_prompts(samples_file),
        view_tokens=read_tokens,
        phase_chart=run_charts.make_phase_chart(run.metrics, run.last_seconds),
        phases=run_charts.PHASES, totals=totals,
        files=sorted(file.name for file in run.folder.iterdir() if not file.name.startswith((".", "report."))),
        linked=path is not None and path.absolute().parent == run.folder, live=run.status in UNFINISHED,
        resumed=[step for step in run.summary.get("resumed_at") or () if isinstance(step, int)],
        tracked=read_wandb_address(run), polling=polling, clocks=[make_clock([run.metrics], choose_window(rows))],
        averaged_steps=AVERAGED_STEPS, best=read_json(run.folder / BEST), filter_values=read_filter_values(run),
    )  # fmt: skip


def read_filter_values(run: RunRecord) -> dict[str, list[list[Any]]]:
    """Return the column of ``dataset_filter``, with its values, their rows and whether the run trains on them.

    Return {} if the run has recorded none.
    """
    values = _read_prompt_counts(run).get("filter_values")
    return values if isinstance(values, dict) else {}


def _read_prompt_counts(run: RunRecord) -> dict[str, Any]:
    """Return the counts of prompts of the last attempt; an empty dict if it has not loaded them."""
    return next(reversed([*read_rows(run.folder / "prompts.jsonl")]), {})


def read_wandb_address(run: RunRecord) -> str:
    """Return the run's URL in W&B from its ``tracked.json``, or "" if the file has no http(s) address."""
    address = str(read_json(run.folder / TRACKED).get("wandb") or "")
    return address if address.startswith(("https://", "http://")) else ""


def make_headline(run: RunRecord) -> str:
    """Return the headline of a run's report: its status if not completed, and whether the reward rose or fell.

    For example "Failed. Reward rose from 0.1 to 0.6 over 40 steps." The mean rewards of the first and of the last tenth
    of the steps (at least 3 steps each) are compared. Below two standard errors, the sentence is "No clear trend in
    the reward". Up to 5 steps are "too few for a trend". For a collapsed reward, it names the level before the fall and
    its step. With overlap_generation, it adds "one step off-policy". Without rewards, it has the loss, or names the
    reason.
    """
    outcome, rewards = run.outcome, run.metrics.known("reward")
    status = _STATUSES.get(run.status, ("", ""))[1]
    if (last := run.summary.get("final_loss")) is not None:
        first, steps = run.summary["initial_loss"], plural(outcome.steps, "step")
        return f"{status}Loss from {format_number(first)} to {format_number(last)} over {steps}."
    if outcome.first is None or outcome.last is None:
        return status + ("No step has a reward." if outcome.steps else "No step was finished.")
    change = (
        f"from {format_number(outcome.first)} to {format_number(outcome.last)} over {plural(outcome.steps, 'step')}"
    )
    ending = ", one step off-policy." if run.value("overlap_generation") else "."
    if collapse := find_collapse(run):
        return f"{status}Reward fell {collapse}{ending}"
    if len(rewards) <= AVERAGED_STEPS:  # the first and the last reward are the same mean
        steps = plural(outcome.steps, "step")
        return f"{status}Mean reward {format_number(outcome.last)} over {steps}, too few for a trend{ending}"
    if compare_ends(rewards):
        return f"{status}Reward {'rose' if outcome.last > outcome.first else 'fell'} {change}{ending}"
    return f"{status}No clear trend in the reward, {change}{ending}"


def collect_notices(run: RunRecord) -> list[Notice]:
    """Return the signs that a run does not learn, without "not finite", which ``describe_gaps`` names by metric."""
    rows = read_rows(run.folder / "metrics.jsonl")
    notices = find_notices(rows, run.value, over=run.status != "running")
    return [notice for notice in notices if notice.name != "not finite"]


def describe_gaps(run: RunRecord) -> list[str]:
    """Return a sentence for each gap in the data of the training; [] if there is none.

    Gaps are dropped prompts that were too long, metrics that were inf or nan, and unreadable lines of
    ``metrics.jsonl``.
    """
    metrics, sentences = run.metrics, list[str]()
    counts = _read_prompt_counts(run)
    if too_long := counts.get("too_long"):
        sentences.append(f"{too_long} of {counts.get('read')} prompts were longer than max_prompt_length and dropped.")
    for name, value_counts in metrics.nonfinite.items():
        expected = value_counts["inf"] if name in run_charts.METRICS and run_charts.METRICS[name].infinite else 0
        if unexpected := value_counts.total() - expected:
            sentences.append(f"{name} was inf or nan in {plural(unexpected, 'step')}.")
    if metrics.unreadable:
        sentences.append(f"{plural(metrics.unreadable, 'line')} of metrics.jsonl could not be read.")
    return sentences


# --- an evaluation

_MAX_PROMPTS, _MAX_COMPLETIONS = 60, 8  # limits of prompts on the page, and of completions per prompt
_MAX_MARKUP = 700_000  # limit of the HTML of all prompts, in characters


def render_evaluation_page(result: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the HTML page of `grpo eval`: scores from ``eval.json`` (``result``), and samples from ``rows``.

    ``rows`` are the scored rows of ``scores.jsonl``. At most 60 prompts, spread over the dataset, are shown. If their
    HTML exceeds 700,000 characters, their number is halved until it fits or one prompt is left.
    """
    last = len(rows) - 1
    chosen = {round(number * last / (_MAX_PROMPTS - 1)) for number in range(_MAX_PROMPTS)}
    groups = [
        render_fragment("completions.html.j2", "judged", _select_completions(rows[index])) for index in sorted(chosen)
    ]
    while len(groups) > 1 and sum(map(len, groups)) > _MAX_MARKUP:
        groups = groups[::2]
    names = [name.split("@") for name in score_names(result)]
    kinds, ks = (list(dict.fromkeys(part)) for part in zip(*names, strict=True))
    score, limits = finite_number(result[f"pass@{ks[0]}"]), result.get(f"pass@{ks[0]}_ci")
    headline = f"No score for pass@{ks[0]}" if score is None else f"pass@{ks[0]} {percent(score)}"
    headline += f" ({percent(limits[0])} to {percent(limits[1])})" if limits else ""
    tiles = [(f"{kind}@{ks[-1]}", "share of prompts") for kind in kinds if kind in ("pass", "majority")]
    return render(
        "evaluation.html.j2", title=f"Evaluation of {result['model']}", badges=[("evaluation", "running")],
        name=str(result["model"]), headline=f"{headline} on {plural(result['prompts'], 'prompt')}", result=result,
        kinds=kinds, ks=ks, tiles=tiles, groups=groups, rewards=", ".join(result["settings"]["reward_funcs"]),
    )  # fmt: skip


def _select_completions(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a scored row with its prompt as one text and at most 8 of its completions, in their order.

    Right, wrong and unscored completions are selected in equal numbers if possible.
    """
    counts, ranks = Counter[bool | None](), list[tuple[int, int]]()
    for index, completion in enumerate(row["completions"]):
        ranks.append((counts[completion["right"]], index))
        counts[completion["right"]] += 1
    indices = sorted(index for _, index in sorted(ranks)[:_MAX_COMPLETIONS])
    prompt = "\n\n".join(f"[{message['role']}]\n{message['content']}" for message in row["prompt"])
    return {**row, "prompt": prompt, "completions": [row["completions"][index] for index in indices]}
