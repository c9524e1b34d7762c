"""End a run before a bad update: numbers that are not finite, stale weights, or too many unscored completions."""

import math
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast_object_list, gather_object

from grpo_recipes.rewards.answers import get_completion_text
from grpo_recipes.rewards.score import NOT_CALLED, RewardWrapper, Score
from grpo_recipes.rollouts.backends import collect_sampling_keys
from grpo_recipes.runs.checkpoints import find_newest_complete
from grpo_recipes.secrets import mask_secrets
from grpo_recipes.trainer_protocol import Mode
from grpo_recipes.trainers.loss_inputs import trained_mask
from grpo_recipes.trainers.metrics import append_json
from grpo_recipes.trainers.model import get_local_shard
from grpo_recipes.trainers.protocol import InnerTrainer
from grpo_recipes.weights.guard import (
    CALIBRATING_SYNCS,
    TOLERANCES,
    WeightsDiffer,
    calibrate_tolerance,
    describe_logprob_error,
)

# fp16 starts with gradients times 65536 and halves the factor with each skipped step. After 17 steps it is below 1.
MOST_SKIPPED = 20
_SLOW_SHARE = 0.5  # a call is slow if it takes this fraction of the reward's time limit
_SLOWEST, _MOST_ROWS = 3, 20  # rows of a generation in slow_rewards.jsonl: slow completions, all
_LONGEST_TEXT = 500  # characters


class NotFinite(RuntimeError):
    """A loss, a gradient, a weight or a log-prob of the trained model is infinite or not a number."""


def make_not_finite_error(trainer: InnerTrainer, problem: str) -> NotFinite:
    """Return a NotFinite error for ``problem`` that names the newest complete checkpoint and the keys to change."""
    args = trainer.args
    newest = find_newest_complete(Path(args.output_dir))
    checkpoint = f"the last complete checkpoint is {newest.name}" if newest else "there is no checkpoint yet"
    fix_applies = {
        "set bf16: true instead of fp16: true": args.fp16,
        f"lower learning_rate (now {args.learning_rate:g})": trainer.state.global_step > 0,
        "set max_grad_norm: 1.0 (now 0: gradients are not clipped)": args.max_grad_norm == 0,
    }
    fixes = [fix for fix, applies in fix_applies.items() if applies]
    before_first_step = "no step was taken: check the model's files, and set a dtype as wide as the model's"
    return NotFinite(f"{problem}; {checkpoint}. Fix: {', or '.join(fixes) or before_first_step}")


