"""Records under bench/results: each names a commit in history, and the page has the command that makes it again."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from statistics import median
from typing import Any

import pytest
from doc_pages import PAGES, REPOSITORY, table_rows

from grpo_recipes.recipe.keys import catalogue

sys.path.insert(0, str(REPOSITORY / "bench"))
import speed_page

RECORDS = sorted((REPOSITORY / "bench/results").iterdir())
PAGE = REPOSITORY / "docs/measurements.md"
UNCOMMITTED = {"multi_answer.json", "multi_answer_tuning.json"}  # the page says so


def commits(content: Any) -> Iterator[str]:
    if isinstance(content, dict):
        yield from [content["commit"]] if "commit" in content else []
        content = list(content.values())
    if isinstance(content, list):
        for part in content:
            yield from commits(part)


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.name)
def test_a_record_names_a_commit_in_history(record) -> None:
    lines = record.read_text().splitlines() if record.suffix == ".jsonl" else [record.read_text()]
    found = [list(commits(json.loads(line))) for line in lines]
    assert all(found), "a record without a commit"
    named = {commit for commits_of_line in found for commit in commits_of_line}
    if record.name in UNCOMMITTED:
        assert named == {"uncommitted"} and f"`{record.name}`" in PAGE.read_text().split("were made before")[0]
        return
    for commit in named:
        git = ["git", "-C", str(REPOSITORY), "merge-base", "--is-ancestor", commit, "HEAD"]
        assert re.fullmatch("[0-9a-f]{40}", commit) and subprocess.run(git, check=False).returncode == 0, commit


def test_every_record_has_the_command_that_makes_it() -> None:
    rows = {name.strip("`"): command.strip("`").split() for name, _, command in table_rows(PAGE, "record")}
    assert list(rows.keys()) == sorted(rows, key=list(rows).index) and rows.keys() == {one.name for one in RECORDS}
    for name, (program, script, *_) in rows.items():
        if program == "make":
            assert f"bench/results/{name}" in (REPOSITORY / "Makefile").read_text()
            assert f"\n{script}: " in (REPOSITORY / "Makefile").read_text()
        else:
            assert name.split(".")[0] in (REPOSITORY / script).read_text(), name


def test_pages_name_no_record_that_is_gone() -> None:
    for page in PAGES:
        for name in re.findall(r"bench/results/([\w.]+\.jsonl?)", page.read_text()):
            assert (REPOSITORY / "bench/results" / name).exists(), (page.name, name)


def test_the_tables_of_the_speed_are_those_of_the_record() -> None:
    record = json.loads((REPOSITORY / "bench/results/speed.json").read_text())
    page = (REPOSITORY / "docs/performance.md").read_text()
    told = page.split(speed_page.BEGIN)[1]
    assert told == speed_page.tables(record) and "| lognormal | ours |" in told


def test_the_conversion_of_groups_is_the_recorded_one() -> None:
    record, text = json.loads((REPOSITORY / "bench/results/atropos_conversion.json").read_text()), PAGE.read_text()
    there, back, parsed = (record[name]["median"] for name in ("to arrays", "from arrays", "parse"))
    assert min(there, back) >= 20_000 and len(record["to arrays"]["raw"]) == 9
    assert f"turns {there:,} sequences of 256 tokens" in text and f"and {back:,} back" in text
    assert f"with {parsed:,} a second" in text


def test_the_cost_of_a_sync_is_the_recorded_one() -> None:
    record, rows = json.loads((REPOSITORY / "bench/results/weights.json").read_text()), []
    for size, bridges in record["figures"].items():
        for name, found in bridges.items():
            memory = f"{found['pss to weights']:.2f}" if "pss to weights" in found else "-"
            times = [f"{found[kind]:.1f}" for kind in ("sync to copy", "sync without guard to copy")]
            millions = f"{record['cases'][size][name]['parameters'] / 1e6:.0f}M"
            rows.append([f"`{name}`", millions, *times, f"{found['moved to weights']:.2f}", memory])
    assert rows and table_rows(REPOSITORY / "docs/weights.md", "bridge") == rows
    (peak,) = {f"{found['peak to weights']:.1f}" for found in record["figures"]["1B"].values()}
    text = " ".join((REPOSITORY / "docs/weights.md").read_text().split())
    assert f"(`VmHWM`), added up, is {peak} copies at 961M parameters with all three" in text
    seconds = [[row[kind] for row in record["cases"]["1B"]["file"]["rounds"]] for kind in ("copy", "sync")]
    copy, sync = (f"{min(values):.1f} to {max(values):.1f} seconds" for values in seconds)
    assert f"takes {copy}, by how much" in text and f"takes {sync}, " in text
    assert f"{median(seconds[1]) / min(seconds[0]):.1f} times the fastest copy" in text


ENVIRONMENTS = [json.loads(line) for line in (REPOSITORY / "bench/results/environments.jsonl").read_text().splitlines()]


def mean_and_ends(values: list[float], between: str) -> str:
    ends = f" ({min(values):.2f}{between}{max(values):.2f})" if len(values) > 1 else ""
    return f"{sum(values) / len(values):.2f}{ends}"


def test_what_the_environments_learn_is_the_recorded_one() -> None:
    runs: dict[tuple[str, str], list[list[float]]] = {}
    for row in (row for row in ENVIRONMENTS if row.get("benchmarks")):
        (scored,) = row["benchmarks"].values()
        found = [row["initial_reward"], row["final_reward"], scored["pass@1"], scored["pass@8"]]
        runs.setdefault((row["recipe"].rpartition("/")[2], row["mode"]), []).append(found)
    rows = [
        [f"`{recipe}`", mode, str(len(found)), *(mean_and_ends(list(one), "-") for one in zip(*found, strict=True))]
        for (recipe, mode), found in runs.items()
    ]
    assert rows and table_rows(REPOSITORY / "docs/environments.md", "recipe") == rows


def test_how_the_game_is_played_is_the_recorded_one() -> None:
    """Rows of baselines name who plays; those of runs have the episodes evaluated on before and after training."""
    baselines, runs = dict[str, dict[str, float]](), dict[tuple[str, str], list[dict[str, float]]]()
    for row in (row for row in ENVIRONMENTS if row["recipe"].endswith("/secret_mafia_smoke.yaml")):
        if "seed" not in row:
            assert row["mode"] not in baselines, "recorded twice"
            (baselines[row["mode"]],) = row["evaluated"]
            continue
        for when, found in zip(("before", "after"), row["evaluated"], strict=True):
            runs.setdefault((f"policy {when} training", row["mode"]), []).append(found)

    def cells(episodes: list[dict[str, float]]) -> list[str]:
        names = [f"eval_episodes/{name}" for name in ("legal", "won", "reward_detective")]
        return [mean_and_ends([one[name] for one in episodes], " to ") for name in names]

    rows = [[who, "-", "-", *cells([found])] for who, found in baselines.items()]
    rows += [[who, mode, str(len(found)), *cells(found)] for (who, mode), found in runs.items()]
    assert list(baselines) == ["blind", "drawn", "scripted"]
    assert table_rows(REPOSITORY / "docs/environments.md", "who plays") == rows


def test_defaults_that_surprise_are_those_of_the_keys() -> None:
    rows = table_rows(REPOSITORY / "docs/training-guide.md", "key")
    told = {name.strip("`"): float(value.strip("`")) for name, value, why in rows if why}
    assert {"eval_subsample", "reward_timeout", "num_train_epochs"} <= told.keys()
    assert told == {name: catalogue()[name]["default"] for name in told}
