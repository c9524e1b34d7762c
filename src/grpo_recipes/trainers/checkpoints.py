"""Checkpoints that are complete or absent, and hold what TRL does not save: resuming equals not having stopped."""

from __future__ import annotations

import json
import math
import os
import random
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy
import torch
from accelerate.utils import gather_object
from trl.trainer.utils import RepeatSampler

from grpo_recipes.algorithms.controllers import KLController, TauController
from grpo_recipes.runs.checkpoints import flush, is_complete, new_digest, prune, publish

# Under DDP on CPU optimizer.pt is loaded with map_location "cpu:0", which torch cannot restore.
torch.serialization.register_package(5, lambda obj: None, lambda obj, where: obj if where.startswith("cpu:") else None)

# How a generation is split into micro-steps.
_SPLIT = ("per_device_train_batch_size", "gradient_accumulation_steps", "steps_per_generation", "num_iterations")


class Checkpoints:
    """Write checkpoints aside, wait for all ranks, mark, rename, and only then prune.

    transformers writes in place, picks the newest folder whether complete or not, and prunes by modification time
    inside the save, so with a limit of 1 a kill can leave no checkpoint at all.
    """

    def __init__(self, trainer: Any):
        self._trainer = trainer
        self.staging: Path | None = None  # where a save under way writes

    def save(self, write: Callable[[], None]) -> None:
        """Save the current step with ``write``, transformers' own save. Called by every rank."""
        trainer = self._trainer
        args, accelerator, step = trainer.args, trainer.accelerator, trainer.state.global_step
        folder = Path(args.output_dir)
        name = f"checkpoint-{step}"
        if is_complete(folder / name):
            return
        if accelerator.is_main_process:
            shutil.rmtree(folder / "partial", ignore_errors=True)  # of a save that was killed
        accelerator.wait_for_everyone()
        limit, args.save_total_limit = args.save_total_limit, None
        self.staging = folder / "partial"
        staged = self.staging / name
        try:
            with digested_saves(staged) as digests:
                write()
        finally:
            args.save_total_limit = limit
            self.staging = None
        if not accelerator.is_main_process:
            for written in digests:  # here, on the node that wrote it; the rest is rank 0's
                flush(staged / written)
        # The ranks wait here for one another, and so for the files of all.
        gathered = dict(gather_object(list(digests.items())))
        if accelerator.is_main_process:
            publish(staged, folder, step, args.world_size, gathered)
            prune(folder, limit)
        accelerator.wait_for_everyone()

    def mark_ended(self) -> None:
        """Note in the checkpoint of this step that a callback ended the training: a resumed run must not continue."""
        if self._trainer.accelerator.is_main_process:
            folder = Path(self._trainer.args.output_dir) / f"checkpoint-{self._trainer.state.global_step}"
            _ended_file(folder).touch()
        self._trainer.accelerator.wait_for_everyone()


def ended_by_callback(checkpoint: str | None) -> bool:
    """Return whether the training had ended where the checkpoint was written."""
    return checkpoint is not None and _ended_file(checkpoint).exists()


