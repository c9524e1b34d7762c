"""The command `grpo chat`: a conversation with a trained model, with any other, or with a server that runs."""

import argparse
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from grpo_recipes.cli import command, option
from grpo_recipes.cli.follow import find_run
from grpo_recipes.console.generate import BACKEND, connect, sampling_of
from grpo_recipes.errors import ConfigError, Problem, config_error
from grpo_recipes.fetch.hub import EXIT_INTERRUPTED
from grpo_recipes.launch.serve import ServerFailed, serving
from grpo_recipes.paths import display_path
from grpo_recipes.process.terminal import readable
from grpo_recipes.recipe import DEFAULT_SOURCE, Recipe, read_frozen
from grpo_recipes.recipe.document import Value
from grpo_recipes.recipe.keys import catalogue, run_root
from grpo_recipes.runs.rundir import Run
from grpo_recipes.smoke import SMOKE_SCHEME, smoke_command

if TYPE_CHECKING:
    from grpo_recipes.rollouts.openai import CompletionClient, SamplingParameters

_LONGEST = 8192  # tokens of a conversation, where the model can read that many
_UNKNOWN_LENGTH = 4096  # of a model of the hub, whose files are not looked at
_WAIT = 10.0  # seconds for a server that runs already
_HELP = "/reset forgets the conversation, /system TEXT begins another with that system prompt, Ctrl-D ends"


@command(
    "talk to a trained model in the terminal",
    option("which", metavar="RUN|MODEL|URL", help="a run (its model/), a model's folder or hub id, or a server's URL"),
    option("--base-url", metavar="URL", help="a server that runs already; RUN gives system prompt and sampling"),
    BACKEND,
    option("--model", metavar="NAME", help="the model that must be served there; by default the one that is"),
    option("--system", metavar="TEXT", help="the system prompt; by default the run's"),
    option("--temperature", type=float, metavar="T", help="by default the run's, else 1; 0 is greedy"),
    option("--max-tokens", type=int, metavar="N", help="of a reply; by default the run's max_completion_length"),
    option("--seed", type=int, metavar="N", help="of the replies; by default each is another one"),
)
def chat(options: argparse.Namespace) -> int:
    """Return 0 at the end of stdin, 1 where a reply failed, 130 after Ctrl-C; a server that was started is ended."""
    _check(options)
    url = options.base_url or (options.which if "://" in options.which else None)
    recipe, model = _subject(options.which, needs_model=url is None)
    from grpo_recipes.rollouts.openai import CompletionClient

    signal.signal(signal.SIGTERM, leave)  # by way of the end of the block below
    with ExitStack() as ending:
        if url is None:
            _say(f"starting a server for {display_path(model) if os.path.isdir(model) else model}")
            try:
                server = ending.enter_context(serving(recipe, model, os.environ))
            except ServerFailed as error:
                print(f"grpo: {error}", file=sys.stderr)
                return 1
            except KeyboardInterrupt:
                return EXIT_INTERRUPTED
            client = CompletionClient(server.url, model=server.name, token=server.token, owner=server.owner)
        else:
            client = connect(url, options.backend, options.model, _WAIT)
        _say(f"{client.model if url else display_path(model)} answers; {_HELP}")
        system = recipe["system_prompt"] if options.system is None else options.system
        most = options.max_tokens or recipe["max_completion_length"] or 1024
        sampling = sampling_of(recipe, options.temperature, most, options.seed)
        talk = _Talk(client, sampling, recipe["chat_template_kwargs"] or {}, system)
        return talk.run()


def leave(*_: int | FrameType | None) -> NoReturn:
    """End the command on a signal by way of the blocks that it is in, and so what they started."""
    raise SystemExit(128 + signal.SIGTERM)


def _check(options: argparse.Namespace) -> None:
    problems = []
    if options.temperature is not None and not options.temperature >= 0:
        problems.append(Problem("--temperature", f"is {options.temperature:g}", "write 0 or more"))
    for name, least in (("max_tokens", 1), ("seed", 0)):
        if (given := getattr(options, name)) is not None and given < least:
            problems.append(Problem(f"--{name.replace('_', '-')}", f"is {given}", f"write {least} or more"))
    if options.base_url is None and "://" not in options.which and options.model is not None:
        problems.append(Problem("--model", "names what a running server serves", "add --base-url URL, or remove it"))
    if problems:
        raise ConfigError(*problems)


def _subject(which: str, needs_model: bool) -> tuple[Recipe, str]:
    """Return the recipe whose settings hold, and the model to serve: a folder or a hub id."""
    if "://" in which:
        return _defaults(which), ""
    fix = "name a run directory, last, a folder with a model's config.json, a hub id, or the URL of a server"
    run, model = run_or_model(which, needs_model, fix)
    folder = Path(model) if os.path.isdir(model) else None
    if run is None:
        return _with_length(_defaults(which), folder), model
    recipe = read_frozen(run.folder / "recipe.yaml").with_value("model_revision", Value("main", "grpo chat"))
    return _with_length(recipe, folder), model


