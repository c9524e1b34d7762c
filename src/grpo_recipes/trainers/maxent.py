"""Train with MaxEnt-GRPO: the package's GRPO trainer with advantages from weights over each group.

    MAXENT=1 bash training.sh        # or: grpo launch RECIPE, with maxent_objective in the recipe

An objective changes only the advantages. The trainer sets ``loss_type`` and two other keys of TRL's loss to the values
that the objective needs, and rejects other values except TRL's defaults. TRL's loss then has the gradient of the
objective. The mathematics are in docs/maxent-formulas.md.
"""

import math
from collections import deque
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from grpo_recipes.algorithms import maxent
from grpo_recipes.errors import config_error, translate_errors
from grpo_recipes.evaluate.scores import accuracy, sum_weighted_rewards
from grpo_recipes.recipe.configs import GRPOConfig
from grpo_recipes.recipe.registry import OBJECTIVES, TAU_TARGETS, Objective, policy_per_token, tau_targets
from grpo_recipes.trainers.checks import compute_trainer_logps
from grpo_recipes.trainers.grpo import GRPOTrainer
from grpo_recipes.trainers.loss_inputs import trained_mask

_WARN_AFTER, _WARN_SHARE = 10, 0.5  # generations, and fraction of the positive advantages on wrong answers


@dataclass
class Groups:
    """A generation of all ranks, P groups of G completions, in float64."""

    rewards_PG: torch.Tensor  # weighted sums; NaN is unscored
    lengths_PG: torch.Tensor  # tokens in the loss; 0 for a completion that ``mask_truncated_completions`` excludes
    learns_PG: torch.Tensor  # whether the completion is scored and has a token in the loss; others get no weight
    judged_PG: torch.Tensor  # whether the answer is known to be right or wrong
    right_PG: torch.Tensor  # whether the completion learns and is right
    wrong_PG: torch.Tensor  # whether the completion learns and is known to be wrong
    ref_logps_PG: torch.Tensor | None  # summed log-probs under the reference; None if the objective has no reference
    policy_logps_PG: torch.Tensor | None  # summed log-probs under the policy at the start of the update