class Checks:
    """Raise an error if a number is not finite (transformers would take the step) or samples have stale weights."""

    def __init__(self, trainer: InnerTrainer):
        self._trainer = trainer
        self._skipped_in_a_row = 0
        self._healthy: list[float] = []  # differences of log-probs after the first syncs, the same on every rank
        self._prompt: list[int] = []  # the last prompt of a probe of the server
        self._unproven = False  # whether the batches since the last sync had no scored token to compare

    def check_gradient(self, norm: Any) -> float | None:
        """Return ``norm`` as a number, or None if it is None. Raise NotFinite if the loss or the norm is not finite.

        With fp16, an infinite norm is an error only after ``MOST_SKIPPED`` of them in a row, because the loss scale
        may still be too large. Call it once per step: it counts them.
        """
        value, loss = None if norm is None else float(norm), float(self._trainer._tr_loss)
        self._skipped_in_a_row = 0 if math.isfinite(value or 0.0) else self._skipped_in_a_row + 1
        most_skipped = MOST_SKIPPED if self._trainer.args.fp16 else 0
        if not math.isfinite(loss) or self._skipped_in_a_row > most_skipped:
            step = self._trainer.state.global_step + 1
            raise make_not_finite_error(
                self._trainer, f"loss {loss:g}, gradient norm {value} in step {step}, which was not taken"
            )
        return value

    def check_weights(self) -> None:
        """Raise NotFinite if a trained weight is not finite after the step. A finite gradient can make it infinite."""
        shards = [
            get_local_shard(parameter) for parameter in self._trainer.model.parameters() if parameter.requires_grad
        ]
        norm = float(torch.nn.utils.get_total_norm(shards))
        if not math.isfinite(norm):
            step = self._trainer.state.global_step
            raise make_not_finite_error(self._trainer, f"the weights are not finite after step {step} (norm {norm:g})")

    def check_server(self, output: dict[str, Any], synced: bool) -> None:
        """Raise ``WeightsDiffer`` on every rank unless the server sampled this ``output`` with the trainer's weights.

        The checks are the checksum of the last transfer, and ``measure_logprob_difference``. ``synced`` tells whether
        weights were sent for this output. If not, check only if no batch since the last sync could compare log-probs.
        Check nothing without ``weight_guard``.
        """
        trainer = self._trainer
        if not (trainer.rollouts.guarded and (synced or self._unproven)):
            return
        error = trainer.rollouts.checksum_error()
        difference = self.measure_logprob_difference(output)
        self._unproven = difference is None
        tolerance = choose_logprob_tolerance(trainer)
        if trainer.args.weight_guard_tolerance is None:
            tolerance = calibrate_tolerance(tolerance, self._healthy)
        error = error or describe_logprob_error(trainer.rollouts.bridge, difference or 0.0, tolerance)
        if error:
            raise WeightsDiffer(f"{error}; step {trainer.state.global_step} was not taken")
        if difference is not None and len(self._healthy) < CALIBRATING_SYNCS:
            self._healthy.append(difference)

    def measure_logprob_difference(self, output: dict[str, Any]) -> float | None:
        """Return the mean |trainer - server| log-prob of the sampled tokens over all ranks.

        If ``rollouts.probes``, sample a new completion from the server, and compare its tokens instead. Otherwise,
        return None in an evaluation with its own sampling settings, and 0 if the recipe truncates the distribution
        (e.g. ``top_p``), so that log-probs can't be compared. Return None also if the batch has no trained token from
        the current weights, and NaN if the server gave no log-prob for any such token. Raise ``NotFinite`` if the
        trainer's log-probs are not finite.
        """
        trainer = self._trainer
        if trainer.rollouts.probes:
            prompt = output["prompt_ids"][0][output["prompt_mask"][0].bool()].tolist()
            self._prompt = list(broadcast_object_list([prompt], from_process=0)[0])
            return self._measure_probe_difference()
        if not trainer.model.training and trainer.evaluation.has_own_sampling:
            return None  # the server samples from another distribution than the trainer's
        if tuple(collect_sampling_keys(trainer).values()) != (1.0, 0, 0.0, 1.0):
            return 0.0  # the server scores a truncated distribution, comparing is not possible
        return self._measure_difference(output)

    def check_final_weights(self) -> str | None:
        """Return an error message if the sampler lacks the last step's weights, which were just sent, or None."""
        trainer = self._trainer
        if not trainer.rollouts.probes:
            return trainer.rollouts.checksum_error()
        difference = self._measure_probe_difference()
        return describe_logprob_error(trainer.rollouts.bridge, difference or 0.0, choose_logprob_tolerance(trainer))

    def _measure_probe_difference(self) -> float | None:
        """Sample a completion from the server for this check; return its mean |trainer - server| log-prob.

        The completion has temperature 1. Its prompt is the first prompt of the last checked batch, or the end token
        before the first check. Used if ``rollouts.probes``. NaN, None and ``NotFinite`` as in
        ``measure_logprob_difference``.
        """
        trainer = self._trainer
        prompt = self._prompt or [trainer.processing_class.eos_token_id]
        ids, logprobs = trainer.rollouts.probe(prompt)
        device = trainer.accelerator.device
        prompt_ids, completion_ids = (torch.tensor([tokens], device=device) for tokens in (prompt, ids))
        batch_of_one = {
            "prompt_ids": prompt_ids, "prompt_mask": torch.ones_like(prompt_ids), "completion_ids": completion_ids,
            "completion_mask": torch.ones_like(completion_ids),
            "sampling_per_token_logps": torch.tensor([logprobs], device=device),
        }  # fmt: skip
        with trainer.with_settings(temperature_B=torch.ones(1, dtype=torch.float64, device=device)):
            return self._measure_difference(batch_of_one)

    def _measure_difference(self, output: dict[str, Any]) -> float | None:
        """Return the mean |trainer - server| log-prob of a batch over all ranks.

        NaN, None and NotFinite as in ``measure_logprob_difference``.
        """
        trainer = self._trainer
        logps = output.get("old_per_token_logps")
        modules = trainer.model.modules()
        if logps is None or any(isinstance(module, torch.nn.Dropout) and module.p > 0 for module in modules):
            logps = compute_trainer_logps(trainer, output)
        mask = trained_mask(output).bool()
        if "fresh" in output:  # (B,): whether a row was sampled with the current weights
            self._log_difference(logps, output["sampling_per_token_logps"], mask)
            mask &= output["fresh"].unsqueeze(1)
        sampled_logps = logps[mask]
        delta = (sampled_logps - output["sampling_per_token_logps"][mask]).abs()
        is_scored = ~delta.isnan()
        counts = torch.stack([is_scored.sum(), (~is_scored).sum(), (~sampled_logps.isfinite()).sum()])
        sums = torch.cat([delta[is_scored].sum().unsqueeze(0), counts.to(delta.dtype)])
        total, count, unscored, infinite = trainer.accelerator.gather(sums.unsqueeze(0)).sum(dim=0).tolist()
        if infinite:
            step = trainer.state.global_step + 1
            problem = f"{infinite:.0f} log-probs of the trained model are not finite before step {step}"
            raise make_not_finite_error(trainer, problem)
        if count == 0:
            return math.nan if unscored else None
        return float(total / count)

    def _log_difference(self, trainer_BT: torch.Tensor, sampler_BT: torch.Tensor, mask_BT: torch.Tensor) -> None:
        """Log mean and maximum of |trainer - sampler| log-probs under TRL's names, also of rows with older weights."""
        delta = (trainer_BT - sampler_BT).abs()[mask_BT]
        sums = torch.stack([delta.sum(), delta.new_tensor(len(delta))]).unsqueeze(0)
        total, count = self._trainer.accelerator.gather(sums).sum(dim=0).tolist()
        largest = self._trainer.accelerator.gather(torch.cat([delta, delta.new_zeros(1)]).max())
        if count:
            name = "sampling/sampling_logp_difference"
            self._trainer.add_metric(f"{name}/mean", total / count)
            self._trainer.add_metric(f"{name}/max", largest.max().item())


