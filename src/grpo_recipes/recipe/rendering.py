"""Check how the prompts of a recipe are rendered: a message that disappears, a date, an open thought. No torch.

The same functions serve `grpo check`, which renders the first rows of a local file with a template that is on this
machine, and the preparation of the data, which renders with the tokenizer.
"""

import ast
import contextlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

from grpo_recipes.errors import ConfigError, Problem
from grpo_recipes.recipe import Recipe
from grpo_recipes.recipe.chat_template import FAILURES, TOKENS, compiled, templates_of, variables_of
from grpo_recipes.recipe.check_data import evaluation_source, head_of, mixture_sources, training_source
from grpo_recipes.recipe.rules import evaluation_set
from grpo_recipes.recipe.shapes import DataSource, Message, chat_of, value_at
from grpo_recipes.recipe.sources import source_of
from grpo_recipes.recipe.user_code import source_path

Render = Callable[[list[Message]], str]

_MARK = "zq7k"  # appended to a message: short texts may occur by chance
_THINK, _END_THINK = "<think>", "</think>"
_CLOCKS = datetime(2001, 2, 3, 4, 5, 6), datetime(2024, 11, 25, 17, 38, 49)
_DATE = "26 Jul 2024"  # Llama 3.1's template uses this date without a clock
_DATE_WORDS = ("date", "today", "time", "now")


# --- a prompt in a template -------------------------------------------------------------------------------------------


def missing_message(render: Render, prompt: list[Message]) -> Message | None:
    """Return the first message whose text does not occur in the rendered prompt; None if all messages occur.

    White space may change. The template may omit reasoning in earlier answers, and may write a tool's answer as JSON.
    Errors of ``render`` are raised, for example if the template rejects the prompt.
    """
    for index, message in enumerate(prompt):
        text = message["content"].rpartition(_END_THINK)[2] if message["role"] == "assistant" else message["content"]
        marked = f"{text} {_MARK}" if text.strip() else _MARK
        before = message["content"].removesuffix(text)
        tried = [*prompt[:index], {**message, "content": before + marked}, *prompt[index + 1 :]]
        squeezed = "".join(render(tried).split())
        forms = (marked, json.dumps(marked, ensure_ascii=False)[1:-1])
        if not any("".join(form.split()) in squeezed for form in forms):
            return message
    return None


def rendering_notes(render: Render, prompt: list[Message], template: str, kwargs: Mapping[str, Any]) -> list[str]:
    """Return notes for the user about rendered prompts: they change with the date, or end in an open ``<think>``.

    ``render`` renders ``prompt`` with the chat ``template`` and its variables ``kwargs``. Its errors are raised.
    """
    notes = []
    with contextlib.suppress(*FAILURES):
        if note := _describe_date(template, prompt, kwargs):
            notes.append(note)
    if opens_thought(render(prompt)):
        notes.append(
            f"prompts end in an open {_THINK}: completions begin inside the thought, so a format reward that expects "
            f"{_THINK} in the completion cannot be met"
        )
    return notes


def opens_thought(rendered: str) -> bool:
    """Return whether a rendered prompt ends in an open ``<think>``."""
    return rendered.rstrip().endswith(_THINK)


def _describe_date(template: str, prompt: list[Message], kwargs: Mapping[str, Any]) -> str:
    """Return a note if the chat template writes the current date into prompts, with the fix; else an empty text."""

    def varies(variables: Mapping[str, Any]) -> bool:
        """Return whether the prompt differs between two dates."""
        texts = {render_with(template, {**kwargs, **variables}, clock)(prompt) for clock in _CLOCKS}
        return len(texts) > 1

    if "strftime_now" not in template or not varies({}):
        return ""
    note = "the chat template writes the current date into prompts, so they differ from day to day"
    dates = sorted(name for name in variables_of([template]) or () if any(word in name for word in _DATE_WORDS))
    pinned = next((name for name in dates if not varies({name: _DATE})), None)
    fix = f'set chat_template_kwargs: {{{pinned}: "{_DATE}"}}' if pinned else "set a chat_template with a fixed date"
    return f"{note}. Fix: {fix}"


def render_with(template: str, kwargs: Mapping[str, Any], clock: datetime | None = None) -> Render:
    """Return a function that renders a prompt with a chat template as transformers does.

    ``kwargs`` are the recipe's ``chat_template_kwargs``. ``clock`` is the time that the template reads, by default the
    current time.
    """
    compiled_template = compiled(template, clock)
    fixed = {"tools": None, "documents": None, "add_generation_prompt": True, **TOKENS, **kwargs}
    return lambda prompt: str(compiled_template.render(messages=prompt, **fixed))


def missing_fix(message: Message, has_rows: bool = True) -> str:
    """Return the fix, as text for the user, for a message that the chat template omits from the prompt.

    ``has_rows`` is false if the message is the recipe's ``system_prompt``. The fix then proposes to remove this key
    instead of messages in the data.
    """
    if message["role"] == "developer":
        return "rename the role developer to system in the data, or set a chat_template that renders it"
    data = ", or remove these messages from the data" if has_rows else ", or remove system_prompt"
    return f"set a chat_template that renders the role {message['role']}{data}"


# --- the first rows of local files ------------------------------------------------------------------------------------


