"""`grpo keys`."""

from __future__ import annotations

import json

import pytest

from grpo_recipes import cli
from grpo_recipes.recipe.keys import ENVIRONMENT_KEYS, READ_VARIABLES, SHELL_VARIABLES, catalogue, nested_catalogue
from grpo_recipes.recipe.registry import BENCHMARKS


def told(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict:
    assert cli.main(["keys", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert cli.main(["keys", *arguments]) == 2
    return capsys.readouterr().err


def test_every_key_is_listed(capsys):
    nested = {f"{path}.{name}" for path, names in nested_catalogue().items() for name in names}
    assert told(capsys).keys() == catalogue().keys() | nested


def test_a_word_is_looked_for_in_names_and_meanings(capsys):
    found = told(capsys, "benchmark")
    assert {"benchmarks", "benchmark_samples"} <= found.keys() < catalogue().keys()
    assert "dataset_mixture.datasets.weight" in told(capsys, "WEIGHT")
    assert "accelerator" in told(capsys, "accelerate")


def test_a_key_is_printed_with_type_limits_default_and_class(capsys):
    assert cli.main(["keys", "benchmark_samples"]) == 0
    first, second, *_ = capsys.readouterr().out.splitlines()
    assert first == "benchmark_samples  (int >= 1, default 1, ScriptArguments)"
    assert second.startswith("    Completions of each benchmark problem")
    assert cli.main(["keys", "reward_isolation"]) == 0
    assert "(completion | none, default" in capsys.readouterr().out


def test_variables(capsys):
    assert told(capsys, "--env").keys() == {
        *ENVIRONMENT_KEYS,
        *READ_VARIABLES,
        *SHELL_VARIABLES,
    }
    assert told(capsys, "vllm_port", "--env").keys() == {"VLLM_PORT"}
    assert "nothing in grpo keys --env" in refused(capsys, "xyzzy", "--env")


def test_benchmarks(capsys):
    assert told(capsys, "--benchmarks").keys() == BENCHMARKS.keys()
    assert told(capsys, "aime", "--benchmarks").keys() == {"aime24", "aime25"}


@pytest.mark.parametrize(
    ("word", "fix"),
    [
        ("leraning_rate", "try learning_rate"),
        ("torch_dtype", "write dtype: bfloat16"),
        ("output_dir", "set run_root and run_name"),
        ("gen_temperature", "write temperature"),
        ("xyzzyx", "no key has that in its name or meaning. Fix: see grpo keys"),
    ],
)
def test_a_word_that_no_key_has(capsys, word, fix):
    assert fix in refused(capsys, word)
