"""Write ``metrics.jsonl`` and ``eval.jsonl`` of a run, and run its evaluations.

``MetricsRows`` times the phases of a step, reports them to the launcher, and writes a row for each optimizer step.
``Evaluation`` writes a row for each evaluation, and leaves the training unchanged.
"""

import hashlib
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from accelerate.data_loader import IterableDatasetShard
from accelerate.utils import broadcast_object_list, gather_object, set_seed
from transformers.trainer_utils import EvalLoopOutput

from grpo_recipes.evaluate.scores import average_rewards, extract_answer, score_groups
from grpo_recipes.process.reports import PhaseFile
from grpo_recipes.recipe.generated import recorded_columns, recorded_values
from grpo_recipes.runs.rundir import read_rows, write_json
from grpo_recipes.runs.stop_request import Stopped
from grpo_recipes.runs.trace import TimedBlock, Trace, measure_process_age
from grpo_recipes.trainers.checkpoints import capture_random_states, copy_containers, replace_contents
from grpo_recipes.trainers.protocol import InnerTrainer

PHASES = ("sample", "score", "sync", "save", "evaluate")


class MetricsRows:
    """Time the phases of a step, report them to the launcher, and write a row of ``metrics.jsonl`` for each step.

    A row has ``seconds/<phase>`` for ``PHASES``, ``update`` (the remaining time) and ``step`` (the sum). ``evaluate``
    counts the evaluation after the previous step. ``syncs`` counts the transfers in ``seconds/sync``.

    The trace of each rank gets the same times as spans: a step, its phases inside it, and ``update`` between them.
    """

    def __init__(self, trainer: InnerTrainer, run_dir: Path, rank: int):
        self._trainer = trainer
        self._file = run_dir / "metrics.jsonl"
        self._seconds, self._syncs = dict.fromkeys(PHASES, 0.0), 0
        self._prompt_values: dict[str, list[Any]] = {}  # by name: values of the prompts sampled since the last row
        self._row_began: float | None = None
        self._tokens_before = 0
        self._wandb_url: str | None = None
        self._phase_file = PhaseFile(run_dir, rank)
        self.trace = Trace(f"rank_{rank}", run_dir)
        self._open_spans = 0
        self._row_step = 1  # the step of the row under way
        self._update_began: float | None = None  # the end of the row's last phase; None before the first row

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Report this phase to the launcher in the block, and add the block's time to ``seconds/NAME`` of the row.

        A sync inside a sample counts only as sync. A block that raises an exception adds no time.
        """
        sync_seconds = self._seconds["sync"]
        with self.reported(name), self.span(name) as timed:
            yield
        self._seconds[name] += timed.seconds
        self._syncs += name == "sync"
        if name == "sample":
            self._seconds["sample"] -= self._seconds["sync"] - sync_seconds

    @contextmanager
    def span(self, name: str) -> Iterator[TimedBlock]:
        """Add the block to this rank's trace, and yield an object that has the block's seconds after it.

        A span that is not inside another ends the ``update`` under way.
        """
        timed = TimedBlock(time.perf_counter())
        if self._open_spans == 0:
            self._end_update(timed.start)
        self._open_spans += 1
        try:
            yield timed
        finally:
            timed.end = time.perf_counter()
            self.trace.add(name, timed.start, timed.end, step=self._row_step)
            self._open_spans -= 1
            if self._open_spans == 0 and self._row_began is not None:
                self._update_began = timed.end

    def _end_update(self, now: float) -> None:
        """Add the time since the last phase to the trace, as ``update``. Before the first step, do nothing."""
        if self._update_began is not None:
            self.trace.add("update", self._update_began, now, step=self._row_step)

    @contextmanager
    def reported(self, phase: str) -> Iterator[None]:
        """Report this phase to the launcher in the block, and the outer phase again afterwards."""
        outer_phase = self.enter(phase)
        try:
            yield
        finally:
            self.enter(outer_phase)

    def enter(self, phase: str) -> str:
        """Report to the launcher that a phase begins. Return the previous phase."""
        return self._phase_file.enter(phase, self._trainer.state.global_step)

    def begin_update(self) -> None:
        """Report the phase ``update``. The first call of the process starts the clock of the first row."""
        self.enter("update")
        if self._row_began is None:
            self._row_began = self._update_began = time.perf_counter()
            self._row_step = self._trainer.state.global_step + 1
            self.trace.add("start", self._row_began - measure_process_age(), self._row_began)
            self._tokens_before = self._trainer.state.num_input_tokens_seen

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Count the time of the block as ``evaluate``, including its sampling and scoring."""
        seconds, syncs = self._seconds, self._syncs
        self._seconds = dict(seconds)
        try:
            with self.span("evaluate") as timed:
                yield
        finally:
            if self._row_began is not None:  # the row of the first step does not cover the time before it
                seconds["evaluate"] += timed.seconds
            self._seconds, self._syncs = seconds, syncs

    def record_prompt_values(self, rows: list[dict[str, Any]]) -> None:
        """Gather recorded values of a generation's prompts, such as seeds, for the next row. Called by every rank."""
        for name, values in recorded_values(rows).items():
            values_of_ranks = gather_object(values)
            if self._trainer.accelerator.is_main_process:
                self._prompt_values.setdefault(name, []).extend(values_of_ranks[:: self._trainer.num_generations])

    def write(self, logs: dict[str, float]) -> None:
        """End the row of a step, on every rank: add the step to the trace. The next row begins.

        The main process appends a row with TRL's ``logs``, times, tokens and memory to ``metrics.jsonl``. If the W&B
        address has changed, it also writes ``tracked.json``.
        """
        now, state = time.perf_counter(), self._trainer.state
        self._end_update(now)
        self.trace.add("step", self._row_began or now, now, step=state.global_step)
        if self._trainer.accelerator.is_main_process:
            self._append_row(logs, now)
        self._row_began = self._update_began = now
        self._row_step, self._tokens_before = state.global_step + 1, state.num_input_tokens_seen
        self._seconds, self._syncs = dict.fromkeys(PHASES, 0.0), 0
        self._prompt_values = {}

    def _append_row(self, logs: dict[str, float], now: float) -> None:
        """Append the row to ``metrics.jsonl``, and write the address of the W&B run if it has changed."""
        state = self._trainer.state
        step_seconds = now - (self._row_began or now)
        tokens = state.num_input_tokens_seen - self._tokens_before
        trained = step_seconds - self._seconds["evaluate"]
        seconds = {**self._seconds, "update": step_seconds - sum(self._seconds.values()), "step": step_seconds}
        row = {
            "step": state.global_step,
            "max_steps": state.max_steps,
            **logs,
            "tokens_per_second": tokens / trained if trained > 0 else 0.0,
            **{f"seconds/{name}": value for name, value in seconds.items()},
            "syncs": self._syncs,
            **self._prompt_values,
            **measure_memory(self._trainer.accelerator.device),
        }
        append_json(self._file, row)
        wandb = sys.modules.get("wandb")
        wandb_url = wandb.run.url if wandb is not None and wandb.run is not None else None
        if wandb_url != self._wandb_url:
            write_json(self._file.with_name("tracked.json"), {"wandb": wandb_url})  # the report links to it
            self._wandb_url = wandb_url


