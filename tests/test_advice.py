"""M1: every advice is executed. A fix is applied to the wrong recipe as its words say, and the problem is gone."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from grpo_recipes import cli
from grpo_recipes.errors import ConfigError, Problem
from grpo_recipes.paths import shell_quote
from grpo_recipes.recipe.check import resolve_recipe
from grpo_recipes.recipe.keys import catalogue, environment_keys

FOLDER = Path(__file__).with_name("wrong_recipes")
# Advice that is not an edit of a recipe or of a command line -> the reason.
NOT_AN_EDIT = {
    "name an existing": "only the user has the file",
    "name a file": "only the user has the file",
    "name a model folder": "only the user has the model",
    "write module:name": "only the user knows the function",
    "lower them to at most": "several numbers share one sum",
    "set base to an existing": "only the user has the file",
    "export variables": "changes the shell",
    "use grpo launch --resume": "is another command",
    "put the recipe right after": "changes the order of the words",
    "write one key: value a line": "the file is not a recipe yet",
    "correct the indentation": "the file is not YAML yet",
    "indent the line with spaces": "the file is not YAML yet",
    "add {completion} to judge_prompt": "only the user knows where",
}
# Wrong recipes with a second, hidden problem, which has its own advice.
SECOND_FAULT = {
    "code_e2b_without_key": "the variable is not exported",
    "judge_incomplete": "the variable is not exported",
    "flag_without_value": "VALUE stands for the user's value",
    "many_faults": "the line that stays is wrong too",
    "maxent_controller_swapped": "tau is outside of the limits, in whichever order",
    "maxent_controller_twice_wrong": "tau is outside of the limits, in whichever order",
    "maxent_tau_negative": "0 needs a maxent_beta",
    "obsolete_evaluation_strategy": "eval_strategy: steps needs eval_steps, with any name",
}
SAMPLES = {
    "an integer": "8",
    "a number": "0.5",
    "true or false": "true",
    "a string": "x",
    "a mapping": "{}",
    "a list": "[1.0]",
}


@dataclass(frozen=True)
class Case:
    """A recipe with the command line and the variables of its check."""

    name: str
    text: str
    flags: tuple[str, ...] = ()
    variables: tuple[tuple[str, str], ...] = ()

    def problems(self, folder: Path) -> list[Problem]:
        """Everything that `grpo check` says of it."""
        path = folder / self.name
        path.write_text(self.text)
        task = None
        flags = list(self.flags)
        if "--task" in flags:
            index = flags.index("--task")
            task = flags[index + 1]
            del flags[index : index + 2]
        try:
            resolve_recipe(str(path), task, flags, dict(self.variables), "cpu")
        except ConfigError as error:
            return error.problems
        return []


def read_case(path: Path) -> Case:
    """Return a wrong recipe with the command that its comments name, its line numbers unchanged."""
    command = next((line for line in path.read_text().splitlines() if "grpo check" in line.split(":")[0]), "")
    variables, _, flags = command.removeprefix("# ").partition("grpo check")
    pairs = tuple(tuple(pair.split("=", 1)) for pair in shlex.split(variables))
    return Case(path.name, path.read_text(), tuple(shlex.split(flags)), pairs)  # type: ignore[arg-type]


def line_of(problem: Problem) -> int | None:
    """Return the line of the recipe that a problem names, from 0."""
    end = problem.where.rpartition(":")[2]
    return int(end) - 1 if end.isdigit() else None


def without_line(case: Case, index: int) -> Case:
    """Return the case without the key at a line and everything below it."""
    lines = case.text.splitlines()
    indent = len(lines[index]) - len(lines[index].lstrip(" -"))
    end = index + 1
    while end < len(lines) and lines[end].strip() and len(lines[end]) - len(lines[end].lstrip(" ")) > indent:
        end += 1
    return replace(case, text="\n".join([*lines[:index], *lines[end:]]) + "\n")


def without(case: Case, problem: Problem) -> Case:
    """Return the case without the problem's line, flag or variable."""
    if (index := line_of(problem)) is not None:
        return without_line(case, index)
    if problem.where.startswith("--"):
        return without_flag(case, problem.where)
    return replace(case, variables=tuple(pair for pair in case.variables if pair[0] != problem.where))


def without_flag(case: Case, flag: str) -> Case:
    flags = list(case.flags)
    index = next(i for i, word in enumerate(flags) if word.partition("=")[0] == flag)
    end = index + 1
    while "=" not in flags[index] and end < len(flags) and not flags[end].startswith("--"):
        end += 1
    return replace(case, flags=tuple(flags[:index] + flags[end:]))


