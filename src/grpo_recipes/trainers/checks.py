"""Checks that end a run before an update from numbers that are not finite, other weights, or too few rewards."""

import math
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast_object_list, gather_object

from grpo_recipes.attributes import replaced
from grpo_recipes.rewards.answers import completion_text
from grpo_recipes.rewards.score import NOT_CALLED, RewardWrapper, Score
from grpo_recipes.rollouts.backends import sampling_keys
from grpo_recipes.runs.checkpoints import newest_complete
from grpo_recipes.secrets import masked
from grpo_recipes.trainers.metrics import append_json
from grpo_recipes.trainers.model import own_part
from grpo_recipes.weights.guard import CALIBRATING_SYNCS, TOLERANCES, WeightsDiffer, calibrated, logprob_error

# fp16 begins with gradients times 65536 and halves that factor with each step it has to skip: after 17 it is below 1.
MOST_SKIPPED = 20
_SLOW_SHARE = 0.5  # of a reward's time limit
_SLOWEST, _MOST_ROWS = 3, 20  # rows of a generation: slow ones, all
_LONGEST_TEXT = 500  # characters


class NotFinite(RuntimeError):
    """A loss, a gradient, a weight or a log-prob of the trained model is infinite or not a number."""


def not_finite(trainer: Any, what: str) -> NotFinite:
    """Return the error for what was seen, with the keys to change and the newest complete checkpoint."""
    args = trainer.args
    newest = newest_complete(Path(args.output_dir))
    kept = f"the last complete checkpoint is {newest.name}" if newest else "there is no checkpoint yet"
    fixes = {
        "write bf16: true in the place of fp16: true": args.fp16,
        f"lower learning_rate (now {args.learning_rate:g})": trainer.state.global_step > 0,
        "write max_grad_norm: 1.0 (now 0: gradients are not cut)": args.max_grad_norm == 0,
    }
    first = "no step was taken: look at the model's files, and at dtype, which must be the model's or wider"
    return NotFinite(f"{what}; {kept}. Fix: {', or '.join(fix for fix, fits in fixes.items() if fits) or first}")


