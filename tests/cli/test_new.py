"""`grpo new`."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from grpo_recipes import cli
from grpo_recipes.cli import recipes
from grpo_recipes.cli.recipes import start_text
from grpo_recipes.launch.resolve import choose_names
from grpo_recipes.paths import find_code_root
from grpo_recipes.plan.devices import Resources
from grpo_recipes.plan.plan import make_plan
from grpo_recipes.recipe import keys, read_recipe
from grpo_recipes.recipe.keys import schema_line, schema_note


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(params=["cpu", "cuda"])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Set the device of the environment."""
    monkeypatch.setattr(recipes, "environment_device", lambda: request.param)
    return request.param


def test_the_recipe_of_this_device_is_right_as_it_is_written(folder, capsys, device):
    """M3: new, check and launch work on the machine on which they are typed."""
    assert cli.main(["new", "my.yaml"]) == 0
    assert capsys.readouterr().out == "grpo: wrote my.yaml; next: grpo check my.yaml\n"
    assert (folder / "my.yaml").read_text().startswith(f"{schema_line(folder / 'my.yaml')}\n")
    assert cli.main(["check", "my.yaml"]) == 0
    output = capsys.readouterr().out
    assert "note:" not in output
    recipe = read_recipe(folder / "my.yaml")
    resources = Resources("cuda", ("0", "1"), 8) if device == "cuda" else Resources("cpu", (), 2)
    plan = make_plan(recipe, resources, {}, choose_names(recipe))
    assert plan.smoke == (device == "cpu") and plan.mode == "server"


SETTING = re.compile(r"^# (?=[a-z_]+: )", re.MULTILINE)
SECTIONS = [text for text in start_text("cpu").split("\n\n") if SETTING.search(text)]


@pytest.mark.parametrize("chosen", [*([section] for section in SECTIONS), SECTIONS], ids=lambda chosen: chosen[0][2:14])
def test_a_section_that_is_off_is_right_when_its_marks_are_taken_away(folder, capsys, device, chosen):
    (folder / "held_out.jsonl").write_text('{"problem": "1+1", "question": "1+1", "answer": "#### 2"}\n')
    assert cli.main(["new", "my.yaml"]) == 0
    text = (folder / "my.yaml").read_text()
    before = yaml.safe_load(text)
    for section in chosen:
        assert section in text
        text = text.replace(section, SETTING.sub("", section))
    (folder / "my.yaml").write_text(text)
    on = yaml.safe_load(text)
    assert len(on) == len(before) + sum(len(SETTING.findall(section)) for section in chosen)  # no key is given twice
    capsys.readouterr()
    assert cli.main(["check", "my.yaml"]) == 0, capsys.readouterr().err
    notes = [line for line in capsys.readouterr().out.splitlines() if "does nothing" in line]
    assert all("reward_timeout" in line for line in notes)  # the reward it limits is not in the recipe yet


def test_the_sections_are_what_a_beginner_asks_for():
    off = {key for section in SECTIONS for key in yaml.safe_load(SETTING.sub("", section))}
    assert {"eval_strategy", "save_steps", "reward_timeout", "use_peft", "wandb_project", "maxent_objective"} <= off


def test_the_line_for_editors_survives_a_move_of_the_folder_that_holds_recipe_and_package(tmp_path, monkeypatch):
    monkeypatch.setattr(keys, "find_code_root", lambda: tmp_path / "both" / "package")
    assert keys.schema_line(tmp_path / "both" / "mine" / "my.yaml").endswith("=../package/recipes/schema.json")
    assert keys.schema_line(Path("/elsewhere/my.yaml")).endswith(f"={tmp_path}/both/package/recipes/schema.json")


def test_its_recipe_is_the_packages_and_not_one_of_the_folder(folder, monkeypatch):
    monkeypatch.setattr(recipes, "environment_device", lambda: "cpu")
    (folder / "recipes" / "base").mkdir(parents=True)
    (folder / "start").mkdir()
    for name in ("recipes/base/start.yaml", "start.yaml", "start/cpu.yaml", "start/cuda.yaml"):
        (folder / name).write_text("seed: 666\n")
    monkeypatch.setenv("GRPO_HOME", str(folder))  # simulate a package without the repository
    assert cli.main(["new", "my.yaml"]) == 0
    assert (folder / "my.yaml").read_text().endswith(start_text("cpu")) and "666" not in start_text("cpu")


@pytest.mark.parametrize("name", ["grpo/config_math.yaml", "maxent/config_math_tempered.yaml"])
def test_it_copies_a_recipe_with_a_schema_that_is_found(folder, name):
    source = find_code_root() / "recipes/Qwen3-4B" / name
    assert cli.main(["new", "my.yaml", "--from", f"recipes/Qwen3-4B/{name}"]) == 0
    assert yaml.safe_load((folder / "my.yaml").read_text()) == yaml.safe_load(source.read_text())
    assert (folder / "my.yaml").read_text().count("yaml-language-server") == 1
    assert schema_note(folder / "my.yaml") is None
    assert read_recipe(folder / "my.yaml")["model_name_or_path"] == "Qwen/Qwen3-4B"


def test_nothing_is_overwritten(folder, capsys):
    (folder / "my.yaml").write_text("seed: 1\n")
    assert cli.main(["new", "my.yaml"]) == 2
    assert "already exists" in capsys.readouterr().err
    assert (folder / "my.yaml").read_text() == "seed: 1\n"
    assert cli.main(["new", "no/such/folder/my.yaml"]) == 2
    assert "my.yaml: can't be written (No such file or directory)" in capsys.readouterr().err
    assert cli.main(["new", "other.yaml", "--from", "no_such.yaml"]) == 2
    assert not (folder / "other.yaml").exists()


@pytest.mark.parametrize("name", ["a" * 300, "a\0b", "a\udcff/b"])
def test_a_name_that_no_file_can_have_is_refused(folder, capsys, name):
    assert cli.main(["new", name]) == 2
    assert "can't be written" in capsys.readouterr().err


def test_an_empty_name_is_none(folder, capsys):
    assert cli.main(["new", ""]) == 2
    assert "FILE: is empty" in capsys.readouterr().err
    assert cli.main(["new", "my.yaml", "--from", ""]) == 2
    assert "--from: is empty" in capsys.readouterr().err
    assert list(folder.iterdir()) == []


def test_the_command_it_names_can_be_typed_for_a_name_with_a_space(folder, capsys):
    assert cli.main(["new", "my own.yaml"]) == 0
    assert capsys.readouterr().out.endswith("next: grpo check 'my own.yaml'\n")