def prompt_problems(recipe: Recipe, environment: Mapping[str, str]) -> Iterator[Problem]:
    """Yield a problem if the model has no chat template, or if the template rejects prompts or omits messages.

    Yield nothing if the model's files are not on this machine, the run does not read prompts from a dataset, or a rule
    already rejects the recipe's template.
    """
    if source_of(recipe.__getitem__) is not None:
        return
    if recipe.model.chat_template and "messages" not in recipe.model.chat_template:  # reported by a rule
        return
    key, templates = _find_templates(recipe, environment)
    if templates is None:
        return
    if "default" not in templates:
        yield recipe.problem(key, "the model has no chat template", "add chat_template to the recipe")
        return
    with contextlib.suppress(ConfigError):  # a row that is not a prompt is reported by the check of the data
        if fault := _find_rendering_fault(recipe, key, templates["default"]):
            yield fault


def _find_rendering_fault(recipe: Recipe, key: str, template: str) -> Problem | None:
    """Return a problem for the first prompt that the template rejects or from which it omits a message, or None.

    ``key`` is the recipe key that sets the template. Raise ConfigError if a row is not a prompt.
    """
    system = recipe.model.system_prompt
    try:
        render = render_with(template, recipe.model.chat_template_kwargs or {})
        for prompt in _read_prompts(recipe):
            if message := missing_message(render, prompt):
                is_system_prompt = system and message == {"role": "system", "content": system}
                fault = f"the chat template leaves out the {message['role']} message of a prompt"
                place = "system_prompt" if is_system_prompt else key
                return recipe.problem(place, fault, missing_fix(message, not is_system_prompt))
    except FAILURES as error:
        prompt_has_system = system and prompt[0] == {"role": "system", "content": system}
        if prompt_has_system and _renders(render, prompt[1:]):
            fault = f"the chat template rejects a system message ({error})"
            return recipe.problem(
                "system_prompt", fault, "remove system_prompt, or set a chat_template that renders it"
            )
        roles = ", ".join(dict.fromkeys(message["role"] for message in prompt))
        fault = f"the chat template rejects a prompt with the roles {roles} ({error})"
        return recipe.problem(key, fault, "set a chat_template that renders them, or change the roles in the data")
    return None


def _renders(render: Render, prompt: list[Message]) -> bool:
    """Return whether a prompt renders to a text that is not empty; false if the template rejects it."""
    try:
        return bool(render(prompt))
    except FAILURES:
        return False


def _find_templates(recipe: Recipe, environment: Mapping[str, str]) -> tuple[str, Mapping[str, str] | None]:
    """Return the recipe key that decides the chat template, and the templates by name.

    The templates are None if the model's files are not on this machine.
    """
    if recipe.model.chat_template is not None:
        return "chat_template", {"default": recipe.model.chat_template}
    return "model_name_or_path", templates_of(recipe, environment)


def _read_prompts(recipe: Recipe) -> Iterator[list[Message]]:
    """Yield a prompt for each sequence of roles in the first rows of local files.

    Without a local row, yield a prompt with the system prompt, if any, and a text of the user.
    """
    sources: list[DataSource] = mixture_sources(recipe) if recipe.data.mixture else []
    sources += [training_source(recipe)] if recipe.data.name and not sources else []
    sources += [evaluation_source(recipe)] if evaluation_set(recipe) else []
    seen_roles, any_row = set(), False
    for source in sources:
        head = head_of(source)
        for row in head.rows if head else ():
            prompt = chat_of(value_at(row, source.prompt), source, recipe.model.system_prompt)
            roles = tuple(message["role"] for message in prompt)
            if prompt and roles not in seen_roles:
                seen_roles.add(roles)
                any_row = True
                yield prompt
    if not any_row:
        system = recipe.model.system_prompt or ""
        yield [{"role": "system", "content": system}] * bool(system) + [{"role": "user", "content": "1+1="}]


def prompt_notes(recipe: Recipe, environment: Mapping[str, str]) -> Iterator[str]:
    """Yield notes about rendered prompts, and about rewards that expect the prompt's own ``<think>``.

    Yield nothing without a local chat template, or if the template rejects the first prompt.
    """
    templates = _find_templates(recipe, environment)[1] if source_of(recipe.__getitem__) is None else None
    if not templates or "default" not in templates:
        return
    kwargs = recipe.model.chat_template_kwargs or {}
    with contextlib.suppress(ConfigError, *FAILURES):
        render = render_with(templates["default"], kwargs)
        prompt = next(_read_prompts(recipe))
        yield from rendering_notes(render, prompt, templates["default"], kwargs)
        if opens_thought(render(prompt)):
            yield from expecting_thought(recipe.rewards.funcs)


def expecting_thought(rewards: Sequence[str]) -> Iterator[str]:
    """Yield a note for each user reward with ``<think>`` in a string of its file.

    Only strings of one line count, because longer strings are docstrings or prompts. Files that can't be parsed are
    skipped.
    """
    for name in dict.fromkeys(rewards):
        path = source_path(name) if ":" in name else None
        tree = None
        with contextlib.suppress(OSError, SyntaxError, ValueError, RecursionError, MemoryError):
            tree = ast.parse(path.read_bytes()) if path else None
        for node in ast.walk(tree) if tree else ():
            if not (isinstance(node, ast.Constant) and isinstance(node.value, str)):
                continue
            if _THINK in node.value and "\n" not in node.value:  # a text of several lines is a docstring or a prompt
                yield f"{name} contains '{_THINK}' (line {node.lineno}), which the prompt already has"
                break
