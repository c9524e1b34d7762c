"""What TRL and transformers do not save, so that continuing equals not having stopped."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from trl.trainer.utils import RepeatSampler

# How a generation is split into micro-steps.
_SPLIT = ("per_device_train_batch_size", "gradient_accumulation_steps", "steps_per_generation", "num_iterations")


class EpochRepeatSampler(RepeatSampler):
    """TRL's sampler whose order is a function of the epoch, not of how often it was iterated in this process."""

    def set_epoch(self, epoch: int) -> None:
        """Reach the state that ``epoch`` iterations leave."""
        if self.shuffle:
            self.generator.manual_seed(self.seed)
            for _ in range(epoch):
                torch.randperm(self.num_samples, generator=self.generator)


class ExactResume:
    """Mixin before TRL's trainer: saves and restores the generation window and the running sums.

    TRL keeps sampled completions for ``steps_per_generation * num_iterations`` micro steps and saves neither them nor
    the position in them; transformers does not save its running loss. Other mixins add to it by ``_unsaved_state``.
    """

    _restarted = False  # whether an epoch was begun again on a resume

    def _get_train_sampler(self, dataset: Any = None) -> Any:
        stock = super()._get_train_sampler(dataset)
        self._train_sampler = EpochRepeatSampler(
            stock.data_source, stock.mini_repeat_count, stock.batch_size, stock.repeat_count, stock.shuffle, stock.seed
        )
        return self._train_sampler

    def _run_epoch(self, *args: Any, epoch: int, resume_from_checkpoint: str | None, **kwargs: Any) -> None:
        """Run an epoch as transformers does, in that epoch's order, and take no step after the last.

        transformers hands the epoch to the data loader, which hands it to the samplers it finds. Of a resumed epoch
        with several processes it does not find ours: accelerate has wrapped it once more to skip what was done.
        transformers also takes one step too many where a resumed run had taken them all.
        """
        ended = resume_from_checkpoint is not None and _ended_file(resume_from_checkpoint).exists()
        if ended or self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True
            return
        self._train_sampler.set_epoch(epoch)
        super()._run_epoch(*args, epoch=epoch, resume_from_checkpoint=resume_from_checkpoint, **kwargs)

    def _maybe_log_save_evaluate(
        self, tr_loss: Any, grad_norm: Any, model: Any, trial: Any, *args: Any, **kwargs: Any
    ) -> None:
        """transformers', and a checkpoint where a callback ends the training: a resumed run must not go on there."""
        super()._maybe_log_save_evaluate(tr_loss, grad_norm, model, trial, *args, **kwargs)
        if not self.control.should_training_stop or self.state.global_step >= self.state.max_steps:
            return
        self._save_checkpoint(model, trial)
        if self.accelerator.is_main_process:
            _ended_file(Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}").touch()
        self.accelerator.wait_for_everyone()

    def _unsaved_state(self) -> dict[str, Any]:
        """What this rank's checkpoints hold beside TRL's, by name: copies of all that a step changes in place."""
        inside = self._step % self._window_steps != 0
        return {
            "step": self._step,
            "split": {key: getattr(self.args, key) for key in _SPLIT},
            "buffered": self._buffered_inputs if inside else None,
            "metrics": {
                mode: {name: list(values) for name, values in metrics.items()}
                for mode, metrics in self._metrics.items()
            },
            "logs": _plain(self._logs),
            "step_time": self._current_train_step_time,
            "tr_loss": self._tr_loss.clone(),
            "total_loss": self._total_loss_scalar,
            "last_logged": self._globalstep_last_logged,
            "flos": self.current_flos,
            "total_flos": self.state.total_flos,
            "tokens_seen": self.state.num_input_tokens_seen,
        }

    @property
    def _window_steps(self) -> int:
        """Micro-steps for which TRL keeps a generation."""
        return self.args.steps_per_generation * self.num_iterations

    def _restore_unsaved(self, state: dict[str, Any]) -> None:
        """Go on from what ``_unsaved_state`` returned. Called by every rank.

        Between two generations the batch may be split otherwise than before, for example because memory was short.

        Raises:
            ValueError: it is split otherwise, and a generation is under way.
        """
        split = {key: getattr(self.args, key) for key in _SPLIT}
        before = state.get("split", split)  # earlier versions did not save it
        if state["buffered"] is not None and before != split:
            raise ValueError(
                f"the checkpoint was saved inside a generation window of {_listed(before)}; this run has "
                f"{_listed(split)}. Fix: resume with these keys as they were, and change them where a generation has "
                "been used up"
            )
        self._step = state["step"]
        if state["buffered"] is None:  # TRL samples where the count of micro-steps is a multiple of the window
            self._step = math.ceil(self._step / self._window_steps) * self._window_steps
        self._buffered_inputs = state["buffered"]
        for mode, metrics in state["metrics"].items():
            self._metrics[mode] = defaultdict(list, metrics)
        _fill(self._logs, state["logs"])
        self._current_train_step_time = state["step_time"]
        self._tr_loss = state["tr_loss"]
        self._total_loss_scalar = state["total_loss"]
        self._globalstep_last_logged = state["last_logged"]
        self.current_flos = state["flos"]
        self.state.total_flos = state["total_flos"]
        self.state.num_input_tokens_seen = state["tokens_seen"]

    def _describe_restored(self, state: dict[str, Any]) -> list[str]:
        """A line for each item of ``_unsaved_state``, or a few that belong together."""
        batches = len(state["buffered"] or [])
        under_way = {mode: sum(len(values) for values in one.values()) for mode, one in state["metrics"].items()}
        return [
            f"generation window: micro-step {state['step']}, {batches} batches of completions",
            f"metrics of steps not logged yet: {under_way['train']} values",
            f"completions last shown: {len(state['logs']['completion'])}",
            f"running loss {state['total_loss']:.6g}, {state['tokens_seen']} tokens, {state['total_flos']:.3g} FLOPs",
        ]

    def _window_file(self, folder: str | Path) -> Path:
        return Path(folder) / f"grpo_window_{self.args.process_index}.pt"

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)
        torch.save(self._unsaved_state(), self._window_file(output_dir))
        if self.accelerator.is_main_process:
            facts = {**self._order_of_data(), "restarted": self._restarted}
            _order_file(output_dir).write_text(json.dumps(facts, indent=1) + "\n")

    def _order_of_data(self) -> dict[str, Any]:
        """Return what decides which prompts a step takes, beside the prompts themselves."""
        sampler, args = self._train_sampler, self.args
        return {
            "prompts": sampler.num_samples,
            "prompts of a generation": sampler.batch_size,
            "num_generations": sampler.mini_repeat_count,
            "num_iterations": self.num_iterations,
            "completions of a step": args.per_device_train_batch_size
            * args.gradient_accumulation_steps
            * args.world_size,
            "shuffle_dataset": sampler.shuffle,
            "seed": sampler.seed,
        }

    def _need_same_order(self, checkpoint: str) -> None:
        """Refuse a checkpoint whose number of steps would mean another place in the data of this run.

        Raises:
            ValueError: it would, and ``ignore_data_skip`` does not ask to begin the epoch again.
        """
        if not _order_file(checkpoint).exists():
            return  # of an earlier version
        before = json.loads(_order_file(checkpoint).read_text())
        self._restarted = before.pop("restarted") or self.args.ignore_data_skip
        now = self._order_of_data()
        if self.args.ignore_data_skip or (now == before and not self._restarted):
            return
        fix = "add --ignore_data_skip true: the epoch then begins again"
        name = Path(checkpoint).name
        if self._restarted:
            raise ValueError(
                f"{name} is of a run that began an epoch again on a resume: its place in the data is unknown. "
                f"Fix: {fix}"
            )
        changed = [key for key in now if now[key] != before.get(key)]
        was, is_now = (_listed({key: one.get(key) for key in changed}) for one in (before, now))
        raise ValueError(
            f"{name} was saved with {was}, this run has {is_now}: the checkpoint would stand at another place in the "
            f"data. Fix: resume with the keys and the data as they were, or {fix}"
        )

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        self._need_same_order(checkpoint)
        if not (self.is_deepspeed_enabled or self.is_fsdp_enabled):  # which have files of their own, and raise
            _need(Path(checkpoint) / "optimizer.pt", "the optimizer's state")
            _need(Path(checkpoint) / "scheduler.pt", "the place in the learning-rate schedule")
        super()._load_optimizer_and_scheduler(checkpoint)
        self._say_restored("optimizer and learning-rate schedule")

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        path = self._window_file(checkpoint)
        if not path.exists():
            raise FileNotFoundError(f"{path} is missing: the checkpoint was made with another number of processes")
        rank = f"_{self.args.process_index}" if self.args.world_size > 1 else ""
        _need(path.with_name(f"rng_state{rank}.pth"), "the random states of this process")
        super()._load_rng_state(checkpoint)
        # Our own file in our own run directory; it holds plain containers and tensors.
        state = torch.load(path, map_location=self.args.device, weights_only=False)
        missing = [name for name in self._unsaved_state() if name not in state and name != "split"]
        if missing:
            raise ValueError(f"{path} has no {', '.join(missing)}: it was saved with other keys, or by other code")
        self._restore_unsaved(state)
        self._say_restored("random states of Python, numpy and torch", *self._describe_restored(state))

    def _say_restored(self, *items: str) -> None:
        if self.accelerator.is_main_process:
            for item in items:
                print(f"grpo: restored {item}", flush=True)


def _need(file: Path, what: str) -> None:
    """Refuse to go on without a file that transformers would go on without."""
    if not file.exists():
        raise FileNotFoundError(f"{file} is missing: {what} cannot be restored")


def _listed(facts: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in facts.items())


def _order_file(checkpoint: str | Path) -> Path:
    return Path(checkpoint) / "order_of_data.json"


def _ended_file(checkpoint: str | Path) -> Path:
    return Path(checkpoint) / "ended_by_callback"


def _plain(logs: Any) -> Any:
    """TRL's completions to show, whose containers cannot be pickled, as lists and dictionaries."""
    return {name: _plain(held) for name, held in logs.items()} if isinstance(logs, dict) else list(logs)


def _fill(logs: Any, held: Any) -> None:
    """Put back what ``_plain`` returned, in TRL's containers."""
    if not isinstance(logs, dict):
        logs.clear()
        logs.extend(held)
        return
    if isinstance(logs, defaultdict):  # it grows by names of rewards
        logs.clear()
    for name, values in held.items():
        _fill(logs[name], values)