def run_or_model(which: str, needs_model: bool, fix: str) -> tuple[Run | None, str]:
    """Return the run a person means, None for a model of no run, and the model: a folder, or a hub id.

    The built-in model is made where it is missing. ``needs_model`` refuses a run without ``model/``; ``fix`` is what to
    name in the place of what is none of these.
    """
    path = Path(which)
    if which.startswith(SMOKE_SCHEME):
        return None, smoke_model(which)
    if (path / "config.json").is_file():
        return None, str(path.absolute())
    is_run = which == "last" or any((folder / "run.json").is_file() for folder in (path, run_root(os.environ) / which))
    if which.count("/") == 1 and not is_run and not path.exists() and not which.startswith((".", "~", "/")):
        return None, which
    try:
        run = find_run(which)
    except ConfigError as error:
        raise ConfigError(*(Problem(one.where, one.what, fix) for one in error.problems)) from error
    if needs_model and not (run.folder / "model" / "config.json").is_file():
        what = f"has no model/: a run writes it at its end, and this one is {run.summary.get('status', 'not started')}"
        raise config_error(display_path(run.folder), what, "wait for it, or name a folder of its checkpoints/")
    return run, str(run.folder / "model")


def smoke_model(name: str) -> str:
    """Return the folder of a built-in model, which is made where it is missing."""
    folder, program = smoke_command(name, os.environ)
    if not (folder / "COMPLETE").exists():
        _say(f"making the smoke model in {display_path(folder)} (once, about a minute)")
        subprocess.run(program, check=True)
    return str(folder / "model")


def _defaults(which: str) -> Recipe:
    """Return a recipe of defaults alone."""
    return Recipe(Path(which), {key: Value(entry["default"], DEFAULT_SOURCE) for key, entry in catalogue().items()})


def _with_length(recipe: Recipe, folder: Path | None) -> Recipe:
    """Let the server take long conversations: a training's limits are those of a prompt and one completion."""
    longest = _UNKNOWN_LENGTH
    if folder is not None and (folder / "config.json").is_file():
        config = json.loads((folder / "config.json").read_text())
        longest = min(_LONGEST, (config.get("text_config") or config).get("max_position_embeddings") or _LONGEST)
    return recipe.with_value("vllm_max_model_length", Value(longest, "grpo chat"))


@dataclass
class _Talk:
    """The conversation."""

    client: "CompletionClient"
    sampling: "SamplingParameters"
    template_kwargs: dict[str, Any]
    system: str | None
    messages: list[dict[str, str]] = field(default_factory=list)
    replies: int = 0
    failed: int = 0

    def run(self) -> int:
        """Answer lines of stdin until it ends; return the exit code."""
        while True:
            try:
                line = self._line()
            except EOFError:
                print()
                return 1 if self.failed else 0
            except KeyboardInterrupt:
                print()
                return EXIT_INTERRUPTED
            if line.startswith("/"):
                self._order(*line.split(maxsplit=1))
            elif line:
                self._answer(line)

    def _line(self) -> str:
        if sys.stdin is None:  # closed
            raise EOFError
        line = input("> ").strip()
        if not sys.stdin.isatty():
            print(line)  # which a terminal shows while it is typed
        return line

    def _order(self, name: str, text: str = "") -> None:
        """Do what a line that begins with a slash asks for."""
        if name == "/system" and text:
            self.system = text
        elif name == "/system":
            return _say(f"system prompt: {self.system}" if self.system else "there is no system prompt")
        elif name != "/reset":
            return _say(_HELP)
        self.messages.clear()
        return _say("a new conversation")

    def _answer(self, line: str) -> None:
        """Print the reply to a line piece by piece; without a whole reply the line is forgotten."""
        from grpo_recipes.rollouts.openai import NoCompletion

        asked = [*self.messages, {"role": "user", "content": line}]
        said: list[str] = []
        pieces = self._pieces(asked)
        try:
            for piece in pieces:
                said.append(piece)
                print(readable(piece), end="", flush=True)
            print(flush=True)
        except NoCompletion as error:
            self.failed += 1
            print()
            return _say(f"no reply: {error}")
        except KeyboardInterrupt:
            pieces.close()  # the server stops too
            print()
            return _say("the reply was cut off, and is forgotten")
        self.messages = [*asked, {"role": "assistant", "content": "".join(said)}]
        return None

    def _pieces(self, asked: list[dict[str, str]]) -> Any:
        from dataclasses import replace

        from grpo_recipes.rollouts.turns import derive_seed

        system = [{"role": "system", "content": self.system}] if self.system else []
        seed = None if self.sampling.seed is None else derive_seed(self.sampling.seed, self.replies) >> 1
        self.replies += 1
        pieces: Iterator[str] = self.client.stream(
            [*system, *asked], replace(self.sampling, seed=seed), self.template_kwargs
        )
        return pieces


def _say(text: str) -> None:
    """Print a line between the replies, in its place: those of ``reports.say`` come from a thread."""
    print(f"grpo: {text}", flush=True)
