"""Run benchmarks with the final model: sample, score, and write ``benchmarks.json`` and ``benchmarks/``.

    run_benchmarks(trainer, script_args, run, lambda: stop_file(run).exists())

Rank 0 reads problems, scores and writes. With a server it also samples, while the other ranks wait for each chunk.
"""

import json
import os
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from accelerate.utils import broadcast_object_list
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from grpo_recipes.data.problems import Fetched, load_rows, read_rows
from grpo_recipes.errors import ConfigError, config_error
from grpo_recipes.evaluate.turns import play_completions, render_chats, sample_shared_turns
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
from grpo_recipes.recipe.shapes import DataSource, Message, answer_of, chat_of
from grpo_recipes.recipe.sources import sampler_of
from grpo_recipes.rewards.answers import extract_final_text
from grpo_recipes.rewards.score import RewardWrapper, make_reward
from grpo_recipes.rollouts.backends import Prompt, Sampling, Tokens, collect_sampling_keys, problem_seed
from grpo_recipes.rollouts.source import PlayedCompletion, SamplingTrainer, Source
from grpo_recipes.runs.rundir import read_json, write_json
from grpo_recipes.runs.stop_request import StoppedOnRequest
from grpo_recipes.secrets import mask_secrets
from grpo_recipes.stats import pass_at_k_table

CHUNK = 256  # completions between two checks of the stop request; also limits how long other ranks wait
_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_KEYS = ("benchmarks", "benchmarks")
_Result = TypeVar("_Result")


class BenchmarkFailed(RuntimeError):
    """A benchmark has no result, because it failed. Others may have one."""


class StoppedInBenchmarks(StoppedOnRequest):
    """Ends the process with code 75: a stop request came while benchmarks ran."""

    def __init__(self, name: str, progress: str) -> None:
        super().__init__(f"in benchmark {name}; {progress}")


# --- problems and rewards ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BenchmarkProblem:
    """A problem of a benchmark."""

    index: int
    """Index in the benchmark. Sampling seeds derive from it."""
    prompt: list[Message]
    """The recipe's system prompt first, the question last."""
    gold: str
    """The right answer."""


def load_problems(
    name: str, args: ScriptArguments, seed: int, fetched: Fetched | None = None
) -> list[BenchmarkProblem]:
    """Read all problems of a benchmark, or a random sample of ``benchmark_max_problems``, in the dataset's order.

    ``name`` is a name in ``benchmarks()`` or a .jsonl file. The seed selects the sample, and shuffles the options of
    multiple choice. ``fetched`` finds downloaded hub datasets. Raise ConfigError if the benchmark can't be read or has
    no rows.
    """
    benchmark = _make_file_benchmark(name, args) if is_file(name) else benchmarks()[name]
    source = DataSource(benchmark.id, benchmark.config, benchmark.split, benchmark.prompt, benchmark.solution, _KEYS)
    if generated(benchmark.id):
        rows: Any = load_rows(source, args)
    else:
        rows = read_rows(benchmark.id, benchmark.config, benchmark.split, fetched=fetched)
    if len(rows) == 0:
        raise config_error("benchmarks", f"'{benchmark.id}' has no rows", "name a dataset with rows")
    count = min(len(rows), args.benchmark_max_problems or len(rows))
    indices = sorted(random.Random(seed).sample(range(len(rows)), count))
    return [_make_problem(index, rows[index], benchmark, source, args.system_prompt, seed) for index in indices]


def _make_file_benchmark(name: str, args: ScriptArguments) -> Benchmark:
    """Return the benchmark in a .jsonl file. Raise ConfigError without the file, or without usable columns in it."""
    path = os.path.expanduser(name)
    if not os.path.isfile(path):
        raise config_error("benchmarks", f"no file '{name}'", "restore it, or remove it from benchmarks")
    names = read_rows(path, None, "test").column_names or []
    columns = benchmark_columns(names, (args.dataset_prompt_column, args.dataset_solution_column))
    if columns is None:
        raise config_error(
            "benchmarks", f"'{name}' has the columns {', '.join(names)}", "rename two: problem and answer"
        )
    return Benchmark("", path, "test", prompt=columns[0], solution=columns[1])


