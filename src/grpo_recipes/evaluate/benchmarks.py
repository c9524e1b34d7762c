"""Benchmarks of the final model: sampled, scored, and written to ``benchmarks.json`` and ``benchmarks/``.

    run_benchmarks(trainer, script_args, run, lambda: stop_file(run).exists())

Rank 0 reads, scores and writes; with a server it samples too, while the others wait a chunk at a time.
"""

import json
import os
import random
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from accelerate.utils import broadcast_object_list
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from grpo_recipes.data.problems import DataSource, Fetched, Message, answer_of, chat_of, read_rows, rows_of
from grpo_recipes.errors import EXIT_STOPPED, ConfigError, config_error
from grpo_recipes.fetch.assets import fingerprint
from grpo_recipes.recipe.configs import ScriptArguments
from grpo_recipes.recipe.generated import GeneratedData, Scoring, generated
from grpo_recipes.recipe.registry import (
    DEFAULT_ACCURACY,
    SOURCE_REWARD,
    Benchmark,
    benchmark_columns,
    benchmarks,
    is_file,
    rewards,
)
from grpo_recipes.recipe.sources import source_of
from grpo_recipes.rewards.answers import final_text
from grpo_recipes.rewards.score import RewardWrapper, make_reward
from grpo_recipes.rollouts.backends import Prompt, Sampling, Tokens, problem_seed, sampling_keys
from grpo_recipes.runs.rundir import read_json, write_json
from grpo_recipes.secrets import masked
from grpo_recipes.stats import pass_table

CHUNK = 256  # completions between two looks at the stop request; bounds the other ranks' wait too
_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_KEYS = ("benchmarks", "benchmarks")
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


# --- problems and rewards ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BenchmarkProblem:
    """One problem."""

    index: int  # its place in the benchmark, from which sampling seeds come
    prompt: list[Message]  # the recipe's system prompt first, the question last
    gold: str  # the right answer


def load_problems(
    name: str, args: ScriptArguments, seed: int, fetched: Fetched | None = None
) -> list[BenchmarkProblem]:
    """Read a benchmark: all of it, or ``benchmark_max_problems`` drawn by seed, in the order of the dataset.

    ``name`` is one of ``benchmarks()``, or a .jsonl file. The seed also shuffles options of multiple choice.
    """
    benchmark = _file_benchmark(name, args) if is_file(name) else benchmarks()[name]
    source = DataSource(benchmark.id, benchmark.config, benchmark.split, benchmark.prompt, benchmark.solution, _KEYS)
    if generated(benchmark.id):
        rows: Any = rows_of(source, args)
    else:
        rows = read_rows(benchmark.id, benchmark.config, benchmark.split, fetched=fetched)
    if len(rows) == 0:
        raise config_error("benchmarks", f"'{benchmark.id}' has no rows", "name a dataset with rows")
    count = min(len(rows), args.benchmark_max_problems or len(rows))
    indices = sorted(random.Random(seed).sample(range(len(rows)), count))
    return [_problem(index, rows[index], benchmark, source, args.system_prompt, seed) for index in indices]


def _file_benchmark(name: str, args: ScriptArguments) -> Benchmark:
    path = os.path.expanduser(name)
    if not os.path.isfile(path):
        raise config_error("benchmarks", f"no file '{name}'", "put it back, or leave it out")
    names = read_rows(path, None, "test").column_names or []
    columns = benchmark_columns(names, (args.dataset_prompt_column, args.dataset_solution_column))
    if columns is None:
        raise config_error(
            "benchmarks", f"'{name}' has the columns {', '.join(names)}", "rename two: problem and answer"
        )
    return Benchmark("", path, "test", prompt=columns[0], solution=columns[1])


def _problem(
    index: int, row: dict[str, Any], benchmark: Benchmark, source: DataSource, system: str | None, seed: int
) -> BenchmarkProblem:
    prompt = chat_of(row.get(benchmark.prompt), source, system)
    gold, _ = answer_of(row.get(benchmark.solution), benchmark.marker, source)
    if not prompt or not gold:
        what = f"row {index} of '{source.id}' has no problem or no answer"
        raise config_error("benchmarks", what, "correct the dataset")
    if benchmark.wrong:  # multiple choice: the options in a drawn order, answered by the right one's letter
        options = [gold, *(str(row[column]).strip() for column in benchmark.wrong)]
        order = random.Random(f"{seed}/{index}").sample(range(len(options)), len(options))
        lines = [f"{letter}) {options[place]}" for letter, place in zip(_LETTERS, order, strict=False)]
        question = [prompt[-1]["content"], "", *lines, "", "Answer with the letter of the right option."]
        prompt, gold = [*prompt[:-1], {**prompt[-1], "content": "\n".join(question)}], _LETTERS[order.index(0)]
    return BenchmarkProblem(index, prompt, gold)