class Checks:
    """End the run when a number is not finite (transformers would take the step), or samples are of other weights."""

    def __init__(self, trainer: Any):
        self._trainer = trainer
        self._skipped_in_a_row = 0
        self._healthy: list[float] = []  # differences of log-probs after the first syncs, the same on every rank
        self._prompt: list[int] = []  # that the guard drew a completion of last, where the server is probed
        self._unproven = False  # whether no batch since a sync had a scored token, to compare log-probs

    def gradient(self, norm: Any) -> float | None:
        """Return the gradient norm, the same on every rank, as a number, so that the device is asked for it once."""
        found, loss = None if norm is None else float(norm), float(self._trainer._tr_loss)
        self._skipped_in_a_row = 0 if math.isfinite(found or 0.0) else self._skipped_in_a_row + 1
        most = MOST_SKIPPED if self._trainer.args.fp16 else 0
        if not math.isfinite(loss) or self._skipped_in_a_row > most:
            step = self._trainer.state.global_step + 1
            raise not_finite(self._trainer, f"loss {loss:g}, gradient norm {found} in step {step}, which was not taken")
        return found

    def weights(self) -> None:
        """Check the weights after the step: a finite gradient times the learning rate can make them infinite."""
        parts = [own_part(parameter) for parameter in self._trainer.model.parameters() if parameter.requires_grad]
        norm = float(torch.nn.utils.get_total_norm(parts))
        if not math.isfinite(norm):
            step = self._trainer.state.global_step
            raise not_finite(self._trainer, f"the weights are not finite after step {step} (norm {norm:g})")

    def server(self, output: dict[str, Any], synced: bool) -> None:
        """Raise ``WeightsDiffer`` on every rank unless the server holds and uses the trainer's weights after a sync."""
        trainer = self._trainer
        if not (trainer.rollouts.guarded and (synced or self._unproven)):
            return
        held = trainer.rollouts.checksum_error()
        difference = self.logprob_difference(output)
        self._unproven = difference is None
        tolerance = logprob_tolerance(trainer)
        if trainer.args.weight_guard_tolerance is None:
            tolerance = calibrated(tolerance, self._healthy)
        if found := held or logprob_error(trainer.rollouts.bridge, difference or 0.0, tolerance):
            raise WeightsDiffer(f"{found}; step {trainer.state.global_step} was not taken")
        if difference is not None and len(self._healthy) < CALIBRATING_SYNCS:
            self._healthy.append(difference)

    def logprob_difference(self, output: dict[str, Any]) -> float | None:
        """Return the mean |trainer - server| log-prob of the sampled tokens over all ranks.

        NaN when the server scored none of them, None without any. ``NotFinite`` when the trainer's own are not finite.
        """
        trainer = self._trainer
        if trainer.rollouts.probes:
            self._prompt = _first_prompt(trainer, output)
            return self._probed_difference()
        if not trainer.model.training and trainer.evaluation.samples_otherwise:
            return None  # the server's log-probs are of another distribution than the trainer's
        if tuple(sampling_keys(trainer).values()) != (1.0, 0, 0.0, 1.0):
            return 0.0  # the server's log-probs are those of a truncated distribution: nothing to compare
        return self._difference(output)

    def final_weights(self) -> str | None:
        """Return why what samples does not have the weights of the last step, sent just now; or None."""
        trainer = self._trainer
        if not trainer.rollouts.probes:
            return trainer.rollouts.checksum_error()
        difference = self._probed_difference()
        return logprob_error(trainer.rollouts.bridge, difference or 0.0, logprob_tolerance(trainer))

    def _probed_difference(self) -> float | None:
        """Return the difference on a completion of the last prompt, drawn plainly and for this alone."""
        trainer = self._trainer
        prompt = self._prompt or [trainer.processing_class.eos_token_id]
        ids, logprobs = trainer.rollouts.probe(prompt)
        plain_B = torch.ones(1, dtype=torch.float64, device=trainer.accelerator.device)
        with replaced(trainer, temperature_B=plain_B):
            return self._difference(_batch_of_one(trainer.accelerator.device, prompt, ids, logprobs))

    def _difference(self, output: dict[str, Any]) -> float | None:
        trainer = self._trainer
        logps = output.get("old_per_token_logps")
        if logps is None or any(isinstance(one, torch.nn.Dropout) and one.p > 0 for one in trainer.model.modules()):
            logps = trainer_logps(trainer, output)
        mask = (output["completion_mask"] * output.get("tool_mask", 1)).bool()
        if "fresh" in output:  # (B,): whether a row was sampled with the weights of now
            self._log_difference(logps, output["sampling_per_token_logps"], mask)
            mask &= output["fresh"].unsqueeze(1)
        own = logps[mask]
        delta = (own - output["sampling_per_token_logps"][mask]).abs()
        known = ~delta.isnan()
        counts = torch.stack([known.sum(), (~known).sum(), (~own.isfinite()).sum()])
        sums = torch.cat([delta[known].sum().unsqueeze(0), counts.to(delta.dtype)])
        total, count, unscored, broken = trainer.accelerator.gather(sums.unsqueeze(0)).sum(dim=0).tolist()
        if broken:
            step = trainer.state.global_step + 1
            raise not_finite(trainer, f"{broken:.0f} log-probs of the trained model are not finite before step {step}")
        if count == 0:
            return math.nan if unscored else None
        return float(total / count)

    def _log_difference(self, own_BT: torch.Tensor, sampled_BT: torch.Tensor, mask_BT: torch.Tensor) -> None:
        """Log what TRL does where it corrects for the difference itself: of all rows, whose weights may be older."""
        delta = (own_BT - sampled_BT).abs()[mask_BT]
        sums = torch.stack([delta.sum(), delta.new_tensor(len(delta))]).unsqueeze(0)
        total, count = self._trainer.accelerator.gather(sums).sum(dim=0).tolist()
        most = self._trainer.accelerator.gather(torch.cat([delta, delta.new_zeros(1)]).max())
        if count:
            name = "sampling/sampling_logp_difference"
            self._trainer._metrics["train"][f"{name}/mean"].append(total / count)
            self._trainer._metrics["train"][f"{name}/max"].append(most.max().item())


