"""The lines about environments in a plan: names, turns, tokens and tools. No process is added (``plan.roles``)."""

from collections.abc import Iterator

from grpo_recipes.extensions.environments.arguments import EnvironmentKeys
from grpo_recipes.extensions.environments.recipe import (
    compute_tool_turn_tokens,
    compute_turn_tokens,
    list_episode_environments,
    list_model_opponents,
)
from grpo_recipes.extensions.environments.rules import uses_tools
from grpo_recipes.plan.roles import Roles
from grpo_recipes.plan.types import Data, Plan
from grpo_recipes.recipe import Recipe
from grpo_recipes.rollouts.turns import BASE


class EnvironmentRoles(Roles):
    """The lines that environments add to a plan; they add no process, because trainers run them as child processes."""

    def data(self, recipe: Recipe, plan: Plan) -> Data | None:
        """Return the plan's line about environments, turns and tokens of an episode; None if the recipe has none."""
        environments, keys = list_episode_environments(recipe.__getitem__), EnvironmentKeys(recipe)
        turns, completion = keys.max_turns, recipe.sampling.max_completion_length
        if not environments or uses_tools(recipe) or completion is None:  # a rule requires max_completion_length
            return None
        names = ", ".join(spec if fraction == 1 else f"{spec} ({fraction:.0%})" for spec, _, fraction in environments)
        length = compute_turn_tokens(keys.turn_length, completion, turns)
        if turns == 1:
            return Data("episodes", f"{names}; an episode has one turn of at most {length} tokens")
        between = f"{completion - turns * length} of max_completion_length {completion} for messages between turns"
        return Data("episodes", f"{names}; an episode has at most {turns} turns of {length} tokens, and {between}")

    def notes(self, recipe: Recipe, plan: Plan) -> Iterator[str]:
        """Yield a note about tools, or if the turns leave no token for the environment's messages between them."""
        keys = EnvironmentKeys(recipe)
        if uses_tools(recipe):
            length = compute_tool_turn_tokens(keys.turn_length, recipe.sampling.max_completion_length or 0)
            names = ", ".join(spec.partition(":")[2] for spec in keys.tools or [str(keys.environment)])
            yield f"tools {names}: at most {keys.max_tool_calls} calls in an episode, and {length} tokens in a turn"
        turns, longest = keys.max_turns, keys.turn_length
        if turns > 1 and longest and turns * longest == recipe.sampling.max_completion_length:
            yield (
                "episodes of full turns end unfinished: max_completion_length leaves no token for messages between "
                "turns"
            )

    def needs_server(self, recipe: Recipe) -> tuple[str, str] | None:
        """Return the subject of the error for a plan without vLLM server, and an addition to its fix.

        Return None unless the base model plays opponents: only a server has it next to the adapter.
        """
        if any(model == BASE for _, model in list_model_opponents(recipe.__getitem__)):
            return "opponents: base needs", ", or set opponents: policy"
        return None


ROLES = EnvironmentRoles()
