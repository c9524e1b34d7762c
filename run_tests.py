"""Run seven tests of the offline trainer on CPU, in under a minute: python run_tests.py.

It ends with "7/7 tests passed" and 0, or with the names of those that failed and 1. ``make test`` runs all tests.
"""

import os
import subprocess
import sys
import tempfile
from xml.etree import ElementTree

from smoke_test import ROOT, fail, need_environment

TESTS = {
    "a seed gives the same problem in another process":
        "tests/extensions/problems/test_seeded.py::test_another_process_makes_the_same_problem",
    "training and evaluation share no seed":
        "tests/extensions/problems/test_seeded.py::test_seeds_of_the_splits_and_what_they_share",
    "the terms of the loss add up":
        "tests/trainers/test_iterations.py::test_each_iteration_has_its_means_and_terms_that_add_up",
    "every sampling field reaches the server":
        "tests/trainers/test_offline_training.py::test_every_sampling_field_reaches_the_server_under_its_name",
    "pass@k is the share of subsets with a right one":
        "tests/test_stats.py::test_it_is_the_share_of_subsets_with_a_right_one",
    "a failed completion is no empty text":
        "tests/rollouts/test_openai.py::test_attempts_are_bounded_and_a_failure_is_no_empty_text",
    "metrics are replaced whole":
        "tests/runs/test_rundir.py::test_json_is_replaced_whole_whoever_reads_meanwhile",
}  # fmt: skip


def results(report):
    """Return of each test that ran, without its parameters, whether all of it passed."""
    found = {}
    for case in ElementTree.parse(report).iter("testcase"):
        name = case.get("name").partition("[")[0]
        found[name] = found.get(name, True) and not [one for one in case if one.tag in ("failure", "error", "skipped")]
    return found


def main():
    """Run the tests, and say which passed."""
    python = need_environment()
    words = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *TESTS.values()]
    with tempfile.TemporaryDirectory() as folder:
        report = os.path.join(folder, "report.xml")
        left_out = ("GRPO_LAST_START", "PYTEST_ADDOPTS")
        variables = {name: text for name, text in os.environ.items() if name not in left_out}
        done = subprocess.run(
            [*words, f"--junitxml={report}"], cwd=ROOT, env={**variables, "HF_HUB_OFFLINE": "1"},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
        )  # fmt: skip
        if not os.path.exists(report):
            if "No module named pytest" in done.stdout:
                fail("pytest is not installed. Fix: run make setup, which installs the tools of a checkout")
            fail(done.stdout.strip() or "pytest said nothing")
        passed = results(report)
    failed = [what for what, test in TESTS.items() if not passed.get(test.rpartition("::")[2])]
    if failed:
        print(done.stdout)
    for what in TESTS:
        print("FAILED" if what in failed else "passed", what)
    print(f"{len(TESTS) - len(failed)}/{len(TESTS)} tests passed")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
