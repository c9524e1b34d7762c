"""Commands in a terminal: colors, lines that end at its width, and plain lines without a terminal."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from grpo_command import run_grpo
from in_terminal import COLOR, run_in_terminal

from grpo_recipes.cli.display import _wrap
from grpo_recipes.paths import find_code_root

SMOKE = str(find_code_root() / "recipes/smoke/grpo.yaml")


@pytest.fixture
def wrong(tmp_path: Path) -> Path:
    path = tmp_path / "wrong.yaml"
    unknown = "a_key_with_a_name_that_is_so_long_that_its_problem_needs_more_than_one_line_of_a_terminal"
    path.write_text(f"model_name_or_path: smoke:sums\nnum_generations: 7.5\n{unknown}: 1\n")
    return path


def test_problems_are_blocks_with_a_green_fix_and_their_number(wrong: Path) -> None:
    text = run_in_terminal(80, "check", str(wrong))
    assert "\x1b[32m  Fix: set num_generations to an integer, e.g. 8\x1b[0m" in text
    assert f"\x1b[1m{wrong}:2\x1b[0m\n  num_generations: expected an integer, got 7.5.\n" in text
    problems = [line for line in COLOR.sub("", text).splitlines() if line.startswith("  Fix: ")]
    assert COLOR.sub("", text).splitlines()[-1] == f"grpo: {len(problems)} problems in {wrong}"


def test_a_list_of_values_and_the_result_of_a_check_break_between_words(tmp_path: Path) -> None:
    path = tmp_path / "w.yaml"
    path.write_text("model_name_or_path: smoke:sums\nlr_scheduler_type: cosin\n")
    lines = COLOR.sub("", run_in_terminal(80, "check", str(path))).splitlines()
    start = next(number for number, line in enumerate(lines) if "lr_scheduler_type to one of" in line)
    assert max(map(len, lines[start : start + 3])) <= 80
    assert lines[start + 1].startswith("      ") and " ".join(lines).count("cosine_warmup_with_min_lr,") == 1
    checked = run_in_terminal(80, "check", SMOKE).splitlines()
    assert max(map(len, checked[:-1])) <= 80 and any(line.startswith("      ") for line in checked)


@pytest.mark.parametrize("variables", [{"NO_COLOR": "1"}, {"TERM": "dumb"}])
def test_no_color_if_the_user_or_the_terminal_wants_none(wrong: Path, variables: dict[str, str]) -> None:
    text = run_in_terminal(80, "check", str(wrong), **variables)
    assert "num_generations: expected an integer, got 7.5." in text
    assert not re.search(r"\x1b\[[0-9;]*3[0-7]m", text)


def test_a_pipe_gets_one_plain_line_for_each_problem(wrong: Path) -> None:
    done = run_grpo("check", str(wrong))
    assert done.returncode == 2 and "\x1b" not in done.stderr
    assert all(line.startswith(f"grpo: {wrong}") and ". Fix: " in line for line in done.stderr.splitlines())


def test_the_lines_of_a_plan_end_at_the_width_and_continue_below_their_text() -> None:
    continued = {}
    for width in (80, 120):
        lines = COLOR.sub("", run_in_terminal(width, "plan", SMOKE)).splitlines()
        short = [line for line in lines if not re.match(r"(server|trainer|model|dataset) ", line)]  # no paths
        assert max(map(len, short)) <= width
        continued[width] = sum(line.startswith(" " * 11) for line in short)
    assert continued[80] > continued[120] > 0


def test_the_next_command_of_a_run_is_one_line(tmp_path: Path) -> None:
    command = f"grpo launch my.yaml --run_name {'long_' * 20} --seed 7"
    (tmp_path / "run.json").write_text(json.dumps({"command": command}))
    (tmp_path / "summary.json").write_text(json.dumps({"status": "failed", "cause": "rank 0: " + "a word " * 20}))
    lines = COLOR.sub("", run_in_terminal(80, "status", str(tmp_path))).splitlines()
    assert lines[-1] == f"next     {command}"
    assert max(len(line) for line in lines if "a word" in line) <= 80


def test_a_command_in_a_fix_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{}")
    (tmp_path / "recipe.yaml").write_text("")
    (tmp_path / "summary.json").write_text(json.dumps({"status": "failed", "cause": "RewardFailed: my_reward"}))
    command = f"grpo check-rewards {tmp_path}/recipe.yaml"
    for width in (len(command), len(command) + 20):
        lines = COLOR.sub("", run_in_terminal(width, "status", str(tmp_path))).splitlines()
        index = next(index for index, line in enumerate(lines) if line.startswith("fix "))
        assert lines[index : index + 2] == ["fix      fix the reward named there; test it with", f"         {command}"]


def test_a_command_in_a_note_of_a_plan_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text("base: recipes/smoke/grpo.yaml\nmodel_name_or_path: somebody/not-on-this-machine\n")
    command = f"grpo fetch {path}"
    lines = COLOR.sub("", run_in_terminal(80, "plan", str(path))).splitlines()
    index = lines.index(f"{' ' * 11}{command}")
    assert lines[index - 1].endswith("not on this machine;") and lines[index + 1].strip() == "downloads it"


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("wait, or use (grpo launch --resume /runs/a) now", ["wait, or use", "grpo launch --resume /runs/a", "now"]),
        ("run grpo check --deep a.yaml, which tries it", ["run", "grpo check --deep a.yaml", "which tries it"]),
        (
            "A=b bash scripts/setup.sh --rebuild; it takes long",
            ["A=b bash scripts/setup.sh --rebuild", "it takes long"],
        ),
        ("it is free: grpo status run-1 shows it", ["it is free:", "grpo status run-1", "shows it"]),
        ("more words with grpo doctor", ["more words with", "grpo doctor"]),
        ("try 'a b', c or grpo keys", ["try 'a b', c or", "grpo keys"]),
    ],
)
def test_a_command_that_does_not_fit_has_its_own_line(text: str, lines: list[str]) -> None:
    assert _wrap(text, 22) == lines


def test_a_plan_begins_with_the_verdict_in_color() -> None:
    assert "does not fit" not in (text := run_in_terminal(120, "plan", SMOKE))
    assert text.startswith("\x1b[2mverdict")


def test_the_help_lists_every_command_in_a_group_and_examples() -> None:
    text = run_in_terminal(80, "--help")
    groups = [line for line in text.splitlines() if line.endswith(":") and not line.startswith(" ")]
    assert groups == [
        "Write a recipe:", "Train:", "Follow runs:", "Use a model:", "Shell:", "Options:", "Examples:",
    ]  # fmt: skip
    examples = re.findall(r"^  (grpo .*?) {2,}# ", text, re.MULTILINE)
    assert len(examples) == 3 and max(map(len, text.splitlines())) <= 80


def test_a_valid_recipe_is_told_what_was_checked_and_what_was_not() -> None:
    checked, unchecked, valid = COLOR.sub("", run_in_terminal(400, "check", SMOKE)).splitlines()[-3:]
    assert re.match(r"grpo: checked \d+ keys \(names, types, limits, combinations\), ", checked)
    assert unchecked.startswith("grpo: not checked: tokenizer, prompts and rewards (--deep), ")
    assert valid.endswith(" is valid")


def test_keys_are_bold_with_green_defaults_and_texts_in_one_column() -> None:
    text = run_in_terminal(100, "keys", "temperature")
    assert "\x1b[1m  eval_temperature" in text and "\x1b[32mnull" in text
    lines = COLOR.sub("", text).splitlines()
    assert max(map(len, lines)) <= 100
    start = next(line.index("Temperature of evaluations") for line in lines if "Temperature of evaluations" in line)
    assert any(re.match(f" {{{start}}}[a-z]", line) for line in lines)


def test_keys_of_a_narrow_terminal_have_their_text_below_the_name() -> None:
    """A column of texts would have single letters in each line."""
    lines = COLOR.sub("", run_in_terminal(80, "keys")).splitlines()
    assert all(len(line) <= 80 or " " not in line.strip() for line in lines)  # long words are kept whole
    start = lines.index("  use_transformers_continuous_batching  false")
    assert lines[start + 1].startswith("      Whether to use transformers' continuous batching")


def test_texts_around_the_tables_of_keys_end_at_the_width() -> None:
    for word in ("lr", "objectives", "max_completion_length"):
        lines = COLOR.sub("", run_in_terminal(80, "keys", word)).splitlines()
        assert all(len(line) <= 80 or "  (" in line for line in lines), word  # a name with its type is not broken
