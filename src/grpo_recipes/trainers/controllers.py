"""Build the controller of the KL coefficient from a recipe.

controller = make_kl_controller(args)  # None without kl_target
"""

from grpo_recipes.algorithms.maxent import KLController
from grpo_recipes.recipe.configs import GRPOConfig


def make_kl_controller(args: GRPOConfig) -> KLController | None:
    """Return the controller that moves ``beta`` toward ``kl_target``, or None if the recipe sets no target.

    Raise ValueError if ``beta`` is 0, because the controller multiplies it.
    """
    if args.kl_target is None:
        return None
    if args.beta == 0.0:
        raise ValueError("kl_target: beta must be above 0, because kl_target multiplies it. Fix: set beta: 0.04")
    return KLController(args.beta, args.kl_target, args.kl_horizon, args.kl_ctl_step_size, args.kl_beta_min)
