"""Controllers of a training: kept in its checkpoints, moved after each optimizer step, the same on every rank."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from grpo_recipes.algorithms.controllers import KLController, TauController
from grpo_recipes.recipe.configs import GRPOConfig


class Controllers:
    """Mixin before TRL's trainer: with ``kl_target``, moves ``beta`` after every optimizer step.

    The KL is that of the step, TRL's ``kl`` over its micro-batches and ranks. The row of a step holds as ``beta`` the
    coefficient that was in force in it.

    Attributes:
        controllers: by name; a subclass adds its own. All of them are in ``controllers.json`` of a checkpoint.

    Raises:
        ValueError: ``kl_target`` without a KL term in the loss.
    """

    def __init__(self, *, args: GRPOConfig, **kwargs: Any):
        self.controllers: dict[str, KLController | TauController] = {}
        if args.kl_target is not None:
            if args.beta == 0.0:
                raise ValueError("kl_target needs beta above 0: a multiple of 0 stays 0")
            self.controllers["kl"] = KLController(args.beta, args.kl_target, args.kl_horizon, args.kl_ctl_step_size)
        super().__init__(args=args, **kwargs)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """TRL's; after the last micro-batch of an optimizer step nothing reads its coefficients any more."""
        loss = super().training_step(*args, **kwargs)
        if self.accelerator.sync_gradients:
            self._move_controllers()
        return loss

    def _move_controllers(self) -> None:
        """Answer to the optimizer step whose losses have been computed."""
        kl_controller = self.controllers.get("kl")
        if kl_controller is None:
            return
        micro_batches = self.current_gradient_accumulation_steps
        kls = self._metrics["train"]["kl"][-micro_batches:]
        self._metrics["train"]["beta"].append(self.beta)
        completions = self.args.per_device_train_batch_size * micro_batches * self.accelerator.num_processes
        kl_controller.update(sum(kls) / len(kls), completions)
        self.beta = kl_controller.beta

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)
        if self.controllers and self.accelerator.is_main_process:
            states = {name: controller.state_dict() for name, controller in self.controllers.items()}
            _state_file(output_dir).write_text(json.dumps(states) + "\n")

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """TRL's, and the controllers; called on every resume, also where ``ignore_data_skip`` skips random states."""
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is None or not self.controllers:
            return
        path = _state_file(checkpoint)
        states = json.loads(path.read_text()) if path.exists() else {}
        for name, controller in self.controllers.items():
            if name not in states:
                raise FileNotFoundError(
                    f"{path} has no state of the {name} controller: it was not on when it was saved"
                )
            controller.load_state_dict(states[name])
        if "kl" in self.controllers:
            self.beta = self.controllers["kl"].beta
        self._say_restored(*(f"{name} controller: {states[name]}" for name in self.controllers))


def _state_file(checkpoint: str) -> Path:
    return Path(checkpoint) / "controllers.json"
