"""The command `grpo chat`: talk to a trained model, to any other model, or to a running server.

For a run or a model, it starts a vLLM server and stops it at the end. A run provides system prompt and sampling.
"""

import argparse
import json
import os
import signal
import sys
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from grpo_recipes.cli import command, option
from grpo_recipes.cli.follow import find_run
from grpo_recipes.console.generate import BACKEND, connect_to_server, make_sampling_parameters
from grpo_recipes.errors import ConfigError, Problem, config_error
from grpo_recipes.fetch.built_in import create_smoke_task
from grpo_recipes.fetch.hub import EXIT_INTERRUPTED
from grpo_recipes.launch.serve import ServerFailed, serving
from grpo_recipes.paths import display_path
from grpo_recipes.process.terminal import strip_control_codes
from grpo_recipes.recipe import DEFAULT_SOURCE, Recipe, read_frozen
from grpo_recipes.recipe.document import Value
from grpo_recipes.recipe.keys import catalogue, run_root
from grpo_recipes.runs.rundir import Run
from grpo_recipes.smoke import SMOKE_SCHEME, smoke_folder

if TYPE_CHECKING:
    from grpo_recipes.rollouts.openai import CompletionClient, SamplingParameters

_MAX_LENGTH = 8192  # tokens of a conversation, if the model supports this length
_UNKNOWN_LENGTH = 4096  # tokens of a conversation with a model of the hub, since its config is not read
_WAIT = 10.0  # seconds to wait for a running server
_HELP = "/reset starts a new conversation, /system TEXT starts one with this system prompt, Ctrl-D quits"


@command(
    "Talk to a trained model in the terminal",
    option("which", metavar="RUN|MODEL|URL", help="A run (its model/), a model's folder or hub id, or a server's URL"),
    option("--base-url", metavar="URL", help="URL of a running server; RUN provides system prompt and sampling"),
    BACKEND,
    option("--model", metavar="NAME", help="Model that the server must have (default: the served model)"),
    option("--system", metavar="TEXT", help="System prompt (default: the run's)"),
    option("--temperature", type=float, metavar="T", help="Temperature (default: the run's, otherwise 1; 0 is greedy)"),
    option("--max-tokens", type=int, metavar="N", help="Maximum tokens of a reply (default: max_completion_length)"),
    option("--seed", type=int, metavar="N", help="Seed of the replies (default: random)"),
)
def chat(options: argparse.Namespace) -> int:
    """Start or connect to a server, and answer lines from stdin until its end.

    Return 0, 1 if the server did not start or a reply failed, or 130 after Ctrl-C. After a failed reply, the
    conversation continues, and Ctrl-C during a reply only drops the reply. A server that the command starts is stopped
    at the end. Raise ConfigError for wrong options, or if an external server does not answer.
    """
    _check_options(options)
    url = options.base_url or (options.which if "://" in options.which else None)
    recipe, model = _find_recipe_and_model(options.which, needs_model=url is None)
    from grpo_recipes.rollouts.openai import CompletionClient

    signal.signal(signal.SIGTERM, exit_on_sigterm)  # so that the block below stops the server
    with ExitStack() as stack:
        if url is None:
            _print_line(f"starting a server for {display_path(model) if os.path.isdir(model) else model}")
            try:
                server = stack.enter_context(serving(recipe, model, os.environ))
            except ServerFailed as error:
                print(f"grpo: {error}", file=sys.stderr)
                return 1
            except KeyboardInterrupt:
                return EXIT_INTERRUPTED
            client = CompletionClient(server.url, model=server.name, token=server.token, owner=server.owner)
        else:
            client = connect_to_server(url, options.backend, options.model, _WAIT)
        _print_line(f"{client.model if url else display_path(model)} is ready; {_HELP}")
        system = recipe.model.system_prompt if options.system is None else options.system
        max_tokens = options.max_tokens or recipe.sampling.max_completion_length or 1024
        sampling = make_sampling_parameters(recipe, options.temperature, max_tokens, options.seed)
        return _Conversation(client, sampling, recipe.model.chat_template_kwargs or {}, system).run()