def without_key(case: Case, name: str) -> Case | None:
    """Return the case without a key, wherever it is given; None if it is not."""
    if any(word.partition("=")[0] == f"--{name}" for word in case.flags):
        return without_flag(case, f"--{name}")
    for index, line in enumerate(case.text.splitlines()):
        if re.match(rf"\s*(- )?{re.escape(name)}:", line):
            return without_line(case, index)
    return None


def with_key(case: Case, key: str, value: str) -> Case:
    """Return the case with a key set in the recipe."""
    while (cleared := without_key(case, key)) is not None:
        case = cleared
    case = replace(case, variables=tuple(p for p in case.variables if environment_keys().get(p[0]) != key))
    return replace(case, text=f"{case.text}{key}: {value}\n")


def with_value(case: Case, problem: Problem, value: str) -> Case | None:
    """Return the case with another value for the problem's key, flag or variable."""
    if problem.where.startswith("--"):
        case = without_flag(case, problem.where)
        return replace(case, flags=(*case.flags, problem.where, value))
    index = line_of(problem)
    if index is None:
        pairs = tuple((name, value if name == problem.where else old) for name, old in case.variables)
        return replace(case, variables=pairs)
    lines = case.text.splitlines()
    name = re.match(r"'?([\w.]+)(?:' is|: )", problem.what)
    last = name[1].rpartition(".")[2] if name else ""
    if last and (inline := re.search(rf"\b{last}: *([^,}}]+)(?=[,}}])", lines[index])):
        lines[index] = lines[index][: inline.start(1)] + value + lines[index][inline.end(1) :]
        return replace(case, text="\n".join(lines) + "\n")
    head = lines[index].partition(":")[0]
    lines = without_line(case, index).text.splitlines()
    lines.insert(index, f"{head}: {value}")
    return replace(case, text="\n".join(lines) + "\n")


def replaced_in_place(case: Case, problem: Problem, old: str, new: str) -> Case | None:
    index = line_of(problem)
    if index is None:
        flags = tuple(re.sub(rf"\b{re.escape(old)}\b", new, word) for word in case.flags)
        return replace(case, flags=flags) if flags != case.flags else None
    lines = case.text.splitlines()
    for number in range(index, len(lines)):
        if old in lines[number]:
            lines[number] = lines[number].replace(old, new, 1)
            return replace(case, text="\n".join(lines) + "\n")
    return None


def edits(case: Case, problem: Problem) -> Iterator[Case | None]:
    """Yield the case after each alternative of a fix; None for an alternative that is not an edit."""
    fix = problem.fix.partition("; docs/")[0]
    if moved := re.match(r"(remove \w+ from \w+), or remove it (and set .*)", fix):
        fix = f"{moved[1]}, or {moved[1]} {moved[2]}"
    for alternative in re.split(r",? or (?=(?:write|set|remove|add|unset|keep|use|raise|lower|make|pip|name)\b)", fix):
        yield edited(case, problem, alternative.strip())