def _first_prompt(trainer: Any, output: dict[str, Any]) -> list[int]:
    """Return the prompt of the first row of rank 0."""
    ids = output["prompt_ids"][0][output["prompt_mask"][0].bool()].tolist()
    return list(broadcast_object_list([ids], from_process=0)[0])


def _batch_of_one(device: Any, prompt: list[int], ids: list[int], logprobs: list[float]) -> dict[str, Any]:
    """Return a batch of one completion."""
    prompt_ids, completion_ids = (torch.tensor([one], device=device) for one in (prompt, ids))
    return {
        "prompt_ids": prompt_ids, "prompt_mask": torch.ones_like(prompt_ids), "completion_ids": completion_ids,
        "completion_mask": torch.ones_like(completion_ids),
        "sampling_per_token_logps": torch.tensor([logprobs], device=completion_ids.device),
    }  # fmt: skip


def trainer_logps(trainer: Any, output: dict[str, Any]) -> torch.Tensor:
    """Return log-probs of the completions, (B, T), without dropout, as the server's are; TRL's are of training."""
    prompt, completion, training = output["prompt_ids"], output["completion_ids"], trainer.model.training
    with ExitStack() as afterwards, torch.no_grad():
        afterwards.callback(trainer.model.train, training)
        trainer.model.eval()
        logps, _, _ = trainer._get_per_token_logps_and_entropies(
            trainer.model,
            torch.cat([prompt, completion], dim=1),
            torch.cat([output["prompt_mask"], output["completion_mask"]], dim=1),
            completion.size(1),
            batch_size=trainer.args.per_device_train_batch_size,
        )
    return logps


def logprob_tolerance(trainer: Any) -> float:
    """Return the recipe's tolerance, or the measured one of the dtype that the trainer computes in."""
    args = trainer.args
    if args.weight_guard_tolerance is not None:
        return float(args.weight_guard_tolerance)
    weights = str(next(trainer.model.parameters()).dtype).removeprefix("torch.")
    mixed = "bfloat16" if args.bf16 else "float16" if args.fp16 else weights
    return TOLERANCES[mixed if weights == "float32" else weights]


class TooManyWithoutVerdict(RuntimeError):
    """A reward scored too few completions of a step for an update to be worth it."""


