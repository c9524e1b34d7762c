"""The reward ``code_tests``: the fraction of a row's tests that the program in a completion passes.

The tests are in the column ``verification_info`` (open-r1) or in the solution (verl), as JSON or as nested values:

    {"language": "python", "test_cases": [{"input": "7", "output": "49", "type": "stdin_stdout"}]}
    {"inputs": ["7"], "outputs": ["49"]}
    {"inputs": ["[1, 2]\n3"], "outputs": ["6"], "fn_name": "f"}  # one line of JSON per argument

Expected outputs stay outside of the sandbox, so a program can't read them.
"""

import contextlib
import json
import math
import re
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

from grpo_recipes.errors import translate_errors
from grpo_recipes.extensions.code.arguments import E2B
from grpo_recipes.extensions.code.jail import run_program
from grpo_recipes.extensions.code.services import SERVICES, Run, limit_overhead, open_e2b_sandbox
from grpo_recipes.rewards.answers import extract_final_text

_BLOCK = re.compile(r"```[^\n`]*\n(.*?)```", re.DOTALL)
_PART_OF_TIME = 0.8  # of reward_timeout, for all tests of a completion
_PART_OF_MEMORY = 0.5  # of reward_memory_gib, for a program
_TIMES_EXPECTED, _MOST_EXTRA = 10, 10_000  # characters of an output that is compared, so that it takes little time
_NO_TESTS = "neither the column verification_info nor the solution has tests"
_REQUESTS = 8  # simultaneous requests to a service for the tests of a completion
# Calls a function with the arguments on stdin, and prints its result in the last line.
_CALL = """import json, sys
space = {{"__name__": "program"}}
exec("from typing import *; from collections import *; from functools import *; from itertools import *", space)
exec("import bisect, collections, functools, heapq, itertools, math, random, re, string", space)
exec(compile({source!r}, "program.py", "exec"), space)
function = getattr(space["Solution"](), {name!r}) if "Solution" in space else space[{name!r}]
result = function(*[json.loads(line) for line in sys.stdin.read().splitlines() if line.strip()])
print("\\n" + json.dumps(result))
"""
# Programs that know the answers, for `grpo check-rewards`.
_ANSWERS = "import sys\nprint({answers!r}[sys.stdin.read().strip()])"
_ANSWERS_OF_FUNCTION = (
    "import json\ndef {name}(*values):\n    return json.loads({answers!r}['\\n'.join(map(json.dumps, values))])"
)


class Case(NamedTuple):
    """A test: the input and the expected output of a program, or of its function ``name``, then as lines of JSON."""

    input: str
    output: str
    name: str | None = None


def code_tests(
    completions: list[Any], answer: list[Any] | None = None, *, code_sandbox: str, code_server_url: str | None,
    code_score: str, reward_timeout: float, reward_memory_gib: float, **columns: list[Any],
) -> list[float | None]:  # fmt: skip
    """Return the fraction of tests that the last fenced code block of a completion passes; 0.0 without a block.

    With ``code_score: all``, return 1.0 only if all tests pass, else 0.0. All tests together have 80 % of
    ``reward_timeout``, and tests that don't end by then fail. Raise ValueError if a row has no tests, and another error
    if the sandbox fails.
    """
    memory_bytes = int(_PART_OF_MEMORY * reward_memory_gib * 2**30)
    run: Run = partial(run_program, memory_bytes=memory_bytes)
    if code_sandbox in SERVICES:
        run = partial(SERVICES[code_sandbox], str(code_server_url), limit_overhead(reward_timeout))
    infos = columns.get("verification_info", [None] * len(completions))
    solutions = answer or [None] * len(completions)
    rewards: list[float | None] = []
    for completion, info, solution in zip(completions, infos, solutions, strict=True):
        cases, blocks = read_cases(info, solution), _BLOCK.findall(extract_final_text(completion))
        if not blocks:
            rewards.append(0.0)
            continue
        deadline = time.monotonic() + _PART_OF_TIME * reward_timeout
        with contextlib.ExitStack() as stack:
            if code_sandbox == E2B:
                run = stack.enter_context(open_e2b_sandbox(code_server_url, reward_timeout))
            passes = partial(_passes, blocks[-1], run, deadline)
            outcomes: Iterable[bool] = map(passes, cases)
            if code_sandbox in SERVICES:
                outcomes = stack.enter_context(ThreadPoolExecutor(_REQUESTS)).map(passes, cases)
            rewards.append(float(all(outcomes)) if code_score == "all" else sum(outcomes) / len(cases))
    return rewards


