"""The schema for editors: it accepts all shipped recipes, marks faults while you type, and is found."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import jsonschema
import pytest
import yaml

from grpo_recipes.paths import find_code_root
from grpo_recipes.recipe.keys import catalogue, schema_file, schema_line, schema_note

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
from make_keys import schema

RECIPES = sorted((find_code_root() / "recipes").rglob("*.yaml"))
# Faults that an editor marks while they are typed.
SEEN_BY_EDITORS = [
    "unknown_key", "unknown_nested_key", "unknown_key_of_mixture", "unknown_checkpointing_key", "obsolete_torch_dtype",
    "owned_resume", "type_float_for_int", "type_text_for_number", "type_list_for_text", "type_text_for_bool",
    "type_text_for_mapping", "range_group_of_one", "range_memory", "choice_loss", "choice_scheduler", "trap_no",
]  # fmt: skip


def problems(text: str) -> list[str]:
    return [error.message for error in jsonschema.Draft7Validator(schema()).iter_errors(yaml.safe_load(text))]


def test_the_file_is_what_the_catalogue_says() -> None:
    assert json.loads(schema_file().read_text()) == json.loads(json.dumps(schema())), "run make keys"


def test_it_is_a_schema_of_every_key() -> None:
    jsonschema.Draft7Validator.check_schema(schema())
    assert catalogue().keys() <= schema()["properties"].keys()
    assert all(entry["description"] for entry in schema()["properties"].values())


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: f"{path.parent.parent.name}-{path.stem}")
def test_shipped_recipes_are_valid_and_name_it(path: Path) -> None:
    # Editors read YAML 1.2, where 1e-6 is a number.
    text = re.sub(r"(?<=: )(\d+)e-", r"\1.0e-", path.read_text())
    assert problems(text) == []
    first = path.read_text().splitlines()[0]
    assert first == schema_line(path)
    assert (path.parent / first.partition("$schema=")[2]).resolve() == schema_file().resolve()


@pytest.mark.parametrize("name", SEEN_BY_EDITORS)
def test_editors_mark_a_wrong_recipe(name: str) -> None:
    assert problems((Path(__file__).parents[1] / "wrong_recipes" / f"{name}.yaml").read_text())


def test_editors_allow_what_grpo_check_takes_beside_trls_types() -> None:
    assert problems("save_steps: 0.1\n") == problems("save_steps: 50\n") == problems("scale_rewards: false\n") == []
    assert problems("save_steps: -1\n") and problems("scale_rewards: often\n")


def test_editors_allow_an_infinite_tau_and_no_negative_one() -> None:
    assert problems("maxent_tau: .inf\n") == [] == problems("maxent_tau: null\n")
    assert problems("maxent_tau: -0.1\n") and problems("maxent_objective: entropy\n")


def test_a_recipe_outside_the_repository_names_the_schema_by_its_full_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.path.commonpath", lambda _: "/")  # simulates a repository outside /tmp
    copied = tmp_path / "mine.yaml"
    copied.write_text(RECIPES[-1].read_text())
    note = schema_note(copied)
    assert note is not None and schema_line(copied) in note and str(schema_file()) in note
    copied.write_text(f"{schema_line(copied)}\nseed: 1\n")
    assert schema_note(copied) is None
    copied.write_text("seed: 1\n")
    assert schema_note(copied) is None
