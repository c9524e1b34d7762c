"""Rules of data made on the spot, ModeBench and problems from seeds, and of the rewards that can judge it."""

from grpo_recipes.extensions.problems.modebench.dataset import SCHEME, TASKS
from grpo_recipes.extensions.problems.seeded import GENERATORS, SAT, Settings, is_seeded
from grpo_recipes.recipe import Recipe
from grpo_recipes.recipe.keys import catalogue
from grpo_recipes.recipe.registry import MODEBENCH_REWARD, ONE_ANSWER, SAT_REWARD
from grpo_recipes.recipe.rules import Rule, evaluates, evaluation_set, given

_LARGEST_OF_FOUR = 14  # listing all problems of four larger numbers takes minutes


def modebench_tasks(recipe: Recipe) -> list[str]:
    """Return the ModeBench tasks that a recipe trains, evaluates or tests on."""
    return [task for task in TASKS if task in (recipe["dataset_name"], evaluation_set(recipe), *recipe["benchmarks"])]


def seeded_sets(recipe: Recipe) -> list[str]:
    """Return the generators whose problems a recipe trains or evaluates on."""
    return [name for name in GENERATORS if name in (recipe["dataset_name"], evaluation_set(recipe))]


def puzzles(recipe: Recipe) -> set[str]:
    """Return the ModeBench tasks whose problems a recipe has, drawn by seeds or not."""
    drawn = {GENERATORS[name].task for name in seeded_sets(recipe)} - {None}
    return {*modebench_tasks(recipe), *map(str, drawn)}


def _made_on_the_spot(recipe: Recipe) -> bool:
    return (recipe["dataset_name"] or "").startswith(SCHEME) or is_seeded(recipe["dataset_name"])


def _own_reward(name: str | None) -> str | None:
    """Return the reward that alone can judge a dataset; None where its problems have one answer each."""
    generator = GENERATORS.get(name or "")
    if (name or "").startswith(SCHEME) or (generator and generator.task):
        return MODEBENCH_REWARD
    return SAT_REWARD if name == SAT else None


def _judges(recipe: Recipe) -> str | None:
    return _own_reward(recipe["dataset_name"])


def _evaluates_on_seeds(recipe: Recipe) -> bool:
    """Return whether the evaluation set is made from seeds."""
    by_default = is_seeded(recipe["dataset_name"]) and not recipe["eval_dataset_name"]
    return evaluates(recipe) and (by_default or is_seeded(evaluation_set(recipe)))


def _shared_seeds(recipe: Recipe) -> list[int]:
    """Return the seeds of one generator that a recipe both trains and evaluates on."""
    name = recipe["dataset_name"]
    same = _evaluates_on_seeds(recipe) and is_seeded(name) and (recipe["eval_dataset_name"] or name) == name
    return Settings.read(recipe.__getitem__).shared if same else []


def _seeds(seeds: list[int]) -> str:
    return f"seed {seeds[0]}" if len(seeds) == 1 else f"the seeds {seeds[0]} to {seeds[-1]}"


