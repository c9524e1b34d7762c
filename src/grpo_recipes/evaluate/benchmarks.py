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

from grpo_recipes.data.rows import Fetched
from grpo_recipes.errors import EXIT_STOPPED, ConfigError
from grpo_recipes.evaluate.baselines import baselines
from grpo_recipes.evaluate.problems import MODEBENCH, BenchmarkProblem, Scorer, load_problems, recipe_scorer
from grpo_recipes.fetch.assets import fingerprint
from grpo_recipes.modebench.dataset import TASKS, Settings
from grpo_recipes.modebench.metrics import mode_scores
from grpo_recipes.modebench.verify import mode_of, problem_of
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
    """Everything sampled so far."""

    scores: list[list[float | None]] = field(default_factory=list)
    modes: list[list[str | None]] = field(default_factory=list)  # of ModeBench alone
    golds: list[str] = field(default_factory=list)
    tokens: int = 0
    truncated: int = 0

    @property
    def completions(self) -> int:
        return sum(len(row) for row in self.scores)


def run_benchmarks(
    trainer: Any,
    script_args: ScriptArguments,
    run: Path,
    stop_requested: Callable[[], bool],
    fetched: Fetched | None = None,
) -> None:
    """Run the recipe's benchmarks that have no result for this model yet. Called by every rank, after training.

    Args:
        trainer: a ``GRPOTrainer`` that has trained.
        script_args: names benchmarks, samples, temperature and rewards.
        run: the run directory.
        stop_requested: looked at by rank 0 between chunks; StoppedInBenchmarks when one came.
        fetched: as in ``data.read_rows``.
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
        missing = self.on_main(lambda: [name for name in names if not self.has_result(name)])
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
        began = time.perf_counter()
        problems = self.on_main(lambda: load_problems(name, self.args, self.trainer.args.seed, self.fetched))
        prompts = self.on_main(lambda: self._rendered(name, problems))
        tally = _Tally()
        step = max(1, _CHUNK // self.args.benchmark_samples)
        for start in range(0, len(problems), step):
            if self.on_main(self.stop_requested):
                raise StoppedInBenchmarks(name, self.stage.left)
            chunk = slice(start, start + step)
            self._run_chunk(name, problems[chunk], prompts[chunk], tally)
        self.on_main(lambda: self._write_result(name, tally, time.perf_counter() - began))

    def on_main(self, work: Callable[[], _Result]) -> _Result:
        """Do something in rank 0, and give its result, or its failure, to every rank."""
        outcome: list[Any] = [None, None]
        if self.trainer.accelerator.is_main_process:
            try:
                outcome[0] = work()
            except Exception as error:  # whatever it is: the other ranks wait, and the other benchmarks may run
                reason = (
                    str(error.problems[0]) if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}"
                )
                outcome[1] = masked(" ".join(reason.split()))
        broadcast_object_list(outcome, from_process=0)
        if outcome[1] is not None:
            raise BenchmarkFailed(outcome[1])
        return outcome[0]

    def _rendered(self, name: str, problems: list[BenchmarkProblem]) -> list[Prompt]:
        """Prompts as in training: TRL's rendering of the recipe's template."""
        ids = self.trainer._tokenize_prompts([problem.prompt for problem in problems])[0]
        limit = self.trainer.args.vllm_max_model_length if self.trainer.use_vllm else None
        longest = max(len(tokens) for tokens in ids)
        most = self._how().max_tokens
        if limit is not None and longest + most > limit:
            what = f"a prompt of {longest} tokens and a completion of {most} exceed vllm_max_model_length {limit}"
            raise ValueError(f"{what}; raise it, or lower max_completion_length")
        seed = self.trainer.args.seed
        return [
            Prompt(tokens, problem_seed(seed, name, problem.index))
            for tokens, problem in zip(ids, problems, strict=True)
        ]

    def _how(self) -> Sampling:
        args = self.args
        return Sampling(
            args.benchmark_samples, args.benchmark_temperature, int(self.trainer.args.max_completion_length)
        )

    def _run_chunk(self, name: str, problems: list[BenchmarkProblem], prompts: list[Prompt], tally: _Tally) -> None:
        rollouts, how = self.trainer.rollouts, self._how()
        if rollouts.main_rank_alone:
            self.on_main(lambda: self._score(name, problems, rollouts.sample(prompts, how), tally))
        else:
            completions = rollouts.sample(prompts, how)
            self.on_main(lambda: self._score(name, problems, completions, tally))

    def _score(
        self, name: str, problems: list[BenchmarkProblem], completions: list[list[Tokens]], tally: _Tally
    ) -> None:
        """Score a chunk and add its rows to the benchmark's file."""
        decode, ends = self.trainer.processing_class.batch_decode, set(self.trainer.eos_token_ids)
        texts = [decode(row, skip_special_tokens=True) for row in completions]
        scores = self._scorer(name).scores(problems, texts)
        if name in TASKS:
            tally.modes += [
                [mode_of(text, problem.gold) for text in row] for problem, row in zip(problems, texts, strict=True)
            ]
        file = self._file(name)
        file.parent.mkdir(exist_ok=True)
        with file.open("a" if tally.scores else "w") as rows:
            for place, (problem, ids, answers, given) in enumerate(
                zip(problems, completions, texts, scores, strict=True), len(tally.scores)
            ):
                cut = [not tokens or tokens[-1] not in ends for tokens in ids]
                row = {
                    "problem": problem.text,
                    "gold": problem.gold,
                    "completions": [masked(answer) for answer in answers],
                    "scores": given,
                    "lengths": [len(tokens) for tokens in ids],
                    "truncated": cut,
                    **({"modes": tally.modes[place]} if name in TASKS else {}),
                }
                rows.write(json.dumps(row) + "\n")
                tally.tokens += sum(len(tokens) for tokens in ids)
                tally.truncated += sum(cut)
        tally.scores += scores
        tally.golds += [problem.gold for problem in problems]
        print(f"grpo: {self.stage.prefix}benchmark {name}: {len(tally.scores)} problems sampled", flush=True)

    def _write_result(self, name: str, tally: _Tally, seconds: float) -> None:
        result = {
            **pass_table(tally.scores),
            **self._mode_scores(name, tally),
            "problems": len(tally.scores),
            "samples": self.args.benchmark_samples,
            "no_verdict": sum(score is None for row in tally.scores for score in row),
            "mean_length": round(tally.tokens / tally.completions, 1),
            "truncated": round(tally.truncated / tally.completions, 4),
            "reward": self._scorer(name).name,
            "temperature": self.args.benchmark_temperature,
            "seconds": round(seconds, 1),
            **self._baselines(name, tally),
        }
        settings = read_json(self._settings_file)
        settings.pop(name, None)
        write_json(self._settings_file, settings)  # never a new result beside old settings
        results = read_json(self._results_file)
        write_json(self._results_file, {**results, name: result})
        write_json(self._settings_file, {**settings, name: self._settings(name)})

    def _scorer(self, name: str) -> Scorer:
        return MODEBENCH if name in TASKS else self.scorer

    def _mode_scores(self, name: str, tally: _Tally) -> dict[str, Any]:
        if name not in TASKS:
            return {}
        return mode_scores(tally.modes, [problem_of(gold)["modes"] for gold in tally.golds])

    def _baselines(self, name: str, tally: _Tally) -> dict[str, Any]:
        """Return what ModeBench's results are compared with; the untrained model's too when it was benchmarked."""
        if name not in TASKS or self.stage is not TRAINED:
            return {}
        found: dict[str, Any] = baselines(tally.golds, self.args.benchmark_samples)
        before = read_json(self.folder / UNTRAINED.results).get(name)
        if before is not None:
            found["untrained"] = {key: value for key, value in before.items() if "@" in key}
        return {"baselines": found}

    def has_result(self, name: str) -> bool:
        """Return whether an earlier attempt finished this benchmark on this model with these settings."""
        known = read_json(self._settings_file).get(name)
        return known == json.loads(json.dumps(self._settings(name)))

    def _settings(self, name: str) -> dict[str, Any]:
        args = self.args
        file = Path(os.path.expanduser(name))
        return {
            "problems": fingerprint(file) if is_file(name) and file.is_file() else None,
            "step": self.trainer.state.global_step,
            "seed": self.trainer.args.seed,
            "samples": args.benchmark_samples,
            "temperature": args.benchmark_temperature,
            "max_completion_length": self.trainer.args.max_completion_length,
            "max_problems": args.benchmark_max_problems,
            "reward": self._scorer(name).name,
            **({"modebench": self._modebench(name)} if name in TASKS else {}),
            "answer_matching": args.answer_matching,
            "system_prompt": args.system_prompt,
            "chat_template": args.chat_template,
            "chat_template_kwargs": self.trainer.args.chat_template_kwargs,
            **sampling_keys(self.trainer),
        }

    def _modebench(self, name: str) -> str:
        return Settings.read(lambda key: getattr(self.args, key)).fingerprint(name)

    @property
    def _results_file(self) -> Path:
        return self.folder / self.stage.results

    @property
    def _settings_file(self) -> Path:
        return self.folder / "benchmarks" / f"{self.stage.prefix}settings.json"

    def _file(self, name: str) -> Path:
        plain = re.sub(r"[^\w.-]+", "_", name.removesuffix(".jsonl"))
        return self.folder / "benchmarks" / f"{self.stage.prefix}{plain}.jsonl"


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
