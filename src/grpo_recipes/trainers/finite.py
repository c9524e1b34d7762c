"""A step whose numbers are not finite ends the run, before its update is taken or anything of it is kept."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch

from grpo_recipes.recipe.configs import GRPOConfig
from grpo_recipes.runs.checkpoints import newest_complete

# fp16 begins with gradients times 65536 and halves that factor with each step it has to skip: after 17 it is below 1.
MOST_SKIPPED = 20


class NotFinite(RuntimeError):
    """A loss, a gradient, a weight or a log-prob of the trained model is infinite or no number."""


class FiniteSteps:
    """Mixin before TRL's trainer: looks at the loss, the gradient norm and the weights of every step.

    transformers logs the mean of earlier losses in the place of one that is no number, and takes the step. Here the run
    ends instead; no checkpoint is written, since the last complete one holds the last weights that are known to work.
    """

    def __init__(self, *, args: GRPOConfig, **kwargs: Any):
        args.logging_nan_inf_filter = False
        self._skipped_in_a_row = 0
        super().__init__(args=args, **kwargs)

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> float | None:
        """Return transformers' gradient norm, as the number that it would ask the device for when it logs.

        DeepSpeed has tried to take the step by now; of gradients that are not finite it takes none.

        Raises:
            NotFinite: on every rank that sees it; the gradient norm is the same on all of them.
        """
        found = super()._get_grad_norm(model, grad_norm=grad_norm)
        norm, loss = None if found is None else float(found), float(self._tr_loss)
        if math.isfinite(loss) and math.isfinite(norm or 0.0):
            self._skipped_in_a_row = 0
            return norm
        self._skipped_in_a_row += 1
        if not self.args.fp16 or not math.isfinite(loss) or self._skipped_in_a_row > MOST_SKIPPED:
            step = self.state.global_step + 1
            raise self.not_finite(f"loss {loss:g}, gradient norm {norm} in step {step}, which was not taken")
        return norm

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        """Look at the weights of the step that was taken; then log, evaluate and save as transformers does.

        Raises:
            NotFinite: a finite gradient times the learning rate made them infinite.
        """
        parts = [_own_part(parameter) for parameter in self.model.parameters() if parameter.requires_grad]
        norm = float(torch.nn.utils.get_total_norm(parts))
        if not math.isfinite(norm):
            raise self.not_finite(f"the weights are not finite after step {self.state.global_step} (norm {norm:g})")
        super()._maybe_log_save_evaluate(*args, **kwargs)

    def not_finite(self, what: str) -> NotFinite:
        """Return the error for what was seen, with the keys to change and the newest complete checkpoint."""
        newest = newest_complete(Path(self.args.output_dir))
        kept = f"the last complete checkpoint is {newest.name}" if newest else "there is no checkpoint yet"
        return NotFinite(f"{what}; {kept}. Fix: {self._finite_fix()}")

    def _finite_fix(self) -> str:
        fixes = []
        if self.args.fp16:
            fixes.append("write bf16: true in the place of fp16: true")
        if self.state.global_step > 0:
            fixes.append(f"lower learning_rate (now {self.args.learning_rate:g})")
        if self.args.max_grad_norm == 0:
            fixes.append("write max_grad_norm: 1.0 (now 0: gradients are not cut)")
        if not fixes:
            fixes.append(
                "no step was taken: look at the model's files, and at dtype, which must be the model's or wider"
            )
        return ", or ".join(fixes)


def _own_part(parameter: torch.Tensor) -> torch.Tensor:
    """Return what this process holds of a parameter: FSDP's and ZeRO-3's are shards."""
    data = getattr(parameter, "ds_tensor", parameter).detach()
    return data.to_local() if hasattr(data, "to_local") else data