class Scoring:
    """Leave completions out that a reward could not score, count them, write them down, and end the run of too many.

    TRL leaves a completion out, with advantage 0, when every reward returned None for it. So all rewards of a
    completion become NaN when one of them should have scored it and could not (a limit, a death, an exception, no
    number). A reward that returns None by itself says that the completion is not its task: that stays TRL's.
    """

    def __init__(self, trainer: Any, run_dir: Path, max_unscored: float):
        self._trainer = trainer
        self._file = run_dir / "slow_rewards.jsonl"
        self.max_unscored = max_unscored  # largest share of a training generation that does not end the run

    def _rewards(self) -> list[RewardWrapper]:
        return [reward for reward in self._trainer.reward_funcs if isinstance(reward, RewardWrapper)]

    def begin(self, rows: int) -> None:
        """Give the rewards the generation's number, and how many unscored ones of ``rows`` here are too many."""
        trainer = self._trainer
        hopeless = self.most_unscored(rows * trainer.accelerator.num_processes)
        for reward in self._rewards():
            reward.generation, reward.stop = trainer._step, trainer.preemption.stop
            reward.give_up_after = hopeless if trainer.model.training else None

    def most_unscored(self, rows: int) -> int:
        """Return how many of so many completions may be unscored."""
        return math.floor(self.max_unscored * rows + 1e-9)  # 0.29 of 100 is 29, not 28

    def mark_failed(self, rewards_BR: torch.Tensor) -> None:
        """Set every column of a completion that the server did not give to NaN; too many of them end the run."""
        trainer = self._trainer
        if not (failed := trainer.rollouts.failed):
            return
        rewards_BR[torch.tensor(failed, device=rewards_BR.device)] = math.nan
        share = sum(failed) / len(failed)
        trainer._metrics["train" if trainer.model.training else "eval"]["rollouts/failed"].append(share)
        if trainer.model.training and sum(failed) > self.most_unscored(len(failed)):
            raise TooManyWithoutVerdict(
                f"the server did not give {share:.0%} of the completions of step {trainer.state.global_step + 1}, more "
                f"than reward_max_no_verdict: {self.max_unscored}; see its log"
            )

    def mark_unscored(self, rewards_BR: torch.Tensor, prompts: list[Any], completions: list[Any]) -> None:
        """Set every column of an unscored completion to NaN in the rewards of all ranks; too many end the run."""
        own, trainer = self._rewards(), self._trainer
        if not own:
            return
        reports = gather_object([[(reward.scores, _rows(reward, prompts, completions)) for reward in own]])
        by_reward = list(zip(*reports, strict=True))
        scores = [[score for of_rank, _ in ranks for score in of_rank] for ranks in by_reward]
        unscored = torch.tensor([any(score.unscored for score in row) for row in zip(*scores, strict=True)])
        rewards_BR[unscored.to(rewards_BR.device)] = math.nan

        training = trainer.model.training
        metrics = trainer._metrics["train" if training else "eval"]
        for reward, given in zip(own, scores, strict=True):
            name = reward.__name__
            metrics[f"rewards/{name}/no_verdict"].append(sum(score.unscored for score in given) / len(given))
            metrics[f"rewards/{name}/seconds_max"].append(max(score.seconds for score in given))
        metrics["rewards/no_verdict"].append(rewards_BR.isnan().all(dim=1).float().mean().item())
        rows = [row for ranks in by_reward for _, rows in ranks for row in rows]
        if rows and trainer.accelerator.is_main_process:
            when = {"step": trainer.state.global_step + int(training), "training": training}
            slow = sorted((row for row in rows if row["reason"] is None), key=lambda row: -row["seconds"])[:_SLOWEST]
            chosen = [*slow, *(row for row in rows if row["reason"] is not None)][:_MOST_ROWS]
            append_json(self._file, *({**when, **row} for row in chosen))
        if training and int(unscored.sum()) > self.most_unscored(len(unscored)):
            raise self._too_many(own, scores, float(unscored.float().mean()))

    def _too_many(self, rewards: list[RewardWrapper], scores: list[list[Score]], share: float) -> TooManyWithoutVerdict:
        """Return the error, with the reward at fault and the most common kind of reason: messages may all differ."""
        worst, given = max(zip(rewards, scores, strict=True), key=lambda one: sum(score.unscored for score in one[1]))
        reasons = [score.reason for score in given if score.reason not in (None, NOT_CALLED)]
        ((kind, count),) = Counter(reason.partition(":")[0] for reason in reasons).most_common(1)
        reason, _ = Counter(one for one in reasons if one.partition(":")[0] == kind).most_common(1)[0]
        return TooManyWithoutVerdict(
            f"{share:.0%} of the completions of step {self._trainer.state.global_step + 1} "
            f"are unscored, more than reward_max_no_verdict: {self.max_unscored}. Reward '{worst.spec}' gave no "
            f"score for {sum(score.unscored for score in given)} of {len(given)}; most often: "
            f"{masked(reason)} ({count}). See {self._file.name} in the run directory"
        )


def _rows(reward: RewardWrapper, prompts: list[Any], completions: list[Any]) -> list[dict[str, Any]]:
    """Return one rank's rows of one reward for ``slow_rewards.jsonl``: slow completions, and unscored ones."""
    scores, limit = reward.scores, _SLOW_SHARE * (reward.timeout or math.inf)
    slow = [row for row, score in enumerate(scores) if not score.unscored and score.seconds > limit]
    slow.sort(key=lambda row: -scores[row].seconds)
    unscored = [row for row, score in enumerate(scores) if score.unscored and score.reason != NOT_CALLED]
    return [
        {
            "reward": reward.spec,
            "seconds": round(scores[row].seconds, 3),
            "reason": masked(scores[row].reason) if scores[row].unscored else None,
            "replayed": scores[row].replayed,
            "prompt": masked(completion_text(prompts[row]))[:_LONGEST_TEXT],
            "completion": masked(completion_text(completions[row]))[:_LONGEST_TEXT],
        }
        for row in [*slow[:_SLOWEST], *unscored[:_MOST_ROWS]]
    ]
