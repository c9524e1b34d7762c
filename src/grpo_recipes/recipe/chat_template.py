"""Whether the model's chat template carries the roles and the tools of a recipe's environments.

Pure: the template is rendered as transformers does, and read from the recipe or from a tokenizer's files that are here.
"""

import contextlib
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
from grpo_recipes.paths import cache_root, newest_first
from grpo_recipes.recipe import Recipe

# A template is code, which fails in other ways than by ``raise_exception`` too.
FAILURES = (TemplateError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
TOKENS = {f"{name}_token": f"<{name}>" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")}
_PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer", "description": "one"}}, "required": ["a"]}
TOOL = {"type": "function", "function": {"name": "add", "description": "Add one.", "parameters": _PARAMETERS}}


def find_left_out_part(templates: Mapping[str, str], roles: list[str], tools: bool, kwargs: dict[str, Any]) -> str:
    """Return the first role that has no part in what the templates render, or that tools have none."""

    def render(template: str, role: str, text: str, **more: Any) -> str:
        given = {"tools": None, "documents": None, "add_generation_prompt": True, **TOKENS, **kwargs, **more}
        return read[template].render(messages=conversation(role, text), **given)

    tried = ""
    try:
        read = {name: compiled(text) for name, text in templates.items()}
        for role in roles:
            tried = f"messages of the role {role}"
            if render("default", role, "1") == render("default", role, "2"):
                return f"the template leaves out {tried}"
        tried = "the tools of an environment"
        with_tools = "tool_use" if "tool_use" in read else "default"
        if tools and render(with_tools, "user", "1", tools=[TOOL]) == render("default", "user", "1"):
            return f"the template leaves out {tried}"
    except TemplateSyntaxError as error:
        return f"the template cannot be read: {error}"
    except FAILURES as error:
        return f"the template refuses {tried}: {error}"
    return ""


def conversation(role: str, text: str) -> list[dict[str, str]]:
    """Return a conversation in which a message of this role stands where environments have it."""
    user, answer, said = ({"role": one, "content": "0"} for one in ("user", "assistant", role))
    said["content"] = text
    return {"user": [said], "assistant": [user, said, user], "system": [said, user], "tool": [user, answer, said]}[role]


class _Generation(Extension):
    """Read the tag ``generation``, which transformers has to mark what the assistant says."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        """Return what is inside, in a scope of its own."""
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


def variables_of(templates: Iterable[str]) -> set[str] | None:
    """Return the variables that chat templates read, without those that transformers defines; None if one is broken."""
    defined = {*TOKENS, "raise_exception", "strftime_now"}
    with contextlib.suppress(TemplateSyntaxError):
        return set().union(*(meta.find_undeclared_variables(_sandbox().parse(text)) for text in templates)) - defined
    return None


def compiled(template: str, clock: datetime | None = None) -> Template:
    """Compile a template as transformers does (``chat_template_utils``), which takes seconds to import.

    ``clock`` is the time that the template reads, the current time by default.
    """
    return _sandbox(clock).from_string(template)


def _sandbox(clock: datetime | None = None) -> ImmutableSandboxedEnvironment:
    """Return an environment of Jinja with the functions and tags that transformers gives chat templates."""

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, **how: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **how)

    sandbox = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    sandbox.filters["tojson"] = tojson

    def strftime_now(form: str) -> str:
        return (clock or datetime.now()).strftime(form)

    sandbox.globals |= {"raise_exception": raise_exception, "strftime_now": strftime_now}
    return sandbox


# --- what a model's files and an environment's code say ---------------------------------------------------------------


def templates_of(recipe: Recipe, environment: Mapping[str, str]) -> dict[str, str] | None:
    """Return the templates of the model's tokenizer by name; None if its files are not on this machine."""
    model = recipe["model_name_or_path"] or ""
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
    found: Any = []
    with contextlib.suppress(ValueError):  # a damaged file is reported when the tokenizer is loaded
        found = json.loads(config.read_text()).get("chat_template") or []
    found = [{"name": "default", "template": found}] if isinstance(found, str) else found
    return named or {one["name"]: one["template"] for one in found}


def model_folder(recipe: Recipe, environment: Mapping[str, str]) -> Path:
    """Return where the model's files are on this machine: its folder or the hub client's; it need not exist."""
    model = recipe["model_name_or_path"] or ""
    folder = Path(os.path.expanduser(model))
    return folder if folder.is_dir() else _snapshot(model, recipe["model_revision"], environment)


def _snapshot(model: str, revision: str, environment: Mapping[str, str]) -> Path:
    """Return the folder where the hub's client keeps a model, the newest where it has no name for the revision."""
    home = environment.get("HF_HOME") or cache_root(environment) / "huggingface"
    kept = Path(environment.get("HF_HUB_CACHE") or Path(home, "hub"), f"models--{model.replace('/', '--')}")
    named = kept / "refs" / revision
    commit = kept / "snapshots" / (named.read_text().strip() if named.is_file() else revision)
    newest = newest_first(kept.glob("snapshots/*"))
    return commit if commit.is_dir() else next(iter(newest), commit)
