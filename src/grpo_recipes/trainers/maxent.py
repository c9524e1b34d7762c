"""MaxEnt-GRPO: our GRPO trainer with advantages that come from weights over each group (docs/maxent.md).

    MAXENT=1 bash training.sh        # or: grpo launch RECIPE, with maxent_objective in the recipe

Every objective is a transform of the advantages: TRL's loss of a fixed ``loss_type`` on them has its gradient.
"""

import math
from collections import deque
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from grpo_recipes.algorithms import maxent
from grpo_recipes.attributes import replaced
from grpo_recipes.errors import config_error, translate
from grpo_recipes.evaluate.scores import accuracy, weighted_rewards
from grpo_recipes.recipe.configs import GRPOConfig
from grpo_recipes.recipe.registry import OBJECTIVES, TAU_TARGETS, Objective, policy_per_token, tau_targets
from grpo_recipes.trainers.checks import trainer_logps
from grpo_recipes.trainers.grpo import GRPOTrainer

_WARN_AFTER, _WARN_SHARE = 10, 0.5  # generations, share of the positive advantages on wrong answers


@dataclass
class Groups:
    """A generation of all ranks, P groups of G completions, in float64."""

    rewards_PG: torch.Tensor  # weighted sums; NaN is unscored
    lengths_PG: torch.Tensor  # tokens in the loss; 0 for a completion that ``mask_truncated_completions`` leaves out
    learns_PG: torch.Tensor  # whether the completion is scored and has a token in the loss: the others get no weight
    judged_PG: torch.Tensor  # whether the answer is known to be right or wrong
    right_PG: torch.Tensor  # whether it learns and is right
    wrong_PG: torch.Tensor  # whether it learns and is known not to be right
    ref_logps_PG: torch.Tensor | None  # summed log-probs under the reference, None where the objective reads none
    policy_logps_PG: torch.Tensor | None  # the same under the policy that the update starts from


