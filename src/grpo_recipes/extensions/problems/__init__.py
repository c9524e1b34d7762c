"""Generated problems: ModeBench, whose problems have many right answers, and problems drawn by seeds."""

from grpo_recipes.recipe.extensions import Extension

EXTENSION = Extension("problems", keys="grpo_recipes.extensions.problems.arguments:ProblemArguments")