@dataclass(frozen=True)
class Scorer:
    """A reward that scores completions of a benchmark."""

    name: str  # for the results
    reward: Any  # called as TRL calls it

    def scores(self, problems: Sequence[BenchmarkProblem], texts: Sequence[Sequence[str]]) -> list[list[float | None]]:
        """Return 1 for a right completion, 0 for a wrong one, None for an unscored one: (problems, samples)."""
        if isinstance(self.reward, RewardWrapper):
            self.reward.give_up_after = None
        flat = [(problem, text) for problem, row in zip(problems, texts, strict=True) for text in row]
        completions = [[{"role": "assistant", "content": text}] for _, text in flat]
        columns = {"prompts": [problem.prompt for problem, _ in flat], "answer": [problem.gold for problem, _ in flat]}
        scores = iter(self.reward(completions=completions, **columns))
        return [[next(scores) for _ in row] for row in texts]


def recipe_scorer(names: Sequence[str], functions: Sequence[Any], script_args: Any, args: Any) -> Scorer:
    """Return the first of the recipe's rewards that says right or wrong; ``pure_accuracy_math`` when there is none.

    Rewards that judge only their own problems do not count. ``functions`` are the rewards ``names``, as the trainer
    calls them.
    """
    known = rewards()
    for name, function in zip(names, functions, strict=True):
        if name in known and known[name].accuracy and known[name].one_answer:
            return Scorer(name, function)
    return Scorer(DEFAULT_ACCURACY, make_reward(DEFAULT_ACCURACY, script_args, args))


def _data_of(name: str) -> GeneratedData | None:
    """Return the generated dataset of a benchmark; None for files, environments and datasets of the hub."""
    benchmark = benchmarks().get(name)
    return generated(benchmark.id) if benchmark else None


def _scoring_of(name: str) -> Scoring | None:
    """Return how a benchmark is scored besides pass@k; None for most."""
    data = _data_of(name)
    return data.scoring if data else None


# --- the run ----------------------------------------------------------------------------------------------------------