def edited(case: Case, problem: Problem, words: str) -> Case | None:
    head = words.partition(";")[0]
    quoted = re.findall(r"'([^']*)'", problem.what)
    head = re.sub(r" \(flag: --unset \w+\)", "", head)
    head = re.sub(r"^set (--)?[\w.-]+ to ", "set ", head)
    if match := re.match(r"set (MAXENT|TRAIN_ENTRYPOINT)=(\S+)", head):
        pairs = (*(pair for pair in case.variables if pair[0] != match[1]), (match[1], match[2]))
        return replace(case, variables=pairs)
    pairs = [(k, v.strip()) for k, v in re.findall(r"(\w+): ((?:\[[^]]*\]|\{[^}]*\}|'[^']*'|[^,; ]+))", head)]
    pairs = [(key, value) for key, value in pairs if key in catalogue()]
    foreign = any(
        words in problem.what for words in ("is not a key", "can't be set", "cannot be set", "has no equivalent")
    )
    if match := re.match(r"(?:remove|take out) (\w+) from (\w+)(.*)", head):
        lines, index = case.text.splitlines(), line_of(problem) or 0
        lines[index] = re.sub(rf"\b{match[1]}: *(\[[^]]*\]|\{{[^}}]*\}}|[^,}}\n]+)(, *)?", "", lines[index])
        case = replace(case, text="\n".join(lines) + "\n")
        for key, value in pairs:
            case = with_key(case, key, value)
        return case
    if match := re.match(r"(?:write|set|use|add) (--\w+) ([^\s,]+)", head):
        cleared = without_flag(case, problem.where) if problem.where.startswith("--") else case
        return replace(cleared, flags=(*cleared.flags, match[1], match[2]))
    if pairs and re.match(r"(?:write|set|use|add)", head):
        case = without(case, problem) if foreign or problem.what.startswith("unknown") else case
        for key, value in pairs:
            case = with_key(case, key, value)
        for key in re.findall(r"and remove (\w+)", head):
            case = without_key(case, key) or case
        return case
    if re.match(r"remove it\b", head) or re.match(r"keep (one|the)", head):
        return without(case, problem)
    if match := re.match(r"(?:unset) (\w+)", head):
        return replace(case, variables=tuple(pair for pair in case.variables if pair[0] != match[1]))
    if match := re.match(r"remove (?:--)?(\w+)", head):
        gone = without_key(case, match[1])
        return (
            gone
            or replaced_in_place(case, problem, f"{match[1]}, ", "")
            or replaced_in_place(case, problem, f", {match[1]}", "")
        )
    if match := re.match(r"(?:write|set|try) '([^']+)'", head):
        wrong = next((name for name in quoted if name != match[1]), "")
        return replaced_in_place(case, problem, wrong, match[1]) if wrong else None
    if match := re.match(r"(?:write|set) (?:one of )?(\"[^\"]+\"|(?<=one of )[^\s,]+)", head):
        return with_value(case, problem, match[1])
    if match := re.match(r"(?:write|set) (-?[\d.e+-]+) or (?:more|less)(?:, e\.g\. (\S+))?", head):
        return with_value(case, problem, match[2] or match[1])
    for pattern, sample in SAMPLES.items():
        if re.match(rf"(?:write|set) {pattern}", head):
            return with_value(case, problem, sample)
    if match := re.match(r"(?:write|set) (?:(?:less|more) than [\d.e+-]+, )?e\.g\. ([\w:/.+-]+)", head):
        return with_value(case, problem, match[1])
    if match := re.match(r"(?:write|set) (\w+)(?:, or | or an? )", head):
        place = re.search(r"reads (\w+) as", problem.what)
        return replaced_in_place(case, problem, place[1], match[1]) if place else with_value(case, problem, match[1])
    if match := re.match(r"(?:write|set|use|keep) (\w+)$", head):
        if match[1] in catalogue() and (foreign or problem.what.startswith("unknown")):
            return replaced_in_place(case, problem, quoted[0], match[1])
        if quoted:
            return replaced_in_place(case, problem, quoted[-1] if quoted[-1] in case.text else quoted[0], match[1])
        return with_value(case, problem, match[1])
    if match := re.match(r"(?:write|set) (\S+)$", head):
        return with_value(case, problem, match[1])
    return None


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_advice_for_a_wrong_recipe_works(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """M1: applying a fix removes its problem, and makes no new one."""
    monkeypatch.chdir(tmp_path)
    case = read_case(path)
    problems = case.problems(tmp_path)
    assert problems
    for problem in problems:
        executed = [after for after in edits(case, problem) if after is not None]
        assert executed or any(problem.fix.startswith(words) for words in NOT_AN_EDIT), problem
        for after in executed:
            remaining = after.problems(tmp_path)
            assert problem.what not in {other.what for other in remaining}, problem
            before = {other.what for other in problems}
            new = [str(other) for other in remaining if other.what not in before]
            assert not new or path.stem in SECOND_FAULT, (problem, new)


MODEL = "model_name_or_path: Qwen/Qwen2.5-0.5B-Instruct\ndataset_name: openai/gsm8k\n"
EVALUATES = "eval_strategy: steps\neval_steps: 5\n"
FINDINGS = {
    "a flag with a YAML list": Case("a.yaml", MODEL, ("--reward_funcs", "[math_verify, format_tag]")),
    "sequences over GPUs": Case("a.yaml", f"{MODEL}sequence_parallel_size: 2\n"),
    "a tracker": Case("a.yaml", f"{MODEL}report_to: clearml\n"),
    "a misspelt key": Case("a.yaml", f"{MODEL}learning_rte: 1e-6\n"),
    "an evaluation switched off": Case(
        "a.yaml", f"{MODEL}eval_strategy: steps\neval_steps: 5\n", ("--eval_strategy", "no")
    ),
    "sampling in a dictionary": Case("a.yaml", f"{MODEL}use_vllm: true\ngeneration_kwargs: {{top_p: 0.5}}\n"),
    "a limit of a dictionary": Case("a.yaml", f"{MODEL}generation_kwargs: {{max_new_tokens: 5}}\n"),
    "a schedule": Case("a.yaml", f"{MODEL}lr_scheduler_type: warmup_stable_decay\nmax_steps: 100\n"),
    "a minimum rate": Case("a.yaml", f"{MODEL}lr_scheduler_type: cosine_with_min_lr\n"),
    "a word of YAML": Case("a.yaml", f"{MODEL}save_strategy: no\n"),
}


@pytest.mark.parametrize("case", FINDINGS.values(), ids=list(FINDINGS))
def test_every_advice_of_a_finding_works(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """M1, S2, M18: the same for recipes of the findings."""
    monkeypatch.chdir(tmp_path)
    problems = case.problems(tmp_path)
    assert problems
    for problem in problems:
        executed = [after for after in edits(case, problem) if after is not None]
        assert executed, problem
        for after in executed:
            assert [str(other) for other in after.problems(tmp_path)] == [], problem


def test_a_model_as_a_reward_is_not_advised_as_a_module(tmp_path: Path) -> None:
    """M1: the advice for trl-lib/Qwen2-0.5B-Reward was to write trl-lib/Qwen2-0:5B-Reward."""
    assert Case("a.yaml", f"{MODEL}reward_funcs: [trl-lib/Qwen2-0.5B-Reward]\n").problems(tmp_path) == []
    (problem,) = Case("a.yaml", f"{MODEL}reward_funcs: [v1.5-reward]\n").problems(tmp_path)
    assert "file.py:function" in problem.fix and "v1:5-reward" not in problem.fix


def test_a_folder_is_not_advised_as_a_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """M1: a folder dir.yaml was answered with "write dir.yaml"."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "dir.yaml").mkdir()
    with pytest.raises(ConfigError, match=r"RECIPE: 'dir.yaml' is a folder. Fix: name a .yaml file in it"):
        resolve_recipe("dir.yaml", None, [], {}, "cpu")


def pasted(command: str) -> list[str]:
    """Return the words that bash reads in a command."""
    words = subprocess.run(["bash", "-c", f"printf '%s\\0' {command}"], capture_output=True, check=True).stdout
    return words.decode(errors="surrogateescape").split("\0")[:-1]


@pytest.mark.parametrize(
    "name",
    ["plain.yaml", "two words", "it's", "a\nb", "a\tb\\n'c", "\x1b[31mred", "\x07f", "\u2028\u00a0é", "\udcff\n", ""],
)
def test_a_word_of_a_command_is_one_line_that_bash_reads_back(name: str) -> None:
    """M1: a newline in a path was printed as it is, or as \\n between plain quotes, which is another file."""
    assert shell_quote(name).isprintable() and pasted(shell_quote(name)) == [name]


@pytest.mark.parametrize("folder", ["new\nline", "it's", "escape\x1b[31m"])
def test_advice_about_a_path_with_control_characters_works_when_pasted(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """M1: in a working folder with a newline in its path, and with a recipe in such a folder."""
    places = tmp_path / folder
    (places / folder).mkdir(parents=True)
    monkeypatch.chdir(places)
    for name in ("a.yaml", f"{folder}/b.yaml", str(places / "c.yaml")):
        assert cli.main(["new", name]) == 0
        (line,) = capsys.readouterr().out.splitlines()
        assert line.isprintable()
        advised = pasted(line.partition("next: grpo check ")[2])
        assert [Path(word).resolve() for word in advised] == [Path(name).resolve()]
        assert cli.main(["check", *advised]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert all(line.startswith("grpo: ") and line.isprintable() for line in lines), lines
    (wrong := Path(f"{folder}/d.yaml")).write_text("unknown: 1\nmodel_name_or_path: a/b\n")
    assert cli.main(["check", str(wrong)]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2 and all(line.startswith("grpo: ") and line.isprintable() for line in lines)
    assert cli.main(["check", f"{folder}/bb.yaml"]) == 2
    advised = pasted(capsys.readouterr().err.rstrip("\n").rpartition("Fix: write ")[2])
    assert advised == [f"{folder}/b.yaml"]