def compute_trainer_logps(trainer: InnerTrainer, output: dict[str, Any], model: Any = None) -> torch.Tensor:
    """Compute the model's log-probs of the completions, (B, T), without dropout. TRL computes them with dropout.

    ``model`` is by default the trained model.
    """
    prompt, completion = output["prompt_ids"], output["completion_ids"]
    model = trainer.model if model is None else model
    with ExitStack() as afterwards, torch.no_grad():
        afterwards.callback(model.train, model.training)
        model.eval()
        logps, _, _ = trainer._get_per_token_logps_and_entropies(
            model,
            torch.cat([prompt, completion], dim=1),
            torch.cat([output["prompt_mask"], output["completion_mask"]], dim=1),
            completion.size(1),
            batch_size=trainer.args.per_device_train_batch_size,
        )
    return logps


def choose_logprob_tolerance(trainer: InnerTrainer) -> float:
    """Return the largest accepted mean difference of log-probs: the recipe's, or a default for the weights' dtype.

    For float32 weights with bf16 or fp16, it is the default of the mixed precision. On GPUs, float32 has the tolerance
    of float16: vLLM's attention computes in TF32, which has as many digits.
    """
    args = trainer.args
    if args.weight_guard_tolerance is not None:
        return float(args.weight_guard_tolerance)
    parameter = next(trainer.model.parameters())
    precision = str(parameter.dtype).removeprefix("torch.")
    if precision == "float32":
        precision = (
            "bfloat16" if args.bf16 else "float16" if args.fp16 or parameter.device.type == "cuda" else precision
        )
    return TOLERANCES[precision]


