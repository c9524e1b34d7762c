"""Problems from seeds: the same everywhere, correct by construction, and assignments judged only by the clauses."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
import subprocess
import sys
from dataclasses import replace

import pytest

from grpo_recipes.extensions.problems.modebench.dataset import find_mode, list_right_answers
from grpo_recipes.extensions.problems.seeded import (
    GENERATORS,
    Draws,
    Settings,
    format_assignment,
    list_assignments,
    make_row,
    make_rows,
    parse_clauses,
    satisfies,
)
from grpo_recipes.recipe.keys import catalogue
from grpo_recipes.smoke import split_sums

DEFAULTS = Settings.read(lambda key: catalogue()[key]["default"])
# Hashes of the rows of seeds 1000 to 1063 as JSON. Changes in a generator or in Python's random module change them.
DIGESTS = {
    "seeded:arithmetic": "4ee622fd89672c2f",
    "seeded:sums": "08d06a760e342f7e",
    "seeded:sat": "e330f8d1adbbd2eb",
    "seeded:countdown": "cfdd7827b2b2a28c",
    "seeded:graph_coloring": "92e564716b2ee398",
}


@pytest.mark.parametrize("name", GENERATORS)
def test_the_problems_of_seeds_never_change(name: str) -> None:
    problems = make_rows(name, "train", DEFAULTS)
    assert [problem["problem_seed"] for problem in problems] == list(range(1000, 1064))
    assert hashlib.sha256(json.dumps(problems).encode()).hexdigest()[:16] == DIGESTS[name]
    assert problems[7] == make_row(name, 1007, DEFAULTS)  # independent of earlier rows
    assert len({problem["problem"] for problem in problems}) >= (40 if name == "seeded:sums" else 60)
    assert set(problems[0]) == set(GENERATORS[name].columns)


def test_another_process_makes_the_same_problem() -> None:
    code = (
        "from grpo_recipes.extensions.problems import seeded\nfrom grpo_recipes.recipe.keys import catalogue\n"
        "keys = seeded.Settings.read(lambda key: catalogue()[key]['default'])\n"
        "print(seeded.make_row('seeded:sat', 1234, keys))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(make_row("seeded:sat", 1234, DEFAULTS))


def test_arithmetic_is_right() -> None:
    operator_pairs = set()
    for problem in make_rows("seeded:arithmetic", "train", replace(DEFAULTS, problem_seeds=200)):
        question = re.match(r"What is (\d+) ([-+*]) (\d+) ([-+*]) (\d+)\?", problem["problem"])
        assert question and str(eval(" ".join(question.groups()))) == problem["answer"]
        operator_pairs.add(question[2] + question[4])
    assert len(operator_pairs) == 9


def test_sums_are_those_of_the_smoke_task() -> None:
    problems = make_rows("seeded:sums", "train", replace(DEFAULTS, problem_seeds=1500))
    train, test = split_sums()
    assert {(problem["problem"], problem["answer"]) for problem in train + test} == {
        (problem["problem"], problem["answer"]) for problem in problems
    }


def test_satisfiability_has_the_sizes_of_its_difficulty_and_its_answer_is_one() -> None:
    sizes = set()
    for problem in make_rows("seeded:sat", "train", replace(DEFAULTS, problem_seeds=300)):
        clauses = parse_clauses(problem["clauses"])
        variables = len(re.findall("x[0-9]=", problem["answer"]))
        assert all(len({abs(part) for part in clause}) == 3 for clause in clauses)
        assert max(abs(part) for clause in clauses for part in clause) <= variables
        assert satisfies(problem["answer"], clauses)
        listed = re.search(r"The clauses are: (.*?)\. Write", problem["problem"])
        read = [
            [int(part.replace("not x", "-").removeprefix("x")) for part in clause.strip("()").split(" or ")]
            for clause in listed[1].split("; ")
        ]
        assert read == clauses
        sizes.add((variables, len(clauses)))
    assert sizes == set(itertools.product(range(6, 9), range(8, 13)))


@pytest.mark.parametrize("name", ["seeded:countdown", "seeded:graph_coloring"])
def test_problems_of_modebench_are_judged_by_its_reward(name: str) -> None:
    for problem in make_rows(name, "test", DEFAULTS):
        assert find_mode(rf"\boxed{{{list_right_answers(problem['answer'])[0]}}}", problem["answer"]) is not None
        assert json.loads(problem["answer"])["modes"] in DEFAULTS.modebench.modes


CLAUSES = [[1, -2, 3], [-1, 2, 3]]


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        ("x1=true, x2=true, x3=false", True),
        ("x1=false, x2=false, x3=true", True),
        ("x1=true, x2=false, x3=false", False),
        ("X3: 1; x2 = F\nx_1=T", True),
        ("{x1=1 x2=1 and x3=0}", True),
        ("x1=true, x2=true, x3=false, x4=true", True),  # one more that no clause has
        ("x1=true, x2=true", False),  # x3 is left out, though the clauses are true
        ("x1=true, x2=true, x3=false, x3=true", False),
        ("x1=true, x2=true, x3=true or false", False),
        ("x1=true, x2=true, x3=10", False),
        ("x1=true, x2=true, x3=trueish", False),
        ("so x1=true, x2=true, x3=true", False),
        ("true, true, true", False),
        ("", False),
        ("x1=true, x2=true, x3=true" + " " * 3000, False),
    ],
)
def test_any_assignment_that_satisfies_is_right(answer: str, right: bool) -> None:
    assert satisfies(answer, CLAUSES) is right


def test_an_assignment_is_judged_as_the_clauses_say() -> None:
    clauses = parse_clauses(make_row("seeded:sat", 1001, DEFAULTS)["clauses"])
    for (text, satisfied), values in zip(
        list_assignments(clauses), itertools.product((False, True), repeat=6), strict=True
    ):
        assert text == format_assignment(values)
        assert satisfied == all(any(values[abs(part) - 1] == (part > 0) for part in clause) for clause in clauses)


@pytest.mark.parametrize("text", ["", "[]", "[[]]", "[[0]]", "[[1, true]]", "3", "[3]", "{", "x", None])
def test_what_has_no_clauses_raises(text: str | None) -> None:
    with pytest.raises(ValueError):
        parse_clauses(text)


def test_seeds_of_the_splits_and_what_they_share() -> None:
    assert DEFAULTS.seeds("train") == range(1000, 1064) and DEFAULTS.seeds("test") == range(5000, 5016)
    assert not DEFAULTS.shared
    assert replace(DEFAULTS, eval_problem_seed_start=1060).shared == [*range(1060, 1064)]
    assert replace(DEFAULTS, eval_problem_seed_start=995).shared == [*range(1000, 1011)]
    assert not replace(DEFAULTS, eval_problem_seed_start=1064).shared
    chosen = replace(DEFAULTS, eval_problem_ids=[7, 1001, 3])
    assert (chosen.seeds("test"), chosen.shared) == ([7, 1001, 3], [1001])
    assert chosen.fingerprint("seeded:sat") != DEFAULTS.fingerprint("seeded:sat")
    assert DEFAULTS.fingerprint("seeded:sat") != replace(DEFAULTS, problem_seeds=65).fingerprint("seeded:sat")


def test_draws_are_even() -> None:
    draws = Draws("even", 0)
    counts = [0] * 5
    for _ in range(5000):
        counts[draws.between(3, 7) - 3] += 1
    assert min(counts) > 900 and sorted(draws.sample(4, range(4))) == [0, 1, 2, 3]
