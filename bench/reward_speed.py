"""Measure the completions per second that the accuracy rewards score.

    python bench/reward_speed.py [--rounds 5] [--workers 2] [--out bench/results/reward_speed.json]
    python bench/reward_speed.py --against HEAD~1  # also runs that commit, in turns, and prints the ratio

Groups of 8 different completions of about 1,400 characters, half of them right, in several notations:

* GSM8K-like whole numbers, scored by ``pure_accuracy_math`` in this process, as in the trainer;
* the same by ``math_verify`` in child processes, with the pickling and the limits of a run;
* expressions for sympy (roots, polynomials, intervals, tuples, multiples of pi), by ``math_verify``;
* two groups of numbers for each group of expressions, by ``math_verify``.

Children are started and warm before a round begins. Targets on two cores: 50,000 a second exact, 500 by math-verify.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from made_by import begin, write_record

from grpo_recipes.paths import find_code_root
from grpo_recipes.rewards.functions import pure_accuracy_math
from grpo_recipes.rewards.pool import RewardPool

GROUP = 8
NUMBERS = [
    "{n}", "{n}.0", "${n}", "$\\boxed{{{n}}}$", "{n:,}", "{n} dollars", "\\frac{{{n}}}{{1}}", "\\(x={n}\\)"
]  # fmt: skip
# Right and wrong ways to write an expression of two numbers, the first as the reference solution.
EXPRESSIONS = [
    (r"\frac{{{a}\sqrt{{2}}}}{{{b}}}", r"\frac{{{a}}}{{{b}}}\sqrt{{2}}", r"\frac{{{b}\sqrt{{2}}}}{{{a}}}"),
    (r"x^2+{a}x+{b}", r"{b}+{a}x+x^2", r"x^2+{b}x+{a}"),
    (r"({a}, {b})", r"( {a},{b} )", r"({b}, {a})"),
    (r"\frac{{{a}\pi}}{{{b}}}", r"\pi\cdot\frac{{{a}}}{{{b}}}", r"\frac{{{b}\pi}}{{{a}}}"),
    (r"x \ge {a}", r"[{a}, \infty)", r"({a}, \infty)"),
    (r"\sqrt{{{a}}}+{b}", r"{b}+\sqrt{{{a}}}", r"\sqrt{{{b}}}+{a}"),
]
Rows = tuple[list[Any], list[str]]


def main() -> None:
    """Measure and write the result."""
    options = _options()
    if options.against:
        print(json.dumps(_compared(options), indent=1))
        return
    rows = options.rows
    origin = begin(options.out, "math-verify", "sympy")
    result = {
        "what": "completions a second, median of the rounds",
        "exact match, numbers, this process": _measure(_exact, lambda seed: numbers(rows, seed), options.rounds),
        **_children(options),
        "rows": {"numbers": rows, "expressions": rows // 16, "numbers and expressions": rows // 8},
        "group": GROUP,
        "rounds": options.rounds,
    }
    write_record(options.out, result, origin)
    print(json.dumps(result, indent=1))


def _compared(options: argparse.Namespace) -> dict[str, float]:
    """Return the speed of this code divided by the speed of another commit, from rounds that alternate."""
    rates: dict[str, dict[str, list[float]]] = {"this code": {}, options.against: {}}
    with tempfile.TemporaryDirectory() as folder:
        other, out = Path(folder) / "other", Path(folder) / "out.json"
        git = ["git", "-C", str(find_code_root()), "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", str(other), options.against], check=True)
        try:
            for _ in range(options.rounds):
                for label, code in (("this code", find_code_root()), (options.against, other)):
                    command = [sys.executable, __file__, "--rounds", "1", "--out", str(out)]
                    command += ["--rows", str(options.rows), "--workers", str(options.workers)]
                    environment = {**os.environ, "PYTHONPATH": str(code / "src")}
                    subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)
                    for task, result in json.loads(out.read_text()).items():
                        if isinstance(result, dict) and "median" in result:
                            rates[label].setdefault(task, []).append(result["median"])
        finally:
            subprocess.run([*git, "remove", "--force", str(other)], check=True)
    rates_here, rates_against = rates["this code"], rates[options.against]
    print(json.dumps(rates, indent=1))
    return {
        f"ratio, {task}": round(statistics.median(rates_here[task]) / statistics.median(rates_against[task]), 2)
        for task in rates_here
    }


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", type=int, default=32_000)
    parser.add_argument("--workers", type=int, default=2, help="child processes")
    parser.add_argument("--against", metavar="COMMIT", help="compare with this commit; writes no record")
    parser.add_argument("--out", type=Path, default=find_code_root() / "bench/results/reward_speed.json")
    return parser.parse_args()


def _children(options: argparse.Namespace) -> dict[str, Any]:
    """math_verify as a run calls it."""
    rows = options.rows
    with RewardPool("math_verify", workers=options.workers) as pool:

        def judge(completions: list[Any], answer: list[str]) -> list[float | None]:
            return [verdict.value for verdict in pool.score("math_verify", completions, {"answer": answer})]

        judge(*expressions(256 * options.workers, 0))
        tasks = {
            "numbers": lambda seed: numbers(rows, seed),
            "expressions": lambda seed: expressions(rows // 16, seed),
            "numbers and expressions": lambda seed: mixed(rows // 8, seed),
        }
        return {
            f"math_verify, {name}, {options.workers} children": _measure(judge, make, options.rounds)
            for name, make in tasks.items()
        }


def _exact(completions: list[Any], answer: list[str]) -> list[float | None]:
    return pure_accuracy_math(completions, answer)


def _measure(judge: Callable[..., list[float | None]], make: Callable[[int], Rows], rounds: int) -> dict[str, Any]:
    """Completions a second of each round; a round that judges wrongly does not count."""
    rates, rates_cpu = [], []
    for seed in range(1, rounds + 1):
        completions, answers = make(seed)
        start, start_cpu = time.perf_counter(), time.process_time()
        values = judge(completions, answers)
        rates.append(len(completions) / (time.perf_counter() - start))
        rates_cpu.append(len(completions) / (time.process_time() - start_cpu))
        expected = [float(index % 2 == 0) for index in range(len(values))]
        wrong = [judged for judged in zip(answers, values, expected, strict=True) if judged[1] != judged[2]]
        assert not wrong, wrong[0]
    result = {"median": round(statistics.median(rates)), "raw": [round(rate) for rate in rates]}
    # Of use on a machine that others use too; children's time is not in it.
    return result | ({"median_by_cpu_time": round(statistics.median(rates_cpu))} if judge is _exact else {})


def numbers(count: int, seed: int) -> Rows:
    """Completions and reference solutions; even ones are right."""
    draw = random.Random(seed)
    golds = [draw.randint(1, 10_000_000) for _ in range(count // GROUP)]
    answers = [golds[index // GROUP] for index in range(count)]
    texts = [
        NUMBERS[index % len(NUMBERS)].format(n=gold if index % 2 == 0 else gold + 1 + index % GROUP)
        for index, gold in enumerate(answers)
    ]
    return [_completion(text, draw) for text in texts], [str(gold) for gold in answers]


def expressions(count: int, seed: int) -> Rows:
    """Completions and reference solutions; even ones are right."""
    draw = random.Random(seed)
    completions, answers = [], []
    for group in range(count // GROUP):
        gold, right, wrong = EXPRESSIONS[group % len(EXPRESSIONS)]
        for member in range(GROUP):
            a, b = _PAIRS[(group + 1000 * seed) % len(_PAIRS)]
            other = a + b + member + 1
            answers.append(gold.format(a=a, b=b))
            text = right.format(a=a, b=b) if member % 2 == 0 else wrong.format(a=other, b=b)
            completions.append(_completion(text, draw))
    return completions, answers


def mixed(count: int, seed: int) -> Rows:
    """Two groups of numbers, one of expressions, and so on."""
    groups = count // (3 * GROUP)
    easy, hard = numbers(2 * groups * GROUP, seed), expressions(groups * GROUP, seed + 500)
    completions, answers = [], []
    for group in range(groups):
        for rows, first, last in ((easy, 2 * group, 2 * group + 2), (hard, group, group + 1)):
            completions += rows[0][first * GROUP : last * GROUP]
            answers += rows[1][first * GROUP : last * GROUP]
    return completions, answers


_PAIRS = [(a, b) for a in (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47) for b in range(51, 101, 2)]
_WORDS = ["so", "the", "number", "of", "eggs", "is", "then", "we", "add", "and", "each", "costs", "twice", "per", "day"]


def _completion(answer: str, draw: random.Random) -> list[dict[str, str]]:
    """A chat message of about 1,400 characters that ends with the answer."""
    reasoning = " ".join(draw.choices(_WORDS, k=360))
    return [{"role": "assistant", "content": f"{reasoning}\n<answer>{answer}</answer>"}]


if __name__ == "__main__":
    main()