def exit_on_sigterm(*_: int | FrameType | None) -> NoReturn:
    """Raise SystemExit with code 143: a SIGTERM handler, so that ``with`` blocks stop the processes they started."""
    raise SystemExit(128 + signal.SIGTERM)


def _check_options(options: argparse.Namespace) -> None:
    """Raise ConfigError if an option has a number that is too small, or if --model is set without a server's URL."""
    problems = []
    if options.temperature is not None and not options.temperature >= 0:
        problems.append(Problem("--temperature", f"expected 0 or more, got {options.temperature:g}", "use 0 or more"))
    for name, minimum in (("max_tokens", 1), ("seed", 0)):
        if (value := getattr(options, name)) is not None and value < minimum:
            message = f"expected {minimum} or more, got {value}"
            problems.append(Problem(f"--{name.replace('_', '-')}", message, f"use {minimum} or more"))
    if options.base_url is None and "://" not in options.which and options.model is not None:
        problems.append(Problem("--model", "needs --base-url", "add --base-url URL, or remove it"))
    if problems:
        raise ConfigError(*problems)


def _find_recipe_and_model(name: str, needs_model: bool) -> tuple[Recipe, str]:
    """Return the recipe with system prompt and sampling, and the model to serve, for the argument RUN|MODEL|URL.

    The model is a folder or a hub id, or "" for a server's URL. For a URL or a model, the recipe has only defaults. For
    a run or a model, it also limits the length of a conversation. Raise ConfigError if ``name`` is none of these, or if
    a run has no model yet and ``needs_model`` is true.
    """
    if "://" in name:
        return _make_default_recipe(name), ""
    fix = "use a run directory, last, a folder with a model's config.json, a hub id, or the URL of a server"
    run, model = find_run_or_model(name, needs_model, fix)
    folder = Path(model) if os.path.isdir(model) else None
    if run is None:
        return _set_conversation_length(_make_default_recipe(name), folder), model
    recipe = read_frozen(run.folder / "recipe.yaml").with_value("model_revision", Value("main", "grpo chat"))
    return _set_conversation_length(recipe, folder), model


def find_run_or_model(name: str, needs_model: bool, fix: str) -> tuple[Run | None, str]:
    """Return the run that ``name`` refers to, and its model's folder; or None, and the folder or hub id of a model.

    ``name`` is a run directory, a run's name, "last", a model's folder, a hub id, or a smoke model such as
    ``smoke:sums``, which is created if it does not exist (SystemExit if that fails). Raise ConfigError with the
    advice ``fix`` if ``name`` is none of these. With ``needs_model``, also raise ConfigError for a run that has not
    written ``model/`` yet.
    """
    path = Path(name)
    if name.startswith(SMOKE_SCHEME):
        return None, ensure_smoke_model(name)
    if (path / "config.json").is_file():
        return None, str(path.absolute())
    is_run = name == "last" or any((folder / "run.json").is_file() for folder in (path, run_root(os.environ) / name))
    if name.count("/") == 1 and not is_run and not path.exists() and not name.startswith((".", "~", "/")):
        return None, name
    try:
        run = find_run(name)
    except ConfigError as error:
        raise ConfigError(*(replace(problem, fix=fix) for problem in error.problems)) from error
    if needs_model and not (run.folder / "model" / "config.json").is_file():
        status = run.summary.get("status", "not started")
        message = f"has no model/: a run writes it at its end, and this run is {status}"
        raise config_error(display_path(run.folder), message, "wait for it, or use a folder of its checkpoints/")
    return run, str(run.folder / "model")


def ensure_smoke_model(name: str) -> str:
    """Return the folder of the smoke model ``name``; create it first if needed. SystemExit if that fails."""
    if code := create_smoke_task(name, os.environ):
        raise SystemExit(code)
    return str(smoke_folder(name, os.environ) / "model")