def run_benchmarks(
    trainer: Any, script_args: ScriptArguments, run: Path, stop_requested: Callable[[], bool],
    fetched: Fetched | None = None,
) -> None:  # fmt: skip
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
        began, rows = time.perf_counter(), list[dict[str, Any]]()
        if self._is_played(name):
            self.trainer.source.run_benchmark(self, name, rows)
        else:
            self._ask(name, rows)
        self.on_main(lambda: self._write_result(name, rows, time.perf_counter() - began))

    def _ask(self, name: str, rows: list[dict[str, Any]]) -> None:
        rollouts, samples = self.trainer.rollouts, self.args.benchmark_samples
        longest = int(self.trainer.args.max_completion_length)
        how = Sampling(samples, self.args.benchmark_temperature, longest)
        problems = self.on_main(lambda: load_problems(name, self.args, self.trainer.args.seed, self.fetched))
        prompts = self.on_main(lambda: self._rendered(name, problems, longest))
        step = max(1, CHUNK // samples)
        for start in range(0, len(problems), step):
            if self.on_main(self.stop_requested):
                raise StoppedInBenchmarks(name, self.stage.left)
            chunk, asked = problems[start : start + step], prompts[start : start + step]
            drawn = None if rollouts.only_main_rank_samples else rollouts.sample(asked, how)
            self.on_main(partial(self._score, name, chunk, asked, how, drawn, rows))

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
        self, name: str, problems: list[BenchmarkProblem], prompts: list[Prompt], how: Sampling,
        drawn: list[list[Tokens]] | None, rows: list[dict[str, Any]],
    ) -> None:  # fmt: skip
        """Score a chunk, sampled here where ``drawn`` is None, and add its rows to ``rows`` and to a file."""
        completions = self.trainer.rollouts.sample(prompts, how) if drawn is None else drawn
        decode, ends = self.trainer.processing_class.batch_decode, set(self.trainer.eos_token_ids)
        texts = [decode(row, skip_special_tokens=True) for row in completions]
        scores = self._scorer(name).scores(problems, texts)
        found, scoring = [], _scoring_of(name)
        for problem, ids, answers, given in zip(problems, completions, texts, scores, strict=True):
            row = {
                "problem": problem.prompt[-1]["content"], "gold": problem.gold, "scores": given,
                "lengths": [len(tokens) for tokens in ids],
                "truncated": [not tokens or tokens[-1] not in ends for tokens in ids],
            }  # fmt: skip
            if scoring:
                row[scoring.column] = [scoring.judge(final_text(text), problem.gold) for text in answers]
            found.append({**row, "completions": [masked(answer) for answer in answers]})
        self.keep(name, found, rows)

    def keep(self, name: str, found: list[dict[str, Any]], rows: list[dict[str, Any]]) -> None:
        """Add what was found of some problems to ``rows``, without the completions, and to the benchmark's file."""
        plain = re.sub(r"[^\w.-]+", "_", name.removesuffix(".jsonl"))
        path = self.folder / "benchmarks" / f"{self.stage.prefix}{plain}.jsonl"
        path.parent.mkdir(exist_ok=True)
        with path.open("a" if rows else "w") as file:
            for row in found:
                file.write(json.dumps(row) + "\n")
                rows.append({key: value for key, value in row.items() if key != "completions"})
        print(f"grpo: {self.stage.prefix}benchmark {name}: {len(rows)} problems sampled", flush=True)

    def _write_result(self, name: str, rows: list[dict[str, Any]], seconds: float) -> None:
        """Write a benchmark's result with its further scores and baselines; the untrained model is a baseline."""
        scores, golds = [row["scores"] for row in rows], [row["gold"] for row in rows]
        lengths, cut = ([one for row in rows for one in row[key]] for key in ("lengths", "truncated"))
        result: dict[str, Any] = pass_table(scores)
        scoring = _scoring_of(name)
        if scoring:
            result |= scoring.scores([row[scoring.column] for row in rows], golds)
        result |= {
            "problems": len(rows), "samples": self.args.benchmark_samples,
            "no_verdict": sum(score is None for row in scores for score in row),
            "mean_length": round(sum(lengths) / len(lengths), 1), "truncated": round(sum(cut) / len(cut), 4),
            "reward": self._judge(name), "temperature": self.args.benchmark_temperature,
            "seconds": round(seconds, 1),
        }  # fmt: skip
        if self._is_played(name):
            known = [one for row in rows for one in row["rewards"] if one is not None]
            result |= {"mean_reward": round(sum(known) / len(known), 6) if known else None}
        if scoring and self.stage is TRAINED:
            before = read_json(self.folder / UNTRAINED.results).get(name)
            untrained = {"untrained": {key: value for key, value in before.items() if "@" in key}} if before else {}
            result |= {"baselines": scoring.baselines(golds, self.args.benchmark_samples) | untrained}
        settings, results = read_json(self._settings_file), self.folder / self.stage.results
        settings.pop(name, None)
        write_json(self._settings_file, settings)  # never a new result beside old settings
        write_json(results, {**read_json(results), name: result})
        write_json(self._settings_file, {**settings, name: self._settings(name)})

    def _is_played(self, name: str) -> bool:
        """Return whether the recipe's prompt source runs this benchmark."""
        lookup = partial(getattr, self.args)
        source = source_of(lookup)
        return source is not None and name in source.benchmarks(lookup)

    def _scorer(self, name: str) -> Scorer:
        data = _data_of(name)
        reward = data.reward if data else None
        return Scorer(reward, make_reward(reward, self.args, self.trainer.args)) if reward else self.scorer

    def _judge(self, name: str) -> str:
        return SOURCE_REWARD if self._is_played(name) else self._scorer(name).name

    def _has_result(self, name: str) -> bool:
        """Return whether an earlier attempt finished this benchmark on this model with these settings."""
        return read_json(self._settings_file).get(name) == json.loads(json.dumps(self._settings(name)))

    def _settings(self, name: str) -> dict[str, Any]:
        args, file = self.args, Path(os.path.expanduser(name))
        data = _data_of(name)
        return {
            "problems": fingerprint(file) if is_file(name) and file.is_file() else None,
            "step": self.trainer.state.global_step, "seed": self.trainer.args.seed,
            "samples": args.benchmark_samples, "temperature": args.benchmark_temperature,
            "max_completion_length": self.trainer.args.max_completion_length,
            "max_problems": args.benchmark_max_problems, "reward": self._judge(name),
            **({data.scheme: data.fingerprint(partial(getattr, args))} if data and not data.in_files else {}),
            **(self.trainer.source.benchmark_settings() if self._is_played(name) else {}),
            "answer_matching": args.answer_matching, "system_prompt": args.system_prompt,
            "chat_template": args.chat_template, "chat_template_kwargs": self.trainer.args.chat_template_kwargs,
            **sampling_keys(self.trainer),
        }  # fmt: skip

    @property
    def _settings_file(self) -> Path:
        return self.folder / "benchmarks" / f"{self.stage.prefix}settings.json"


class UntrainedBenchmarks(TrainerCallback):
    """Run the recipe's benchmarks that have baselines before the first step, and leave no trace in the training.

    The model is wrapped by then, and the server there. ``benchmarks/untrained.json`` is written once in the life of a
    run: a resumed run, or one that has these results, does nothing. The results after training quote it.
    """

    def __init__(self, trainer: Any, script_args: ScriptArguments, run: Path, stop_requested: Callable[[], bool]):
        self._trainer = trainer
        self._names = [name for name in script_args.benchmarks if _scoring_of(name)]
        scorer = recipe_scorer(script_args.reward_funcs, trainer.reward_funcs, script_args, trainer.args)
        self._runner = Runner(trainer, script_args, run, stop_requested, scorer, None, UNTRAINED)

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Run them; a failure or a stop request ends the run on every rank."""
        if self._names and state.global_step == 0:
            with self._trainer.evaluation.undisturbed(), self._trainer.rollouts.resending_weights():
                self._runner.run_missing(self._names)
