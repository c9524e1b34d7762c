"""Benchmarks of the final model: sampled, scored, and written to ``benchmarks.json`` and ``benchmarks/``.

    run_benchmarks(trainer, script_args, run, lambda: stop_file(run).exists())

Rank 0 reads, scores and writes; with a server it samples too, while the others wait a chunk at a time.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from accelerate.utils import broadcast_object_list
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from grpo_recipes.data.problems import Fetched
from grpo_recipes.errors import EXIT_STOPPED, ConfigError
from grpo_recipes.evaluate.baselines import baselines
from grpo_recipes.evaluate.problems import MODEBENCH, BenchmarkProblem, Scorer, load_problems, recipe_scorer
from grpo_recipes.fetch.assets import fingerprint
from grpo_recipes.modebench.dataset import TASKS, Settings
from grpo_recipes.modebench.verify import mode_of, mode_scores, problem_of
from grpo_recipes.recipe.configs import ScriptArguments
from grpo_recipes.recipe.registry import is_file
from grpo_recipes.rollouts.backends import Prompt, Sampling, Tokens, problem_seed, sampling_keys
from grpo_recipes.runs.rundir import read_json, write_json
from grpo_recipes.secrets import masked
from grpo_recipes.stats import pass_table

_CHUNK = 256  # completions between two looks at the stop request; bounds the other ranks' wait too
_Result = TypeVar("_Result")


class BenchmarkFailed(RuntimeError):
    """A benchmark has no result."""


class StoppedInBenchmarks(SystemExit):
    """A stop request came while benchmarks ran."""

    def __init__(self, name: str, what_is_left: str):
        super().__init__(EXIT_STOPPED)
        self.name, self.what_is_left = name, what_is_left

    def __str__(self) -> str:
        return f"stopped on request in benchmark {self.name}; {self.what_is_left}"


@dataclass
class _Tally:
    """Everything sampled so far; ``scores`` and ``modes`` have a row for each problem."""

    scores: list[list[float | None]] = field(default_factory=list)
    modes: list[list[str | None]] = field(default_factory=list)  # of ModeBench alone
    golds: list[str] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)  # tokens of each completion
    truncated: int = 0


def run_benchmarks(
    trainer: Any,
    script_args: ScriptArguments,
    run: Path,
    stop_requested: Callable[[], bool],
    fetched: Fetched | None = None,
) -> None:
    """Run the recipe's benchmarks that have no result for this model yet. Called by every rank, after training.

    ``trainer`` is a ``GRPOTrainer`` that has trained, ``run`` the run directory, ``fetched`` as in ``data.read_rows``.
    Rank 0 calls ``stop_requested`` between chunks; where it returns True, StoppedInBenchmarks ends the run.
    """
    scorer = recipe_scorer(script_args.reward_funcs, trainer.reward_funcs, script_args, trainer.args)
    Runner(trainer, script_args, run, stop_requested, scorer, fetched).run_missing(script_args.benchmarks)


@dataclass(frozen=True)
class Stage:
    """When benchmarks are run."""

    results: str  # file of the results, in the run directory
    prefix: str  # of the files in ``benchmarks/``
    left: str  # what the run has at that time, for messages


TRAINED = Stage("benchmarks.json", "", "the model is saved")
UNTRAINED = Stage("benchmarks/untrained.json", "untrained_", "nothing is trained yet")


@dataclass
class Runner:
    """One rank's part in the benchmarks of a run; the arguments are those of ``run_benchmarks``."""

    trainer: Any
    args: ScriptArguments
    folder: Path
    stop_requested: Callable[[], bool]
    scorer: Scorer
    fetched: Fetched | None
    stage: Stage = TRAINED

    def run_missing(self, names: Sequence[str]) -> None:
        """Run those that have no result for this model and these settings yet; fail when all others have one."""
        missing = self.on_main(lambda: [name for name in names if not self._has_result(name)])
        if not missing:
            return
        self.trainer.serve_final_weights()
        failures = []
        for name in missing:
            try:
                self.run(name)
            except BenchmarkFailed as failed:
                failures.append(f"benchmark {name}: {failed}")
        if failures:
            left = self.stage.left.capitalize()
            raise BenchmarkFailed(f"{'; '.join(failures)}. {left}; a resumed run tries again")

    def run(self, name: str) -> None:
        """Sample, score and write one benchmark."""
        began, tally = time.perf_counter(), _Tally()
        samples, longest = self.args.benchmark_samples, int(self.trainer.args.max_completion_length)
        how = Sampling(samples, self.args.benchmark_temperature, longest)
        problems = self.on_main(lambda: load_problems(name, self.args, self.trainer.args.seed, self.fetched))
        prompts = self.on_main(lambda: self._rendered(name, problems, longest))
        step = max(1, _CHUNK // samples)
        for start in range(0, len(problems), step):
            if self.on_main(self.stop_requested):
                raise StoppedInBenchmarks(name, self.stage.left)
            chunk = slice(start, start + step)
            self._run_chunk(name, problems[chunk], prompts[chunk], how, tally)
        self.on_main(lambda: self._write_result(name, tally, time.perf_counter() - began))

    def _run_chunk(
        self, name: str, problems: list[BenchmarkProblem], prompts: list[Prompt], how: Sampling, tally: _Tally
    ) -> None:
        rollouts = self.trainer.rollouts
        if rollouts.main_rank_alone:
            self.on_main(lambda: self._score(name, problems, rollouts.sample(prompts, how), tally))
        else:
            completions = rollouts.sample(prompts, how)
            self.on_main(lambda: self._score(name, problems, completions, tally))

    def on_main(self, work: Callable[[], _Result]) -> _Result:
        """Do something in rank 0, and give its result, or its failure, to every rank."""
        outcome: list[Any] = [None, None]
        if self.trainer.accelerator.is_main_process:
            try:
                outcome[0] = work()
            except Exception as error:  # whatever it is: the other ranks wait, and the other benchmarks may run
                text = f"{type(error).__name__}: {error}"
                reason = str(error.problems[0]) if isinstance(error, ConfigError) else text
                outcome[1] = masked(" ".join(reason.split()))
        broadcast_object_list(outcome, from_process=0)
        if outcome[1] is not None:
            raise BenchmarkFailed(outcome[1])
        return outcome[0]

    def _rendered(self, name: str, problems: list[BenchmarkProblem], most: int) -> list[Prompt]:
        """Return prompts as in training: TRL's rendering of the recipe's template; completions have ``most`` tokens."""
        ids = self.trainer._tokenize_prompts([problem.prompt for problem in problems])[0]
        limit = self.trainer.args.vllm_max_model_length if self.trainer.use_vllm else None
        longest = max(len(tokens) for tokens in ids)
        if limit is not None and longest + most > limit:
            what = f"a prompt of {longest} tokens and a completion of {most} exceed vllm_max_model_length {limit}"
            raise ValueError(f"{what}; raise it, or lower max_completion_length")
        seeds = [problem_seed(self.trainer.args.seed, name, problem.index) for problem in problems]
        return [Prompt(tokens, seed) for tokens, seed in zip(ids, seeds, strict=True)]

    def _score(
        self, name: str, problems: list[BenchmarkProblem], completions: list[list[Tokens]], tally: _Tally
    ) -> None:
        """Score a chunk and add its rows to the benchmark's file."""
        decode, ends = self.trainer.processing_class.batch_decode, set(self.trainer.eos_token_ids)
        texts = [decode(row, skip_special_tokens=True) for row in completions]
        scores = self._scorer(name).scores(problems, texts)
        plain = re.sub(r"[^\w.-]+", "_", name.removesuffix(".jsonl"))
        path = self.folder / "benchmarks" / f"{self.stage.prefix}{plain}.jsonl"
        path.parent.mkdir(exist_ok=True)
        with path.open("a" if tally.scores else "w") as file:
            for problem, ids, answers, given in zip(problems, completions, texts, scores, strict=True):
                row: dict[str, Any] = {
                    "problem": problem.text,
                    "gold": problem.gold,
                    "completions": [masked(answer) for answer in answers],
                    "scores": given,
                    "lengths": [len(tokens) for tokens in ids],
                    "truncated": [not tokens or tokens[-1] not in ends for tokens in ids],
                }
                if name in TASKS:
                    row["modes"] = [mode_of(text, problem.gold) for text in answers]
                    tally.modes.append(row["modes"])
                file.write(json.dumps(row) + "\n")
                tally.lengths += row["lengths"]
                tally.truncated += sum(row["truncated"])
        tally.scores += scores
        tally.golds += [problem.gold for problem in problems]
        print(f"grpo: {self.stage.prefix}benchmark {name}: {len(tally.scores)} problems sampled", flush=True)

    def _write_result(self, name: str, tally: _Tally, seconds: float) -> None:
        """Write a benchmark's result; for ModeBench also the baselines, one of which is the untrained model."""
        modes = [problem_of(gold)["modes"] for gold in tally.golds] if name in TASKS else []
        result: dict[str, Any] = {
            **pass_table(tally.scores),
            **(mode_scores(tally.modes, modes) if name in TASKS else {}),
            "problems": len(tally.scores),
            "samples": self.args.benchmark_samples,
            "no_verdict": sum(score is None for row in tally.scores for score in row),
            "mean_length": round(sum(tally.lengths) / len(tally.lengths), 1),
            "truncated": round(tally.truncated / len(tally.lengths), 4),
            "reward": self._scorer(name).name,
            "temperature": self.args.benchmark_temperature,
            "seconds": round(seconds, 1),
        }
        if name in TASKS and self.stage is TRAINED:
            before = read_json(self.folder / UNTRAINED.results).get(name, {})
            untrained = {key: value for key, value in before.items() if "@" in key}
            known = baselines(tally.golds, self.args.benchmark_samples)
            result |= {"baselines": {**known, **({"untrained": untrained} if before else {})}}
        settings, results = read_json(self._settings_file), self.folder / self.stage.results
        settings.pop(name, None)
        write_json(self._settings_file, settings)  # never a new result beside old settings
        write_json(results, {**read_json(results), name: result})
        write_json(self._settings_file, {**settings, name: self._settings(name)})

    def _scorer(self, name: str) -> Scorer:
        return MODEBENCH if name in TASKS else self.scorer

    def _has_result(self, name: str) -> bool:
        """Return whether an earlier attempt finished this benchmark on this model with these settings."""
        return read_json(self._settings_file).get(name) == json.loads(json.dumps(self._settings(name)))

    def _settings(self, name: str) -> dict[str, Any]:
        args, file = self.args, Path(os.path.expanduser(name))
        modebench = Settings.read(lambda key: getattr(args, key)) if name in TASKS else None
        return {
            "problems": fingerprint(file) if is_file(name) and file.is_file() else None,
            "step": self.trainer.state.global_step,
            "seed": self.trainer.args.seed,
            "samples": args.benchmark_samples,
            "temperature": args.benchmark_temperature,
            "max_completion_length": self.trainer.args.max_completion_length,
            "max_problems": args.benchmark_max_problems,
            "reward": self._scorer(name).name,
            **({"modebench": modebench.fingerprint(name)} if modebench else {}),
            "answer_matching": args.answer_matching,
            "system_prompt": args.system_prompt,
            "chat_template": args.chat_template,
            "chat_template_kwargs": self.trainer.args.chat_template_kwargs,
            **sampling_keys(self.trainer),
        }

    @property
    def _settings_file(self) -> Path:
        return self.folder / "benchmarks" / f"{self.stage.prefix}settings.json"


class UntrainedBenchmarks(TrainerCallback):
    """Run the recipe's ModeBench benchmarks before the first step, and leave no trace in the training.

        trainer.add_callback(UntrainedBenchmarks(trainer, script_args, run, stop_requested))

    The model is wrapped by then, and the server there. ``benchmarks/untrained.json`` is written once in the life of a
    run: a resumed run, or one that has these results, does nothing. The results after training quote it.
    """

    def __init__(self, trainer: Any, script_args: ScriptArguments, run: Path, stop_requested: Callable[[], bool]):
        self._trainer = trainer
        self._names = [name for name in script_args.benchmarks if name in TASKS]
        self._runner = Runner(trainer, script_args, run, stop_requested, MODEBENCH, None, UNTRAINED)

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Run them; a failure or a stop request ends the run on every rank."""
        if self._names and state.global_step == 0:
            with self._trainer.evaluation.undisturbed(), self._trainer.rollouts.sent_again():
                self._runner.run_missing(self._names)
