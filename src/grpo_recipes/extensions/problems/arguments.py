"""Keys of generated problems: ModeBench, and problems drawn by seeds. No torch."""

from dataclasses import dataclass

from grpo_recipes.recipe.fields import key


# fmt: off
@dataclass
class ProblemArguments:
    """Keys of generated problems: ModeBench, and problems drawn by seeds."""

    problem_seed_start: int = key(1000, "First seed of a seeded dataset to train on.", min=0)
    problem_seeds: int = key(64, "Seeds of a seeded dataset to train on, one after the other; they repeat.", min=1)
    eval_problem_seed_start: int = key(5000, "First seed of a seeded dataset to evaluate on.", min=0)
    eval_problem_seeds: int = key(16, "Seeds of a seeded dataset to evaluate on, none of them trained on.", min=1)
    eval_problem_ids: list[int] | None = key(None,
        "The seeds themselves to evaluate on, in the place of eval_problem_seed_start and eval_problem_seeds.")
    modebench_prompts: int = key(384, "Problems of a modebench dataset to train on.", min=1)
    modebench_test_prompts: int = key(128, "Problems of its test split, none of them in training.", min=1)
    modebench_seed: int = key(0, "Seed by which the problems of a modebench dataset are drawn.", min=0)
    modebench_min_modes: int = key(2, "Fewest right answers of a modebench problem; 1 for those with one.", min=1)
    modebench_max_modes: int = key(24, "Most right answers of a modebench problem.", min=1)
    modebench_numbers: int = key(3, "Countdown: numbers of a problem, 3 or 4.", min=3, max=4)
    modebench_largest_number: int | None = key(None,
        "Countdown: the largest number, at most 14 with four of them; by default 24, or 12 with four.", min=5, max=30)
    modebench_vertices: int = key(8, "Graph colouring: vertices of a graph.", min=3, max=12)
    modebench_hidden: int = key(5,
        "Graph colouring: uncoloured vertices; more make guessing worth less.", min=1, max=8)
# fmt: on