@contextmanager
def digested_saves(folder: Path) -> Iterator[dict[str, str]]:
    """Yield digests, by name, of what ``torch.save`` writes below a folder (optimizer, shards) while it is written.

    They are final at the end: without files that were changed afterwards. Reading files back costs several times as
    much, over the network for one of another node; ``publish`` does so for what is written otherwise (safetensors,
    JSON). torch's CRC-32 is left out: ``torch.load`` never checks it and it takes longer than the digest.
    """
    digests: dict[str, str] = {}
    written: dict[str, os.stat_result] = {}
    plain = torch.save

    def save(obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
        path = Path(f) if isinstance(f, str | os.PathLike) else None
        if path is None or not path.is_relative_to(folder):
            return plain(obj, f, *args, **kwargs)
        crc32 = torch.serialization.get_crc32_options()
        torch.serialization.set_crc32_options(False)
        try:
            with path.open("wb") as file:
                digested = _Digested(file)
                plain(obj, digested, *args, **kwargs)
        finally:
            torch.serialization.set_crc32_options(crc32)
        name = str(path.relative_to(folder))
        digests[name], written[name] = digested.digest.hexdigest(), path.stat()
        return None

    torch.save = save
    try:
        yield digests
    finally:
        torch.save = plain
    for name, then in written.items():
        now = (folder / name).stat() if (folder / name).exists() else None
        if now is None or (now.st_size, now.st_mtime_ns) != (then.st_size, then.st_mtime_ns):
            del digests[name]


class _Digested:
    """A file that computes a digest of what is written to it, with the two methods that ``torch.save`` needs."""

    _chunk_bytes = 1 << 20  # small enough to be in the core's cache when it is copied to the page cache

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.digest = new_digest()

    def write(self, data: Any) -> int:
        """Write bytes."""
        view = memoryview(data).cast("B")
        for start in range(0, len(view), self._chunk_bytes):
            chunk = view[start : start + self._chunk_bytes]
            self.digest.update(chunk)
            self._file.write(chunk)
        return len(view)

    def flush(self) -> None:
        """Write what is buffered."""
        self._file.flush()


class EpochRepeatSampler(RepeatSampler):
    """TRL's sampler whose order is a function of the epoch, not of how often it was iterated in this process."""

    def set_epoch(self, epoch: int) -> None:
        """Reach the state that ``epoch`` iterations leave."""
        if self.shuffle:
            self.generator.manual_seed(self.seed)
            for _ in range(epoch):
                torch.randperm(self.num_samples, generator=self.generator)


class ResumeState:
    """Save and restore the generation window, the running sums, and this run's place in the data.

    TRL keeps sampled completions for ``steps_per_generation * num_iterations`` micro-steps and saves neither them nor
    the position in them; transformers does not save its running loss.
    """

    def __init__(self, trainer: Any):
        self._trainer = trainer
        self._sampler: Any = None  # the EpochRepeatSampler, once there is one
        self._restarted = False  # whether an epoch was begun again on a resume

    def sampler(self, stock: RepeatSampler) -> EpochRepeatSampler:
        """Return the sampler of prompts in the place of TRL's."""
        self._sampler = EpochRepeatSampler(
            stock.data_source, stock.mini_repeat_count, stock.batch_size, stock.repeat_count, stock.shuffle, stock.seed
        )
        return self._sampler

    def begin_epoch(self, epoch: int) -> None:
        """Put the prompts in the order of the epoch.

        transformers hands the epoch to the data loader, which hands it to the samplers it finds. Of a resumed epoch
        with several processes it does not find ours: accelerate has wrapped it once more to skip what was done.
        """
        self._sampler.set_epoch(epoch)

    def state(self) -> dict[str, Any]:
        """Return what this rank's checkpoints hold beside TRL's: copies of all that a step changes in place."""
        trainer = self._trainer
        inside = trainer._step % self._window_steps != 0
        return {
            "step": trainer._step,
            "split": self._split(),
            "buffered": trainer._buffered_inputs if inside else None,
            "metrics": {
                mode: {name: list(values) for name, values in metrics.items()}
                for mode, metrics in trainer._metrics.items()
            },
            "logs": _plain(trainer._logs),
            "step_time": trainer._current_train_step_time,
            "tr_loss": trainer._tr_loss.clone(),
            "total_loss": trainer._total_loss_scalar,
            "last_logged": trainer._globalstep_last_logged,
            "flos": trainer.current_flos,
            "total_flos": trainer.state.total_flos,
            "tokens_seen": trainer.state.num_input_tokens_seen,
        }

    @property
    def _window_steps(self) -> int:
        """Micro-steps for which TRL keeps a generation."""
        return int(self._trainer.args.steps_per_generation * self._trainer.num_iterations)

    def _split(self) -> dict[str, Any]:
        return {key: getattr(self._trainer.args, key) for key in _SPLIT}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from what ``state`` returned. Called by every rank.

        Only between two generations may the batch be split otherwise than before, say because memory was short.
        """
        trainer, split = self._trainer, self._split()
        before = state.get("split", split)  # earlier versions did not save it
        if state["buffered"] is not None and before != split:
            raise ValueError(
                f"the checkpoint was saved inside a generation window of {_listed(before)}; this run has "
                f"{_listed(split)}. Fix: resume with these keys as they were, and change them where a generation has "
                "been used up"
            )
        trainer._step = state["step"]
        if state["buffered"] is None:  # TRL samples where the count of micro-steps is a multiple of the window
            trainer._step = math.ceil(trainer._step / self._window_steps) * self._window_steps
        trainer._buffered_inputs = state["buffered"]
        for mode, metrics in state["metrics"].items():
            trainer._metrics[mode] = defaultdict(list, metrics)
        _fill(trainer._logs, state["logs"])
        trainer._current_train_step_time = state["step_time"]
        trainer._tr_loss = state["tr_loss"]
        trainer._total_loss_scalar = state["total_loss"]
        trainer._globalstep_last_logged = state["last_logged"]
        trainer.current_flos = state["flos"]
        trainer.state.total_flos = state["total_flos"]
        trainer.state.num_input_tokens_seen = state["tokens_seen"]

    @staticmethod
    def describe(state: dict[str, Any]) -> list[str]:
        """Return a line for each item of ``state``, or for a few that belong together."""
        batches = len(state["buffered"] or [])
        under_way = {mode: sum(len(values) for values in one.values()) for mode, one in state["metrics"].items()}
        return [
            f"generation window: micro-step {state['step']}, {batches} batches of completions",
            f"metrics of steps not logged yet: {under_way['train']} values",
            f"completions last shown: {len(state['logs']['completion'])}",
            f"running loss {state['total_loss']:.6g}, {state['tokens_seen']} tokens, {state['total_flos']:.3g} FLOPs",
        ]

    # --- files of a checkpoint ------------------------------------------------------------------------------------

    def save(self, folder: str, state: dict[str, Any]) -> None:
        """Write this rank's state, and by rank 0 the place in the data, into a checkpoint."""
        torch.save(state, self._file(folder))
        if self._trainer.accelerator.is_main_process:
            facts = {**self._order_of_data(), "restarted": self._restarted}
            _order_file(folder).write_text(json.dumps(facts, indent=1) + "\n")

    def load(self, checkpoint: str, known: Mapping[str, Any]) -> dict[str, Any]:
        """Return the state that this rank wrote, which must have all the names of ``known``."""
        path = self._file(checkpoint)
        # Our own file in our own run directory; it holds plain containers and tensors.
        state: dict[str, Any] = torch.load(path, map_location=self._trainer.args.device, weights_only=False)
        missing = [name for name in known if name not in state and name != "split"]
        if missing:
            raise ValueError(f"{path} has no {', '.join(missing)}: it was saved with other keys, or by other code")
        return state

    def _file(self, folder: str | Path) -> Path:
        return Path(folder) / f"grpo_window_{self._trainer.args.process_index}.pt"

    def require_random_states(self, checkpoint: str) -> None:
        """Refuse a checkpoint without this rank's files, which transformers would accept."""
        path, args = self._file(checkpoint), self._trainer.args
        if not path.exists():
            raise FileNotFoundError(f"{path} is missing: the checkpoint was made with another number of processes")
        rank = f"_{args.process_index}" if args.world_size > 1 else ""
        _require(path.with_name(f"rng_state{rank}.pth"), "the random states of this process")

    def require_optimizer(self, checkpoint: str) -> None:
        """Refuse a checkpoint of another place in the data, or without optimizer; transformers would accept it."""
        self._require_same_order(checkpoint)
        trainer = self._trainer
        if not (trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled):  # which have files of their own, and raise
            _require(Path(checkpoint) / "optimizer.pt", "the optimizer's state")
            _require(Path(checkpoint) / "scheduler.pt", "the place in the learning-rate schedule")

    def _order_of_data(self) -> dict[str, Any]:
        """Return what decides which prompts a step takes, beside the prompts themselves."""
        sampler, trainer, args = self._sampler, self._trainer, self._trainer.args
        per_step = args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size
        return {
            "prompts": sampler.num_samples,
            "prompts of a generation": sampler.batch_size,
            "num_generations": sampler.mini_repeat_count,
            "num_iterations": trainer.num_iterations,
            "completions of a step": per_step,
            "shuffle_dataset": sampler.shuffle,
            "seed": sampler.seed,
        }

    def _require_same_order(self, checkpoint: str) -> None:
        if not _order_file(checkpoint).exists():
            return  # of an earlier version
        before = json.loads(_order_file(checkpoint).read_text())
        restart = self._trainer.args.ignore_data_skip
        self._restarted = before.pop("restarted") or restart
        now = self._order_of_data()
        if restart or (now == before and not self._restarted):
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


def _require(file: Path, what: str) -> None:
    if not file.exists():
        raise FileNotFoundError(f"{file} is missing: {what} cannot be restored")


def _listed(facts: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in facts.items())


def _order_file(checkpoint: str | Path) -> Path:
    return Path(checkpoint) / "order_of_data.json"


def _ended_file(checkpoint: str | Path) -> Path:
    return Path(checkpoint) / "ended_by_callback"


def _plain(logs: Any) -> Any:
    """Return TRL's completions to show, whose containers cannot be pickled, as lists and dictionaries."""
    return {name: _plain(held) for name, held in logs.items()} if isinstance(logs, dict) else list(logs)


def _fill(logs: Any, held: Any) -> None:
    """Put what ``_plain`` returned back into TRL's containers."""
    if not isinstance(logs, dict):
        logs.clear()
        logs.extend(held)
        return
    if isinstance(logs, defaultdict):  # it grows by names of rewards
        logs.clear()
    for name, values in held.items():
        _fill(logs[name], values)


def random_states() -> dict[str, Any]:
    """Return the states of Python's, numpy's, torch's and its current device's generators in this process."""
    return {
        "python": random.getstate(),
        "numpy": numpy.random.get_state(),
        "torch": torch.get_rng_state(),
        "device": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
    }


def set_random_states(states: dict[str, Any]) -> None:
    """Put back what ``random_states`` returned."""
    random.setstate(states["python"])
    numpy.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    if states["device"] is not None:
        torch.cuda.set_rng_state(states["device"])


Controllers = dict[str, KLController | TauController]


def save_controllers(folder: str, controllers: Controllers) -> None:
    """Write the state of each controller into a checkpoint."""
    states = {name: controller.state_dict() for name, controller in controllers.items()}
    _controllers_file(folder).write_text(json.dumps(states) + "\n")


def load_controllers(checkpoint: str, controllers: Controllers) -> list[str]:
    """Restore each controller from a checkpoint, where it must have been on; return a line for each."""
    path = _controllers_file(checkpoint)
    states = json.loads(path.read_text()) if path.exists() else {}
    for name, controller in controllers.items():
        if name not in states:
            raise FileNotFoundError(f"{path} has no state of the {name} controller: it was not on when it was saved")
        controller.load_state_dict(states[name])
    return [f"{name} controller: {states[name]}" for name in controllers]


def _controllers_file(checkpoint: str) -> Path:
    return Path(checkpoint) / "controllers.json"
