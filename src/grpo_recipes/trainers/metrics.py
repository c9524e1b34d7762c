"""Rows that a training writes: ``metrics.jsonl`` per optimizer step, ``samples.jsonl`` to read, and ``eval.jsonl``."""

import hashlib
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from accelerate.data_loader import IterableDatasetShard
from accelerate.utils import broadcast_object_list, gather_object, set_seed
from transformers.trainer_utils import EvalLoopOutput

from grpo_recipes.attributes import replaced
from grpo_recipes.evaluate.scores import answer_in, group_scores, reward_means, weighted_rewards
from grpo_recipes.process.reports import PhaseFile
from grpo_recipes.recipe.generated import recorded_columns, recorded_values
from grpo_recipes.runs.rundir import read_rows, write_json
from grpo_recipes.runs.stop_request import Stopped
from grpo_recipes.secrets import masked
from grpo_recipes.trainers.checkpoints import contents, keep_random_states, refill

PHASES = ("sample", "score", "sync", "save", "evaluate")
LONGEST_TEXT = 4000  # characters
_LONGEST_EPISODE, _SHORTEST_CUT = 16_000, 200  # characters of an episode's texts together, and of one at least


class MetricsRows:
    """Time the phases of a training, report them to the launcher, and write what TRL logs.

    A row's ``seconds/<phase>`` are those of ``PHASES`` (``evaluate`` counts the evaluation after the previous step),
    update (the rest) and step (the sum); ``syncs`` counts the transfers in ``seconds/sync``.
    """

    def __init__(self, trainer: Any, run_dir: Path, rank: int):
        self._trainer = trainer
        self._file = run_dir / "metrics.jsonl"
        self._seconds, self._syncs = dict.fromkeys(PHASES, 0.0), 0
        self._recorded: dict[str, list[Any]] = {}  # values of the prompts sampled since the last row, by name
        self._row_began: float | None = None
        self._tokens_before = 0
        self._tracked: str | None = None
        self._phase_file = PhaseFile(run_dir, rank)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a phase; a sync inside a sample counts as sync alone."""
        start, synced = time.perf_counter(), self._seconds["sync"]
        with self.reported(name):
            yield
        self._seconds[name] += time.perf_counter() - start
        self._syncs += name == "sync"
        if name == "sample":
            self._seconds["sample"] -= self._seconds["sync"] - synced

    @contextmanager
    def reported(self, phase: str) -> Iterator[None]:
        """Report a phase inside another to the launcher."""
        before = self.enter(phase)
        try:
            yield
        finally:
            self.enter(before)

    def enter(self, phase: str) -> str:
        """Report that a phase begins; return the one before."""
        return self._phase_file.enter(phase, self._trainer.state.global_step)

    def begin_update(self) -> None:
        """Note that a micro-step begins; the first row begins with the first of them."""
        self.enter("update")
        if self._row_began is None:
            self._row_began = time.perf_counter()
            self._tokens_before = self._trainer.state.num_input_tokens_seen

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Count everything inside as ``evaluate``, whatever is sampled and scored there."""
        began, seconds, syncs = time.perf_counter(), self._seconds, self._syncs
        self._seconds = dict(seconds)
        try:
            yield
        finally:
            if self._row_began is not None:  # not before the first step: its row does not cover that time
                seconds["evaluate"] += time.perf_counter() - began
            self._seconds, self._syncs = seconds, syncs

    def note_prompts(self, rows: list[dict[str, Any]]) -> None:
        """Note the values of a generation's prompts that the row records, e.g. seeds. Called by every rank."""
        for name, values in recorded_values(rows).items():
            every = gather_object(values)
            if self._trainer.accelerator.is_main_process:
                self._recorded.setdefault(name, []).extend(every[:: self._trainer.num_generations])

    def write(self, logs: dict[str, float]) -> None:
        """Add the row of an optimizer step; the next one begins."""
        now, state = time.perf_counter(), self._trainer.state
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
            **self._recorded,
            **memory_row(self._trainer.accelerator.device),
        }
        append_json(self._file, row)
        wandb = sys.modules.get("wandb")
        tracked = wandb.run.url if wandb is not None and wandb.run is not None else None
        if tracked != self._tracked:
            write_json(self._file.with_name("tracked.json"), {"wandb": tracked})  # the report's link
            self._tracked = tracked
        self._row_began, self._tokens_before = now, state.num_input_tokens_seen
        self._seconds, self._syncs = dict.fromkeys(PHASES, 0.0), 0
        self._recorded = {}