def measure_memory(device: torch.device) -> dict[str, float]:
    """Return the current and the peak memory of this process in GB: of the GPU, or resident memory on CPU."""
    if device.type == "cuda":
        current, peak = torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device)
    else:
        status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        current, peak = (1024 * int(status[name].split()[0]) for name in ("VmRSS", "VmHWM"))
    return {"memory/gb": current / 1e9, "memory/peak_gb": peak / 1e9}


def to_json_number(value: Any) -> Any:
    """Convert a value for JSON: infinite and undefined numbers become text, and -0.0 becomes 0.0."""
    if not isinstance(value, float):
        return value
    return value + 0.0 if math.isfinite(value) else str(value)


def append_json(file: Path, *rows: dict[str, Any]) -> None:
    """Append rows to a JSONL file; first end an incomplete last line, which a kill can leave, with a line break."""
    texts = [json.dumps({key: to_json_number(value) for key, value in row.items()}) + "\n" for row in rows]
    with file.open("ab+") as lines:
        if lines.tell() and os.pread(lines.fileno(), 1, lines.tell() - 1) != b"\n":
            lines.write(b"\n")
        lines.write("".join(texts).encode())


class Evaluation:
    """Evaluate as in TRL, write ``eval.jsonl``, and leave the training unchanged.

    TRL averages the means of batches, and the last batch may repeat prompts. Here every completion counts once. A stop
    request ends an evaluation. If it was due, the resumed run makes it.
    """

    def __init__(self, trainer: InnerTrainer, run_dir: Path):
        self._trainer = trainer
        self._file = run_dir / "eval.jsonl"
        self.batch = 0  # number of the batch; sampling seeds depend on it
        self.rewards: list[torch.Tensor] | None = None  # (B, rewards) for each batch; None outside an evaluation
        self._answers: list[str | None] = []  # answers in the same completions
        self._set: str | None = None
        self._inside = False  # True in an evaluation and while one is due, because a stop ends it as a whole
        self.earlier_metrics: dict[
            str | None, dict[str, float]
        ] = {}  # by set: written for this step by an earlier attempt
        self.owed = False  # whether the run was stopped in an evaluation that was due

    def set_name(self, eval_dataset: Any, prefix: str) -> str | None:
        """Return a set's name in ``eval.jsonl``: its key in a dict, or the prefix. None for the trainer's own set."""
        if eval_dataset is None or eval_dataset is self._trainer.eval_dataset:
            return None
        if isinstance(eval_dataset, str):  # the key of one of the trainer's own sets
            return eval_dataset
        return "other" if prefix == "eval" else prefix.removeprefix("eval_")  # "eval" is the default prefix

    def read_earlier_metrics(self) -> None:
        """Read the metrics that an earlier attempt wrote for this step into ``earlier_metrics``, by set.

        Only the trainer's own sets count, which are then not evaluated again. Called by every rank.
        """
        trainer = self._trainer
        set_names = trainer.eval_dataset if isinstance(trainer.eval_dataset, dict) else {None}
        rows = read_rows(self._file) if trainer.accelerator.is_main_process else []
        rows = [row for row in rows if row["step"] == trainer.state.global_step and row.get("set") in set_names]
        (rows,) = broadcast_object_list([rows])  # from rank 0, because other nodes may see the file later
        for row in rows:
            # Confidence intervals are only in the file. append_json wrote infinite numbers as text.
            numbers = {
                name: float(value) if isinstance(value, str) else value
                for name, value in row.items()
                if name.startswith("eval_") and not name.endswith("_ci")
            }
            self.earlier_metrics[row.get("set")] = numbers

    @property
    def is_running(self) -> bool:
        """Whether an evaluation is running or due."""
        return self._inside

    def start_batch(self) -> None:
        """Increase the batch number, which is part of the sampling seeds."""
        self.batch += 1

    @contextmanager
    def due(self) -> Iterator[None]:
        """Run the evaluation that is due in the block. If a stop request ends it, set ``owed`` and suppress Stopped."""
        self._inside = True
        try:
            yield
        except Stopped:
            self.owed = True
        finally:
            self._inside, self.earlier_metrics = False, {}

    @contextmanager
    def running(self, name: str | None = None) -> Iterator[None]:
        """Evaluate a set in the block: apply the recipe's evaluation sampling, and restore the training afterwards.

        Suppress Stopped, so that a stop request ends only this evaluation, unless it is part of another.
        """
        args, rollouts = self._trainer.args, self._trainer.rollouts
        sampling = self._trainer.sampling_with(
            temperature=args.eval_temperature,
            top_p=args.eval_top_p,
            max_completion_length=args.eval_max_completion_length,
        )
        seed = args.eval_sampling_seed
        try:
            with (
                self.undisturbed(name),
                sampling,
                nullcontext() if seed is None else rollouts.using_seed(seed),
                self._trainer.rows.reported("evaluate"),
            ):
                yield
        except Stopped:
            if self._inside:
                raise

    @contextmanager
    def undisturbed(self, name: str | None = None) -> Iterator[None]:
        """Seed the block for the set ``name``, and restore the training afterwards.

        Restored are the random states, TRL's table of completions, the model's mode, and the times of the row.

        TRL reads from the model's mode whether the next log belongs to the training. transformers takes any evaluation
        of a callback for the evaluation that is due.
        """
        trainer = self._trainer
        logs, is_training = copy_containers(trainer._logs), trainer.model.training
        outer_set, is_nested = self._set, self._inside
        due_actions = trainer.control.should_log, trainer.control.should_evaluate
        restore_random_states = capture_random_states()
        try:
            self._set, self._inside = name, True
            with trainer.rows.evaluating():
                # The seed depends on step, rank and set, so a late evaluation draws the same completions.
                seed = trainer.args.seed if trainer.args.eval_sampling_seed is None else trainer.args.eval_sampling_seed
                text = f"{seed}/eval/{trainer.state.global_step}/{trainer.args.process_index}"
                text += "" if name is None else f"/{name}"
                set_seed(int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big"))
                yield
        finally:
            self._set, self._inside = outer_set, is_nested
            restore_random_states()
            replace_contents(trainer._logs, logs)
            self.rewards = None
            trainer.model.train(is_training)
            if not is_nested:
                trainer.control.should_log, trainer.control.should_evaluate = due_actions
            trainer._metrics["eval"].clear()

    @property
    def has_own_sampling(self) -> bool:
        """Whether the recipe lets evaluations sample with another temperature or ``top_p`` than the training."""
        trainer, args = self._trainer, self._trainer.args
        has_temperature = args.eval_temperature not in (None, trainer.temperature)
        return has_temperature or args.eval_top_p not in (None, trainer.top_p)

    def add(self, rewards_BR: torch.Tensor, completions: list[Any]) -> None:
        """Add the rewards of all ranks' batch, and the answers in this rank's completions. Called by every rank."""
        assert self.rewards is not None
        self.rewards.append(rewards_BR.detach().cpu())
        self._answers += gather_object([extract_answer(completion) for completion in completions])

    def loop(self, run: Callable[[], EvalLoopOutput], dataloader: Any, description: str, prefix: str) -> EvalLoopOutput:
        """Run transformers' loop with ``run``, add metrics of rewards to its output, and write the evaluation's row.

        The last batch may repeat prompts to be full. The means count every completion once.
        """
        began, trainer = time.perf_counter(), self._trainer
        self.batch, self.rewards, self._answers = 0, [], []
        trainer._metrics["eval"].clear()
        output = run()
        rewards = torch.cat(self.rewards or [torch.empty(0, len(trainer.reward_func_names))])
        repeats = trainer.num_generations_eval
        dataset = dataloader.dataset
        dataset = dataset.dataset if isinstance(dataset, IterableDatasetShard) else dataset
        prompts_of_set = dataset.rows // repeats if isinstance(dataset, CountedStream) else len(dataset)
        prompts = min(prompts_of_set, len(rewards) // repeats)
        means: dict[str, float | None] = {}
        for name, values in trainer._metrics["eval"].items():  # one value per batch, as in TRL
            numbers = [value for value in values if not math.isnan(value)]
            means[name] = fmean(numbers) if numbers else None
        # Repeated prompts in the last batch come after all completions that count.
        counted = rewards[: prompts * repeats]
        scored = counted, trainer.reward_func_names, trainer.reward_weights
        means |= average_rewards(*scored)
        at_k = score_groups(*scored, self._answers[: len(counted)], repeats) if prompts else {}
        means |= {name: score for name, (score, _) in at_k.items()}
        all_metrics: dict[str, Any] = output.metrics if output.metrics is not None else {}
        all_metrics.update({f"{prefix}_{name}": mean for name, mean in means.items()})
        trainer._metrics["eval"].clear()  # otherwise TRL logs them again under its own names
        self.rewards = None
        if description == "Evaluation" and trainer.accelerator.is_main_process:
            set_columns, start = ({}, "eval_") if self._set is None else ({"set": self._set}, f"eval_{self._set}_")
            metrics = {f"{start}{name.removeprefix(f'{prefix}_')}": value for name, value in all_metrics.items()}
            metrics.pop(f"{start}model_preparation_time", None)  # transformers' metric of a process's first evaluation
            metrics |= {f"{start}{name}_ci": list(limits) for name, (_, limits) in at_k.items() if limits is not None}
            for column, metric in recorded_columns().items():
                if column in (getattr(dataset, "column_names", None) or ()):
                    metrics[metric] = list(dataset[column])[:prompts]
            row = {"step": trainer.state.global_step, **set_columns, **metrics, "prompts": prompts}
            append_json(self._file, {**row, "seconds": time.perf_counter() - began})
        return output


class CountedStream(torch.utils.data.IterableDataset[Any]):
    """A stream that counts its rows, because accelerate fills up the last batch.

    accelerate would distribute a plain stream of several files by file, and processes would wait for each other.
    """

    def __init__(self, stream: Any):
        self.stream, self.rows = stream, 0

    def __iter__(self) -> Iterator[Any]:
        self.rows = 0
        for row in self.stream:
            self.rows += 1
            yield row

    def set_epoch(self, epoch: int) -> None:
        """Pass the epoch to the stream, which shuffles by it."""
        self.stream.set_epoch(epoch)