class MaxEntGRPOTrainer(GRPOTrainer):
    """``GRPOTrainer`` with the objective ``args.maxent_objective`` and the same arguments.

    Raise ValueError if no objective is set, if a key of the loss contradicts it, or for two targets of tau.
    """

    def __init__(self, *, args: GRPOConfig, **kwargs: Any):
        """Set the keys of the loss in ``args``, and add the controller of tau if a key sets a target."""
        if args.maxent_objective is None:
            raise ValueError("maxent_objective is not set. Fix: set maxent_objective: listwise")
        self._objective = OBJECTIVES[args.maxent_objective]
        self._fixed_tau = self._objective.tau_or_default(args.maxent_tau)
        self._target_beta = args.maxent_beta if self._objective.targets_q else 0.0
        self._tau_controller: maxent.TauController | None = None  # moves tau toward its target; None if tau is fixed
        set_loss_keys(args, self._objective)
        beta = args.beta
        if beta == 0.0 and args.kl_target is None:
            args.beta = self._target_beta  # at 0 TRL would build no reference model, which the target needs
        try:
            super().__init__(args=args, **kwargs)
        finally:
            args.beta = beta
        self.beta = beta
        if targets := tau_targets(partial(getattr, args)):
            if len(targets) > 1:
                raise ValueError(f"{' and '.join(targets)} can't be combined. Fix: keep one target of tau")
            assert self._fixed_tau is not None  # only objectives with a temperature have targets
            self._tau_controller = maxent.TauController(
                self._fixed_tau, args.maxent_tau_lr, args.maxent_tau_min, args.maxent_tau_max,
                TAU_TARGETS[targets[0]], getattr(args, targets[0]), args.maxent_tau_warmup_steps,
            )  # fmt: skip
            self.controllers["tau"] = self._tau_controller
        self._tau_measures: list[float] = []  # values for the controller of tau in this optimizer step
        # Sums of positive advantages in recent generations: on wrong answers, on all judged answers.
        self._on_wrong: deque[tuple[float, float]] = deque(maxlen=_WARN_AFTER)
        self._warned = False
        self.checkpoints.add_state(on_wrong="_on_wrong", warned="_warned")

    @property
    def tau(self) -> float | None:
        """The objective's current temperature. None for an objective without a temperature."""
        controller = self._tau_controller
        return controller.tau if controller else self._fixed_tau

    def move_controllers(self) -> None:
        """After an optimizer step, adjust beta as in GRPO, and tau toward its target.

        Tau stays if no generation of the step has a value of the controller's measure.
        """
        super().move_controllers()
        if self._tau_measures and self._tau_controller:
            self._tau_controller.update(sum(self._tau_measures) / len(self._tau_measures))
        self._tau_measures.clear()

    def sample_and_score(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """Sample and score as in GRPO, and let TRL also compute the reference's log-probs if the target needs them.

        TRL computes them only if ``beta`` is not 0.
        """
        beta = self.beta
        if self.model.training and beta == 0.0:
            self.beta = self._target_beta
        try:
            return super().sample_and_score(inputs)
        finally:
            self.beta = beta

    def weigh(self, output: dict[str, Any]) -> torch.Tensor | None:
        """Return the objective's advantages, (P, G), of all ranks, and log metrics of the weights.

        Return None to keep TRL's advantages, which equal those of ``tempered`` at tau inf bit for bit. If ``beta`` is
        0, remove the reference's log-probs from ``output``. Raise ConfigError if the source has its own advantages.
        """
        if self.source is not None and self.source.brings_advantages:
            problem = "a group has its own advantages, but MaxEnt computes advantages from the scores of a group"
            fix = "let the environment send only scores, or remove the maxent keys to train with GRPO"
            raise config_error("maxent_objective", problem, fix)
        groups = self._gather_groups(output)
        if self.beta == 0.0:
            output.pop("ref_per_token_logps", None)  # the loss does not use them
        weights_PG = self._compute_weights(groups)
        advantages_PG = self._compute_advantages(groups, weights_PG)
        self._log_weights(groups, weights_PG)
        self._warn_of_wrong_answers(groups, advantages_PG)
        return None if self.args.maxent_objective == "tempered" and self.tau == math.inf else advantages_PG

    def _gather_groups(self, output: dict[str, Any]) -> Groups:
        """Return the rewards, lengths and log-probs of the generation of all ranks, as groups of completions."""
        mask = trained_mask(output)
        columns = {"lengths": mask.sum(1).double()}
        if self._target_beta > 0:
            columns["ref"] = _sum_logps(output["ref_per_token_logps"], mask)
        if self.args.maxent_objective == "listwise":
            logps = output.get("old_per_token_logps")
            columns["policy"] = _sum_logps(compute_trainer_logps(self, output) if logps is None else logps, mask)
        gathered = self.accelerator.gather(torch.stack(list(columns.values()), dim=1))
        all_PG = {name: column.view(-1, self.num_generations) for name, column in zip(columns, gathered.T, strict=True)}

        rewards_PG = sum_weighted_rewards(self.rewards_BR, self.reward_weights).double().view(-1, self.num_generations)
        learns_PG = ~rewards_PG.isnan() & (all_PG["lengths"] > 0)
        # Answers that are known to be right or wrong, and right answers, (P, G). Without an accuracy reward, an answer
        # above the group's mean counts as right and others as wrong. In a group of equal rewards, none is known.
        if (verdicts := accuracy(self.rewards_BR, self.reward_func_names)) is not None:
            judged_PG, right_PG = (verdict_B.view_as(rewards_PG) for verdict_B in verdicts)
        else:
            right_PG = maxent.subtract_group_mean(rewards_PG) > maxent.EQUAL
            judged_PG = right_PG.any(dim=1, keepdim=True).expand_as(right_PG)
        return Groups(
            rewards_PG=rewards_PG,
            lengths_PG=all_PG["lengths"],
            learns_PG=learns_PG,
            judged_PG=judged_PG,
            right_PG=learns_PG & right_PG,
            wrong_PG=learns_PG & judged_PG & ~right_PG,
            ref_logps_PG=all_PG.get("ref"),
            policy_logps_PG=all_PG.get("policy"),
        )

    def _compute_weights(self, groups: Groups) -> torch.Tensor:
        """Return the objective's weights, (P, G). In each group, the weights of completions that learn sum to 1.

        A completion learns if it is scored and has a token in the loss. Other weights are 0. With ``maxrl``, all
        weights of a group are 0 if its rewards are all 0. Raise ConfigError if ``maxrl`` gets a negative reward.
        """
        args = self.args
        if args.maxent_objective == "maxrl":
            fix = "rescale the reward to be at least 0, or set another maxent_objective"
            with translate_errors(ValueError, lambda error: config_error("maxent_objective", f"maxrl: {error}", fix)):
                return maxent.compute_reward_shares(groups.rewards_PG.masked_fill(~groups.learns_PG, torch.nan))
        tau = self.tau
        assert tau is not None  # only maxrl has no temperature
        if args.maxent_objective == "tempered":
            utilities_PG = maxent.subtract_group_mean(groups.rewards_PG)
            if args.maxent_utility == "length_scaled":
                utilities_PG = utilities_PG * groups.lengths_PG / self.max_completion_length
            return maxent.tempered_weights(utilities_PG.masked_fill(~groups.learns_PG, torch.nan), tau)
        rewards_PG = groups.rewards_PG.masked_fill(~groups.learns_PG, torch.nan)
        q_PG = maxent.listwise_q(rewards_PG, args.maxent_q_temperature, args.maxent_q_epsilon)
        ref_PG = groups.ref_logps_PG
        if ref_PG is not None and args.maxent_length_normalize_ref:
            ref_PG = ref_PG / groups.lengths_PG.clamp(min=1)
        return maxent.target_weights(q_PG, ref_PG, tau, self._target_beta)

    def _compute_advantages(self, groups: Groups, weights_PG: torch.Tensor) -> torch.Tensor:
        """Return the advantages, (P, G), that give TRL's loss the gradient of the objective.

        ``grpo`` takes a mean over tokens. ``dr_grpo`` divides a sum by ``max_completion_length``, which is undone here.
        """
        args, learning_P1 = self.args, groups.learns_PG.sum(dim=1, keepdim=True)
        if args.maxent_objective == "tempered":
            return (learning_P1 * weights_PG * maxent.subtract_group_mean(groups.rewards_PG)).nan_to_num(nan=0.0)
        if args.maxent_objective == "maxrl":
            return (learning_P1 * weights_PG - 1).masked_fill(~groups.learns_PG | (weights_PG.sum(1, True) == 0), 0.0)
        normalized, policy_PG = policy_per_token(partial(getattr, args)), groups.policy_logps_PG
        temperature = 0.0
        if policy_PG is not None:
            temperature = args.maxent_policy_temperature
            policy_PG = policy_PG / groups.lengths_PG.clamp(min=1) if normalized else policy_PG
            spread = args.maxent_policy_spread
            weights_PG = weights_PG - maxent.policy_weights(policy_PG, groups.learns_PG, temperature or 1.0, spread)
        # With a temperature the loss is multiplied by temperature / max_completion_length, so nothing is undone.
        is_summed = not (normalized or temperature)
        return self.num_generations * (self.max_completion_length if is_summed else 1) * weights_PG

    def _log_weights(self, groups: Groups, weights_PG: torch.Tensor) -> None:
        """Log ``maxent/*``: tau, beta, the weight on wrong answers, and the spread of weights in groups.

        The spread covers only groups with different rewards. Values of NaN are not logged. Store the measure that
        the controller of tau uses.
        """
        mass_P = maxent.incorrect_mass(weights_PG, groups.wrong_PG)[groups.judged_PG.any(dim=1)]
        metrics = {
            "maxent/tau": math.nan if self.tau is None else self.tau,
            "maxent/beta": self._target_beta,
            "maxent/incorrect_mass": mass_P.nanmean().item(),
        }
        differ_P = maxent.find_different_rewards(groups.rewards_PG.masked_fill(~groups.learns_PG, torch.nan))
        if differ_P.any():
            entropy_P = maxent.weight_entropy(weights_PG[differ_P])
            ratio_P = maxent.target_ratio(weights_PG[differ_P], groups.right_PG[differ_P], groups.wrong_PG[differ_P])
            metrics |= {
                "maxent/weight_entropy": entropy_P.mean().item(),
                "maxent/weight_entropy_min": entropy_P.min().item(),
                "maxent/weight_entropy_max": entropy_P.max().item(),
                "maxent/eff_rollouts": entropy_P.exp().mean().item(),
                "maxent/target_ratio": ratio_P.nanmean().item(),
            }
        metrics = {name: value for name, value in metrics.items() if not math.isnan(value)}
        for name, value in metrics.items():
            self.add_metric(name, value)
        if self._tau_controller and (measure := f"maxent/{self._tau_controller.measure}") in metrics:
            self._tau_measures.append(metrics[measure])

    def _warn_of_wrong_answers(self, groups: Groups, advantages_PG: torch.Tensor) -> None:
        """Print a warning on rank 0, once, if wrong answers got over half of the positive advantages.

        The last 10 generations count. Before the tenth, do nothing.
        """
        positive_PG = advantages_PG.clamp(min=0)
        self._on_wrong.append((positive_PG[groups.wrong_PG].sum().item(), positive_PG[groups.judged_PG].sum().item()))
        on_wrong, on_all = (sum(column) for column in zip(*self._on_wrong, strict=True))
        if self._warned or len(self._on_wrong) < _WARN_AFTER or on_wrong <= _WARN_SHARE * on_all:
            return
        self._warned = True
        fix = "other rewards outweigh accuracy: raise its share in reward_weights"
        if self._objective.targets_q:
            fix = "lower maxent_tau, maxent_beta or maxent_q_temperature, or use prompts that are solved more often"
        if self.accelerator.is_main_process:
            share = f"{on_wrong / on_all:.0%} of the positive advantages of the last {_WARN_AFTER} generations"
            print(f"grpo: {share} are on wrong answers, which the update makes more likely; {fix}", flush=True)


def set_loss_keys(args: GRPOConfig, objective: Objective) -> None:
    """Set the keys of TRL's loss in ``args`` to the values that the objective needs.

    Raise ValueError if a key has another value that is not TRL's default.
    """
    for key, value in objective.fixed_keys(partial(getattr, args)).items():
        if getattr(args, key) not in (value, GRPOConfig.__dataclass_fields__[key].default):
            problem = f"{key}: expected {value}, which maxent_objective needs, got {getattr(args, key)}"
            raise ValueError(f"{problem}. Fix: remove {key}")
        setattr(args, key, value)


def _sum_logps(logps_BT: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
    """Return the sum of log-probs over the tokens in the mask, (B,), in float64."""
    return logps_BT.double().masked_fill(mask_BT == 0, 0.0).sum(dim=1)
