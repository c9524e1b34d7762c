"""Build the controller of the KL coefficient from a recipe, and move the coefficient after each optimizer step.

controller = make_kl_controller(args)  # None without kl_target
trainer.beta = update_beta(trainer, controller)
"""

from grpo_recipes.algorithms.maxent import KLController
from grpo_recipes.recipe.configs import GRPOConfig
from grpo_recipes.trainers.protocol import InnerTrainer


def make_kl_controller(args: GRPOConfig) -> KLController | None:
    """Return the controller that moves ``beta`` toward ``kl_target``, or None if the recipe sets no target.

    Raise ValueError if ``beta`` is 0, because the controller multiplies it.
    """
    if args.kl_target is None:
        return None
    if args.beta == 0.0:
        raise ValueError("kl_target: beta must be above 0, because kl_target multiplies it. Fix: set beta: 0.04")
    return KLController(args.beta, args.kl_target, args.kl_horizon, args.kl_ctl_step_size, args.kl_beta_min)


def update_beta(trainer: InnerTrainer, controller: KLController) -> float:
    """Adjust the controller to the KL divergence of this optimizer step, and return the new ``beta``.

    ``trainer.beta`` does not change: set it to the result. The KL divergence is the mean of TRL's metric ``kl``
    over the micro-batches of the step. TRL has averaged it over the ranks. Call this before TRL's ``log``, which
    clears the metrics.
    """
    micro_batches = trainer.current_gradient_accumulation_steps
    kls = trainer._metrics["train"]["kl"][-micro_batches:]
    completions = trainer.args.per_device_train_batch_size * micro_batches * trainer.accelerator.num_processes
    controller.update(sum(kls) / len(kls), completions)
    return controller.beta
