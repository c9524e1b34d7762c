"""The chat template of a recipe or its model, rendered without transformers for the roles of its environments."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jinja2
import pytest
import trl
from transformers.utils.chat_template_utils import render_jinja_template

from grpo_recipes.recipe import Recipe, chat_template
from grpo_recipes.recipe.check import check

GAME = Path(__file__).parents[1] / "rollouts/wild_environment.py"
PLAYS = {"dataset_name": None, "environment": f"{GAME}:Sums", "reward_funcs": ["environment"]}
Read = Callable[..., Recipe]


SAYS_ALL = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token }}{% endfor %}"
REFUSES = (
    "{{% for m in messages %}}{{% if m.role == '{0}' %}}{{{{ raise_exception('no {0}') }}}}{{% endif %}}"
    "{1}{{% endfor %}}"
)
WITH_TOOLS = "{{ tools | tojson }}{% generation %}" + SAYS_ALL + "{% endgeneration %}"


def test_a_template_carries_the_roles_of_every_environment(read: Read) -> None:
    assert check(read(**PLAYS, chat_template=SAYS_ALL), {}) == []
    for role in ("user", "assistant"):
        (problem,) = check(read(**PLAYS, chat_template=REFUSES.format(role, "{{ m.role + m.content }}")), {})
        told = f"the template refuses messages of the role {role}: no {role}. Fix: set a chat_template that renders"
        assert "recipe.yaml:" in problem.where and told in str(problem)
    (problem,) = check(read(**PLAYS, chat_template="{{ messages[0].content }}"), {})
    assert "the template leaves out messages of the role assistant" in str(problem)
    (problem,) = check(read(**PLAYS, chat_template="{% for m in messages %}"), {})
    assert "the template cannot be read: Unexpected end of template" in str(problem)
    failing = "{% if messages[0].content + 1 %}{% endif %}"
    assert "refuses messages of the role user: can only concatenate" in str(
        check(read(**PLAYS, chat_template=failing), {})[0]
    )


def test_a_template_is_asked_for_the_roles_of_an_environment_alone(read: Read) -> None:
    pytest.importorskip("reasoning_gym")
    without = REFUSES.format("system", SAYS_ALL)
    task = PLAYS | {"environment": "reasoning_gym:basic_arithmetic", "chat_template": without}
    assert check(read(**task), {}) == []
    (problem,) = check(read(**task, environment_args={"system_prompt": "Add."}), {})
    assert "of the role system: no system" in str(problem)
    pytest.importorskip("verifiers")
    gym = task | {"environment": "verifiers:ReasoningGymEnv"}
    # This environment has its own system prompt.
    (problem,) = check(read(**gym, environment_args={"gym": "basic_arithmetic"}), {})
    assert "of the role system: no system" in str(problem)
    assert check(read(**gym, environment_args={"gym": "basic_arithmetic", "system_prompt": ""}), {}) == []


def test_a_template_shows_the_tools_of_an_environment(read: Read, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("verifiers")
    monkeypatch.syspath_prepend(GAME.parent / "envs")
    task = PLAYS | {"environment": "verifiers:sums_tool"}
    assert check(read(**task, chat_template=WITH_TOOLS), {}) == []
    (problem,) = check(read(**task, chat_template=SAYS_ALL), {})
    assert "the template leaves out the tools" in str(problem)
    refusing = "{{ tools }}" + REFUSES.format("tool", "{{ m.role + m.content }}")
    assert check(read(**task, chat_template=refusing), {}) == []  # no tool answers the only turn
    (problem,) = check(read(**task, chat_template=refusing, environment_max_turns=4), {})
    assert "of the role tool: no tool" in str(problem)
    assert check(read(**PLAYS | {"environment": "verifiers:sums_single"}, chat_template=SAYS_ALL), {}) == []


def tokenizer_in(folder: Path, **config: Any) -> None:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def test_the_template_of_a_model_that_is_here_is_read(read: Read, tmp_path: Path) -> None:
    refusing = REFUSES.format("user", "{{ m.content }}")
    hub = tmp_path / "hub/models--Qwen--Qwen2.5-1.5B-Instruct"
    assert check(read(**PLAYS), {"HF_HUB_CACHE": str(tmp_path / "hub")}) == []  # not fetched yet
    tokenizer_in(hub / "snapshots/0123abcd", chat_template=[{"name": "default", "template": refusing}])
    (hub / "refs").mkdir()
    (hub / "refs/main").write_text("0123abcd")
    for variables in ({"HF_HUB_CACHE": str(tmp_path / "hub")}, {"HF_HOME": str(tmp_path)}):
        (problem,) = check(read(**PLAYS), variables)
        assert problem.where.startswith("recipe.yaml:") and "of the role user: no user" in str(problem)
    assert check(read(**PLAYS, chat_template=SAYS_ALL), {"HF_HOME": str(tmp_path)}) == []

    tokenizer_in(tmp_path / "mine", chat_template=refusing)
    assert len(check(read(**PLAYS, model_name_or_path="mine"), {})) == 1
    (tmp_path / "mine/chat_template.jinja").write_text(SAYS_ALL)
    assert check(read(**PLAYS, model_name_or_path="mine"), {}) == []
    tokenizer_in(tmp_path / "base")
    tokenizer_in(tmp_path / "damaged")
    (tmp_path / "damaged/tokenizer_config.json").write_text("{")
    assert len(check(read(**PLAYS, model_name_or_path="damaged"), {})) == 1
    (problem,) = check(read(**PLAYS, model_name_or_path="base"), {})
    assert "the model has no chat template. Fix: add chat_template to the recipe" in str(problem)


@pytest.mark.slow
@pytest.mark.parametrize("tools", [None, [chat_template.TOOL]], ids=["no tools", "tools"])
@pytest.mark.parametrize("role", ["user", "assistant", "system", "tool"])
def test_a_template_is_rendered_as_transformers_does(role: str, tools: list[Any] | None) -> None:
    templates = sorted((Path(trl.__file__).parent / "chat_templates").glob("*.jinja"))
    arguments: dict[str, Any] = {"tools": tools, "add_generation_prompt": True, **chat_template.TOKENS}
    chat, rendered = chat_template.conversation(role, "1"), 0
    for file in templates:
        try:
            expected = render_jinja_template([chat], chat_template=file.read_text(), **arguments)[0][0]
        except jinja2.TemplateError as error:
            with pytest.raises(jinja2.TemplateError, match=re.escape(str(error))):
                chat_template.compiled(file.read_text()).render(messages=chat, **arguments)
            continue
        assert chat_template.compiled(file.read_text()).render(messages=chat, **arguments) == expected, file.name
        rendered += 1
    assert rendered > 20