class TooManyWithoutVerdict(RuntimeError):
    """A reward scored too few completions of a step for an update."""


class Scoring:
    """Exclude unscored completions from the update, count and record them, and raise an error if there are too many.

    TRL excludes a completion, with advantage 0, if every reward returned None for it. So all rewards of a completion
    become NaN if one of them should have scored it and could not (a limit, a dead process, an exception, no number). A
    reward that returns None itself does not apply to the completion. TRL handles this case.
    """

    def __init__(self, trainer: InnerTrainer, run_dir: Path, max_unscored: float):
        self._trainer = trainer
        self._file = run_dir / "slow_rewards.jsonl"
        self.max_unscored = max_unscored  # largest unscored fraction of a training generation that is accepted

    def _list_reward_wrappers(self) -> list[RewardWrapper]:
        """Return the rewards that know why a completion is unscored: not plain built-in functions."""
        return [reward for reward in self._trainer.reward_funcs if isinstance(reward, RewardWrapper)]

    def begin(self, rows: int) -> None:
        """Start a generation with ``rows`` completions on this rank in each reward.

        In training, rewards stop calling user code once so many completions are unscored that the run must end.
        """
        trainer = self._trainer
        give_up_after = self.most_unscored(rows * trainer.accelerator.num_processes) if trainer.model.training else None
        for reward in self._list_reward_wrappers():
            reward.start_generation(trainer._step, trainer.preemption.stop, give_up_after)

    def most_unscored(self, rows: int) -> int:
        """Return how many of ``rows`` completions may be unscored without ending the run.

        A round of dynamic sampling has fewer rows than a generation, but may have as many unscored completions.
        """
        rows = max(rows, self._trainer.args.generation_batch_size)
        return math.floor(self.max_unscored * rows + 1e-9)  # 0.29 of 100 is 29, not 28

    def mark_failed(self, rewards_BR: torch.Tensor) -> None:
        """Set all rewards of completions that the server did not return to NaN, in place, and log their fraction.

        ``trainer.rollouts.failed`` marks them, in the order of the rows of all ranks. If it is empty, do nothing.
        In training, raise TooManyWithoutVerdict if they are more than the accepted fraction.
        """
        trainer = self._trainer
        if not (failed := trainer.rollouts.failed):
            return
        rewards_BR[torch.tensor(failed, device=rewards_BR.device)] = math.nan
        share = sum(failed) / len(failed)
        trainer.add_metric("rollouts/failed", share, "train" if trainer.model.training else "eval")
        if trainer.model.training and sum(failed) > self.most_unscored(len(failed)):
            raise TooManyWithoutVerdict(
                f"the server did not return {share:.0%} of the completions of step {trainer.state.global_step + 1}, "
                f"more than reward_max_no_verdict: {self.max_unscored}; see its log"
            )

    def mark_unscored(self, rewards_BR: torch.Tensor, prompts: list[Any], completions: list[Any]) -> None:
        """Set all rewards of all ranks' unscored completions to NaN, log their fractions, and write a file of rewards.

        A completion is unscored if any reward failed to score it. ``slow_rewards.jsonl`` gets the slowest rows and the
        failures. Do nothing if all rewards are plain built-in functions. In training, raise TooManyWithoutVerdict if
        unscored completions exceed the accepted fraction.
        """
        rewards, trainer = self._list_reward_wrappers(), self._trainer
        if not rewards:
            return
        report = [(reward.scores, _collect_slow_rows(reward, prompts, completions)) for reward in rewards]
        reports = gather_object([report])
        by_reward = list(zip(*reports, strict=True))
        scores = [[score for of_rank, _ in ranks for score in of_rank] for ranks in by_reward]
        unscored_B = torch.tensor([any(score.unscored for score in row) for row in zip(*scores, strict=True)])
        rewards_BR[unscored_B.to(rewards_BR.device)] = math.nan

        is_training = trainer.model.training
        mode: Mode = "train" if is_training else "eval"
        for reward, of_reward in zip(rewards, scores, strict=True):
            name, unscored = reward.__name__, sum(score.unscored for score in of_reward)
            trainer.add_metric(f"rewards/{name}/no_verdict", unscored / len(of_reward), mode)
            trainer.add_metric(f"rewards/{name}/seconds_max", max(score.seconds for score in of_reward), mode)
        trainer.add_metric("rewards/no_verdict", rewards_BR.isnan().all(dim=1).float().mean().item(), mode)
        rows = [row for ranks in by_reward for _, rows in ranks for row in rows]
        if rows and trainer.accelerator.is_main_process:
            step = {"step": trainer.state.global_step + int(is_training), "training": is_training}
            slow = sorted((row for row in rows if row["reason"] is None), key=lambda row: -row["seconds"])[:_SLOWEST]
            chosen = [*slow, *(row for row in rows if row["reason"] is not None)][:_MOST_ROWS]
            append_json(self._file, *({**step, **row} for row in chosen))
        if is_training and int(unscored_B.sum()) > self.most_unscored(len(unscored_B)):
            for reward in rewards:  # the resumed run repeats this generation, maybe with a server that answers
                reward.discard_generation()
            raise self._make_too_many_error(rewards, scores, float(unscored_B.float().mean()))

    def _make_too_many_error(
        self, rewards: list[RewardWrapper], scores: list[list[Score]], share: float
    ) -> TooManyWithoutVerdict:
        """Return the error for an unscored ``share``. It names the reward at fault and its most common reason."""
        worst, of_worst = max(
            zip(rewards, scores, strict=True), key=lambda pair: sum(score.unscored for score in pair[1])
        )
        reasons = [score.reason for score in of_worst if score.reason is not None and score.reason != NOT_CALLED]
        # Messages of one kind may all differ after the colon.
        ((kind, count),) = Counter(reason.partition(":")[0] for reason in reasons).most_common(1)
        reason, _ = Counter(reason for reason in reasons if reason.partition(":")[0] == kind).most_common(1)[0]
        return TooManyWithoutVerdict(
            f"{share:.0%} of the completions of step {self._trainer.state.global_step + 1} "
            f"are unscored, more than reward_max_no_verdict: {self.max_unscored}. Reward '{worst.spec}' gave no "
            f"score for {sum(score.unscored for score in of_worst)} of {len(of_worst)}; most often: "
            f"{mask_secrets(reason)} ({count}). See {self._file.name} in the run directory"
        )


