"""Save complete checkpoints, restore them, and stop on request. A resumed run equals an uninterrupted run.

A checkpoint is written to a separate folder and renamed when all ranks have finished. It adds the state that
transformers does not save. On a stop request, all ranks stop at the same place and save the last completed step.
"""

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
from typing import IO, Any, BinaryIO, cast

import numpy
import torch
import torch.distributed
from accelerate.utils import broadcast_object_list, gather_object
from transformers import StoppingCriteriaList
from trl.trainer.utils import RepeatSampler

from grpo_recipes.runs.checkpoints import (
    find_newest_complete,
    flush_to_disk,
    is_complete,
    new_digest,
    prune_checkpoints,
    publish_checkpoint,
)
from grpo_recipes.runs.rundir import read_json
from grpo_recipes.runs.stop_request import Stopped, StoppedOnRequest, StopRequest
from grpo_recipes.trainers.model import load_reference, save_reference
from grpo_recipes.trainers.protocol import InnerTrainer

# Under DDP on CPU optimizer.pt is loaded with map_location "cpu:0", which torch cannot restore.
torch.serialization.register_package(
    5, lambda obj: None, lambda obj, location: obj if location.startswith("cpu:") else None
)

# State that a step changes and transformers does not save: name in the checkpoint (it must not change) -> attribute.
_UNSAVED = {
    "step": "_step", "metrics": "_metrics", "logs": "_logs", "step_time": "_current_train_step_time",
    "tr_loss": "_tr_loss", "total_loss": "_total_loss_scalar", "last_logged": "_globalstep_last_logged",
    "flos": "current_flos", "total_flos": "state.total_flos", "tokens_seen": "state.num_input_tokens_seen",
    "evaluation_owed": "evaluation.owed",
}  # fmt: skip
# Keys that decide how a generation is split into micro-steps.
_SPLIT = ("per_device_train_batch_size", "gradient_accumulation_steps", "steps_per_generation", "num_iterations")
_ORDER, _CONTROLLERS, _ENDED = "order_of_data.json", "controllers.json", "ended_by_callback"


