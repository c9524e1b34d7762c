"""How prompts are rendered: no message disappears, dates and open thoughts are noted."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from grpo_recipes.recipe import Recipe
from grpo_recipes.recipe.check import check
from grpo_recipes.recipe.rendering import missing_message, prompt_notes, render_with

TEMPLATES = {path.stem: path.read_text() for path in sorted((Path(__file__).parent / "chat_templates").glob("*.jinja"))}
Read = Callable[..., Recipe]
USER, SYSTEM = {"role": "user", "content": " Add 1.\n"}, {"role": "system", "content": "Be brief."}
DEVELOPER = {"role": "developer", "content": "Be brief."}
TURNS = [USER, {"role": "assistant", "content": "<think>\nwhy\n</think>\n\n2"}, {"role": "user", "content": "And 2?"}]
TOOL = [*TURNS, {"role": "assistant", "content": "add"}, {"role": "tool", "content": 'a "3"'}]
NO_SYSTEM = ("gemma",)


def test_the_families_of_the_findings_have_a_template():
    expected = "gemma llama3.1 mistral nemotron phi3 qwen2.5 qwen3 qwen3.5 r1_distill"
    assert sorted(TEMPLATES) == expected.split()


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_prompt_whose_messages_are_all_rendered_is_accepted(name):
    """S3: stripped white space and earlier thoughts do not count as a missing message."""
    render = render_with(TEMPLATES[name], {})
    for prompt in ([USER], TURNS, *([[SYSTEM, USER], [SYSTEM, *TURNS]] if name not in NO_SYSTEM else [])):
        assert missing_message(render, prompt) is None, prompt


@pytest.mark.parametrize("name", ["qwen2.5", "qwen3", "phi3", "r1_distill", "nemotron"])
def test_a_message_that_disappears_is_found(name):
    """S3: a developer message is not rendered by these families."""
    assert missing_message(render_with(TEMPLATES[name], {}), [DEVELOPER, USER]) == DEVELOPER


@pytest.mark.parametrize("name", ["qwen2.5", "qwen3", "llama3.1", "nemotron", "qwen3.5"])
def test_a_tools_answer_is_found_also_as_json(name):
    """S3: rows that end with a tool's answer."""
    assert missing_message(render_with(TEMPLATES[name], {}), TOOL) is None


@pytest.mark.parametrize("name", ["phi3", "r1_distill"])
def test_a_tools_answer_that_disappears_is_found(name):
    """S3: families without a role for tools."""
    assert missing_message(render_with(TEMPLATES[name], {}), TOOL) == TOOL[-1]


@pytest.mark.parametrize("text", ["1", "user", ""])
def test_a_short_or_repeated_text_is_not_found_by_chance(text):
    """S3: the text of a left-out message may occur elsewhere in the prompt."""
    lost = {"role": "developer", "content": text}
    assert missing_message(render_with(TEMPLATES["qwen3"], {}), [lost, {"role": "user", "content": "1"}]) == lost


def rows(tmp_path: Path, *prompts: Any) -> str:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"problem": prompt, "answer": "1"}) + "\n" for prompt in prompts * 12))
    return str(path)


@pytest.mark.parametrize("name", ["qwen2.5", "qwen3", "phi3", "r1_distill"])
def test_check_rejects_rows_with_a_message_that_disappears_and_its_fix_works(read: Read, tmp_path: Path, name):
    """S3: the developer message of a row."""
    keys = {"chat_template": TEMPLATES[name], "system_prompt": "Think."}
    (problem,) = check(read(dataset_name=rows(tmp_path, [DEVELOPER, USER]), **keys), {})
    assert "the chat template leaves out the developer message of a prompt" in problem.what
    assert problem.fix.startswith("rename the role developer to system in the data")
    assert check(read(dataset_name=rows(tmp_path, [SYSTEM, USER]), **keys), {}) == []