def _collect_slow_rows(reward: RewardWrapper, prompts: list[Any], completions: list[Any]) -> list[dict[str, Any]]:
    """Return this rank's rows of ``slow_rewards.jsonl`` for a reward: up to 3 slow and 20 unscored completions.

    A scored completion is slow if it took over half of the reward's time limit. Unscored completions that the reward
    was not called with are left out. Texts are cut, and secrets are masked.
    """
    scores, limit = reward.scores, _SLOW_SHARE * (reward.timeout or math.inf)
    slow = [row for row, score in enumerate(scores) if not score.unscored and score.seconds > limit]
    slow.sort(key=lambda row: -scores[row].seconds)
    unscored = [row for row, score in enumerate(scores) if score.unscored and score.reason != NOT_CALLED]
    return [
        {
            "reward": reward.spec,
            "seconds": round(scores[row].seconds, 3),
            "reason": mask_secrets(scores[row].reason or "") if scores[row].unscored else None,
            "replayed": scores[row].replayed,
            "prompt": mask_secrets(get_completion_text(prompts[row]))[:_LONGEST_TEXT],
            "completion": mask_secrets(get_completion_text(completions[row]))[:_LONGEST_TEXT],
        }
        for row in [*slow[:_SLOWEST], *unscored[:_MOST_ROWS]]
    ]
