"""Measure the progress of environment recipes on CPU, with a vLLM server and with vLLM inside the trainer.

    python bench/environments.py recipes/environments/*_smoke.yaml [--seeds 1 2 3 4] [--colocate 1] [--unset KEY...]

Runs ``grpo launch`` for each recipe and seed, with a server or, for the seeds of ``--colocate``, with vLLM inside the
trainer. Each run adds a row to ``--out`` (bench/results/environments.jsonl): the reward before and after (the means of
the first 3 and the last 5 steps), the final benchmark scores, the rewards and episodes of the evaluations before the
first and after the last step, and seconds. ``--unset`` runs the recipes without these keys.

``--scripted`` trains nothing. It plays the evaluation episodes of a SecretMafia recipe 16 times each with each of the
``BASELINES``, and adds a row with the baseline's name as mode: "blind" ignores the game and makes malformed moves half
of the time, "drawn" accuses any other living player, "scripted" follows a script.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from made_by import append_record, begin

from grpo_recipes.extensions.environments.games import Game
from grpo_recipes.extensions.environments.rows import make_evaluation_rows
from grpo_recipes.paths import find_code_root, module_command
from grpo_recipes.recipe import read_recipe
from grpo_recipes.recipe.configs import ScriptArguments
from grpo_recipes.rollouts.turns import Turn
from grpo_recipes.runs.rundir import read_json

OUT = find_code_root() / "bench/results/environments.jsonl"
TIMES = 16  # that --scripted plays each episode
BASELINES: dict[str, Callable[[Game, random.Random], str]] = {
    "blind": lambda game, generator: _blind_move(generator),
    "drawn": lambda game, generator: game.choose_scripted_move(generator, plan=False),
    "scripted": lambda game, generator: game.choose_scripted_move(generator),
}


def measure(recipe: Path, mode: str, seed: int, unset: Sequence[str] = ()) -> dict[str, Any]:
    """Train with this recipe once, without the keys ``unset``, and return the row.

    Raise a RuntimeError with the end of the output if it fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "recipes").symlink_to(find_code_root() / "recipes")  # recipes name their files from the repository
        keys = ["--vllm_mode", mode, "--seed", str(seed), "--run_root", folder]
        keys += [word for key in unset for word in ("--unset", key)]
        began = time.perf_counter()
        command = [*module_command("grpo_recipes", "launch", str(recipe)), *keys]
        done = subprocess.run(command, capture_output=True, text=True, cwd=folder)
        seconds = time.perf_counter() - began
        if done.returncode:
            raise RuntimeError(f"{recipe} ended with {done.returncode}: {(done.stdout + done.stderr)[-3000:]}")
        (run,) = (path.parent for path in Path(folder).glob("*/summary.json"))
        summary = read_json(run / "summary.json")
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        evaluated = (run / "eval.jsonl").read_text().splitlines() if (run / "eval.jsonl").exists() else []
    return {
        "recipe": str(recipe.resolve().relative_to(find_code_root())), "mode": mode, "seed": seed,
        **({"unset": [*unset]} if unset else {}), "steps": summary["steps"],
        "initial_reward": round(statistics.fmean(row["reward"] for row in rows[:3]), 4),
        "final_reward": round(summary["final_reward"], 4),
        "episodes": _of_episodes(rows[0], "episodes/"),
        "evaluated": [_of_episodes(json.loads(line), "eval_episodes/") for line in evaluated],
        "evaluated_rewards": [round(json.loads(line)["eval_reward"], 4) for line in evaluated],
        "benchmarks": summary.get("benchmarks", {}), "seconds": round(seconds, 1),
    }  # fmt: skip


def _of_episodes(row: dict[str, Any], prefix: str) -> dict[str, float]:
    """Return the means of episodes in a row of metrics.jsonl or eval.jsonl."""
    return {key: round(value, 4) for key, value in row.items() if key.startswith(prefix)}


def _blind_move(generator: random.Random) -> str:
    """Return the move of a player who does not look at the game: any number, malformed half of the time."""
    first, second = generator.randrange(10), generator.randrange(10)
    return generator.choice([f"[{first}]", f"[{first}]", f"{first}", f"[{first}] [{second}]"])


def baseline(recipe: Path, mode: str, times: int = TIMES) -> dict[str, Any]:
    """Play the recipe's evaluation episodes ``times`` times each with a baseline, and return the row."""
    keys = read_recipe(recipe)
    rows = make_evaluation_rows(
        ScriptArguments(
            dataset_name=None, environment=keys["environment"], environment_args=keys["environment_args"],
            environment_eval_episodes=keys["environment_eval_episodes"],
        )
    )  # fmt: skip
    game, episodes, began = (
        Game(keys["environment"].partition(":")[2], keys["environment_args"]),
        [],
        time.perf_counter(),
    )
    for seed, number in ((seed, number) for seed in rows["seed"] for number in range(times)):
        generator = random.Random(f"{seed}/{number}")
        turns: list[Turn] = [game.reset(seed)]
        while not turns[-1].done and len(turns) <= keys["environment_max_turns"]:
            turns.append(game.step(BASELINES[mode](game, generator)))
        legal = statistics.fmean(float(turn.info["legal"]) for turn in turns[1:])
        role, won = str(turns[-1].info["role"]).lower(), float(turns[-1].info.get("won", 0))
        episodes.append({"legal": legal, "won": won, "turns": len(turns) - 1.0,
                      f"reward_{role}": sum(turn.reward for turn in turns)})  # fmt: skip
    names = dict.fromkeys(name for episode in episodes for name in episode)
    values = {name: [episode[name] for episode in episodes if name in episode] for name in names}
    means = {f"eval_episodes/{name}": round(statistics.fmean(of_all), 4) for name, of_all in values.items()}
    return {
        "recipe": str(recipe.resolve().relative_to(find_code_root())), "mode": mode, "episodes_played": len(episodes),
        "evaluated": [means], "seconds": round(time.perf_counter() - began, 1),
    }  # fmt: skip


def main() -> None:
    """Measure the recipes of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="+", type=Path)
    parser.add_argument("--seeds", nargs="*", type=int, default=[1, 2, 3, 4])
    parser.add_argument("--colocate", nargs="*", type=int, default=[1])
    parser.add_argument("--unset", nargs="*", default=[], metavar="KEY")
    parser.add_argument("--scripted", action="store_true", help="play the baselines; train nothing")
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    origin = begin(args.out)
    for recipe, mode in ((recipe, mode) for recipe in args.recipes * args.scripted for mode in BASELINES):
        row = baseline(recipe, mode)
        print(f"{recipe.stem} {mode}: {row['evaluated']}", flush=True)
        append_record(args.out, row, origin)
    if args.scripted:
        return
    for mode, seeds in (("server", args.seeds), ("colocate", args.colocate)):
        for seed, recipe in ((seed, recipe) for seed in seeds for recipe in args.recipes):
            row = measure(recipe, mode, seed, args.unset)
            rewards = [row["initial_reward"], row["final_reward"]]
            print(f"{recipe.stem} {mode} {seed}: {rewards}, evaluated {row['evaluated_rewards']}", flush=True)
            append_record(args.out, row, origin)


if __name__ == "__main__":
    main()
