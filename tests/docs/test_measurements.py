"""Records of bench/ and evidence/: each names a commit in history, and a page has the command that makes it again."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache, partial
from statistics import median
from typing import Any

import pytest
import yaml
from doc_pages import PAGES, REPOSITORY, table_rows

from grpo_recipes.recipe.keys import catalogue

sys.path.insert(0, str(REPOSITORY / "bench"))

PAGE = REPOSITORY / "bench/README.md"
TABLES = {"bench": PAGE, "evidence": REPOSITORY / "evidence/README.md"}  # folder -> the page that lists its records
RECORDS = {folder: sorted((REPOSITORY / folder / "results").iterdir()) for folder in TABLES}
git = partial(subprocess.run, cwd=REPOSITORY, check=False, capture_output=True, text=True)


def origins(content: Any) -> Iterator[dict[str, Any]]:
    """Every part of a record that names its commit."""
    if isinstance(content, dict):
        yield from [content] if "commit" in content else []
        content = list(content.values())
    if isinstance(content, list):
        for part in content:
            yield from origins(part)


@cache
def fault(command: str, commit: str) -> str | None:
    """Why this command at this commit cannot have made a record."""
    if git(["git", "merge-base", "--is-ancestor", commit, "HEAD"]).returncode:
        return f"commit {commit} is not in the history of this one"
    program, script, *_ = command.split()
    if program == "make":
        exists = f"\n{script}:" in git(["git", "show", f"{commit}:Makefile"]).stdout
    else:
        exists = git(["git", "cat-file", "-e", f"{commit}:{script}"]).returncode == 0
    return None if exists else f"{command}: commit {commit} has no {script}"


def faults(lines: list[Any]) -> set[str]:
    """Return the problems of the origins of a record; each line has an origin."""
    problems = set[str | None]()
    for line in lines:
        parts = list(origins(line))
        problems |= set() if parts else {"a line without an origin"}
        for part in parts:
            missing = {"command", "uncommitted_changes"} - part.keys()
            if missing:
                problems.add(f"an origin without {', '.join(sorted(missing))}")
            elif part["uncommitted_changes"] is not False:
                problems.add("uncommitted changes")
            else:
                problems.add(fault(part["command"], part["commit"]))
    return {problem for problem in problems if problem}


@pytest.fixture(scope="module", autouse=True)
def history() -> None:
    """Skip without the whole history: old records name old commits."""
    shallow = git(["git", "rev-parse", "--is-shallow-repository"]).stdout.strip()
    if shallow != "false":
        pytest.fail(f"{REPOSITORY} has no full history ({shallow or 'no git'}): git fetch --unshallow")


@pytest.mark.parametrize("record", [*RECORDS["bench"], *RECORDS["evidence"]], ids=lambda record: record.name)
def test_a_record_is_of_code_in_history(record) -> None:
    text = record.read_text()
    lines = text.splitlines() if record.suffix == ".jsonl" else [text]
    assert faults([json.loads(line) for line in lines]) == set()


def test_what_no_commit_has_made_is_seen() -> None:
    head = git(["git", "rev-parse", "HEAD"]).stdout.strip()
    right = {"command": "python bench/wire.py --rounds 5", "commit": head, "uncommitted_changes": False}
    assert faults([{"cases": [right]}, right | {"command": "make exact"}]) == set()
    wrong = {
        "command": ["python bench/no_such.py", "make nothing"], "commit": ["0" * 40, "uncommitted"],
        "uncommitted_changes": [True, None],
    }  # fmt: skip
    for key, values in wrong.items():
        assert all(faults([right, right | {key: value}]) for value in values), key
        assert faults([{name: value for name, value in right.items() if name != key}])
    assert faults([right, {}]) == {"a line without an origin"}


@pytest.mark.parametrize("folder", TABLES)
def test_every_record_has_the_command_that_makes_it(folder: str) -> None:
    rows = {name.strip("`"): command.strip("`").split() for name, _, command in table_rows(TABLES[folder], "record")}
    assert rows.keys() == {record.name for record in RECORDS[folder]}
    for name, (program, script, *_) in rows.items():
        if program == "make":
            assert f"{folder}/results/{name}" in (REPOSITORY / "Makefile").read_text()
            assert f"\n{script}: " in (REPOSITORY / "Makefile").read_text()
        else:
            stem = "maxent_PART" if name.startswith("maxent_") else name.split(".")[0]
            assert stem in (REPOSITORY / script).read_text(), name


def test_pages_name_no_record_that_is_gone() -> None:
    for page in [*PAGES, TABLES["evidence"]]:
        for name in re.findall(r"(?:bench|evidence)/results/[\w.]+\.jsonl?", page.read_text()):
            assert (REPOSITORY / name).exists(), (page.name, name)


def test_the_conversion_of_groups_is_the_recorded_one() -> None:
    record, text = json.loads((REPOSITORY / "bench/results/atropos_conversion.json").read_text()), PAGE.read_text()
    to_arrays, back, parsed = (record[name]["median"] for name in ("to arrays", "from arrays", "parse"))
    assert min(to_arrays, back) >= 20_000 and len(record["to arrays"]["raw"]) == 9
    assert f"turns {to_arrays:,} sequences of 256 tokens" in text and f"and {back:,} back" in text
    assert f"with {parsed:,} a second" in text


def test_the_cost_of_a_sync_is_the_recorded_one() -> None:
    record = json.loads((REPOSITORY / "bench/results/weights.json").read_text())
    (peak,) = {f"{figures['peak to weights']:.1f}" for figures in record["figures"]["1B"].values()}
    text = " ".join((REPOSITORY / "docs/weights.md").read_text().split())
    assert f"(`VmHWM`), added up, is {peak} copies at 961M parameters with all three" in text
    seconds = [[row[kind] for row in record["cases"]["1B"]["file"]["rounds"]] for kind in ("copy", "sync")]
    copy, sync = (f"{min(values):.1f} to {max(values):.1f} seconds" for values in seconds)
    assert f"takes {copy}, depending on" in text and f"takes {sync}, " in text
    assert f"{median(seconds[1]) / min(seconds[0]):.1f} times the fastest copy" in text
    case = record["cases"]["1B"]["file"]
    guard = median(row["sync"] - row["sync without guard"] for row in case["rounds"]) / case["weight_bytes"] * 1e9
    assert f"[{guard:.2f} s/GB on CPU](#what-a-sync-costs) at 961M parameters" in text
    assert f"(15 GB), this would be {15 * guard:.0f} s" in text


def test_what_digests_add_to_a_save_is_the_recorded_share() -> None:
    record = json.loads((REPOSITORY / "bench/results/checkpoint_digest.json").read_text())
    xxh3, other = record["saves"]["xxh3_128"], record["saves"]["sha256"]
    low, high = xxh3["ratio_median_95"]
    text = " ".join((REPOSITORY / "docs/slurm.md").read_text().split())
    told = f"{xxh3['ratio_median']:.2f} times as long as one without digests (95 % interval {low:.2f}-{high:.2f})"
    assert f"{told}. With SHA-256 it would take {other['ratio_median']:.2f} times as long" in text
    fast = record["gigabytes_per_second_of_one_thread"]
    assert round(fast["xxh3_128"] / fast["sha256"]) == 7 and "seven times as fast as SHA-256" in text
    assert f"one thread hashes the 122 GB in {122 / fast['xxh3_128']:.0f} s" in text


def test_what_overlap_costs_in_samples_is_the_difference_of_the_medians() -> None:
    text, guide = (
        " ".join((REPOSITORY / f"docs/{page}.md").read_text().split()) for page in ("measurements", "performance")
    )
    medians = re.findall(r"median ([\d.]+); with overlap [\d to]+, median ([\d.]+)\.", text)
    assert [float(late) - float(early) for early, late in medians] == [1.5, 1.5]
    (sums, sums_late), (countdown, countdown_late) = medians
    assert f"took {sums_late} steps instead of {sums} on sums, and {countdown_late} instead of {countdown} on" in guide


def test_sampling_has_the_recorded_share_of_a_step() -> None:
    arms = json.loads((REPOSITORY / "bench/results/speed.json").read_text())["step"]["found"]
    bare = [arms[name]["bare TRL"] for name in ("lognormal", "lognormal, 8 x 16")]
    small, large = (round(100 * arm["seconds_sampling"] / arm["seconds_median"]) for arm in bare)
    text = " ".join((REPOSITORY / "docs/measurements.md").read_text().split())
    assert f"{small} % of TRL's step with 4 prompts" in text and f"and {large} % with 8 prompts of 16" in text


def test_defaults_that_surprise_are_those_of_the_keys() -> None:
    rows = table_rows(REPOSITORY / "docs/recipes.md", "key")
    told = {name.strip("`"): yaml.safe_load(value.strip("`")) for name, value, why in rows if why}
    assert {"use_vllm", "dtype", "eval_max_prompts", "reward_timeout", "num_train_epochs"} <= told.keys()
    assert told == {name: catalogue()[name]["default"] for name in told}


def test_the_new_shapes_are_the_recorded_ones() -> None:
    record = json.loads((REPOSITORY / "bench/results/shapes.json").read_text())
    cases = {(case["rows of a micro-batch"], case["pad_to_multiple_of"]): case for case in record["cases"]}
    shapes = {key: case["new shapes"]["input"] for key, case in cases.items()}
    assert max(shapes[rows, 64] for rows in (4, 8, 16)) <= 16
    more_tokens = 100 * (cases[8, 64]["fed"] / cases[8, None]["fed"] - 1)
    text = " ".join((REPOSITORY / "docs/performance.md").read_text().split())
    assert f"use {shapes[8, 64]} new input shapes instead of {shapes[8, None]}, for {more_tokens:.0f} % more" in text


def test_the_work_of_rank_0_is_the_recorded_one_projected_to_more_gpus() -> None:
    records = json.loads((REPOSITORY / "bench/results/rank0.json").read_text())["completions"]
    size = max(map(int, records))
    record = records[str(size)]
    text = " ".join((REPOSITORY / "docs/measurements.md").read_text().split())

    def project(gpus: int) -> tuple[float, float]:
        """Return the seconds of 4,096 completions, and their percentage of a step on this number of GPUs."""
        only_rank_0 = {"read", "hand on", "samples"}
        seconds = sum(part / (1 if name in only_rank_0 else gpus) for name, part in record["seconds"].items())
        return seconds * 4096 / size, 100 * seconds / (record["assumed_step_seconds"] * 8 / gpus)

    (seconds, at_8), (_, at_16), (_, at_64) = map(project, (8, 16, 64))
    source = "`bench/rank0.py`" if size == 4096 else f"`bench/rank0.py`, projected from {size}"
    assert f"take rank 0 {seconds:.1f} s of CPU time ({source}), {at_8:.1f} % of an assumed step" in text
    goal = "met" if at_64 < 3 else "missed"
    assert f"Projected to 16 GPUs, it is {at_16:.1f} %, and to 64 GPUs {at_64:.1f} % (goal {goal})" in text


def test_the_padding_of_the_larger_step_is_the_recorded_one() -> None:
    cases = json.loads((REPOSITORY / "bench/results/speed.json").read_text())["step"]["found"]
    small, large = (cases[name]["bare TRL"]["fed_per_real_token"] for name in ("lognormal", "lognormal, 8 x 16"))
    text = " ".join((REPOSITORY / "docs/measurements.md").read_text().split())
    assert f"TRL feeds {large:.2f} tokens per real one instead of {small:.2f}" in text
