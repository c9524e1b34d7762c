"""A problem is one line without secrets."""

from __future__ import annotations

import pytest

from grpo_recipes.errors import ConfigError, Problem, config_error, translate_errors

TOKEN = "hf_" + "plantedsecret" * 2


def test_it_is_one_line_whatever_the_user_wrote():
    problem = Problem("a.yaml:1", "unknown key 'a\nb\x1b[31m\ud800'", "remove it")
    assert str(problem) == "a.yaml:1: unknown key 'a\\nb\\x1b[31m\\ud800'. Fix: remove it"


def test_it_repeats_no_secret():
    problem = Problem(f"'{TOKEN}'", f"got {TOKEN}", f"not {TOKEN}")
    assert TOKEN not in str(problem) + problem.where + problem.what + problem.fix


def test_letters_of_any_language_stay():
    assert str(Problem("é", "größe → 「数」", "😀")) == "é: größe → 「数」. Fix: 😀"


def test_an_error_of_a_kind_is_translated_and_any_other_passes() -> None:
    def fail(error: Exception) -> None:
        with translate_errors((OSError, ValueError), lambda error: config_error("here", f"failed: {error}", "do that")):
            raise error

    cause = ValueError("odd")
    with pytest.raises(ConfigError, match=r"^here: failed: odd\. Fix: do that$") as caught:
        fail(cause)
    assert caught.value.__cause__ is cause
    with pytest.raises(KeyError):
        fail(KeyError("other"))