def _make_default_recipe(name: str) -> Recipe:
    """Create a recipe in which every key has its default; ``name`` becomes its path, for messages."""
    return Recipe(Path(name), {key: Value(entry["default"], DEFAULT_SOURCE) for key, entry in catalogue().items()})


def _set_conversation_length(recipe: Recipe, folder: Path | None) -> Recipe:
    """Return a copy of the recipe with vllm_max_model_length set for a long conversation, in tokens.

    It is 8192, or the limit in the model's config.json if that is lower. If ``folder``, the model's folder, is None or
    has no config.json, it is 4096.
    """
    max_length = _UNKNOWN_LENGTH
    if folder is not None and (folder / "config.json").is_file():
        config = json.loads((folder / "config.json").read_text())
        positions = (config.get("text_config") or config).get("max_position_embeddings")
        max_length = min(_MAX_LENGTH, positions or _MAX_LENGTH)
    return recipe.with_value("vllm_max_model_length", Value(max_length, "grpo chat"))


@dataclass
class _Conversation:
    """A conversation on the terminal: reads lines, sends them with the history, prints the replies."""

    client: "CompletionClient"
    sampling: "SamplingParameters"
    template_kwargs: dict[str, Any]
    system: str | None
    messages: list[dict[str, str]] = field(default_factory=list)
    replies: int = 0
    failed: int = 0

    def run(self) -> int:
        """Answer lines of stdin until its end; return the exit code: 0, 1 if a reply failed, or 130 after Ctrl-C."""
        while True:
            try:
                if sys.stdin is None:  # closed
                    raise EOFError
                line = input("> ").strip()
                if not sys.stdin.isatty():
                    print(line)  # a terminal shows it while it is typed
            except EOFError:
                print()
                return 1 if self.failed else 0
            except KeyboardInterrupt:
                print()
                return EXIT_INTERRUPTED
            if line.startswith("/"):
                self._run_command(*line.split(maxsplit=1))
            elif line:
                self._print_reply(line)

    def _run_command(self, name: str, text: str = "") -> None:
        """Run a command of the user: /reset, /system or /system TEXT; print its result, or the help for another name.

        /reset and /system TEXT clear the history, and /system without a text prints the system prompt.
        """
        if name == "/system" and text:
            self.system = text
        elif name == "/system":
            return _print_line(f"system prompt: {self.system}" if self.system else "no system prompt")
        elif name != "/reset":
            return _print_line(_HELP)
        self.messages.clear()
        return _print_line("new conversation")

    def _print_reply(self, line: str) -> None:
        """Send a line with the history, print the reply while it arrives, and add both to the history.

        If the reply fails or Ctrl-C interrupts it, print a message and leave the history unchanged.
        """
        from grpo_recipes.rollouts.openai import NoCompletion
        from grpo_recipes.rollouts.turns import derive_seed

        messages = [*self.messages, {"role": "user", "content": line}]
        system = [{"role": "system", "content": self.system}] if self.system else []
        # Each reply gets another seed.
        seed = None if self.sampling.seed is None else derive_seed(self.sampling.seed, self.replies) >> 1
        self.replies += 1
        sampling = replace(self.sampling, seed=seed)
        reply = ""
        pieces = self.client.stream([*system, *messages], sampling, self.template_kwargs)
        try:
            for piece in pieces:
                reply += piece
                print(strip_control_codes(piece), end="", flush=True)
            print(flush=True)
        except NoCompletion as error:
            self.failed += 1
            print()
            return _print_line(f"no reply: {error}")
        except KeyboardInterrupt:
            pieces.close()  # the server stops too
            print()
            return _print_line("reply interrupted and dropped")
        self.messages = [*messages, {"role": "assistant", "content": reply}]
        return None


def _print_line(text: str) -> None:
    """Print ``grpo: TEXT`` at once, in order with the replies; ``reports.say`` would print from another thread."""
    print(f"grpo: {text}", flush=True)
