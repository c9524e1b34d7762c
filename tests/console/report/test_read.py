"""Run directories with holes: torn lines, odd numbers, older files, secrets."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from grpo_recipes.console.report.pages import write_report
from grpo_recipes.console.report.read import read_run, read_scored_rows, read_table
from grpo_recipes.errors import ConfigError

from .synthetic_runs import make_run

SECRET = "hf_" + "abcdefghij" * 2


def test_rows_become_columns_with_gaps(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    rows = [{"step": 1, "loss": 0.5, "text": "x"}, {"step": 2, "loss": "nan", "kl": 1}, {"step": 3, "loss": "-inf"}]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 4, "lo')
    table = read_table(file)
    assert table.steps == [1, 2, 3]
    assert table.columns == {"step": [1, 2, 3], "loss": [0.5, None, None], "kl": [None, 1, None]}
    assert table.nonfinite == {"loss": {"nan": 1, "-inf": 1}}
    assert (table.unreadable, table.last("loss"), table.last("kl")) == (0, 0.5, 1)
    assert table.known("kl") and not table.known("text")


def test_lines_that_are_no_rows_are_counted(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 1}\nnonsense\n[1]\n{"loss": 3}\n\n{"step": 2, "loss": true}\n')
    table = read_table(file)
    assert (table.steps, table.unreadable) == ([1, 2], 3)
    assert "loss" not in table.columns
    file.write_bytes(b'{"step": 1, "loss": 2, "text": "\xff"}\n')
    assert (read_table(file).steps, read_table(file).unreadable) == ([1], 0)


def test_a_torn_row_of_samples_is_left_out(tmp_path: Path) -> None:
    run = read_run(make_run(tmp_path, steps=7))
    with (run.folder / "samples.jsonl").open("a") as file:
        file.write('{"step": 8, "rewa')
    reread = read_run(run.folder)
    assert [row.step for row in reread.scored] == list(range(1, 8))
    assert len(reread.scored[3].rewards) == 64  # the unscored completion is not counted


def test_secrets_are_masked_wherever_they_stand(tmp_path: Path) -> None:
    sample = {"prompt": SECRET, "completion": f"my token {SECRET}", "rewards": {SECRET: 1.0}}
    folder = make_run(
        tmp_path,
        steps=2,
        samples=[sample],
        summary={"status": "failed", "cause": f"a {SECRET} b"},
        recipe={"run_name": (SECRET, SECRET)},
    )
    page = write_report(folder).read_text()
    assert SECRET not in page
    assert "a ******** b" in page and "my token ********" in page
    (folder / "samples.jsonl").write_text(
        json.dumps({"step": 1, "samples": [{"prompt": "x" * 2495 + " " + SECRET}]}) + "\n"
    )
    assert SECRET[:4] not in write_report(folder).read_text()  # not even a part of the secret, after a text is cut


def test_origins_stand_above_the_keys(tmp_path: Path) -> None:
    run = read_run(make_run(tmp_path, steps=1))
    origins = run.origins
    assert origins["learning_rate"] == "--learning_rate"
    assert origins["run_root"] == "RUN_ROOT"
    assert origins["system_prompt"] == "config_math.yaml:9"
    assert run.value("system_prompt").splitlines()[1] == "# not an origin"
    assert run.value("not_given") is None


def test_a_run_that_has_only_begun_is_read(tmp_path: Path) -> None:
    missing_files = ("metrics.jsonl", "eval.jsonl", "samples.jsonl", "summary.json", "plan.json", "recipe.yaml")
    run = read_run(make_run(tmp_path, steps=1, without=missing_files))
    assert (run.status, run.recipe, run.metrics.steps, run.scored) == ("unknown", {}, [], [])


@pytest.mark.parametrize("file", ["run.json", "plan.json", "summary.json", "recipe.yaml"])
def test_a_damaged_file_is_named(tmp_path: Path, file: str) -> None:
    folder = make_run(tmp_path, steps=1)
    (folder / file).write_text("{ [")
    with pytest.raises(ConfigError, match=f"{file}: is damaged"):
        write_report(folder)


@pytest.mark.parametrize("text", ["- a\n", "a text\n", "7\n"])
def test_a_recipe_that_is_not_a_mapping_is_damaged(tmp_path: Path, text: str) -> None:
    folder = make_run(tmp_path, steps=1)
    (folder / "recipe.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"recipe.yaml: is damaged \(not a YAML mapping\)"):
        write_report(folder)


@pytest.mark.parametrize("benchmarks", [["a"], {"a": None}, {"a": 0.5}])
def test_parts_of_another_kind_are_left_out(tmp_path: Path, benchmarks: object) -> None:
    folder = make_run(tmp_path, steps=2, summary={"benchmarks": benchmarks})
    rows = [
        {"step": 1, "rewards": 5, "samples": [7, {"completion": "without a prompt"}, None]},
        {"step": 2, "rewards": [0.5], "samples": 7},
    ]
    (folder / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = read_run(folder)
    assert [list(row.rewards) for row in run.scored] == [[], [0.5]] and run.benchmarks == {}
    assert "without a prompt" in write_report(folder).read_text()


def test_a_folder_without_identity_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a run directory"):
        read_run(tmp_path)


@pytest.mark.parametrize(
    ("file", "key", "value", "message"),
    [
        ("plan.json", "batch", None, "'batch' is not a mapping"),
        ("plan.json", "processes", {"role": "server"}, "'processes' is not a list"),
        ("plan.json", "processes", ["server"], "'processes' is not a list of mappings"),
        ("plan.json", "notes", 3, "'notes' is not a list"),
        ("run.json", "code", "abc", "'code' is not a mapping"),
        ("run.json", "versions", [], "'versions' is not a mapping"),
    ],
)
def test_a_part_of_another_kind_is_told(tmp_path: Path, file: str, key: str, value: object, message: str) -> None:
    folder = make_run(tmp_path, steps=2)
    content = json.loads((folder / file).read_text())
    (folder / file).write_text(json.dumps({**content, key: value}))
    with pytest.raises(ConfigError, match=f"{file}: is damaged \\({message}"):
        write_report(folder)


@pytest.mark.parametrize("file", ["run.json", "plan.json", "summary.json", "recipe.yaml"])
def test_a_file_nested_too_deeply_is_damaged(tmp_path: Path, file: str) -> None:
    folder = make_run(tmp_path, steps=2)
    (folder / file).write_text("[" * 5000)
    with pytest.raises(ConfigError, match=f"{file}: is damaged"):
        write_report(folder)


def test_numbers_that_no_chart_can_show_are_left_out(tmp_path: Path) -> None:
    big = "9" * 400
    metrics, samples = tmp_path / "metrics.jsonl", tmp_path / "samples.jsonl"
    metrics.write_text(
        f'{{"step": {big}, "a": 1}}\n{{"step": NaN}}\n{{"step": Infinity}}\n{{"step": true}}\n' + "[" * 5000 + "\n"
        f'{{"step": 1, "a": {big}, "b": 1e308, "c": NaN, "d": 1e30}}\n'
    )
    table = read_table(metrics)
    assert (table.steps, table.columns, table.unreadable) == ([1], {"step": [1], "d": [1e30]}, 5)
    samples.write_text(
        f'{{"step": 1, "rewards": [NaN, {big}, 0.5, true, null]}}\n{{"step": 2, "rewards": null}}\n{{"step": 4}}\n'
    )
    assert [list(scored.rewards) for scored, _ in read_scored_rows(samples)] == [[0.5], [], []]


def test_a_folder_with_a_name_too_long_for_a_file_is_no_run() -> None:
    with pytest.raises(ConfigError, match="is not a run directory"):
        read_run(Path("a" * 300))


def test_four_times_the_rows_take_about_four_times_as_long_to_read(tmp_path: Path) -> None:
    def seconds(rows: int) -> float:
        file, row = tmp_path / f"{rows}.jsonl", dict.fromkeys("abcdefgh", 0.5)
        file.write_text("".join(json.dumps({"step": step, **row}) + "\n" for step in range(rows)))
        durations = []
        for _ in range(3):
            began = time.process_time()
            assert len(read_table(file).columns["h"]) == rows
            durations.append(time.process_time() - began)
        return min(durations)

    assert seconds(12_000) / seconds(3_000) < 8  # 16 or more if each cell reads a whole column