def _make_problem(
    index: int, row: dict[str, Any], benchmark: Benchmark, source: DataSource, system: str | None, seed: int
) -> BenchmarkProblem:
    """Return the problem in a row. For multiple choice, add the options in random order. The answer is a letter.

    ``system`` is the recipe's system prompt. Raise ConfigError for a row without a problem or an answer.
    """
    prompt = chat_of(row.get(benchmark.prompt), source, system)
    gold, _ = answer_of(row.get(benchmark.solution), benchmark.marker, source)
    if not prompt or not gold:
        problem = f"row {index} of '{source.id}' has no problem or no answer"
        raise config_error("benchmarks", problem, "correct the dataset")
    if benchmark.wrong:  # multiple choice: shuffle the options; the answer is the letter of the right option
        options = [gold, *(str(row[column]).strip() for column in benchmark.wrong)]
        order = random.Random(f"{seed}/{index}").sample(range(len(options)), len(options))
        lines = [f"{letter}) {options[index]}" for letter, index in zip(_LETTERS, order, strict=False)]
        question = [prompt[-1]["content"], "", *lines, "", "Answer with the letter of the right option."]
        prompt, gold = [*prompt[:-1], {**prompt[-1], "content": "\n".join(question)}], _LETTERS[order.index(0)]
    return BenchmarkProblem(index, prompt, gold)


@dataclass(frozen=True)
class Scorer:
    """Score completions of a benchmark with a reward."""

    name: str
    """Name in the results."""
    reward: Any
    """Called as TRL calls a reward."""

    def scores(
        self, problems: Sequence[BenchmarkProblem], completions: Sequence[Sequence[list[Message]]]
    ) -> list[list[float | None]]:
        """Return the reward of each completion, (problems, samples): 1 right, 0 wrong, None unscored.

        ``completions`` has the messages of each completion. The reward's limit ``give_up_after`` is removed for good.
        """
        if isinstance(self.reward, RewardWrapper):
            self.reward.give_up_after = None
        flat = [(problem, messages) for problem, row in zip(problems, completions, strict=True) for messages in row]
        columns = {"prompts": [problem.prompt for problem, _ in flat], "answer": [problem.gold for problem, _ in flat]}
        scores = iter(self.reward(completions=[messages for _, messages in flat], **columns))
        return [[next(scores) for _ in row] for row in completions]


def make_recipe_scorer(names: Sequence[str], functions: Sequence[Any], script_args: Any, args: Any) -> Scorer:
    """Return a scorer with the recipe's first accuracy reward, or ``pure_accuracy_math`` if there is none.

    Rewards that judge only their own problems do not count. ``functions`` are the trainer's reward functions for
    ``names``.
    """
    known = rewards()
    for name, function in zip(names, functions, strict=True):
        if name in known and known[name].accuracy and known[name].one_answer:
            return Scorer(name, function)
    return Scorer(DEFAULT_ACCURACY, make_reward(DEFAULT_ACCURACY, script_args, args))


def _find_generated_data(name: str) -> GeneratedData | None:
    """Return the generated dataset of a benchmark. None for files, environments and datasets of the hub."""
    benchmark = benchmarks().get(name)
    return generated(benchmark.id) if benchmark else None


def _find_scoring(name: str) -> Scoring | None:
    """Return the functions for a benchmark's additional scores besides pass@k, or None if it has none."""
    data = _find_generated_data(name)
    return data.scoring if data else None


# --- the run ----------------------------------------------------------------------------------------------------------


def run_benchmarks(
    trainer: SamplingTrainer, script_args: ScriptArguments, run: Path, stop_requested: Callable[[], bool],
    fetched: Fetched | None = None,
) -> None:  # fmt: skip
    """Run the recipe's benchmarks that have no result for this model yet. Called by every rank, after training.

    ``run`` is the run directory. ``fetched`` finds downloaded datasets (``data.read_rows``). Rank 0 calls
    ``stop_requested`` between chunks. Raise StoppedInBenchmarks if it returns True, BenchmarkFailed after a failure.
    """
    scorer = make_recipe_scorer(script_args.reward_funcs, trainer.reward_funcs, script_args, trainer.args)
    Runner(trainer, script_args, run, stop_requested, scorer, fetched).run_missing(script_args.benchmarks)


@dataclass(frozen=True)
class Stage:
    """When benchmarks run, before or after the training, and where their results go."""

    results: str
    """File of the results in the run directory."""
    prefix: str
    """Prefix of the files in ``benchmarks/``."""
    progress: str
    """The progress of the run at that point, for messages."""


TRAINED = Stage("benchmarks.json", "", "the model is saved")
UNTRAINED = Stage("benchmarks/untrained.json", "untrained_", "nothing is trained yet")


