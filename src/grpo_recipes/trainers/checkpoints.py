"""Checkpoints that are complete or absent, and stops on request: resuming equals not having stopped."""

import json
import math
import os
import random
import shutil
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any, BinaryIO

import numpy
import torch
import torch.distributed
from accelerate.utils import gather_object
from transformers import StoppingCriteriaList
from trl.trainer.utils import RepeatSampler

from grpo_recipes.attributes import replaced
from grpo_recipes.runs.checkpoints import (
    flush_to_disk,
    is_complete,
    new_digest,
    newest_complete,
    prune,
    publish_checkpoint,
)
from grpo_recipes.runs.rundir import read_json
from grpo_recipes.runs.stop_request import Stopped, StoppedOnRequest, StopRequest
from grpo_recipes.trainers.model import load_reference, save_reference

# Under DDP on CPU optimizer.pt is loaded with map_location "cpu:0", which torch cannot restore.
torch.serialization.register_package(5, lambda obj: None, lambda obj, where: obj if where.startswith("cpu:") else None)

# What a step changes in place and transformers does not save: its name in a checkpoint, which stays, and the attribute.
_UNSAVED = {
    "step": "_step", "metrics": "_metrics", "logs": "_logs", "step_time": "_current_train_step_time",
    "tr_loss": "_tr_loss", "total_loss": "_total_loss_scalar", "last_logged": "_globalstep_last_logged",
    "flos": "current_flos", "total_flos": "state.total_flos", "tokens_seen": "state.num_input_tokens_seen",
    "evaluation_owed": "evaluation.owed",
}  # fmt: skip
# How a generation is split into micro-steps.
_SPLIT = ("per_device_train_batch_size", "gradient_accumulation_steps", "steps_per_generation", "num_iterations")
_ORDER, _CONTROLLERS, _ENDED = "order_of_data.json", "controllers.json", "ended_by_callback"


