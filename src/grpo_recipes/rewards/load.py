"""Load a recipe's rewards for the trainer: built-in rewards and the user's own. No torch.

A built-in reward is a plain function. User rewards, and built-in rewards that may run forever, are ``RewardWrapper``s,
which know why a completion is unscored.

    with open_rewards(settings, run_dir) as rewards:
        values = rewards[0](completions, answer=answers)
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from grpo_recipes.paths import display_path
from grpo_recipes.recipe.datafiles import LIVE_OBJECTS, solution_names
from grpo_recipes.recipe.registry import SOURCE_REWARD, list_reward_models, rewards_in_children
from grpo_recipes.recipe.sources import starts_from_rows
from grpo_recipes.recipe.user_code import REWARD_COPIES, changed_copies, copy_path, copy_source, source_path, split_spec
from grpo_recipes.rewards.chance import make_call_seed
from grpo_recipes.rewards.pool import RewardPool
from grpo_recipes.rewards.score import (
    NOT_CALLED,
    Reward,
    RewardWrapper,
    Score,
    is_user_reward,
    load_reward,
    make_reward,
    read_keys,
    select_columns,
)
from grpo_recipes.runs.rundir import cut_damaged_end, load_json_mapping, write_atomically
from grpo_recipes.runs.trace import Trace


def copy_reward_files(names: Sequence[str], run_dir: Path, update: bool = False) -> list[str]:
    """Copy the files of the user rewards in ``names`` to ``rewards/`` in the run directory; keep existing copies.

    With ``update``, a changed file replaces its copy, and the old copy gets another name. Return a note for the user
    for each file that is gone, that differs from its copy, or that replaced its copy; [] if there is none. Raise
    ConfigError if a file has no copy and does not exist.
    """
    notes = []
    changed = changed_copies(filter(is_user_reward, names), run_dir / REWARD_COPIES) if update else []
    # Several rewards may be in the same file.
    for copy, spec in {copy_path(spec, run_dir / REWARD_COPIES): spec for spec in changed}.items():
        old_copy = copy.with_suffix(f".{hashlib.sha256(copy.read_bytes()).hexdigest()[:8]}.py")
        copy.replace(old_copy)
        file = split_spec(spec)[0]
        notes.append(f"--update-rewards: the run now uses the current {file}; its previous copy is {old_copy.name}")
    for spec in filter(is_user_reward, names):
        copy, original = copy_path(spec, run_dir / REWARD_COPIES), source_path(spec)
        if not copy.exists():
            copy_source(spec, run_dir / REWARD_COPIES)
        elif original is None:
            notes.append(f"the file of reward {spec} is gone; this run uses its copy {display_path(copy)}")
        elif original.read_bytes() != copy.read_bytes():
            is_file = split_spec(spec)[0].endswith(".py")
            used = "the copy; to use the file, add --update-rewards" if is_file else "the current module"
            notes.append(
                f"{display_path(original)} has changed since this run started (copy: {display_path(copy)});"
                f" the run uses {used}"
            )
    return list(dict.fromkeys(notes))


def load_rewards(
    script_args: Any, args: Any, run_dir: Path, left_out: Mapping[str, str] = MappingProxyType({}),
    trace: Trace | None = None,
) -> list[Any]:  # fmt: skip
    """Load the rewards in ``reward_funcs``, in this order, as functions that TRL can call; models stay names.

    User rewards and built-in rewards that may run forever are called in the child processes of a pool, which is started
    here. With ``reward_isolation: none``, user rewards are called in this process. ``script_args`` and ``args`` are the
    recipe's configs. ``run_dir`` gets copies of the files of user rewards, and records of scores that a limit decided.
    ``left_out`` maps columns that rewards do not get to the reasons. ``trace`` gets the times of the child processes.
    Raise ConfigError if a file does not exist, and RewardFailed if a reward cannot be loaded.
    """
    names, copies = script_args.reward_funcs, run_dir / REWARD_COPIES
    copy_reward_files(names, run_dir)
    isolates_user_rewards = script_args.reward_isolation == "completion"
    unbounded = rewards_in_children()
    isolated = [
        name for name in dict.fromkeys(names) if name in unbounded or (is_user_reward(name) and isolates_user_rewards)
    ]
    pool = RewardPool(
        *sorted(
            isolated, key=is_user_reward
        ),  # built-in rewards first, so that the user's folder is not before them on the path
        workers=script_args.reward_workers,
        timeout=script_args.reward_timeout,
        memory_gib=script_args.reward_memory_gib,
        copies=copies,
        environment=script_args.reward_environment,
        concurrency=script_args.reward_concurrency,
        keys={name: read_keys(name, script_args, args) for name in isolated if not is_user_reward(name)},
        trace=trace,
    )
    records = LimitRecords(copies / f"limits_{os.environ.get('RANK', '0')}.jsonl")
    short_names = [split_spec(name)[1] or name for name in names]
    mixture, keys = script_args.dataset_mixture, ("dataset_solution_column", "eval_dataset_solution_column")
    solutions = solution_names([getattr(script_args, key) for key in keys], mixture)
    episodes_may_fail = starts_from_rows(lambda key: getattr(script_args, key, None))
    rewards: list[Any] = []
    for name, short_name in zip(names, short_names, strict=True):
        label = short_name if short_names.count(short_name) == 1 else name  # the name in metrics
        if name in isolated:
            code = hashlib.sha256(copy_path(name, copies).read_bytes()).hexdigest() if is_user_reward(name) else ""
            solution_columns = solutions if is_user_reward(name) else ()
            rewards.append(IsolatedReward(pool, name, label, records, code, solution_columns, left_out, args.seed))
        elif name == SOURCE_REWARD:
            rewards.append(EpisodeReward())
        elif list_reward_models([name]):
            rewards.append(name)
        elif is_user_reward(name):
            rewards.append(RewardWrapper(load_reward(name, copies), name, label, solutions, left_out))
        else:
            function = make_reward(name, script_args, args)
            rewards.append(RewardWrapper(function, name, label) if episodes_may_fail else function)
    if isolated:
        pool.start()
    return rewards


@contextlib.contextmanager
def open_rewards(
    settings: Any, run_dir: Path, left_out: Mapping[str, str] = MappingProxyType({})
) -> Iterator[list[Reward]]:
    """Load a recipe's rewards for a ``with`` block, and end their child processes after it, also after an error.

    ``settings`` has the recipe keys as attributes. ``left_out`` has the columns that rewards do not get, with the
    reasons. ``run_dir`` gets the files that ``load_rewards`` writes. Errors are raised as by ``load_rewards``.
    """
    rewards = load_rewards(settings, settings, run_dir, left_out)
    try:
        yield rewards
    finally:
        for reward in rewards:
            if isinstance(reward, IsolatedReward):
                reward.pool.close()


class IsolatedReward(RewardWrapper):
    """A reward that TRL calls like a function, and that runs in the child processes of a ``RewardPool``.

    Rows with equal arguments share one call, which is repeated once if it fails. If a limit decided its score, it is
    not repeated, also after a resume (``LimitRecords``). ``code`` is a hash of the user's code, since such a record is
    not valid for changed code. ``run_seed`` and the generation determine the random numbers of a call.
    """

    def __init__(
        self, pool: RewardPool, spec: str, name: str, records: LimitRecords, code: str = "",
        solutions: Collection[str] = (), left_out: Mapping[str, str] = MappingProxyType({}), run_seed: int = 0,
    ):  # fmt: skip
        """Create a reward that calls ``spec`` in ``pool``; ``name`` is its name in metrics. Nothing is called yet.

        ``solutions`` are more names for the column ``answer``. ``left_out`` maps columns that the reward does not get
        to the reasons.
        """
        super().__init__(pool.score, spec, name, solutions, left_out)
        self.pool, self.timeout, self._records, self._run_seed = pool, pool.timeout, records, run_seed
        self._identity = (spec, code, pool.timeout, pool.memory_gib)
        self._watch: Callable[[], bool] | None = None

    def watch_calls(self, watch: Callable[[], bool]) -> None:
        """Set a function that the pool calls a few times per second during calls; if it returns True, no more rows run.

        It replaces the run's stop request (``stop``).
        """
        self._watch = watch

    def discard_generation(self) -> None:
        """Remove the records of the current generation, which ends the run: nothing was trained on its scores."""
        self._records.remove(self.generation)

    def _score_batch(self, rows: int, columns: dict[str, Any]) -> list[Score]:
        """Score the rows in the pool's child processes and return their scores in order.

        Equal rows share a call, and share a second one if it fails. Without sharing, a server that fails at random
        would rarely fail for all of them. Scores that a limit decided are written to the run's file of such scores, and
        reused. ``rows`` is the number of rows.
        """
        plain = {name: values for name, values in columns.items() if name not in LIVE_OBJECTS}
        arguments = select_columns(plain, self.pool.accepted[self.spec])
        keys = [
            hash_call(self._identity, {name: values[row] for name, values in arguments.items()}) for row in range(rows)
        ]
        first_rows: dict[str, int] = {}
        first_equal_row = [row if key is None else first_rows.setdefault(key, row) for row, key in enumerate(keys)]
        recorded = {row: self._records.find(keys[row], self.generation) for row in first_equal_row}
        scores = {row: score for row, score in recorded.items() if score is not None}
        new_rows = [row for row, score in recorded.items() if score is None]
        new_scores = self._call_rows(new_rows, arguments, keys)
        if all(score.reason != NOT_CALLED for score in new_scores.values()):
            copies = Counter(first_equal_row)
            repeated = [row for row, score in new_scores.items() if copies[row] > 1 and score.may_differ]
            second_scores = self._call_rows(repeated, arguments, keys)
            new_scores |= {row: score for row, score in second_scores.items() if score.reason != NOT_CALLED}
        for row, score in new_scores.items():
            self._records.add(keys[row], self.generation, score)
        scores |= new_scores
        return [scores[row] for row in first_equal_row]

    def _call_rows(self, rows: list[int], arguments: dict[str, Any], keys: list[str | None]) -> dict[int, Score]:
        """Call the reward once for each of these rows in the pool, and return the scores by row."""
        if not rows:
            return {}
        # A call's seed depends on its arguments, not on its order: equal rows share a call, and calls are repeated.
        seeds = [make_call_seed(self._run_seed, self.generation, self.spec, keys[row] or row) for row in rows]
        columns = {name: [values[row] for row in rows] for name, values in arguments.items()}
        completions = columns.pop("completions")
        stopped = self._watch or (self.stop.cuts if self.stop else lambda: False)
        scores = self.pool.score(self.spec, completions, columns, self.give_up_after, stopped, seeds=seeds)
        return dict(zip(rows, scores, strict=True))


class EpisodeReward(RewardWrapper):
    """The reward that an environment gave to an episode, as a reward for TRL; unscored if the environment failed."""

    def __init__(self) -> None:
        super().__init__(make_reward(SOURCE_REWARD), SOURCE_REWARD, SOURCE_REWARD)


class LimitRecords:
    """The scores of a rank that a time limit, a memory limit or a death decided, so that a resumed run repeats them.

    The records are lines of a JSONL file; a damaged last line is removed. A record is valid from its generation on. If
    steps are repeated from a checkpoint, earlier generations call the reward again and later generations use the
    record, exactly as in the first attempt.
    """

    def __init__(self, file: Path):
        """Read the records in ``file``, which need not exist, and cut off a damaged last line."""
        self._file = file
        self._records: dict[str, tuple[int, str]] = {}
        text = file.read_bytes() if file.exists() else b""
        valid_text = cut_damaged_end(text)
        if valid_text != text:  # otherwise the next record would continue a damaged line
            write_atomically(file, valid_text.decode())
        for record in filter(None, map(load_json_mapping, valid_text.splitlines())):
            self._records.setdefault(record["key"], (record["generation"], record["reason"]))

    def find(self, key: str | None, generation: int) -> Score | None:
        """Return the recorded score of a call if its record is from this or an earlier generation, else None.

        ``key`` is a result of ``hash_call``. For None there is no record. The score has no value, only the reason of
        the limit, and is marked as replayed.
        """
        recorded_in, reason = self._records.get(key or "", (generation + 1, ""))
        return Score(None, reason, by_limit=True, replayed=True) if recorded_in <= generation else None

    def add(self, key: str | None, generation: int, score: Score) -> None:
        """Write a score to the file if a limit decided it; ignore other scores, and calls with the key None."""
        if key is None or not score.by_limit or score.reason is None:
            return
        self._records[key] = (generation, score.reason)
        self._file.parent.mkdir(exist_ok=True)
        with self._file.open("a") as file:
            file.write(_format_record(key, generation, score.reason))

    def remove(self, generation: int) -> None:
        """Remove the scores of a generation from the file, so that a resumed run calls the rewards again."""
        records = {key: record for key, record in self._records.items() if record[0] != generation}
        if len(records) < len(self._records):
            write_atomically(self._file, "".join(_format_record(key, *record) for key, record in records.items()))
        self._records = records


def _format_record(key: str, generation: int, reason: str) -> str:
    """Return the line of a score in the file of ``LimitRecords``."""
    return json.dumps({"key": key, "generation": generation, "reason": reason}) + "\n"


def hash_call(reward: Sequence[Any], arguments: dict[str, Any]) -> str | None:
    """Return a hash of ``reward`` (its name, code and limits) and the arguments of a call, which determine its score.

    Return None if an argument can't be converted to JSON, since it has no stable hash.
    """
    with contextlib.suppress(TypeError, ValueError):
        return hashlib.sha256(json.dumps([*reward, arguments], sort_keys=True).encode()).hexdigest()[:32]
    return None