class Checkpoints:
    """Save each checkpoint in a separate folder, rename it when complete, and only then delete old ones. Restore them.

    transformers writes in place and deletes during the save. With a limit of 1, a kill can leave no checkpoint.
    """

    def __init__(self, trainer: InnerTrainer):
        self._trainer = trainer
        self.staging: Path | None = None  # the folder of a running save
        self._unsaved = dict(_UNSAVED)
        self._restarted = False  # whether a resume has restarted an epoch

    def add_state(self, **attributes: str) -> None:
        """Add attributes of the trainer to the saved state: ``name_in_the_checkpoint="attribute"``."""
        self._unsaved |= attributes

    def save(self, write: Callable[[], None]) -> None:
        """Save the current step with ``write``, transformers' own save, publish it, and delete old checkpoints.

        Called by every rank. Do nothing if the step is already saved.
        """
        args, accelerator, step = self._trainer.args, self._trainer.accelerator, self._trainer.state.global_step
        folder = Path(args.output_dir)
        name = f"checkpoint-{step}"
        # Another node may not see the checkpoint yet: network file systems cache folders.
        (is_saved,) = broadcast_object_list([is_complete(folder / name)])
        if is_saved:
            return
        staged = folder / "partial" / name
        if accelerator.is_main_process:
            shutil.rmtree(staged.parent, ignore_errors=True)  # left by a killed save
        accelerator.wait_for_everyone()
        self.staging = staged.parent  # transformers' own pruning finds a single checkpoint there
        try:
            with collecting_digests(staged) as digests:
                write()
        finally:
            self.staging = None
        if not accelerator.is_main_process:
            for file_name in digests:  # flushed on the node that wrote it; rank 0 flushes its files when it publishes
                flush_to_disk(staged / file_name)
        # Gathering also waits for the files of all ranks.
        digests_of_ranks = dict(gather_object(list(digests.items())))
        if accelerator.is_main_process:
            publish_checkpoint(staged, folder, step, args.world_size, digests_of_ranks)
            prune_checkpoints(folder, args.save_total_limit, self._trainer.best.checkpoint)
        accelerator.wait_for_everyone()

    def mark_ended(self) -> None:
        """Mark this step's checkpoint: a callback ended the training, and a resumed run must not continue.

        Early stopping needs no mark. Its count is in the checkpoint, and a larger patience continues the training.
        Called by every rank.
        """
        if self._trainer.accelerator.is_main_process and not self._trainer.best.has_stopped_early:
            folder = Path(self._trainer.args.output_dir)
            (folder / f"checkpoint-{self._trainer.state.global_step}" / _ENDED).touch()
        self._trainer.accelerator.wait_for_everyone()

    def state(self) -> dict[str, Any]:
        """Return copies of the state of this rank that a step changes and transformers does not save."""
        trainer = self._trainer
        return {
            **{name: copy_containers(attrgetter(path)(trainer)) for name, path in self._unsaved.items()},
            "split": self._split,
            "buffered": trainer._buffered_inputs if trainer._step % self._window_steps else None,
            "ahead": trainer.rollouts.pending_generation,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Set the trainer's attributes and its pending generation to ``state``, a result of the method ``state``.

        Raise ValueError if it was saved while a generation was in use, and this run splits generations differently.
        """
        trainer, saved_split = self._trainer, state.get("split", self._split)  # earlier versions did not save it
        if state["buffered"] is not None and saved_split != self._split:
            fix = "resume with the saved values of these keys, and change them after a generation has been used up"
            settings, saved_settings = _format_settings(self._split), _format_settings(saved_split)
            problem = f"saved inside a generation window of {saved_settings}; this run has {settings}"
            raise ValueError(f"the checkpoint was {problem}. Fix: {fix}")
        for name, path in self._unsaved.items():
            owner, _, attribute = path.rpartition(".")
            if isinstance(value := attrgetter(path)(trainer), dict | deque):
                replace_contents(value, state[name])
            else:
                setattr(attrgetter(owner)(trainer) if owner else trainer, attribute, state[name])
        if state["buffered"] is None:  # TRL samples if the number of micro-steps is a multiple of the window
            trainer._step = math.ceil(trainer._step / self._window_steps) * self._window_steps
        trainer._buffered_inputs = state["buffered"]
        trainer.rollouts.restore_pending_generation(state.get("ahead"))
        trainer.evaluation.owed &= trainer.args.eval_strategy != "no"

    @property
    def _split(self) -> dict[str, int]:
        """The recipe keys that decide how a generation is split into micro-steps, with this run's values."""
        return {key: getattr(self._trainer.args, key) for key in _SPLIT}

    @property
    def _window_steps(self) -> int:
        """Number of micro-steps that use a generation."""
        return int(self._trainer.args.steps_per_generation * self._trainer.num_iterations)

    def save_unsaved(self, folder: Path) -> None:
        """Write the state that transformers does not save into the checkpoint ``folder``. Called by every rank.

        It includes the pending generation, the reference model of ``sync_ref_model``, the order of data, and the
        controllers.
        """
        trainer = self._trainer
        trainer.best.name_checkpoint()  # trainer_state.json is written after this
        torch.save({**self.state(), "ahead": trainer.rollouts.finish_pending_generation()}, self._state_file(folder))
        if trainer.args.sync_ref_model:
            save_reference(trainer, folder)
        if trainer.accelerator.is_main_process:
            order = {**self._collect_order_settings(), "restarted": self._restarted}
            (folder / _ORDER).write_text(json.dumps(order, indent=1) + "\n")
            states = {name: controller.state_dict() for name, controller in trainer.controllers.items()}
            (folder / _CONTROLLERS).write_text(json.dumps(states) + "\n")

    def load_optimizer(self, folder: Path, load: Callable[[], None]) -> None:
        """Restore the optimizer with ``load``, transformers' own method, then the reference and the controllers.

        Raise FileNotFoundError if a part is missing, ValueError if this run uses prompts in another order.
        """
        trainer = self._trainer
        self._require_same_order(folder)
        if not (trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled):  # they check their own files
            _require_files(folder, "optimizer.pt", "scheduler.pt")
        load()
        self._print_restored("optimizer and learning-rate schedule")
        if trainer.args.sync_ref_model:
            load_reference(trainer, folder)
            self._print_restored("reference model of the last sync")
        states = read_json(folder / _CONTROLLERS)
        for name, controller in trainer.controllers.items():
            if name not in states:
                path = folder / _CONTROLLERS
                raise FileNotFoundError(f"{path} has no state of the {name} controller: it was not on when saved")
            controller.load_state_dict(states[name])
            self._print_restored(f"{name} controller: {states[name]}")

    def load_random_states(self, folder: Path, load: Callable[[], None]) -> None:
        """Restore the random states with ``load``, transformers' own method, then this rank's other state.

        Raise FileNotFoundError if a file is missing, ValueError if a part of the state is missing.
        """
        trainer, args, path = self._trainer, self._trainer.args, self._state_file(folder)
        if not path.exists():
            raise FileNotFoundError(f"{path} is missing: the checkpoint was made with another number of processes")
        _require_files(folder, f"rng_state_{args.process_index}.pth" if args.world_size > 1 else "rng_state.pth")
        load()
        # weights_only=False is safe for a file that this run wrote: it contains plain containers, tensors and arrays.
        state: dict[str, Any] = torch.load(path, map_location=args.device, weights_only=False)
        if missing := [name for name in (*self._unsaved, "buffered") if name not in state]:
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
        """Print a line for each restored part of the training, on rank 0."""
        if self._trainer.accelerator.is_main_process:
            for item in items:
                print(f"grpo: restored {item}", flush=True)

    def _state_file(self, folder: Path) -> Path:
        """Return this rank's file in a checkpoint for the state that transformers does not save."""
        return folder / f"grpo_window_{self._trainer.args.process_index}.pt"

    def _collect_order_settings(self) -> dict[str, Any]:
        """Return the settings that decide which prompts a step gets."""
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
        """Raise ValueError if the checkpoint's run used prompts in another order, or had restarted an epoch.

        With ``ignore_data_skip``, which restarts the epoch, any order is accepted.
        """
        order = self._collect_order_settings()
        saved = read_json(folder / _ORDER) or {**order, "restarted": False}  # earlier versions did not save it
        self._restarted = saved["restarted"] or self._trainer.args.ignore_data_skip
        if self._trainer.args.ignore_data_skip:
            return
        fix = "add --ignore_data_skip true, which restarts the epoch"
        if self._restarted:
            problem = "comes from a run that restarted an epoch: its position in the data is unknown"
            raise ValueError(f"{folder.name} {problem}. Fix: {fix}")
        if changed := [key for key in order if order[key] != saved.get(key)]:
            settings = ({key: facts.get(key) for key in changed} for facts in (saved, order))
            saved_values, values = map(_format_settings, settings)
            problem = f"saved with {saved_values}, this run has {values}: it would continue elsewhere in the data"
            raise ValueError(f"{folder.name} was {problem}. Fix: resume with the saved keys and data, or {fix}")


class Preemption:
    """Stop all ranks at the same place on request. The run is saved and exits with code 75.

    Sampling, scoring and evaluation end early. A running update or save is finished. The state after each optimizer
    step stays in memory, so that the checkpoint has nothing of the unfinished step.
    """

    def __init__(self, trainer: InnerTrainer, checkpoints: Checkpoints, stop: StopRequest):
        self._trainer, self._checkpoints = trainer, checkpoints
        self.stop = stop
        self._agreed = False
        self._last_step: tuple[dict[str, Any], Callable[[], None]] | None = None

    @property
    def _stoppable(self) -> bool:
        """Whether the training has a next step that a stop would prevent. The same on every rank."""
        trainer = self._trainer
        ends = trainer.control.should_training_stop or trainer.state.global_step >= trainer.state.max_steps
        return trainer.is_in_train and not ends

    def stop_if_agreed(self) -> None:
        """Raise ``Stopped`` on every rank if any rank has seen a stop request, unless no step is left.

        Called by every rank.
        """
        if self._stoppable:
            self._agreed = self._agreed or any_rank_requests_stop(self.stop, self._trainer.args.device)
            if self._agreed:
                raise Stopped

    def record_completed_step(self) -> None:
        """Copy the completed step's state, except model and optimizer. Then raise ``Stopped`` on a stop request.

        Do nothing after the last step.
        """
        if self._stoppable:
            self._last_step = self._checkpoints.state(), capture_random_states()
            self.stop_if_agreed()

    def save_last_step(self) -> StoppedOnRequest:
        """Restore the state of the last completed step and save its checkpoint. Return the exception that ends the run.

        Without a completed step, save nothing.
        """
        trainer = self._trainer
        if self._last_step is None:
            return make_stop_before_first_step(Path(trainer.args.output_dir))
        state, restore_random_states = self._last_step
        self._checkpoints.restore(state)
        restore_random_states()
        trainer._save_checkpoint(trainer.model, None)
        return StoppedOnRequest(f"after step {trainer.state.global_step}, state saved")

    def cutting_short(self) -> AbstractContextManager[None]:
        """Let ``StopRequest.cuts`` become true in the block, which must poll it and end early after a stop request.

        If no training step follows, ``cuts`` stays false, because the result of the block is still needed.
        """
        return self.stop.cutting_short() if self._stoppable else nullcontext()

    @contextmanager
    def sampling(self) -> Iterator[None]:
        """Let a stop request end sampling in the block early.

        TRL passes no stopping criteria to ``generate`` and has no hook for them, so the model's method adds them here.
        Under ZeRO-3 and FSDP, transformers continues until all ranks have stopped.
        """
        model = self._trainer.accelerator.unwrap_model(self._trainer.model_wrapped)

        def stopped(ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
            """Return for each row whether to stop, as transformers' stopping criterion: all or none."""
            return torch.full((len(ids),), self.stop.cuts(), device=ids.device)

        instance_method = vars(model).get("generate")
        model.generate = partial(model.generate, stopping_criteria=StoppingCriteriaList([stopped]))
        try:
            with self.cutting_short():
                yield
        finally:
            del model.generate
            if instance_method is not None:
                model.generate = instance_method


def choose_checkpoint(folder: Path) -> Path | None:
    """Return the newest complete checkpoint that rank 0 sees in ``folder``, or None. Called by every rank.

    Ranks of other nodes may not see it yet: network file systems cache folders. They must not resume from another one.
    """
    checkpoint: Path | None
    (checkpoint,) = broadcast_object_list([find_newest_complete(folder)])
    return checkpoint


def ended_by_callback(checkpoint: str | None) -> bool:
    """Return whether the checkpoint folder has the marker of ``mark_ended``. False for None."""
    return checkpoint is not None and (Path(checkpoint) / _ENDED).exists()


def copy_containers(value: Any) -> Any:
    """Return a copy of a dict and its values, a list, a deque (as a list) or a tensor. Return other values unchanged.

    The items of a list or deque are not copied.
    """
    if isinstance(value, dict):
        return {name: copy_containers(item) for name, item in value.items()}
    if isinstance(value, list | deque):
        return list(value)
    return value.clone() if isinstance(value, torch.Tensor) else value


def replace_contents(container: Any, saved: Any) -> None:
    """Replace the content of a dict, list or deque by a result of ``copy_containers``. A deque keeps its ``maxlen``."""
    if not isinstance(container, dict):
        container.clear()
        container.extend(saved)
        return
    if isinstance(container, defaultdict):  # its keys are added during a step
        container.clear()
    for name, values in saved.items():
        replace_contents(container[name], values)


def _require_files(folder: Path, *names: str) -> None:
    """Raise FileNotFoundError unless the checkpoint ``folder`` has these files."""
    for name in names:
        if not (folder / name).exists():
            raise FileNotFoundError(f"{folder / name} is missing: this part of the training cannot be restored")


def _format_settings(facts: dict[str, Any]) -> str:
    """Return names with their values for a message: ``seed 1, num_generations 8``."""
    return ", ".join(f"{name} {value}" for name, value in facts.items())


@contextmanager
def collecting_digests(folder: Path) -> Iterator[dict[str, str]]:
    """Yield a dict of digests by file name, to which each ``torch.save`` below ``folder`` in the block adds its file.

    After the block, the dict loses files that were changed since their ``torch.save``. Reading the files again
    would cost several times as much. transformers and accelerate call ``torch.save`` in many places, so the function
    itself is replaced. torch's CRC-32 is turned off: it takes longer than the digest, and ``torch.load`` never checks
    it.
    """
    digests: dict[str, str] = {}
    stats: dict[str, os.stat_result] = {}
    torch_save, crc32 = torch.save, torch.serialization.get_crc32_options()

    def save(obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
        """Save as in torch, and compute the digest of files in ``folder``."""
        path = Path(f) if isinstance(f, str | os.PathLike) else None
        if path is None or not path.is_relative_to(folder):
            torch_save(obj, f, *args, **kwargs)
            return
        with path.open("wb") as file:
            digested = _DigestedFile(file)
            torch_save(obj, cast(IO[bytes], digested), *args, **kwargs)
        name = str(path.relative_to(folder))
        digests[name], stats[name] = digested.digest.hexdigest(), path.stat()

    torch.serialization.set_crc32_options(False)
    torch.save = save
    try:
        yield digests
    finally:
        torch.save = torch_save
        torch.serialization.set_crc32_options(crc32)
    for name, stat in stats.items():
        now = (folder / name).stat() if (folder / name).exists() else None
        if now is None or (now.st_size, now.st_mtime_ns) != (stat.st_size, stat.st_mtime_ns):
            del digests[name]


class _DigestedFile:
    """A file that computes a digest while it is written, with the two methods that ``torch.save`` needs."""

    _chunk_bytes = 1 << 20  # small enough to stay in the core's cache until it is copied to the page cache

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.flush = file.flush
        self.digest = new_digest()

    def write(self, data: Any) -> int:
        """Write bytes, add them to the digest, and return their number."""
        view = memoryview(data).cast("B")
        for start in range(0, len(view), self._chunk_bytes):
            chunk = view[start : start + self._chunk_bytes]
            self.digest.update(chunk)
            self._file.write(chunk)
        return len(view)


def begin_epoch(sampler: RepeatSampler | None, epoch: int) -> None:
    """Seed the sampler's generator so that an epoch's prompt order depends only on seed and epoch, also after a resume.

    Do nothing for a stream, which has no sampler: accelerate sets its epoch.
    """
    if sampler is not None and sampler.shuffle:
        assert sampler.seed is not None  # TRL passes the recipe's seed
        sampler.generator.manual_seed(sampler.seed)
        for _ in range(epoch):
            torch.randperm(sampler.num_samples, generator=sampler.generator)


def capture_random_states() -> Callable[[], None]:
    """Return a function that restores the current random states of Python, NumPy, torch and the GPU."""
    python_state, numpy_state, cpu_state = random.getstate(), numpy.random.get_state(), torch.get_rng_state()
    device_state = torch.cuda.get_rng_state() if torch.cuda.is_available() else None

    def restore() -> None:
        """Set all random states to the captured ones."""
        random.setstate(python_state)
        numpy.random.set_state(numpy_state)
        torch.set_rng_state(cpu_state)
        if device_state is not None:
            torch.cuda.set_rng_state(device_state)

    return restore


def any_rank_requests_stop(stop: StopRequest, device: torch.device) -> bool:
    """Return whether any rank has seen a stop request. Called by every rank."""
    is_requested = torch.tensor(int(stop.requested()), device=device)
    if torch.distributed.is_initialized():
        torch.distributed.all_reduce(is_requested, op=torch.distributed.ReduceOp.MAX)
    return bool(is_requested)


def make_stop_before_first_step(checkpoints: Path) -> StoppedOnRequest:
    """Return the StoppedOnRequest for a run that was stopped before this attempt completed a step.

    Its message names the newest checkpoint, if there is one.
    """
    if newest := find_newest_complete(checkpoints):
        return StoppedOnRequest(f"before a step was completed; the newest checkpoint is {newest.name}")
    return StoppedOnRequest("before the first step was completed; there is nothing to save")
