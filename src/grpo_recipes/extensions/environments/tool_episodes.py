"""Episodes with tools: the policy answers a prompt of a dataset, and may call functions before its answer.

The policy's calls run in child processes, and their results return as messages of the role ``tool``. ``Episodes``
keeps the tokens and masks. Prompts and rewards come from the dataset and ``reward_funcs``, as without tools.
"""

import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from grpo_recipes.extensions.environments.episode import Episode, Tokens
from grpo_recipes.extensions.environments.episodes import Episodes
from grpo_recipes.extensions.environments.recipe import compute_tool_turn_tokens
from grpo_recipes.extensions.environments.tools import (
    CALL,
    Call,
    CallParser,
    describe_tools,
    make_results_turn,
    name_of,
)
from grpo_recipes.recipe.configs import GRPOConfig, ScriptArguments
from grpo_recipes.recipe.user_code import REWARD_COPIES, copy_path, source_path
from grpo_recipes.rewards.chance import make_call_seed
from grpo_recipes.rewards.load import hash_call
from grpo_recipes.rewards.score import Score
from grpo_recipes.rollouts.renderer import DUMMY, Renderer
from grpo_recipes.rollouts.source import PlayedCompletion, SamplingTrainer
from grpo_recipes.rollouts.turns import Message, Turn, derive_seed

LIMIT = "max_tool_calls"
_MISSING = "a turn is missing"  # why an episode failed that was played without a trainer
_KEYS = ("timeout", "memory_gib", "network", "turn_length")  # keys of environments that change the results of calls