class MaxEntGRPOTrainer(GRPOTrainer):
    """``GRPOTrainer`` with the objective ``args.maxent_objective``. Takes the same arguments."""

    def __init__(self, *, args: GRPOConfig, **kwargs: Any):
        if args.maxent_objective is None:
            raise ValueError("maxent_objective is None: set it, for example to listwise")
        self._objective = OBJECTIVES[args.maxent_objective]
        self._fixed_tau = self._objective.tau_or_default(args.maxent_tau)
        self._target_beta = args.maxent_beta if self._objective.targets_q else 0.0
        fix_loss(args, self._objective)
        lent = args.beta == 0.0 and args.kl_target is None  # at 0 TRL builds no reference model, which the target needs
        with replaced(args, beta=self._target_beta if lent else args.beta):
            super().__init__(args=args, **kwargs)
        self.beta = args.beta
        if targets := tau_targets(partial(getattr, args)):
            if len(targets) > 1:
                raise ValueError(f"{' and '.join(targets)} are given, and tau can follow only one target")
            self.controllers["tau"] = maxent.TauController(
                self._fixed_tau, args.maxent_tau_lr, args.maxent_tau_min, args.maxent_tau_max,
                TAU_TARGETS[targets[0]], getattr(args, targets[0]), args.maxent_tau_warmup_steps,
            )  # fmt: skip
        self._measured: list[float] = []  # by the controller of tau, in this optimizer step
        self._on_wrong: deque[tuple[float, float]] = deque(maxlen=_WARN_AFTER)  # positive advantages: on wrong, on all
        self._warned = False
        self.checkpoints.unsaved |= {"on_wrong": "_on_wrong", "warned": "_warned"}

    @property
    def tau(self) -> float | None:
        """The temperature in force; None for an objective without one."""
        return self.controllers["tau"].tau if "tau" in self.controllers else self._fixed_tau

    def move_controllers(self) -> None:
        """Move GRPO's, and tau by the generations of the step that measured it; a step without one is not counted."""
        super().move_controllers()
        if self._measured:
            self.controllers["tau"].update(sum(self._measured) / len(self._measured))
        self._measured.clear()

    def sample_and_score(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """Lend TRL the target's ``beta``: it computes the reference's log-probs where ``beta`` is not 0."""
        lent = self.model.training and self.beta == 0.0
        with replaced(self, beta=self._target_beta if lent else self.beta):
            return super().sample_and_score(inputs)

    def weigh(self, output: dict[str, Any]) -> torch.Tensor | None:
        """Return the objective's advantages, (P, G); None for ``tempered`` at tau inf, which is Dr.GRPO bit for bit."""
        if self.source is not None and self.source.brings_advantages:
            what = "a group brings advantages of its own, and MaxEnt makes them of the scores of a group"
            fix = "let the environment send scores alone, or remove the maxent keys, which makes this GRPO"
            raise config_error("maxent_objective", what, fix)
        groups = self._groups(output)
        if self.beta == 0.0:
            output.pop("ref_per_token_logps", None)  # the loss has no use for them
        weights_PG = self._weights(groups)
        advantages_PG = self._advantages(groups, weights_PG)
        self._log_weights(groups, weights_PG)
        self._warn_of_wrong(groups, advantages_PG)
        return None if self.args.maxent_objective == "tempered" and self.tau == math.inf else advantages_PG

    def _groups(self, output: dict[str, Any]) -> Groups:
        """Return the generation over all ranks."""
        mask = output["completion_mask"] * output.get("tool_mask", 1)
        columns = {"lengths": mask.sum(1).double()}
        if self._target_beta > 0:
            columns["ref"] = _summed(output["ref_per_token_logps"], mask)
        if self.args.maxent_objective == "listwise":
            logps = output.get("old_per_token_logps")
            columns["policy"] = _summed(trainer_logps(self, output) if logps is None else logps, mask)
        gathered = self.accelerator.gather(torch.stack(list(columns.values()), dim=1))
        of = {name: column.view(-1, self.num_generations) for name, column in zip(columns, gathered.T, strict=True)}

        rewards_PG = weighted_rewards(self.rewards_BR, self.reward_weights).double().view(-1, self.num_generations)
        learns_PG = ~rewards_PG.isnan() & (of["lengths"] > 0)
        judged_PG, right_PG = self._judged(rewards_PG)
        right_PG, wrong_PG = learns_PG & right_PG, learns_PG & judged_PG & ~right_PG
        ref_PG, policy_PG = of.get("ref"), of.get("policy")
        return Groups(rewards_PG, of["lengths"], learns_PG, judged_PG, right_PG, wrong_PG, ref_PG, policy_PG)

    def _judged(self, rewards_PG: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return which answers are known to be right or wrong, and which are right, (P, G): accuracy, or any reward."""
        if (found := accuracy(self.rewards_BR, self.reward_func_names)) is not None:
            judged_B, right_B = found
            return judged_B.view_as(rewards_PG), right_B.view_as(rewards_PG)
        # Without accuracy: above the mean. Equal rewards decide nothing.
        right_PG = maxent.centred(rewards_PG) > maxent.EQUAL
        return right_PG.any(dim=1, keepdim=True).expand_as(right_PG), right_PG

    def _weights(self, groups: Groups) -> torch.Tensor:
        """Return the objective's weights, (P, G): of each group they sum to 1 over the completions that learn."""
        args = self.args
        if args.maxent_objective == "maxrl":
            fix = "rescale the reward to 0 and more, or take another maxent_objective"
            with translate(ValueError, lambda error: config_error("maxent_objective", f"maxrl: {error}", fix)):
                return maxent.reward_shares(groups.rewards_PG.masked_fill(~groups.learns_PG, torch.nan))
        if args.maxent_objective == "tempered":
            utilities_PG = maxent.centred(groups.rewards_PG)
            if args.maxent_utility == "length_scaled":
                utilities_PG = utilities_PG * groups.lengths_PG / self.max_completion_length
            return maxent.tempered_weights(utilities_PG.masked_fill(~groups.learns_PG, torch.nan), self.tau)
        rewards_PG = groups.rewards_PG.masked_fill(~groups.learns_PG, torch.nan)
        q_PG = maxent.listwise_q(rewards_PG, args.maxent_q_temperature, args.maxent_q_epsilon)
        ref_PG = groups.ref_logps_PG
        if ref_PG is not None and args.maxent_length_normalize_ref:
            ref_PG = ref_PG / groups.lengths_PG.clamp(min=1)
        return maxent.target_weights(q_PG, ref_PG, self.tau, self._target_beta)

    def _advantages(self, groups: Groups, weights_PG: torch.Tensor) -> torch.Tensor:
        """Return the advantages, (P, G), with which TRL's loss has the objective's gradient.

        ``grpo`` takes a mean over tokens; ``dr_grpo`` divides a sum by ``max_completion_length``: undone here.
        """
        args, learning_P1 = self.args, groups.learns_PG.sum(dim=1, keepdim=True)
        if args.maxent_objective == "tempered":
            return (learning_P1 * weights_PG * maxent.centred(groups.rewards_PG)).nan_to_num(nan=0.0)
        if args.maxent_objective == "maxrl":
            return (learning_P1 * weights_PG - 1).masked_fill(~groups.learns_PG | (weights_PG.sum(1, True) == 0), 0.0)
        normalized, policy_PG = policy_per_token(partial(getattr, args)), groups.policy_logps_PG
        temperature = 0.0
        if policy_PG is not None:
            temperature = args.maxent_policy_temperature
            policy_PG = policy_PG / groups.lengths_PG.clamp(min=1) if normalized else policy_PG
            spread = args.maxent_policy_spread
            weights_PG = weights_PG - maxent.policy_weights(policy_PG, groups.learns_PG, temperature or 1.0, spread)
        summed = not (normalized or temperature)  # a temperature multiplies the loss by itself over this length
        return self.num_generations * (self.max_completion_length if summed else 1) * weights_PG

    def _log_weights(self, groups: Groups, weights_PG: torch.Tensor) -> None:
        """Log metrics of a generation: wrong weight of all groups, the spread of weights where rewards differ."""
        mass_P = maxent.incorrect_mass(weights_PG, groups.wrong_PG)[groups.judged_PG.any(dim=1)]
        found = {
            "maxent/tau": math.nan if self.tau is None else self.tau,
            "maxent/beta": self._target_beta,
            "maxent/incorrect_mass": mass_P.nanmean().item(),
        }
        differ_P = maxent.rewards_differ(groups.rewards_PG.masked_fill(~groups.learns_PG, torch.nan))
        if differ_P.any():
            entropy_P = maxent.weight_entropy(weights_PG[differ_P])
            ratio_P = maxent.target_ratio(*(one[differ_P] for one in (weights_PG, groups.right_PG, groups.wrong_PG)))
            found |= {
                "maxent/weight_entropy": entropy_P.mean().item(),
                "maxent/weight_entropy_min": entropy_P.min().item(),
                "maxent/weight_entropy_max": entropy_P.max().item(),
                "maxent/eff_rollouts": entropy_P.exp().mean().item(),
                "maxent/target_ratio": ratio_P.nanmean().item(),
            }
        found = {name: value for name, value in found.items() if not math.isnan(value)}
        for name, value in found.items():
            self._metrics["train"][name].append(value)
        if "tau" in self.controllers and (measure := f"maxent/{self.controllers['tau'].measure}") in found:
            self._measured.append(found[measure])

    def _warn_of_wrong(self, groups: Groups, advantages_PG: torch.Tensor) -> None:
        """Warn once, by rank 0, when most of what is reinforced is wrong."""
        pushed_PG = advantages_PG.clamp(min=0)
        self._on_wrong.append((pushed_PG[groups.wrong_PG].sum().item(), pushed_PG[groups.judged_PG].sum().item()))
        on_wrong, pushed = (sum(column) for column in zip(*self._on_wrong, strict=True))
        if self._warned or len(self._on_wrong) < _WARN_AFTER or on_wrong <= _WARN_SHARE * pushed:
            return
        self._warned = True
        advice = "other rewards outweigh accuracy: raise its share in reward_weights"
        if self._objective.targets_q:
            advice = "lower maxent_tau, maxent_beta or maxent_q_temperature, or take prompts that are solved more often"
        if self.accelerator.is_main_process:
            share = f"{on_wrong / pushed:.0%} of the positive advantages of the last {_WARN_AFTER} generations"
            print(f"grpo: {share} are on wrong answers, which the update makes more likely; {advice}", flush=True)


def fix_loss(args: GRPOConfig, objective: Objective) -> None:
    """Set the keys of TRL's loss that the objective fixes; refuse values that are neither TRL's default nor its."""
    for key, value in objective.fixed_keys(partial(getattr, args)).items():
        if getattr(args, key) not in (value, GRPOConfig.__dataclass_fields__[key].default):
            raise ValueError(f"{key}: {getattr(args, key)} is not what maxent_objective fixes it to ({value})")
        setattr(args, key, value)


def _summed(logps_BT: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
    return logps_BT.double().masked_fill(mask_BT == 0, 0.0).sum(dim=1)
