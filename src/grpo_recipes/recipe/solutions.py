"""Decide whether the rewards of a recipe read the rows' solutions. No torch.

A built-in reward is registered with its need. For a user's reward, the parameters and body of the function decide.

    requires_solutions(recipe.__getitem__, ["kind"])  # False if no reward fails on rows without a solution
"""

import ast
from collections.abc import Collection

from grpo_recipes.recipe.datafiles import solution_names
from grpo_recipes.recipe.registry import rewards
from grpo_recipes.recipe.sources import Lookup
from grpo_recipes.recipe.user_code import find_run_copy, function_source, names_read_by, required_parameters

_ANSWER = "answer"  # the trainer's name for the solution


def requires_solutions(lookup: Lookup, columns: Collection[str]) -> bool:
    """Return whether a reward of a recipe fails without solutions.

    ``columns`` are the dataset's other columns, as rewards get them. A column with a name of the solution replaces it.
    """
    names = _list_names(lookup) - set(columns)

    def requires(spec: str) -> bool:
        """Return whether a reward fails without a solution; False if its source does not show it."""
        if (entry := rewards().get(spec)) is not None:
            return entry.reads_solution(lookup) and not set(entry.instead_of_solution) & set(columns)
        function = _find_function(spec, lookup)
        return bool(function and names & {*required_parameters(function), *_list_subscripts(function)})

    return any(map(requires, lookup("reward_funcs")))


def reads_solutions(lookup: Lookup) -> bool:
    """Return whether a reward of a recipe may read solutions. True if the source of a user's reward does not show it.

    Reward models never read them.
    """
    names = _list_names(lookup)

    def reads(spec: str) -> bool:
        """Return whether a reward may read solutions."""
        if (entry := rewards().get(spec)) is not None:
            return entry.reads_solution(lookup)
        function = _find_function(spec, lookup)
        return ":" in spec and (function is None or bool(names & names_read_by(function)) or _passes_on(function))

    return any(map(reads, lookup("reward_funcs")))


def _find_function(spec: str, lookup: Lookup) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
    """Return the source of a user's reward, from the run's copy if it has one; None if it can't be read."""
    return function_source(spec, find_run_copy(spec, lookup)) if ":" in spec else None


def _list_names(lookup: Lookup) -> set[str]:
    """Return all names under which a user's reward gets the solution."""
    columns = lookup("dataset_solution_column"), lookup("eval_dataset_solution_column")
    return {_ANSWER, *solution_names(columns, lookup("dataset_mixture"))}


def _list_subscripts(function: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    """Return the columns that a function reads as ``columns["name"]``, where ``**columns`` is its parameter."""
    columns = function.args.kwarg.arg if function.args.kwarg else None
    nodes = [node for node in ast.walk(function) if isinstance(node, ast.Subscript)]
    return {
        str(node.slice.value)
        for node in nodes
        if isinstance(node.value, ast.Name) and node.value.id == columns and isinstance(node.slice, ast.Constant)
    }


def _passes_on(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Return whether a function uses ``**columns`` as a whole, for example as arguments of another function."""
    columns = function.args.kwarg.arg if function.args.kwarg else None
    nodes = list(ast.walk(function))
    parts = {id(node.value) for node in nodes if isinstance(node, ast.Subscript | ast.Attribute)}
    return any(isinstance(node, ast.Name) and node.id == columns and id(node) not in parts for node in nodes)