class Checkpoints:
    """Write checkpoints aside, wait for all ranks, mark, rename, and only then prune; restore what they hold.

    transformers writes in place and prunes inside the save: with a limit of 1 a kill can leave no checkpoint at all.
    """

    def __init__(self, trainer: Any):
        self._trainer = trainer
        self.staging: Path | None = None  # where a save under way writes
        self.unsaved = dict(_UNSAVED)  # a trainer's subclass adds its own
        self._restarted = False  # whether an epoch was begun again on a resume

    def save(self, write: Callable[[], None]) -> None:
        """Save the current step with ``write``, transformers' own save. Called by every rank."""
        args, accelerator, step = self._trainer.args, self._trainer.accelerator, self._trainer.state.global_step
        folder = Path(args.output_dir)
        name = f"checkpoint-{step}"
        if is_complete(folder / name):
            return
        staged = folder / "partial" / name
        if accelerator.is_main_process:
            shutil.rmtree(staged.parent, ignore_errors=True)  # of a save that was killed
        accelerator.wait_for_everyone()
        aside, unlimited = replaced(self, staging=staged.parent), replaced(args, save_total_limit=None)
        with aside, unlimited, digested_saves(staged) as digests:
            write()
        if not accelerator.is_main_process:
            for written in digests:  # here, on the node that wrote it; the rest is rank 0's
                flush_to_disk(staged / written)
        # The ranks wait here for one another, and so for the files of all.
        gathered = dict(gather_object(list(digests.items())))
        if accelerator.is_main_process:
            publish_checkpoint(staged, folder, step, args.world_size, gathered)
            prune(folder, args.save_total_limit)
        accelerator.wait_for_everyone()

    def mark_ended(self) -> None:
        """Note in the checkpoint of this step that a callback ended the training: a resumed run must not continue."""
        if self._trainer.accelerator.is_main_process:
            folder = Path(self._trainer.args.output_dir)
            (folder / f"checkpoint-{self._trainer.state.global_step}" / _ENDED).touch()
        self._trainer.accelerator.wait_for_everyone()

    def state(self) -> dict[str, Any]:
        """Return what this rank's checkpoints hold beside transformers': copies of all that a step changes in place."""
        trainer = self._trainer
        return {
            **{name: contents(attrgetter(path)(trainer)) for name, path in self.unsaved.items()},
            "split": self._split,
            "buffered": trainer._buffered_inputs if trainer._step % self._window_steps else None,
            "ahead": trainer.rollouts.pending_generation,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from what ``state`` returned; only between generations may the batch be split otherwise."""
        trainer, before = self._trainer, state.get("split", self._split)  # earlier versions did not save it
        if state["buffered"] is not None and before != self._split:
            fix = "resume with these keys as they were, and change them where a generation has been used up"
            what = f"saved inside a generation window of {_listed(before)}; this run has {_listed(self._split)}"
            raise ValueError(f"the checkpoint was {what}. Fix: {fix}")
        for name, path in self.unsaved.items():
            owner, _, attribute = path.rpartition(".")
            if isinstance(own := attrgetter(path)(trainer), dict | deque):
                refill(own, state[name])
            else:
                setattr(attrgetter(owner)(trainer) if owner else trainer, attribute, state[name])
        if state["buffered"] is None:  # TRL samples where the count of micro-steps is a multiple of the window
            trainer._step = math.ceil(trainer._step / self._window_steps) * self._window_steps
        trainer._buffered_inputs = state["buffered"]
        trainer.rollouts.restore_pending_generation(state.get("ahead"))
        trainer.evaluation.owed &= trainer.args.eval_strategy != "no"

    @property
    def _split(self) -> dict[str, int]:
        return {key: getattr(self._trainer.args, key) for key in _SPLIT}

    @property
    def _window_steps(self) -> int:
        """Micro-steps for which TRL keeps a generation."""
        return int(self._trainer.args.steps_per_generation * self._trainer.num_iterations)

    def save_unsaved(self, folder: Path) -> None:
        """Write into a checkpoint what transformers does not save. Called by every rank."""
        trainer = self._trainer
        torch.save({**self.state(), "ahead": trainer.rollouts.finish_pending_generation()}, self._state_file(folder))
        if trainer.args.sync_ref_model:
            save_reference(trainer, folder)
        if trainer.accelerator.is_main_process:
            order = {**self._order_of_data(), "restarted": self._restarted}
            (folder / _ORDER).write_text(json.dumps(order, indent=1) + "\n")
            states = {name: controller.state_dict() for name, controller in trainer.controllers.items()}
            (folder / _CONTROLLERS).write_text(json.dumps(states) + "\n")

    def load_optimizer(self, folder: Path, load: Callable[[], None]) -> None:
        """Restore the optimizer with ``load``, transformers' own, which accepts any checkpoint, then what is ours."""
        trainer = self._trainer
        self._require_same_order(folder)
        if not (trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled):  # which have files of their own, and raise
            _require(folder, "optimizer.pt", "scheduler.pt")
        load()
        self._print_restored("optimizer and learning-rate schedule")
        if trainer.args.sync_ref_model:
            load_reference(trainer, folder)
            self._print_restored("reference model as it was last synced")
        states = read_json(folder / _CONTROLLERS)
        for name, controller in trainer.controllers.items():
            if name not in states:
                where = folder / _CONTROLLERS
                raise FileNotFoundError(f"{where} has no state of the {name} controller: it was not on when saved")
            controller.load_state_dict(states[name])
            self._print_restored(f"{name} controller: {states[name]}")

    def load_random_states(self, folder: Path, load: Callable[[], None]) -> None:
        """Restore the random states with ``load``, transformers' own, then this rank's state."""
        trainer, args, path = self._trainer, self._trainer.args, self._state_file(folder)
        if not path.exists():
            raise FileNotFoundError(f"{path} is missing: the checkpoint was made with another number of processes")
        _require(folder, f"rng_state_{args.process_index}.pth" if args.world_size > 1 else "rng_state.pth")
        load()
        # Our own file in our own run directory; it holds plain containers and tensors.
        state: dict[str, Any] = torch.load(path, map_location=args.device, weights_only=False)
        if missing := [name for name in (*self.unsaved, "buffered") if name not in state]:
            raise ValueError(f"{path} has no {', '.join(missing)}: it was saved with other keys, or by other code")
        self.restore(state)
        self._print_restored(
            "random states of Python, numpy and torch",
            f"generation window: micro-step {state['step']}, {len(state['buffered'] or [])} batches of completions",
            f"metrics of steps not logged yet: {sum(map(len, state['metrics']['train'].values()))} values",
            f"completions last shown: {len(state['logs']['completion'])}",
            f"running loss {state['total_loss']:.6g}, {state['tokens_seen']} tokens, {state['total_flos']:.3g} FLOPs",
            f"evaluation: {'owed' if trainer.evaluation.owed else 'none owed'}",
            *([f"generation sampled ahead: {len(ahead['prompts'])} prompts"] if (ahead := state.get("ahead")) else []),
        )

    def _print_restored(self, *items: str) -> None:
        if self._trainer.accelerator.is_main_process:
            for item in items:
                print(f"grpo: restored {item}", flush=True)

    def _state_file(self, folder: Path) -> Path:
        return folder / f"grpo_window_{self._trainer.args.process_index}.pt"

    def _order_of_data(self) -> dict[str, Any]:
        """Return what decides which prompts a step takes, beside the prompts themselves."""
        trainer, args = self._trainer, self._trainer.args
        per_process = args.per_device_train_batch_size * args.gradient_accumulation_steps
        return {
            "prompts": trainer.sampler and trainer.sampler.num_samples,  # None for a stream
            "prompts of a generation": args.generation_batch_size // trainer.num_generations,
            "num_generations": trainer.num_generations,
            "num_iterations": trainer.num_iterations,
            "completions of a step": per_process * args.world_size,
            "shuffle_dataset": trainer.shuffle_dataset,
            "seed": args.seed,
        }

    def _require_same_order(self, folder: Path) -> None:
        now = self._order_of_data()
        before = read_json(folder / _ORDER) or {**now, "restarted": False}  # earlier versions did not save it
        self._restarted = before["restarted"] or self._trainer.args.ignore_data_skip
        if self._trainer.args.ignore_data_skip:
            return
        fix = "add --ignore_data_skip true: the epoch then begins again"
        if self._restarted:
            what = "is of a run that began an epoch again on a resume: its place in the data is unknown"
            raise ValueError(f"{folder.name} {what}. Fix: {fix}")
        if changed := [key for key in now if now[key] != before.get(key)]:
            was, is_now = (_listed({key: one.get(key) for key in changed}) for one in (before, now))
            what = f"saved with {was}, this run has {is_now}: it would continue at another place in the data"
            raise ValueError(f"{folder.name} was {what}. Fix: resume with keys and data as they were, or {fix}")


class Preemption:
    """Stop all ranks at the same place on request; the run is saved and exits with code 75.

    Sampling, scoring and evaluation are cut short; an update or a save under way is finished. The state after each
    optimizer step is kept in memory, so that nothing of the step in flight is in the checkpoint.
    """

    def __init__(self, trainer: Any, stop: StopRequest):
        self._trainer = trainer
        self.stop = stop
        self._agreed = False
        self._last_step: tuple[dict[str, Any], Callable[[], None]] | None = None

    @property
    def _stoppable(self) -> bool:
        """Whether there is a next step to be kept from; the same on every rank."""
        trainer = self._trainer
        ends = trainer.control.should_training_stop or trainer.state.global_step >= trainer.state.max_steps
        return trainer.is_in_train and not ends

    def stop_if_agreed(self) -> None:
        """Raise ``Stopped`` on every rank if any knows of a request. Called by every rank."""
        if self._stoppable:
            self._agreed = self._agreed or agreed(self.stop, self._trainer.args.device)
            if self._agreed:
                raise Stopped

    def step_completed(self) -> None:
        """Keep what a checkpoint of now holds beside what the optimizer alone changes, then check for a request."""
        if self._stoppable:
            self._last_step = self._trainer.checkpoints.state(), keep_random_states()
            self.stop_if_agreed()

    def save_last_step(self) -> StoppedOnRequest:
        """Save the state of the last completed step, if there is one; return how the run ended."""
        trainer = self._trainer
        if self._last_step is None:
            return stopped_before_a_step(Path(trainer.args.output_dir))
        state, put_back_random_states = self._last_step
        trainer.checkpoints.restore(state)
        put_back_random_states()
        trainer._save_checkpoint(trainer.model, None)
        return StoppedOnRequest(f"after step {trainer.state.global_step}, state saved")

    def cutting_short(self) -> AbstractContextManager[None]:
        """End the work inside early when a request comes."""
        return self.stop.cutting_short() if self._stoppable else nullcontext()

    @contextmanager
    def sampling(self) -> Iterator[None]:
        """Cut sampling short: criteria to stop by are given to ``generate``, because TRL passes none.

        transformers continues under ZeRO-3 and FSDP until all ranks are done.
        """
        model = self._trainer.accelerator.unwrap_model(self._trainer.model_wrapped)

        def stopped(ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
            return torch.full((len(ids),), self.stop.cuts(), device=ids.device)

        generate = partial(model.generate, stopping_criteria=StoppingCriteriaList([stopped]))
        with replaced(model, generate=generate), self.cutting_short():
            yield


def ended_by_callback(checkpoint: str | None) -> bool:
    """Return whether the training had ended where the checkpoint was written."""
    return checkpoint is not None and (Path(checkpoint) / _ENDED).exists()


def contents(value: Any) -> Any:
    """Return containers as new plain ones with the same elements, a tensor as a copy, and anything else as it is."""
    if isinstance(value, dict):
        return {name: contents(one) for name, one in value.items()}
    if isinstance(value, list | deque):
        return list(value)
    return value.clone() if isinstance(value, torch.Tensor) else value


def refill(own: Any, saved: Any) -> None:
    """Put what ``contents`` returned back into a trainer's own containers, whose bounds are those of this run."""
    if not isinstance(own, dict):
        own.clear()
        own.extend(saved)
        return
    if isinstance(own, defaultdict):  # it grows by names
        own.clear()
    for name, values in saved.items():
        refill(own[name], values)


def _require(folder: Path, *names: str) -> None:
    for name in names:
        if not (folder / name).exists():
            raise FileNotFoundError(f"{folder / name} is missing: this part of the training cannot be restored")


def _listed(facts: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in facts.items())


@contextmanager
def digested_saves(folder: Path) -> Iterator[dict[str, str]]:
    """Yield digests, by name, of what ``torch.save`` writes below a folder; at the end without files changed since.

    Reading files back costs several times as much. torch's CRC-32 is left out: ``torch.load`` never checks it and it
    takes longer than the digest.
    """
    digests: dict[str, str] = {}
    written: dict[str, os.stat_result] = {}
    plain, crc32 = torch.save, torch.serialization.get_crc32_options()

    def save(obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
        """Save as torch does, with the digest of what goes into ``folder``."""
        path = Path(f) if isinstance(f, str | os.PathLike) else None
        if path is None or not path.is_relative_to(folder):
            plain(obj, f, *args, **kwargs)
            return
        with path.open("wb") as file:
            digested = _DigestedFile(file)
            plain(obj, digested, *args, **kwargs)
        name = str(path.relative_to(folder))
        digests[name], written[name] = digested.digest.hexdigest(), path.stat()

    torch.serialization.set_crc32_options(False)
    try:
        with replaced(torch, save=save):
            yield digests
    finally:
        torch.serialization.set_crc32_options(crc32)
    for name, then in written.items():
        now = (folder / name).stat() if (folder / name).exists() else None
        if now is None or (now.st_size, now.st_mtime_ns) != (then.st_size, then.st_mtime_ns):
            del digests[name]


class _DigestedFile:
    """A file that computes a digest of what is written to it, with the two methods that ``torch.save`` needs."""

    _chunk_bytes = 1 << 20  # small enough to be in the core's cache when it is copied to the page cache

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.flush = file.flush
        self.digest = new_digest()

    def write(self, data: Any) -> int:
        """Write bytes."""
        view = memoryview(data).cast("B")
        for start in range(0, len(view), self._chunk_bytes):
            chunk = view[start : start + self._chunk_bytes]
            self.digest.update(chunk)
            self._file.write(chunk)
        return len(view)


def begin_epoch(sampler: RepeatSampler | None, epoch: int) -> None:
    """Make the order of the prompts a function of the epoch, not of how often it was iterated in this process.

    A stream has no sampler; accelerate tells it the epoch.
    """
    if sampler is not None and sampler.shuffle:
        sampler.generator.manual_seed(sampler.seed)
        for _ in range(epoch):
            torch.randperm(sampler.num_samples, generator=sampler.generator)


def keep_random_states() -> Callable[[], None]:
    """Return a function that puts the states of Python's, numpy's, torch's and its device's generators back."""
    python, of_numpy, cpu = random.getstate(), numpy.random.get_state(), torch.get_rng_state()
    device = torch.cuda.get_rng_state() if torch.cuda.is_available() else None

    def put_back() -> None:
        random.setstate(python)
        numpy.random.set_state(of_numpy)
        torch.set_rng_state(cpu)
        if device is not None:
            torch.cuda.set_rng_state(device)

    return put_back


def agreed(stop: StopRequest, device: torch.device) -> bool:
    """Return whether any rank knows of a request. Called by every rank."""
    seen = torch.tensor(int(stop.requested()), device=device)
    if torch.distributed.is_initialized():
        torch.distributed.all_reduce(seen, op=torch.distributed.ReduceOp.MAX)
    return bool(seen)


def stopped_before_a_step(checkpoints: Path) -> StoppedOnRequest:
    """Return how a run ended that was stopped before this attempt completed a step."""
    if newest := newest_complete(checkpoints):
        return StoppedOnRequest(f"before a step was completed; the newest checkpoint is {newest.name}")
    return StoppedOnRequest("before the first step was completed; there is nothing to save")
