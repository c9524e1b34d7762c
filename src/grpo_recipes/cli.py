"""The command `grpo`: check, plan and launch a recipe."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import replace

from grpo_recipes.check import check
from grpo_recipes.errors import EXIT_REFUSED, Problem, Refused
from grpo_recipes.launch.plan import choose_recipe, choose_task, describe, make_plan
from grpo_recipes.launch.resources import environment_flavour, find_resources
from grpo_recipes.launch.run import Options, launch, planned_names
from grpo_recipes.recipe import read_recipe

_EPILOG = "Any recipe key is a flag too, e.g. --learning_rate 1e-6: flag > environment variable > YAML > default."


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; every refusal is one line a problem and exit code 2."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    # The recipe stands right after the command: later on a bare word is the value of a recipe flag.
    recipe = arguments.pop(1) if len(arguments) > 1 and not arguments[1].startswith("-") else None
    options, flags = _parser().parse_known_args(arguments)
    options.recipe = recipe
    try:
        return int(options.run(options, flags))
    except Refused as refused:
        for problem in refused.problems:
            print(f"grpo: {problem}", file=sys.stderr)
        return EXIT_REFUSED
    except BrokenPipeError:
        # `grpo plan | head`: nothing is left to tell; keep the interpreter from complaining at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_REFUSED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="grpo", description=__doc__, allow_abbrev=False)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, run, text in (
        ("check", _check, "say everything that is wrong in a recipe"),
        ("plan", _plan, "say what a launch would start, without starting it"),
        ("launch", _launch, "run a recipe"),
    ):
        usage = f"grpo {name} [RECIPE] [options] [--KEY VALUE ...]"
        command = commands.add_parser(
            name, help=text, description=text, usage=usage, epilog=_EPILOG, allow_abbrev=False
        )
        command.add_argument("--config", metavar="RECIPE", help="the recipe; by default CONFIG, or the flavour's own")
        command.add_argument("--task", choices=["grpo", "maxent"], help="the trainer (MAXENT=1 selects maxent)")
        command.set_defaults(run=run)
        if name == "plan":
            command.add_argument("--gpus", type=int, help="plan for this many GPUs instead of those visible")
            command.add_argument("--json", action="store_true", help="print the plan as JSON")
        if name == "launch":
            command.add_argument("--resume", metavar="DIR|last", help="continue a run")
            command.add_argument("--allow-changed-code", action="store_true", help="resume though the code changed")
            command.add_argument("--dry-run", action="store_true", help="print argv and environment of every process")
    return parser


def _recipe_path(options: argparse.Namespace) -> str | None:
    if options.recipe and options.config:
        raise Refused(Problem("--config", "two recipes are named", "name one"))
    return options.recipe or options.config


def _check(options: argparse.Namespace, flags: list[str]) -> int:
    task, _ = choose_task(os.environ, options.task)
    path = choose_recipe(_recipe_path(options), os.environ, task, environment_flavour())
    recipe = read_recipe(path, flags, os.environ)
    problems = check(recipe, os.environ)
    if problems:
        raise Refused(*problems)
    print(f"grpo: {path} is right")
    return 0


def _plan(options: argparse.Namespace, flags: list[str]) -> int:
    resources = find_resources(os.environ)
    if options.gpus is not None:
        resources = replace(resources, flavour="cuda", gpus=tuple(str(index) for index in range(options.gpus)))
    task, entry = choose_task(os.environ, options.task)
    path = choose_recipe(_recipe_path(options), os.environ, task, resources.flavour)
    recipe = read_recipe(path, flags, os.environ)
    plan = make_plan(recipe, resources, os.environ, planned_names(recipe), task, entry)
    print(json.dumps(plan.as_json(), indent=1) if options.json else describe(plan))
    return 0


def _launch(options: argparse.Namespace, flags: list[str]) -> int:
    return launch(
        Options(
            recipe=_recipe_path(options),
            task=options.task,
            resume=options.resume,
            allow_changed_code=options.allow_changed_code,
            dry_run=options.dry_run,
            flags=tuple(flags),
        )
    )


if __name__ == "__main__":
    sys.exit(main())
