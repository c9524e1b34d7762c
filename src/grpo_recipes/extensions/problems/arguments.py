"""Keys of generated problems: ModeBench, and problems drawn by seeds. No torch."""

from dataclasses import dataclass

from grpo_recipes.recipe.fields import key
from grpo_recipes.recipe.sections import Key, Section


# fmt: off
@dataclass
class ProblemArguments:
    """Keys of generated problems: ModeBench, and problems drawn by seeds."""

    problem_seed_start: int = key(1000, "First seed of a seeded dataset to train on.", min=0)
    problem_seeds: int = key(64, "Number of consecutive seeds of a seeded dataset to train on; they repeat.", min=1)
    eval_problem_seed_start: int = key(5000, "First seed of a seeded dataset to evaluate on.", min=0)
    eval_problem_seeds: int = key(16, "Number of seeds to evaluate on, not used in training.", min=1)
    eval_problem_ids: list[int] | None = key(None,
        "Seeds to evaluate on, instead of eval_problem_seed_start and eval_problem_seeds.")
    modebench_prompts: int = key(384, "Number of training problems of a modebench dataset.", min=1)
    modebench_test_prompts: int = key(128, "Number of test problems, not used in training.", min=1)
    modebench_seed: int = key(0, "Seed for drawing the problems of a modebench dataset.", min=0)
    modebench_min_modes: int = key(2, "Fewest correct answers of a modebench problem.", min=1)
    modebench_max_modes: int = key(24, "Most correct answers of a modebench problem.", min=1)
    modebench_numbers: int = key(3, "Countdown: count of numbers in a problem, 3 or 4.", min=3, max=4)
    modebench_largest_number: int | None = key(None,
        "Countdown: largest number (default 24; with four numbers 12, at most 14).", min=5, max=30)
    modebench_vertices: int = key(8, "Graph coloring: number of vertices.", min=3, max=12)
    modebench_hidden: int = key(5,
        "Graph coloring: number of uncolored vertices; with more of them, guessing scores less.", min=1, max=8)
# fmt: on


class ProblemKeys(Section):
    """The keys of generated problems that code reads, with their types."""

    problem_seed_start = Key[int]("problem_seed_start")
    problem_seeds = Key[int]("problem_seeds")
    eval_problem_ids = Key[list[int] | None]("eval_problem_ids")
    eval_problem_seed_start = Key[int]("eval_problem_seed_start")
    eval_problem_seeds = Key[int]("eval_problem_seeds")
    modebench_numbers = Key[int]("modebench_numbers")
    modebench_largest_number = Key[int | None]("modebench_largest_number")
    modebench_min_modes = Key[int]("modebench_min_modes")
    modebench_max_modes = Key[int]("modebench_max_modes")
    modebench_vertices = Key[int]("modebench_vertices")
    modebench_hidden = Key[int]("modebench_hidden")
