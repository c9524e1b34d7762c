"""Read, compile and check the chat template of a model without importing transformers.

The template comes from the recipe or from the tokenizer's files on this machine. It is rendered as in transformers. The
check finds messages and tools of an environment that the template leaves out.
"""

import contextlib
import functools
import json
import os
from collections.abc import Iterable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2 import Template, TemplateError, TemplateSyntaxError, meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from grpo_recipes import smoke
from grpo_recipes.paths import cache_root, sort_newest_first
from grpo_recipes.recipe import Recipe

# A template is code, so it can fail in other ways than ``raise_exception``.
FAILURES = (TemplateError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
TOKENS = {f"{name}_token": f"<{name}>" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")}
_PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer", "description": "one"}}, "required": ["a"]}
TOOL = {"type": "function", "function": {"name": "add", "description": "Add one.", "parameters": _PARAMETERS}}


def find_left_out_part(templates: Mapping[str, str], roles: list[str], tools: bool, kwargs: dict[str, Any]) -> str:
    """Return a message about the first part that the chat templates omit or reject; "" if they render all parts.

    Parts are messages of each role in ``roles``, and the tools of an environment if ``tools`` is true. A template that
    can't be read also gives a message. ``templates`` has at least the template "default". ``kwargs`` are the recipe's
    ``chat_template_kwargs``.
    """

    def render(template: str, role: str, text: str, **extra: Any) -> str:
        """Render a conversation with a message of this role and text, with the template of this name."""
        variables = {"tools": None, "documents": None, "add_generation_prompt": True, **TOKENS, **kwargs, **extra}
        return by_name[template].render(messages=conversation(role, text), **variables)

    part = ""
    try:
        by_name = {name: compiled(text) for name, text in templates.items()}
        for role in roles:
            part = f"messages of the role {role}"
            if render("default", role, "1") == render("default", role, "2"):
                return f"the template leaves out {part}"
        part = "the tools"
        with_tools = "tool_use" if "tool_use" in by_name else "default"
        if tools and render(with_tools, "user", "1", tools=[TOOL]) == render("default", "user", "1"):
            return f"the template leaves out {part}"
    except TemplateSyntaxError as error:
        return f"the template cannot be read: {error}"
    except FAILURES as error:
        return f"the template refuses {part}: {error}"
    return ""


def conversation(role: str, text: str) -> list[dict[str, str]]:
    """Return a conversation with a message of this role and text at its usual position; the other texts are "0".

    The role is "user", "assistant", "system" or "tool".
    """
    user, answer = {"role": "user", "content": "0"}, {"role": "assistant", "content": "0"}
    message = {"role": role, "content": text}
    conversations = {
        "user": [message],
        "assistant": [user, message, user],
        "system": [message, user],
        "tool": [user, answer, message],
    }
    return conversations[role]


class _Generation(Extension):
    """Parse the tag ``generation``, with which templates mark the assistant's text in transformers."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        """Return the content of the tag in its own scope."""
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


def variables_of(templates: Iterable[str]) -> set[str] | None:
    """Return the names of the variables that chat templates read, except transformers' own variables.

    Return None if a template has a syntax error.
    """
    defined = {*TOKENS, "raise_exception", "strftime_now"}
    with contextlib.suppress(TemplateSyntaxError):
        trees = (_make_sandbox().parse(text) for text in templates)
        return set().union(*map(meta.find_undeclared_variables, trees)) - defined
    return None


@functools.cache
def compiled(template: str, clock: datetime | None = None) -> Template:
    """Compile a chat template and return it, as transformers does, without importing transformers for seconds; cached.

    ``clock`` is the time that the template reads, by default the current time. Raise TemplateSyntaxError for a broken
    template.
    """
    return _make_sandbox(clock).from_string(template)


def _make_sandbox(clock: datetime | None = None) -> ImmutableSandboxedEnvironment:
    """Return a sandboxed Jinja environment with the functions and tags of transformers.

    Templates read the time ``clock``, by default the current time.
    """

    def raise_exception(message: str) -> None:
        """Raise TemplateError, for templates that reject a prompt."""
        raise TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        """Return a value as JSON, without Jinja's escapes for HTML."""
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    sandbox = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    sandbox.filters["tojson"] = tojson
    sandbox.globals["raise_exception"] = raise_exception
    sandbox.globals["strftime_now"] = lambda form: (clock or datetime.now()).strftime(form)
    return sandbox


# --- the files of a model on this machine -----------------------------------------------------------------------------


def templates_of(recipe: Recipe, environment: Mapping[str, str]) -> dict[str, str] | None:
    """Return name -> chat template of the model's tokenizer; None if the tokenizer's files are not on this machine.

    The result is empty if the tokenizer has no template. The usual template is named "default".
    """
    model = recipe.model.name
    if not model:
        return None
    if model.startswith(smoke.SMOKE_SCHEME):
        return {"default": smoke.CHAT_TEMPLATE}
    folder = model_folder(recipe, environment)
    config = folder / "tokenizer_config.json"
    if not config.is_file():
        return None
    files = [folder / "chat_template.jinja", *folder.glob("additional_chat_templates/*.jinja")]
    named = {"default" if file.parent == folder else file.stem: file.read_text() for file in files if file.is_file()}
    entries: Any = []
    with contextlib.suppress(ValueError):  # a damaged file is reported when the tokenizer is loaded
        entries = json.loads(config.read_text()).get("chat_template") or []
    entries = [{"name": "default", "template": entries}] if isinstance(entries, str) else entries
    return named or {entry["name"]: entry["template"] for entry in entries}


def model_folder(recipe: Recipe, environment: Mapping[str, str]) -> Path:
    """Return the folder of the model's files on this machine, which may be in the hub's cache; it need not exist."""
    return find_model_folder(recipe.model.name, recipe.model.revision, environment)


def find_model_folder(name: str, revision: str, environment: Mapping[str, str]) -> Path:
    """Return the folder with this name, or the folder of a hub id in the hub's cache; it need not exist.

    The cache's folder is the folder of the revision if it exists, otherwise the newest snapshot.
    """
    folder = Path(os.path.expanduser(name))
    if folder.is_dir():
        return folder
    home = environment.get("HF_HOME") or cache_root(environment) / "huggingface"
    cache = Path(environment.get("HF_HUB_CACHE") or Path(home, "hub"), f"models--{name.replace('/', '--')}")
    reference = cache / "refs" / revision
    commit = cache / "snapshots" / (reference.read_text().strip() if reference.is_file() else revision)
    newest = sort_newest_first(cache.glob("snapshots/*"))
    return commit if commit.is_dir() else next(iter(newest), commit)