# fmt: off
RULES: tuple[Rule, ...] = (
    Rule("reward_funcs", lambda r: MODEBENCH_REWARD in r["reward_funcs"] and _judges(r) != MODEBENCH_REWARD,
        f"reward '{MODEBENCH_REWARD}' judges the problems of {' and '.join(TASKS)} alone",
        f"write dataset_name: {TASKS[0]}, or remove it"),
    Rule("reward_funcs", lambda r: SAT_REWARD in r["reward_funcs"] and _judges(r) != SAT_REWARD,
        f"reward '{SAT_REWARD}' judges the problems of {SAT} alone", f"write dataset_name: {SAT}, or remove it"),
    Rule("reward_funcs", lambda r: [name for name in r["reward_funcs"] if name in ONE_ANSWER and _judges(r)],
        "reward '{item}' compares with one answer, a problem of {dataset_name} has several",
        lambda r, _: f"write reward_funcs: [{_judges(r)}]"),
    Rule("eval_dataset_name",
        lambda r: evaluation_set(r) and _own_reward(evaluation_set(r)) != _judges(r),
        lambda r, _: f"the rewards of '{r['dataset_name'] or 'dataset_mixture'}' cannot judge '{evaluation_set(r)}'",
        "evaluate on data of the same kind, or name the other one in benchmarks"),
    Rule("dataset_streaming", lambda r: r["dataset_streaming"] and (_made_on_the_spot(r) or bool(r["dataset_mixture"])),
        "neither data made on the spot nor a mixture, whose weights are shares of all rows, can be streamed",
        "remove dataset_streaming"),
    Rule("dataset_streaming", lambda r: r["dataset_streaming"] and r["max_train_prompts"] is None
        and not r["dataset_mixture"] and not _made_on_the_spot(r),
        "dataset_streaming without max_train_prompts would read the stream to its end",
        "add max_train_prompts, e.g. max_train_prompts: 10000"),
    Rule("{item}", lambda r: is_seeded(r["dataset_name"]) and given(r, "max_train_prompts", any_value=False),
        "'{item}' does nothing with {dataset_name}, whose problems are those of its seeds",
        "{removal}, or write problem_seeds"),
    Rule("{item}", lambda r: _evaluates_on_seeds(r)
        and [key for key in given(r, "eval_subsample eval_max_prompts") if r[key] != catalogue()[key]["default"]],
        "'{item}' does nothing with a seeded evaluation set, of which every seed is used",
        "{removal}, or write eval_problem_seeds"),
    Rule("{item}", lambda r: bool(r["eval_problem_ids"]) and given(r, "eval_problem_seed_start eval_problem_seeds"),
        "'{item}' contradicts eval_problem_ids, which are the seeds themselves",
        "{removal}, or remove eval_problem_ids"),
    Rule("eval_problem_ids", lambda r: [one for one in r["eval_problem_ids"] or () if one < 0],
        "{item} cannot be a seed", "write whole numbers of 0 or more"),
    Rule("eval_problem_ids", lambda r: bool(r["eval_problem_ids"]) and _shared_seeds(r),
        "{item} is trained on too: problem_seed_start {problem_seed_start} with problem_seeds {problem_seeds}",
        "write other seeds"),
    Rule("eval_problem_seed_start", lambda r: not r["eval_problem_ids"] and bool(_shared_seeds(r)),
        lambda r, _: f"{_seeds(_shared_seeds(r))} would be trained and evaluated on: problem_seed_start "
        f"{r['problem_seed_start']} with problem_seeds {r['problem_seeds']}, eval_problem_seed_start "
        f"{r['eval_problem_seed_start']} with eval_problem_seeds {r['eval_problem_seeds']}",
        lambda r, _: f"write eval_problem_seed_start: {r['problem_seed_start'] + r['problem_seeds']} or more"),
    Rule("modebench_min_modes", lambda r: puzzles(r) and r["modebench_min_modes"] > r["modebench_max_modes"],
        "modebench_min_modes {modebench_min_modes} exceeds modebench_max_modes {modebench_max_modes}",
        "write at most {modebench_max_modes}"),
    Rule("modebench_largest_number", lambda r: "modebench:countdown" in puzzles(r)
        and r["modebench_numbers"] == 4 and (r["modebench_largest_number"] or 0) > _LARGEST_OF_FOUR,
        "modebench_largest_number {modebench_largest_number} with 4 numbers takes minutes to list",
        f"write at most {_LARGEST_OF_FOUR}"),
    Rule("modebench_hidden",
        lambda r: "modebench:graph_coloring" in puzzles(r) and r["modebench_hidden"] > r["modebench_vertices"],
        "modebench_hidden {modebench_hidden} exceeds modebench_vertices {modebench_vertices}",
        "write at most {modebench_vertices}"),
)
# fmt: on