@dataclass
class Runner:
    """A rank's part in the benchmarks of a run. The fields are the arguments of ``run_benchmarks``."""

    trainer: SamplingTrainer
    args: ScriptArguments
    folder: Path
    stop_requested: Callable[[], bool]
    scorer: Scorer
    fetched: Fetched | None
    stage: Stage = TRAINED

    def run_missing(self, names: Sequence[str]) -> None:
        """Run the benchmarks in ``names`` that have no result for this model and these settings.

        Send the final weights to the sampler first. Raise StoppedInBenchmarks at once after a stop request, and
        BenchmarkFailed at the end if any failed.
        """
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
            progress = self.stage.progress.capitalize()
            raise BenchmarkFailed(f"{'; '.join(failures)}. {progress}; a resumed run tries again")

    def run(self, name: str) -> None:
        """Sample and score a benchmark, and write its result. Raise BenchmarkFailed on every rank if that fails."""
        rows = list[dict[str, Any]]()
        with self.trainer.rows.span(f"benchmark {name}") as timed:
            if self._is_played(name):
                assert self.trainer.source is not None
                self.trainer.source.run_benchmark(self, name, rows)
            else:
                self._sample_and_score(name, rows)
        self.on_main(lambda: self._write_result(name, rows, timed.seconds))

    def _sample_and_score(self, name: str, rows: list[dict[str, Any]]) -> None:
        """Sample and score a benchmark in chunks, and add a row per problem to ``rows`` on rank 0.

        Raise StoppedInBenchmarks if a stop was requested before a chunk.
        """
        rollouts, samples = self.trainer.rollouts, self.args.benchmark_samples
        longest = int(self.trainer.args.max_completion_length)
        sampling = Sampling(samples, self.args.benchmark_temperature, longest)
        problems = self.on_main(lambda: load_problems(name, self.args, self.trainer.args.seed, self.fetched))
        prompts = self.on_main(lambda: self._render_problems(name, problems, longest))
        step = max(1, CHUNK // samples)
        for start in range(0, len(problems), step):
            if self.on_main(self.stop_requested):
                raise StoppedInBenchmarks(name, self.stage.progress)
            chunk, chunk_prompts = problems[start : start + step], prompts[start : start + step]
            sampled = None
            if not rollouts.only_main_rank_samples:
                if self._turn_source is None:
                    sampled = rollouts.sample(chunk_prompts, sampling)
                elif not self.trainer.accelerator.is_main_process:
                    sample_shared_turns(self._turn_source, self.trainer, sampling)
            self.on_main(partial(self._score_chunk, name, chunk, chunk_prompts, sampling, sampled, rows))

    def on_main(self, work: Callable[[], _Result]) -> _Result:
        """Call ``work`` on rank 0. Return its result, or raise its error as BenchmarkFailed, on every rank."""
        outcome: list[Any] = [None, None]  # result, error
        if self.trainer.accelerator.is_main_process:
            try:
                outcome[0] = work()
            except Exception as error:  # the other ranks wait, and other benchmarks may still run
                text = f"{type(error).__name__}: {error}"
                reason = str(error.problems[0]) if isinstance(error, ConfigError) else text
                outcome[1] = mask_secrets(" ".join(reason.split()))
        broadcast_object_list(outcome, from_process=0)
        if outcome[1] is not None:
            raise BenchmarkFailed(outcome[1])
        result: _Result = outcome[0]
        return result

    def _render_problems(self, name: str, problems: list[BenchmarkProblem], max_tokens: int) -> list[Prompt]:
        """Return the problems as token ids, rendered as in training, each with a sampling seed.

        Raise ValueError if a prompt with a completion of ``max_tokens`` does not fit ``vllm_max_model_length``.
        """
        chats = [problem.prompt for problem in problems]
        ids = render_chats(self.trainer, chats) if self._turn_source else self.trainer._tokenize_prompts(chats)[0]
        limit = self.trainer.args.vllm_max_model_length if self.trainer.use_vllm else None
        longest = max(len(tokens) for tokens in ids)
        if limit is not None and longest + max_tokens > limit:
            sizes = f"a prompt of {longest} tokens and a completion of {max_tokens}"
            problem = f"{sizes} exceed vllm_max_model_length {limit}"
            raise ValueError(f"{problem}; raise it, or lower max_completion_length")
        seeds = [problem_seed(self.trainer.args.seed, name, problem.index) for problem in problems]
        return [Prompt(tokens, seed) for tokens, seed in zip(ids, seeds, strict=True)]

    def _score_chunk(
        self, name: str, problems: list[BenchmarkProblem], prompts: list[Prompt], sampling: Sampling,
        sampled: list[list[Tokens]] | None, rows: list[dict[str, Any]],
    ) -> None:  # fmt: skip
        """Score the completions of a chunk of problems, and append its rows to ``rows`` and to the benchmark's file.

        ``sampled`` are the completions' token ids. With None, they are sampled here. A source with turns plays them.
        """
        source, end_ids = self._turn_source, set(self.trainer.eos_token_ids)
        if source is not None:
            played = play_completions(source, self.trainer, prompts, sampling)
        else:
            sampled = self.trainer.rollouts.sample(prompts, sampling) if sampled is None else sampled
            played = [self._read_completions(row) for row in sampled]
        messages = [[completion.messages for completion in completions] for completions in played]
        scores = self._make_scorer(name).scores(problems, messages)
        chunk_rows, scoring = list[dict[str, Any]](), _find_scoring(name)
        for problem, completions, problem_scores in zip(problems, played, scores, strict=True):
            answers = [completion.messages[-1]["content"] for completion in completions]
            row: dict[str, Any] = {
                "problem": problem.prompt[-1]["content"], "gold": problem.gold, "scores": problem_scores,
                "lengths": [completion.tokens for completion in completions],
                "truncated": [completion.is_cut(end_ids) for completion in completions],
            }  # fmt: skip
            if scoring:
                row[scoring.column] = [scoring.judge(extract_final_text(text), problem.gold) for text in answers]
            texts = [completion.text for completion in completions] if source else answers
            chunk_rows.append({**row, "completions": [mask_secrets(text) for text in texts]})
        self.add_rows(name, chunk_rows, rows)

    @property
    def _turn_source(self) -> Source | None:
        """The source that samples the recipe's datasets turn by turn, e.g. because the policy has tools; or None."""
        lookup = partial(getattr, self.args)
        sampler = sampler_of(lookup)
        return self.trainer.source if sampler is not None and sampler.reads_datasets(lookup) else None

    def _read_completions(self, completions: list[Tokens]) -> list[PlayedCompletion]:
        """Return sampled completions with their texts as messages."""
        texts = self.trainer.processing_class.batch_decode(completions, skip_special_tokens=True)
        messages = [[{"role": "assistant", "content": text}] for text in texts]
        return [PlayedCompletion(*pair, len(pair[1]), False) for pair in zip(messages, completions, strict=True)]

    def add_rows(self, name: str, new_rows: list[dict[str, Any]], rows: list[dict[str, Any]]) -> None:
        """Append ``new_rows`` to the benchmark's file, and to ``rows`` without the completions.

        Print the number of all ``rows``. If ``rows`` is empty at first, the file is replaced. Called on rank 0.
        """
        plain = re.sub(r"[^\w.-]+", "_", name.removesuffix(".jsonl"))
        path = self.folder / "benchmarks" / f"{self.stage.prefix}{plain}.jsonl"
        path.parent.mkdir(exist_ok=True)
        with path.open("a" if rows else "w") as file:
            for row in new_rows:
                file.write(json.dumps(row) + "\n")
                rows.append({key: value for key, value in row.items() if key != "completions"})
        print(f"grpo: {self.stage.prefix}benchmark {name}: {len(rows)} problems sampled", flush=True)

    def _write_result(self, name: str, rows: list[dict[str, Any]], seconds: float) -> None:
        """Write a benchmark's result to the stage's results, and its settings to ``settings.json``.

        The result has pass@k, additional scores, and baselines, which include the untrained model.
        """
        scores, golds = [row["scores"] for row in rows], [row["gold"] for row in rows]
        lengths, truncated = ([value for row in rows for value in row[key]] for key in ("lengths", "truncated"))
        result: dict[str, Any] = pass_at_k_table(scores)
        scoring = _find_scoring(name)
        if scoring:
            result |= scoring.scores([row[scoring.column] for row in rows], golds)
        result |= {
            "problems": len(rows), "samples": self.args.benchmark_samples,
            "no_verdict": sum(score is None for row in scores for score in row),
            "mean_length": round(sum(lengths) / len(lengths), 1),
            "truncated": round(sum(truncated) / len(truncated), 4),
            "reward": self._get_reward_name(name), "temperature": self.args.benchmark_temperature,
            "seconds": round(seconds, 1),
        }  # fmt: skip
        if self._is_played(name):
            rewards_known = [reward for row in rows for reward in row["rewards"] if reward is not None]
            mean = round(sum(rewards_known) / len(rewards_known), 6) if rewards_known else None
            result |= {"mean_reward": mean}
        if scoring and self.stage is TRAINED:
            earlier = read_json(self.folder / UNTRAINED.results).get(name)
            untrained = {"untrained": {key: value for key, value in earlier.items() if "@" in key}} if earlier else {}
            result |= {"baselines": scoring.baselines(golds, self.args.benchmark_samples) | untrained}
        settings, results = read_json(self._settings_file), self.folder / self.stage.results
        settings.pop(name, None)
        write_json(self._settings_file, settings)  # a crash must not leave a new result with old settings
        write_json(results, {**read_json(results), name: result})
        write_json(self._settings_file, {**settings, name: self._collect_settings(name)})

    def _is_played(self, name: str) -> bool:
        """Return whether the recipe's source of completions runs this benchmark itself, by playing episodes."""
        lookup = partial(getattr, self.args)
        source = sampler_of(lookup)
        return source is not None and name in source.benchmarks(lookup)

    def _make_scorer(self, name: str) -> Scorer:
        """Return the scorer with the reward of the benchmark's generated data, or else the recipe's."""
        data = _find_generated_data(name)
        reward = data.reward if data else None
        return Scorer(reward, make_reward(reward, self.args, self.trainer.args)) if reward else self.scorer

    def _get_reward_name(self, name: str) -> str:
        """Return the name of the reward that scores a benchmark, for its result."""
        return SOURCE_REWARD if self._is_played(name) else self._make_scorer(name).name

    def _has_result(self, name: str) -> bool:
        """Return whether an earlier attempt finished this benchmark on this model with these settings."""
        return bool(read_json(self._settings_file).get(name) == json.loads(json.dumps(self._collect_settings(name))))

    def _collect_settings(self, name: str) -> dict[str, Any]:
        """Return the step and all settings that change a benchmark's result. If one changes, the benchmark is rerun."""
        args, file = self.args, Path(os.path.expanduser(name))
        data = _find_generated_data(name)
        source = self.trainer.source if self._is_played(name) else self._turn_source
        return {
            "problems": fingerprint(file) if is_file(name) and file.is_file() else None,
            "step": self.trainer.state.global_step, "seed": self.trainer.args.seed,
            "samples": args.benchmark_samples, "temperature": args.benchmark_temperature,
            "max_completion_length": self.trainer.args.max_completion_length,
            "max_problems": args.benchmark_max_problems, "reward": self._get_reward_name(name),
            **({data.scheme: data.fingerprint(partial(getattr, args))} if data and not data.in_files else {}),
            **(source.benchmark_settings() if source else {}),
            "answer_matching": args.answer_matching, "system_prompt": args.system_prompt,
            "chat_template": args.chat_template, "chat_template_kwargs": self.trainer.args.chat_template_kwargs,
            **collect_sampling_keys(self.trainer),
        }  # fmt: skip

    @property
    def _settings_file(self) -> Path:
        """The file with the settings of each finished benchmark of this stage."""
        return self.folder / "benchmarks" / f"{self.stage.prefix}settings.json"


class UntrainedBenchmarks(TrainerCallback):
    """Run the recipe's benchmarks with baselines before the first step, without any effect on the training.

    At that time the model is wrapped and the server is ready. ``benchmarks/untrained.json`` is written once: a resumed
    run and a run with these results do nothing. The results after training include it.
    """

    def __init__(
        self, trainer: SamplingTrainer, script_args: ScriptArguments, run: Path, stop_requested: Callable[[], bool]
    ) -> None:
        """Choose the recipe's benchmarks that have scores besides pass@k; run nothing yet."""
        self._trainer = trainer
        self._names = [name for name in script_args.benchmarks if _find_scoring(name)]
        scorer = make_recipe_scorer(script_args.reward_funcs, trainer.reward_funcs, script_args, trainer.args)
        self._runner = Runner(trainer, script_args, run, stop_requested, scorer, None, UNTRAINED)

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Run the benchmarks if no step was taken. An error or a stop request ends the run on every rank."""
        if self._names and state.global_step == 0:
            with self._trainer.evaluation.undisturbed(), self._trainer.rollouts.resending_weights():
                self._runner.run_missing(self._names)