def read_cases(*values: Any) -> list[Case]:
    """Return the tests in the first of these values that has tests. Raise ValueError if there are none for Python."""
    for value in values:
        if isinstance(value, str):
            with contextlib.suppress(ValueError):
                value = json.loads(value)
        info = {"test_cases": value} if isinstance(value, list) else value
        if not isinstance(info, dict) or not (info.get("test_cases") or info.get("inputs")):
            continue
        if not str(info.get("language") or "python").startswith("python"):
            raise ValueError(f"the tests are for {info['language']}, but code_tests runs only Python")
        with translate_errors((AttributeError, LookupError, TypeError), lambda _: ValueError(_NO_TESTS)):
            tests = info.get("test_cases") or [
                {"input": text, "output": expected, "fn_name": info.get("fn_name")}
                for text, expected in zip(info["inputs"], info["outputs"], strict=True)
            ]
            return [_make_case(test["input"], test["output"], test.get("fn_name") or None) for test in tests]
    raise ValueError(_NO_TESTS)


def _make_case(arguments: Any, expected: Any, name: str | None) -> Case:
    """Return a test from its input and output: a text or lines; for a function, JSON or a list of arguments.

    ``name`` is the function to call, or None for a program that reads its input from stdin.
    """
    if name is None:
        values = (value if isinstance(value, list) else [value] for value in (arguments, expected))
        return Case(*("\n".join(map(str, value)) for value in values))
    if isinstance(expected, str):
        with contextlib.suppress(ValueError):
            expected = json.loads(expected)
    lines = arguments if isinstance(arguments, str) else "\n".join(map(json.dumps, arguments))
    return Case(lines, json.dumps(expected), name)


def _passes(program: str, run: Run, deadline: float, case: Case) -> bool:
    """Return whether a program passes a test before the deadline, a time of ``time.monotonic()``."""
    seconds = deadline - time.monotonic()
    if seconds <= 0:
        return False
    source = program if case.name is None else _CALL.format(source=program, name=case.name)
    output = run(source, case.input, seconds)
    return output is not None and is_expected(output, case)


def is_expected(output: str, case: Case) -> bool:
    """Return whether the output of a program passes a test.

    Words and lines must be equal, except that numbers with a decimal point may differ by a millionth. The result of a
    function must be equal as JSON. Some datasets wrap it in a list. A much longer output fails.
    """
    if case.name is not None:
        output = output.removesuffix("\n").rpartition("\n")[2]
    if len(output) > _TIMES_EXPECTED * len(case.output) + _MOST_EXTRA:
        return False
    if case.name is not None:
        with contextlib.suppress(ValueError, RecursionError):
            result, expected = json.loads(output), json.loads(case.output)
            return bool(result == expected or [result] == expected)
        return False
    rows, expected_rows = ([line.split() for line in text.strip().splitlines()] for text in (output, case.output))
    return len(rows) == len(expected_rows) and all(
        len(row) == len(expected_row) and all(map(_is_same_word, row, expected_row))
        for row, expected_row in zip(rows, expected_rows, strict=True)
    )


def _is_same_word(word: str, expected: str) -> bool:
    """Return whether two words are equal; if ``expected`` has a decimal point, also numbers that are almost equal."""
    if word != expected and "." in expected:
        with contextlib.suppress(ValueError):
            return math.isclose(float(word), float(expected), rel_tol=1e-6, abs_tol=1e-9)
    return word == expected


def list_programs(row: Mapping[str, Any]) -> tuple[list[str], list[str]] | None:
    """Return a list with a program that passes a row's tests, and a list with a program that fails them.

    Return None if the row has no tests for Python.
    """
    try:
        cases = read_cases(row.get("verification_info"), row.get("answer"))
    except ValueError:
        return None
    name, answers = cases[0].name, {_format_input(case): case.output for case in cases}
    right = _ANSWERS.format(answers=answers)
    if name is not None:
        right = _ANSWERS_OF_FUNCTION.format(name=name, answers=answers)
    return [right], ["raise SystemExit(1)"]


def _format_input(case: Case) -> str:
    """Return the input of a test without white space around it; for a function, with the JSON as Python writes it."""
    if case.name is not None:
        with contextlib.suppress(ValueError):
            return "\n".join(json.dumps(json.loads(line)) for line in case.input.splitlines() if line.strip())
    return case.input.strip()