def test_check_rejects_a_system_prompt_without_a_system_role(read: Read, tmp_path: Path):
    """R4: the template of Gemma raises for a system message."""
    keys = {"dataset_name": rows(tmp_path, "1+1="), "chat_template": TEMPLATES["gemma"]}
    (problem,) = check(read(**keys, system_prompt="Think."), {})
    assert "the chat template rejects a system message (System role not supported)" in problem.what
    assert "remove system_prompt" in problem.fix and problem.where.startswith("recipe.yaml:")
    assert check(read(**keys), {}) == []
    silent = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
    (problem,) = check(read(**keys | {"chat_template": silent}, system_prompt="Think."), {})
    assert "leaves out the system message" in problem.what and "remove system_prompt" in problem.fix


def test_check_rejects_rows_with_roles_that_the_template_rejects(read: Read, tmp_path: Path):
    """R4: system messages in the rows."""
    keys = {"chat_template": TEMPLATES["gemma"]}
    (problem,) = check(read(dataset_name=rows(tmp_path, [SYSTEM, USER]), **keys), {})
    assert "rejects a prompt with the roles system, user (System role not supported)" in problem.what


def test_check_rejects_a_model_without_a_chat_template(read: Read, tmp_path: Path):
    """M20: a base model's tokenizer may have none."""
    (tmp_path / "model").mkdir()
    for name in ("config", "tokenizer_config"):
        (tmp_path / "model" / f"{name}.json").write_text("{}")
    keys = {"model_name_or_path": str(tmp_path / "model"), "dataset_name": rows(tmp_path, "1+1=")}
    (problem,) = check(read(**keys), {})
    assert "the model has no chat template. Fix: add chat_template" in str(problem)
    assert check(read(**keys, chat_template=TEMPLATES["qwen3"]), {}) == []


@pytest.mark.parametrize(("kwargs", "has_note"), [({}, True), ({"date_string": "26 Jul 2024"}, False)])
def test_a_date_in_the_prompt_is_noted_and_the_fix_pins_it(read: Read, tmp_path: Path, kwargs, has_note):
    """M7, S3: two renderings with different clocks differ."""
    recipe = read(dataset_name=rows(tmp_path, "1+1="), chat_template=TEMPLATES["llama3.1"], chat_template_kwargs=kwargs)
    notes = [note for note in prompt_notes(recipe, {}) if "current date" in note]
    assert bool(notes) == has_note
    if has_note:
        assert 'Fix: set chat_template_kwargs: {date_string: "26 Jul 2024"}' in notes[0]


def test_a_date_that_nothing_pins_is_noted(read: Read, tmp_path: Path):
    """M7: a template that always writes the date."""
    template = "{{ strftime_now('%H:%M') }}{% for m in messages %}{{ m.content }}{% endfor %}"
    (note,) = prompt_notes(read(dataset_name=rows(tmp_path, "1+1="), chat_template=template), {})
    assert "Fix: set a chat_template with a fixed date" in note


@pytest.mark.parametrize("name", TEMPLATES)
def test_an_open_thought_is_noted(read: Read, tmp_path: Path, name):
    """S4: prompts that end in an open <think>, also as the reason for a format reward that cannot be earned."""
    (tmp_path / "mine.py").write_text(
        'import re\nSHAPE = re.compile(r"^<think>.*</think>")\n'
        "def shape(completions):\n    return [0.0 for _ in completions]\n"
    )
    keys = {"dataset_name": rows(tmp_path, "1+1="), "reward_funcs": [f"{tmp_path}/mine.py:shape"]}
    notes = list(prompt_notes(read(chat_template=TEMPLATES[name], **keys), {}))
    opens = name in ("r1_distill", "nemotron", "qwen3.5")
    assert any("prompts end in an open <think>" in note for note in notes) == opens
    assert any("mine.py:shape contains '<think>' (line 2)" in note for note in notes) == opens
    if name in ("nemotron", "qwen3.5"):
        closed = read(chat_template=TEMPLATES[name], chat_template_kwargs={"enable_thinking": False}, **keys)
        assert not list(prompt_notes(closed, {}))