def memory_row(device: torch.device) -> dict[str, float]:
    """Return the memory of a GPU that this process holds, and the most it held, in GB; on CPU its resident memory."""
    if device.type == "cuda":
        held, most = torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device)
    else:
        status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        held, most = (1024 * int(status[name].split()[0]) for name in ("VmRSS", "VmHWM"))
    return {"memory/gb": held / 1e9, "memory/peak_gb": most / 1e9}


def json_number(value: Any) -> Any:
    """Return a number as JSON has it: an infinite or undefined number becomes text, and -0.0 becomes 0.0."""
    if not isinstance(value, float):
        return value
    return value + 0.0 if math.isfinite(value) else str(value)


def append_json(file: Path, *rows: dict[str, Any]) -> None:
    """Add rows to a JSONL file, on a new line even if a kill cut the last one short."""
    texts = [json.dumps({key: json_number(value) for key, value in row.items()}) + "\n" for row in rows]
    with file.open("ab+") as lines:
        if lines.tell() and os.pread(lines.fileno(), 1, lines.tell() - 1) != b"\n":
            lines.write(b"\n")
        lines.write("".join(texts).encode())


def write_samples(file: Path, trainer: Any, answers: list[Any], episodes: list[dict[str, Any]] | None = None) -> None:
    """Add a row with all rewards of the generation that TRL just logged, and completions of rank 0's ``answers``.

    ``episodes`` are the records of the completions, (B,), where these come from environments.
    """
    logs, group, names = trainer._logs, trainer.num_generations, trainer.reward_func_names
    prompts, completions, advantages = (list(logs[name]) for name in ("prompt", "completion", "advantages"))
    rewards_BR = trainer.rewards_BR[-len(prompts) :]
    totals = [_rounded(total) for total in weighted_rewards(rewards_BR, trainer.reward_weights).tolist()]
    samples = []
    for row in chosen_rows(totals, group, len(answers), trainer.args.report_samples):
        answer = answers[row - row % group]
        samples.append(
            {
                "prompt": _text(prompts[row], roles=True),
                "completion": _text(completions[row], roles=len(completions[row]) > 1),
                "answer": None if answer is None else _text(str(answer)),
                "reward": totals[row],
                "rewards": dict(zip(names, map(_rounded, rewards_BR[row].tolist()), strict=True)),
                "advantage": _rounded(advantages[row]),
                **({"episode": _short_episode(episodes[row])} if episodes else {}),
            }
        )
    append_json(file, {"step": trainer.state.global_step + 1, "rewards": totals, "samples": samples})