class ToolEpisodes(Episodes):
    """Completions for recipes with ``tools``. The chat template gets the tools as its variable ``tools``."""

    _function = CALL

    def __init__(self, script_args: ScriptArguments, args: GRPOConfig, run_dir: Path):
        """Start the child processes that run the tools, and add the tools to ``args.chat_template_kwargs``.

        Raise ConfigError if a tool can't be described.
        """
        super().__init__(script_args, args, run_dir)
        self._copies = run_dir / REWARD_COPIES
        began = time.monotonic()
        schemas = describe_tools(partial(getattr, script_args), self._copies)
        self._pool.allow_imports(self._function, 2 * (time.monotonic() - began))
        self._tools, self._specs_by_name = list(schemas.values()), {name_of(schemas[spec]): spec for spec in schemas}
        self._template_kwargs = args.chat_template_kwargs or {}
        args.chat_template_kwargs = {**self._template_kwargs, "tools": self._tools}
        self.turn_tokens = compute_tool_turn_tokens(script_args.environment_turn_length, args.max_completion_length)
        self._parser: CallParser | None = None  # set by ``attach``

    def attach(self, trainer: SamplingTrainer) -> None:
        """Create the parser of calls; raise ConfigError if the chat template omits tools or has no known format."""
        tokenizer = trainer.processing_class
        Renderer(tokenizer, self._template_kwargs).prompt(Turn(DUMMY[:1], tools=self._tools))
        self._parser = CallParser(tokenizer, self._tools)

    @property
    def _max_turns(self) -> int:
        """The maximum number of turns of the policy: ``max_tool_calls``, and the answer."""
        return int(self._script.max_tool_calls) + 1

    def _make_episode(self, row_index: int, row: dict[str, Any]) -> Episode:
        """Return the episode of a dataset row before its first turn, with the row's prompt as its arguments."""
        return Episode(row_index, "tools", json.dumps(row["prompt"]), 0)

    def benchmark_settings(self) -> dict[str, Any]:
        """Return the keys of tools with their values, and a hash of the code of each tool or class."""
        names = ("tools", "max_tool_calls", *(f"environment_{name}" for name in _KEYS))
        files = {spec: copy_path(spec, self._copies) for spec in self._user_specs}
        paths = {spec: copy if copy.is_file() else source_path(spec) for spec, copy in files.items()}
        hashes = {spec: hashlib.sha256(path.read_bytes()).hexdigest()[:16] for spec, path in paths.items() if path}
        return {**{name: getattr(self._script, name) for name in names}, **hashes}

    def play(
        self, prompts: Sequence[Tokens], seeds: Sequence[int], trainer: SamplingTrainer,
        sample: Callable[[list[int], list[Tokens]], list[Tokens | None]], rows: Sequence[Mapping[str, Any]] = (),
    ) -> list[PlayedCompletion | None]:  # fmt: skip
        """Play an episode per prompt; see ``Source.play``. Calls are seeded by ``seeds``."""
        self._name = ""  # calls of a training are seeded by its generations
        self.played = [
            Episode(seed, "tools", "", seed, prompt_ids=list(prompt), turns=[Turn([])])
            for prompt, seed in zip(prompts, seeds, strict=True)
        ]
        self._play_turns(seeds, trainer, sample)
        return self._collect_played([None] * len(self.played))

    def _play_turns(
        self, seeds: Sequence[int], trainer: SamplingTrainer,
        sample: Callable[[list[int], list[Tokens]], list[Tokens | None]],
    ) -> None:  # fmt: skip
        """Sample turns and run their calls until all episodes of ``played`` have ended; they have these ``seeds``."""
        pairs = list(zip(self.played, seeds, strict=True))
        while active := [(episode, seed) for episode, seed in pairs if episode.active]:
            turn_seeds = [derive_seed(seed, len(episode.actions)) for episode, seed in active]
            samples = sample(turn_seeds, [episode.context() for episode, _ in active])
            for (episode, _), ids in zip(active, samples, strict=True):
                episode.failed = _MISSING if ids is None else None
            playing = [episode for episode, _ in active if episode.active]
            self.continue_episodes(playing, [ids for ids in samples if ids is not None], trainer)

    def _collect_played(self, columns: Sequence[dict[str, Any] | None]) -> list[PlayedCompletion | None]:
        """Return the completions of ``played`` with these columns for rewards; None if a turn is missing."""
        return [
            None if episode.failed == _MISSING
            else PlayedCompletion(
                messages, episode.ids, sum(turn is not None for turn in episode.turn_ids), bool(episode.unfinished),
                values,
            )
            for episode, messages, values in zip(self.played, self.completions(), columns, strict=True)
        ]  # fmt: skip

    def _request_answers(
        self, episodes: Sequence[Episode], give_up_after: int | None, stopped: Callable[[], bool]
    ) -> list[Score]:
        """Run the calls of the last turns; return a turn as JSON for each episode: its prompt, results, or the end.

        Each failure of a call is a result that the policy reads. The number of failures has no limit: ``give_up_after``
        is not used. Open calls are given up once ``stopped`` returns true.
        """
        calls = [self._find_calls(episode) for episode in episodes]
        requests = [
            (index, position, tool_call)
            for index, tool_calls in enumerate(calls)
            for position, tool_call in enumerate(tool_calls)
        ]
        scores = self._run_calls([(episodes[index], position, each) for index, position, each in requests], stopped)
        results: list[list[tuple[Call, Score]]] = [[] for _ in episodes]
        for (index, _, tool_call), score in zip(requests, scores, strict=True):
            results[index].append((tool_call, score))
        turns = [self._make_turn(episode, result) for episode, result in zip(episodes, results, strict=True)]
        return [Score(json.dumps(asdict(turn))) for turn in turns]

    def _find_calls(self, episode: Episode) -> list[Call]:
        """Return the calls of an episode's last turn.

        If the calls of the whole episode exceed ``max_tool_calls``, set ``unfinished`` and return no calls.
        """
        if not episode.actions:
            return []
        assert self._parser is not None
        turn = len(episode.actions) - 1
        start = episode.turn_ids.index(turn) if turn in episode.turn_ids else len(episode.ids)
        context = [*episode.prompt_ids, *episode.ids[:start]]
        calls = self._parser.parse(context, episode.ids[start:], episode.actions[-1])
        if count_calls(episode, "tool_calls") + len(calls) > self._script.max_tool_calls:
            episode.unfinished = LIMIT
            return []
        return calls

    def _run_calls(self, calls: Sequence[tuple[Episode, int, Call]], stopped: Callable[[], bool]) -> list[Score]:
        """Run calls of episodes, each with its position in the turn; return their results, or the reasons of failures.

        A call with a problem is not run: the problem is its reason. A call that exceeds a limit is recorded in a file
        of the run, and never repeated.
        """
        names = [f"{self._name}/{episode.row}/{len(episode.actions)}/{position}" for episode, position, _ in calls]
        keys = [
            hash_call((*self._identify(tool_call), name), tool_call.arguments)
            for (_, _, tool_call), name in zip(calls, names, strict=True)
        ]
        scores: dict[int, Score] = {}
        for index, (key, (_, _, tool_call)) in enumerate(zip(keys, calls, strict=True)):
            if tool_call.problem:
                scores[index] = Score(None, tool_call.problem)
            elif recorded := self._limit_records.find(key, 0):
                scores[index] = recorded
        open_calls = [index for index in range(len(calls)) if index not in scores]
        texts = [self._serialize(calls[index][2]) for index in open_calls]
        seeds = [make_call_seed(self._args.seed, names[index]) for index in open_calls]
        new_scores = self._pool.score(CALL, texts, stopped=stopped, seeds=seeds)
        for index, score in zip(open_calls, new_scores, strict=True):
            scores[index] = score
            self._limit_records.add(keys[index], 0, score)
        return [scores[index] for index in range(len(calls))]

    def _identify(self, tool_call: Call) -> tuple[Any, ...]:
        """Return the tool, its code and its limits, under which an exceeded limit of a call is recorded."""
        spec = self._specs_by_name.get(tool_call.name, "")
        path = source_path(spec) if spec else None
        code = hashlib.sha256(path.read_bytes()).hexdigest() if path else ""
        return spec, code, self._pool.timeout, self._pool.memory_gib

    def _serialize(self, tool_call: Call) -> str:
        """Return a call as JSON for the child processes."""
        spec = self._specs_by_name[tool_call.name]
        return json.dumps({"tool": spec, "copies": str(self._copies), "arguments": tool_call.arguments})

    def _make_turn(self, episode: Episode, results: Sequence[tuple[Call, Score]]) -> Turn:
        """Return the next turn: the prompt before the first action, else a message for each result.

        Without results, the last action was the answer: the turn has ``done``, unless the episode is unfinished.
        """
        if not episode.actions:
            return Turn(json.loads(episode.arguments))
        return make_results_turn([(tool_call.name, score) for tool_call, score in results], episode.unfinished)

    def _make_output(self, trainer: SamplingTrainer) -> dict[str, Any]:
        """Log the episodes' metrics and return TRL's columns, without rewards: ``reward_funcs`` compute them."""
        output = super()._make_output(trainer)
        return {name: column for name, column in output.items() if not name.startswith("episode_")}

    def _compute_metrics(self, episode: Episode) -> dict[str, float]:
        """Return the metrics of any episode, and the numbers of its calls and failed calls."""
        calls, failures = count_calls(episode, "tool_calls"), count_calls(episode, "tool_failures")
        return {**super()._compute_metrics(episode), "tool_calls": calls, "tool_failures": failures}

    def completions(self) -> list[list[Message]]:
        """Return each episode's messages after the prompt, up to the policy's last message.

        Results of tools after it are left out, because rewards would read them as the answer.
        """
        completions = super().completions()
        for messages in completions:
            while messages[-1]["role"] == "tool":
                messages.pop()
        return completions


def count_calls(episode: Episode, name: str) -> float:
    """Return the number of an episode's calls ("tool_calls"), or of its failed calls ("tool_failures")."""
    return sum(float(turn.info.get(name, 0.0)) for turn in episode.turns)
