"""Output of commands for a person at a terminal: colors, and lines that end at the terminal's width.

Without a terminal (a file, a pipe, a Slurm log), the same facts are plain lines, which scripts can read. NO_COLOR and
TERM=dumb turn off colors. rich is imported only for a terminal, because its import takes 0.1 s.

    print_labelled(["state      completed", "reward     0.539"], 10)
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import textwrap
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, TextIO

from grpo_recipes.errors import Problem
from grpo_recipes.process.reports import align_columns

if TYPE_CHECKING:
    from rich.console import Console

_INDENT = 2
_LEAST_TEXT = 32  # characters of a table's last column
_MOST_COLUMNS = 40  # characters of a line in which its text begins
# A command in a text: a program with the flags, values and paths behind it. A plain word or a comma ends it.
_COMMAND = re.compile(
    r"""(?<!\S)\(?(
    (?:cd\ \S+\ &&\ )?(?:[A-Z_]+=\S+\ )*
    (?:grpo\ [a-z][a-z-]+|sbatch\b|bash\b|make\b|export\b|(?:uv\ )?pip\ install\ (?:'[^']*'|[^\s,;]+))
    (?:\ (?:--?[\w-]+(?:[ =](?:'[^']*'|[^-\s]\S*(?<![,;:.)])))?  # a flag, with its value
        |'[^']*'|(?=\S*[/.=_A-Z0-9])\S*(?<![,;:.)])|setup|last))*)""",
    re.VERBOSE,
)
_STYLES = (  # pattern in a line -> style
    (r"Fix: .*|-> .*", "green"),
    (r"does not fit\b|^PROBLEM|\bfailed\b|\blost\b|\bdamaged\b", "bold red"),
    (r"^warn\b|^note\b|^not estimated", "yellow"),
    (r"^ok\b|\bcompleted\b|\bsufficient\b", "green"),
    (r"\brunning\b|\bstarting\b", "cyan"),
)


def is_terminal(stream: TextIO) -> bool:
    """Return whether a person reads this stream in a terminal that understands colors and positions."""
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def print_problems(problems: Sequence[Problem], stream: TextIO) -> None:
    """Print config errors: one line each, or in a terminal a block each, and the number of problems at the end.

    A fix is not broken into lines, so that a command in it can be copied; only a list of values is.
    """
    if not is_terminal(stream):
        print(*(f"grpo: {problem}" for problem in problems), sep="\n", file=stream)
        return
    console = make_console(stream)
    for problem in problems:
        console.print(problem.where, style="bold", soft_wrap=True)
        for line in _wrap(f"{problem.what}.", console.width - _INDENT):
            console.print(" " * _INDENT + line)
        fix = f"Fix: {problem.fix}"
        for number, line in enumerate(_wrap(fix, console.width - 3 * _INDENT) if " one of " in fix else [fix]):
            console.print(" " * (3 * _INDENT if number else _INDENT) + line, style="green", soft_wrap=True)
    if len(problems) > 1:
        files = {problem.where.partition(":")[0] for problem in problems}
        place = f" in {files.pop()}" if len(files) == 1 else ""
        console.print(f"grpo: {len(problems)} problems{place}", style="bold red", soft_wrap=True)


def print_notes(notes: Iterable[str]) -> None:
    """Print texts, each as a line that begins with "grpo: ", and in a terminal continues below its text."""
    for note in notes:
        print_wrapped(f"grpo: {note}", 6)


def print_wrapped(line: str, indent: int = _INDENT) -> None:
    """Print a line; in a terminal, it is broken at spaces and continues after ``indent`` spaces."""
    lines = _wrap(line, shutil.get_terminal_size().columns - indent) if is_terminal(sys.stdout) else [line]
    print(*lines, sep="\n" + " " * indent)


def print_labelled(lines: Sequence[str], label_width: int) -> None:
    """Print lines that begin with a label of ``label_width`` characters and a space.

    In a terminal, labels are dim, long texts continue below their beginning, and states, problems and fixes have
    colors. JSON, a variable and commands are not broken, so that they can be copied.
    """
    if not is_terminal(sys.stdout):
        print(*lines, sep="\n")
        return
    from rich.text import Text

    console = make_console(sys.stdout)
    for line in lines:
        # The text begins behind the columns of its line, for example status and name in `grpo doctor`.
        start = max([label_width + 1, *(gap.end() for gap in re.finditer(" {2,}", line[:_MOST_COLUMNS]))])
        columns, text = Text(line[:start]), Text(line[start:])
        label_style = next((style for pattern, style in _STYLES if re.match(pattern, line)), "dim")
        columns.stylize(label_style, 0, label_width)
        for pattern, style in _STYLES:
            text.highlight_regex(pattern, style)
        can_break = len(line) > console.width > 2 * start and not re.match(r"\[|\w+=|grpo ", text.plain)
        end = 0
        for number, part in enumerate(_wrap(text.plain, console.width - start) if can_break else [text.plain]):
            begin = text.plain.index(part, end)
            end = begin + len(part)
            console.print(Text.assemble(" " * start if number else columns, text[begin:end]), soft_wrap=True)


def print_table(rows: Sequence[Sequence[str]], title: str = "", space: bool = False) -> None:
    """Print rows of name, value and text in aligned columns below a title; with ``space``, after an empty line.

    In a terminal, the text continues in its column, the name is bold and the value is green. If the column would be
    narrow, each text begins in the line below its name.
    """
    if space:
        print()
    if not is_terminal(sys.stdout):
        print(*([title] if title else []), *(f"  {line}" for line in align_columns(rows)), sep="\n")
        return
    from rich.text import Text

    console = make_console(sys.stdout)
    if title:
        console.print(title, style="bold underline")
    names, values = (max((len(row[column]) for row in rows), default=0) for column in (0, 1))
    start = names + values + 3 * _INDENT
    stacked = console.width - start < _LEAST_TEXT
    for name, value, text in rows:
        lines = _wrap(text, console.width - (3 * _INDENT if stacked else start))
        width = len(name) if stacked else names
        first = "" if stacked else " " * _INDENT + lines.pop(0)
        parts = (f"  {name:<{width}}", "bold"), " " * _INDENT, (value if stacked else f"{value:<{values}}", "green")
        console.print(Text.assemble(*parts, first), soft_wrap=True)
        for line in lines:
            console.print(" " * (3 * _INDENT if stacked else start) + line, soft_wrap=True)


def make_console(stream: TextIO) -> Console:
    """Return a console of rich that prints texts unchanged: no markup, no automatic colors."""
    from rich.console import Console

    return Console(file=stream, markup=False, highlight=False, emoji=False)


def _wrap(text: str, width: int) -> list[str]:
    """Break a text at spaces into lines of at most ``width`` characters. Longer words are kept whole.

    A command that would be broken gets a line of its own, without the punctuation around it.
    """
    lines = textwrap.wrap(text, max(width, 20), break_long_words=False, break_on_hyphens=False) or [""]
    for match in _COMMAND.finditer(text):
        if not any(match[1] in line for line in lines):
            before, after = text[: match.start(1)].rstrip(" ("), text[match.end() :].lstrip("),;:. ")
            return [*(_wrap(before, width) if before else []), match[1], *(_wrap(after, width) if after else [])]
    return lines