def chosen_rows(totals: list[float | None], group: int, own: int, count: int) -> list[int]:
    """Choose ``count`` rows worth reading, by the rewards, (B,): of the first group, and of the one with most spread.

    Groups begin in the first ``own`` rows, whose answers rank 0 knows. Of each come best, worst, second best and so on.
    """

    def spread(start: int) -> float:
        known = [total for total in totals[start : start + group] if total is not None]
        return max(known) - min(known) if known else -1.0

    def extremes(start: int, share: int) -> list[int]:
        rows = range(start, min(start + group, len(totals)))
        ranked = sorted(rows, key=lambda row: -math.inf if totals[row] is None else totals[row], reverse=True)
        return [ranked.pop(-(place % 2)) for place in range(len(rows))][:share]

    widest = max(range(group, min(own, len(totals)), group), key=spread, default=0)
    return extremes(0, count - count // 2) + extremes(widest, count // 2) if widest else extremes(0, count)


def _short_episode(record: dict[str, Any]) -> Any:
    """Return the record of an episode with its texts masked and, in long episodes, cut earlier than others."""
    most = max(_SHORTEST_CUT, _LONGEST_EPISODE // (1 + 2 * len(record["turns"])))

    def short(value: Any) -> Any:
        if isinstance(value, dict):
            return {masked(str(name)): short(one) for name, one in value.items()}
        if isinstance(value, list):
            return [short(one) for one in value]
        return _text(value, most=most) if isinstance(value, str) else json_number(value)

    return short(record)


def _text(content: Any, roles: bool = False, most: int = LONGEST_TEXT) -> str:
    """Return a text, or chat messages one after another and under their ``roles``, masked and of bounded length."""
    if not isinstance(content, str):
        texts = [one if isinstance(one := message.get("content"), str) else json.dumps(one) for message in content]
        heads = [f"[{message['role']}]\n" if roles else "" for message in content]
        content = "\n\n".join(head + text for head, text in zip(heads, texts, strict=True))
    text = masked(content)
    more = len(text) - most
    return text if more <= 0 else f"{text[:most]} […{more:,} more characters]"


def _rounded(value: float) -> float | None:
    return round(value, 4) if math.isfinite(value) else None


class Evaluation:
    """Evaluate as TRL does, write ``eval.jsonl``, and leave no trace in the training.

    TRL averages the means of batches, whose last one may be filled up with prompts seen before; here every completion
    counts once. A stop request ends an evaluation; the resumed run makes up for it where it was due.
    """

    def __init__(self, trainer: Any, run_dir: Path):
        self._trainer = trainer
        self._file = run_dir / "eval.jsonl"
        self.batch = 0  # batches so far: sampling seeds come from the count
        self.rewards: list[torch.Tensor] | None = None  # of the batches, (B, rewards) each; None outside an evaluation
        self._answers: list[str | None] = []  # of the same completions
        self._set: str | None = None
        self._inside = False  # True inside an evaluation, or while one is due: a stop ends that as a whole
        self.made: dict[str | None, dict[str, float]] = {}  # metrics of this step by set that an earlier attempt wrote
        self.owed = False  # whether the run was stopped in an evaluation that was due

    def set_name(self, eval_dataset: Any, prefix: str) -> str | None:
        """Return what ``eval.jsonl`` calls the set, None for the trainer's own one."""
        if eval_dataset is None or eval_dataset is self._trainer.eval_dataset:
            return None
        if isinstance(eval_dataset, str):  # one of the trainer's own sets
            return eval_dataset
        return "other" if prefix == "eval" else prefix.removeprefix("eval_")  # "eval" where no prefix was passed

    def read_made(self) -> None:
        """Read the metrics of the trainer's own sets, by name, that an earlier attempt wrote for this step."""
        trainer = self._trainer
        own = trainer.eval_dataset if isinstance(trainer.eval_dataset, dict) else {None}
        rows = read_rows(self._file) if trainer.accelerator.is_main_process else []
        rows = [row for row in rows if row["step"] == trainer.state.global_step and row.get("set") in own]
        (rows,) = broadcast_object_list([rows])  # by rank 0: ranks on other nodes may see a file later
        for row in rows:  # append_json wrote numbers that JSON does not have as text
            # Intervals are of the row alone.
            metrics = {one: value for one, value in row.items() if one.startswith("eval_") and not one.endswith("_ci")}
            numbers = {name: float(value) if isinstance(value, str) else value for name, value in metrics.items()}
            self.made[row.get("set")] = numbers

    @contextmanager
    def due(self) -> Iterator[None]:
        """Owe the evaluation that the training makes inside, where a stop request ends it."""
        self._inside = True
        try:
            yield
        except Stopped:
            self.owed = True
        finally:
            self._inside, self.made = False, {}

    @contextmanager
    def running(self, name: str | None = None) -> Iterator[None]:
        """Evaluate a set inside; a stop request ends that alone, unless the evaluation is part of another."""
        try:
            with self.undisturbed(name), self._sampling(), self._seeded(), self._trainer.rows.reported("evaluate"):
                yield
        except Stopped:
            if self._inside:
                raise

    @contextmanager
    def undisturbed(self, name: str | None = None) -> Iterator[None]:
        """Put back what training continues from: random states, TRL's table of completions, the clock of the row.

        By the model's mode TRL knows whether the next log is of the training; transformers takes any evaluation that a
        callback makes for the one that is due.
        """
        trainer = self._trainer
        logs, training, inside = contents(trainer._logs), trainer.model.training, self._inside
        due = trainer.control.should_log, trainer.control.should_evaluate
        put_back_random_states = keep_random_states()
        own_table = replaced(trainer, log_completions=False)  # the parquet file of this step is the training's
        try:
            with own_table, replaced(self, _set=name, _inside=True), trainer.rows.evaluating():
                # A seed for each step, rank and set: an evaluation made up for later draws what it would have drawn.
                own = trainer.args.eval_sampling_seed
                seed = trainer.args.seed if own is None else own
                place = f"{seed}/eval/{trainer.state.global_step}/{trainer.args.process_index}"
                text = place if name is None else f"{place}/{name}"
                set_seed(int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big"))
                yield
        finally:
            put_back_random_states()
            refill(trainer._logs, logs)
            self.rewards = None
            trainer.model.train(training)
            if not inside:
                trainer.control.should_log, trainer.control.should_evaluate = due
            trainer._metrics["eval"].clear()

    def _sampling(self) -> AbstractContextManager[None]:
        """Let completions inside be drawn as the recipe says for evaluations."""
        args = self._trainer.args
        drawn: AbstractContextManager[None] = self._trainer.sampling_with(
            temperature=args.eval_temperature,
            top_p=args.eval_top_p,
            max_completion_length=args.eval_max_completion_length,
        )
        return drawn

    @property
    def samples_otherwise(self) -> bool:
        """Whether completions are drawn from another distribution than in training."""
        trainer, args = self._trainer, self._trainer.args
        own = ((args.eval_temperature, trainer.temperature), (args.eval_top_p, trainer.top_p))
        return any(given not in (None, of_training) for given, of_training in own)

    def _seeded(self) -> AbstractContextManager[None]:
        """Let sampling seeds inside be derived from that of evaluations."""
        own = self._trainer.args.eval_sampling_seed
        return nullcontext() if own is None else self._trainer.rollouts.using_seed(own)

    def add(self, rewards_BR: torch.Tensor, completions: list[Any]) -> None:
        """Take the rewards of all ranks' batch, and the answers in this rank's completions. Called by every rank."""
        assert self.rewards is not None
        self.rewards.append(rewards_BR.detach().cpu())
        self._answers += gather_object([answer_in(completion) for completion in completions])

    def loop(self, run: Callable[[], EvalLoopOutput], dataloader: Any, description: str, prefix: str) -> EvalLoopOutput:
        """Run transformers' loop, and add TRL's metrics, with the rewards' means over every completion once."""
        began, trainer = time.perf_counter(), self._trainer
        self.batch, self.rewards, self._answers = 0, [], []
        trainer._metrics["eval"].clear()
        output = run()
        rewards = torch.cat(self.rewards or [torch.empty(0, len(trainer.reward_func_names))])
        repeats = trainer.num_generations_eval
        dataset = dataloader.dataset
        dataset = dataset.dataset if isinstance(dataset, IterableDatasetShard) else dataset
        in_set = dataset.rows // repeats if isinstance(dataset, CountedStream) else len(dataset)
        prompts = min(in_set, len(rewards) // repeats)
        known = {name: [one for one in ones if not math.isnan(one)] for name, ones in trainer._metrics["eval"].items()}
        means = {name: fmean(values) if values else None for name, values in known.items()}  # of batches, as TRL's
        # What fills up the last batch comes after all completions that count.
        counted = rewards[: prompts * repeats]
        judged = counted, trainer.reward_func_names, trainer.reward_weights
        means |= reward_means(*judged)
        at_k = group_scores(*judged, self._answers[: len(counted)], repeats) if prompts else {}
        means |= {name: score for name, (score, _) in at_k.items()}
        output.metrics.update({f"{prefix}_{name}": mean for name, mean in means.items()})
        trainer._metrics["eval"].clear()  # else TRL logs them again, under its own names
        self.rewards = None
        if description == "Evaluation" and trainer.accelerator.is_main_process:
            which, start = ({}, "eval_") if self._set is None else ({"set": self._set}, f"eval_{self._set}_")
            named = {f"{start}{name.removeprefix(f'{prefix}_')}": value for name, value in output.metrics.items()}
            named.pop(f"{start}model_preparation_time", None)  # transformers', of the first evaluation of a process
            named |= {f"{start}{name}_ci": list(limits) for name, (_, limits) in at_k.items() if limits is not None}
            for column, recorded in recorded_columns().items():
                if column in (getattr(dataset, "column_names", None) or ()):
                    named[recorded] = list(dataset[column])[:prompts]
            row = {"step": trainer.state.global_step, **which, **named, "prompts": prompts}
            append_json(self._file, {**row, "seconds": time.perf_counter() - began})
        return output


class CountedStream(torch.utils.data.IterableDataset[Any]):
    """A stream that counts its rows, since accelerate fills up the last batch.

    A plain stream of several files accelerate would deal out file by file, and processes would wait for each other.
    """

    def __init__(self, stream: Any):
        self.stream, self.rows = stream, 0

    def __iter__(self) -> Iterator[Any]:
        self.rows = 0
        for row in self.stream:
            self.rows += 1
            yield row

    def set_epoch(self, epoch: int) -> None:
        """Give a shuffled stream the order of this epoch."""
        self.stream.set_epoch(epoch)
