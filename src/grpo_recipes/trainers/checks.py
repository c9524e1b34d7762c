"""Checks that end a run before an update is computed from, or saved with, wrong numbers or another model's samples."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch

from grpo_recipes.runs.checkpoints import newest_complete
from grpo_recipes.weights.guard import TOLERANCES, WeightsDiffer, logprob_error

# fp16 begins with gradients times 65536 and halves that factor with each step it has to skip: after 17 it is below 1.
MOST_SKIPPED = 20


class NotFinite(RuntimeError):
    """A loss, a gradient, a weight or a log-prob of the trained model is infinite or not a number."""


def not_finite(trainer: Any, what: str) -> NotFinite:
    """Return the error for what was seen, with the keys to change and the newest complete checkpoint."""
    args = trainer.args
    newest = newest_complete(Path(args.output_dir))
    kept = f"the last complete checkpoint is {newest.name}" if newest else "there is no checkpoint yet"
    fixes = [
        "write bf16: true in the place of fp16: true" if args.fp16 else None,
        f"lower learning_rate (now {args.learning_rate:g})" if trainer.state.global_step > 0 else None,
        "write max_grad_norm: 1.0 (now 0: gradients are not cut)" if args.max_grad_norm == 0 else None,
    ]
    first = "no step was taken: look at the model's files, and at dtype, which must be the model's or wider"
    return NotFinite(f"{what}; {kept}. Fix: {', or '.join(filter(None, fixes)) or first}")


class Checks:
    """End the run in a step whose loss, gradient norm or weights are not finite, or whose samples are of other weights.

    transformers logs the mean of earlier losses in the place of one that is not a number, and takes the step. Here no
    checkpoint is written either, since the last complete one holds the last weights that are known to work.
    """

    def __init__(self, trainer: Any):
        self._trainer = trainer
        self._skipped_in_a_row = 0
        self._unproven = False  # whether the batch after a sync had nothing to compare

    def gradient(self, norm: Any) -> float | None:
        """Return the gradient norm, the same on every rank, as a number, so that the device is asked for it once.

        DeepSpeed has tried to take the step by now, and takes none with gradients that are not finite.
        """
        found, loss = None if norm is None else float(norm), float(self._trainer._tr_loss)
        if math.isfinite(loss) and math.isfinite(found or 0.0):
            self._skipped_in_a_row = 0
            return found
        self._skipped_in_a_row += 1
        if not self._trainer.args.fp16 or not math.isfinite(loss) or self._skipped_in_a_row > MOST_SKIPPED:
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
        """Raise ``WeightsDiffer`` on every rank unless the server holds and uses the trainer's weights.

        After a sync compare checksums, and log-probs of the first batch with a scored token: others prove nothing.
        """
        trainer = self._trainer
        if not (trainer.rollouts.guarded and (synced or self._unproven)):
            return
        held = trainer.rollouts.checksum_error()
        difference = self.logprob_difference(output)
        self._unproven = difference is None
        found = held or logprob_error(trainer.args.weight_sync, difference or 0.0, logprob_tolerance(trainer))
        if found:
            raise WeightsDiffer(f"{found}; step {trainer.state.global_step} was not taken")

    def logprob_difference(self, output: dict[str, Any]) -> float | None:
        """Return the mean |trainer - server| log-prob of the sampled tokens over all ranks.

        NaN when the server scored none of the tokens, None when there are none to compare. ``NotFinite`` when the
        trainer's own are not finite: the server is not to blame.
        """
        trainer = self._trainer
        if (trainer.top_p, trainer.top_k, trainer.min_p or 0.0, trainer.repetition_penalty) != (1.0, 0, 0.0, 1.0):
            return 0.0  # the server's log-probs are those of a truncated distribution: nothing to compare
        logps = output.get("old_per_token_logps")
        if logps is None or any(isinstance(one, torch.nn.Dropout) and one.p > 0 for one in trainer.model.modules()):
            logps = trainer_logps(trainer, output)
        mask = output["completion_mask"].bool()
        own = logps[mask]
        delta = (own - output["sampling_per_token_logps"][mask]).abs()
        known = ~delta.isnan()
        counts = (known.sum(), (~known).sum(), (~own.isfinite()).sum())
        sums = torch.stack([delta[known].sum(), *(count.to(delta.dtype) for count in counts)])
        total, count, unscored, broken = trainer.accelerator.gather(sums.unsqueeze(0)).sum(dim=0).tolist()
        if broken:
            step = trainer.state.global_step + 1
            raise not_finite(trainer, f"{broken:.0f} log-probs of the trained model are not finite before step {step}")
        if count == 0:
            return math.nan if unscored else None
        return float(total / count)


def trainer_logps(trainer: Any, output: dict[str, Any]) -> torch.Tensor:
    """Return log-probs of the completions, (B, T), which TRL computes only for its importance-sampling correction.

    Without dropout, as the server's: TRL's are those of a model in training.
    """
    prompt, completion, training = output["prompt_ids"], output["completion_ids"], trainer.model.training
    trainer.model.eval()
    try:
        with torch.no_grad():
            logps, _, _ = trainer._get_per_token_logps_and_entropies(
                trainer.model,
                torch.cat([prompt, completion], dim=1),
                torch.cat([output["prompt_mask"], output["completion_mask"]], dim=1),
                completion.size(1),
                batch_size=trainer.args.per_device_train_batch_size,
            )
    finally:
        trainer.model.train(training)
    return logps


def logprob_tolerance(trainer: Any) -> float:
    """Return the recipe's tolerance, or the measured one of the dtype that the trainer computes in."""
    args = trainer.args
    if args.weight_guard_tolerance is not None:
        return float(args.weight_guard_tolerance)
    dtype = str(next(trainer.model.parameters()).dtype).removeprefix("torch.")
    if dtype == "float32" and (args.bf16 or args.fp16):
        dtype = "bfloat16" if args.bf16 else "float16"
    return TOLERANCES[dtype]


def own_part(parameter: torch.Tensor) -> torch.Tensor:
    """Return what this process holds of a parameter, not a copy: FSDP's and ZeRO-3's are shards."""
    data = getattr(parameter, "ds_tensor", parameter).detach()
    return data.to_local() if hasattr(data, "to_local") else data
