"""From the names in a recipe to the rewards the trainer calls: ours, and the user's own. No torch.

A reward of ours is a plain function. The user's own, and ours whose work has no bound, are ``RewardWrapper``s, which
know why a completion is unscored.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from grpo_recipes.paths import display_path
from grpo_recipes.recipe.datafiles import LIVE_OBJECTS, solution_names
from grpo_recipes.recipe.registry import SOURCE_REWARD, rewards_in_children
from grpo_recipes.recipe.user_code import REWARD_COPIES, changed_copies, copy_path, copy_source, source_path, split_spec
from grpo_recipes.rewards.chance import call_seed
from grpo_recipes.rewards.pool import RewardPool
from grpo_recipes.rewards.score import (
    Reward,
    RewardWrapper,
    Score,
    is_user_reward,
    load_reward,
    make_reward,
    select_columns,
)
from grpo_recipes.runs.rundir import json_mapping, without_damaged_end, write_atomically


def keep_rewards(names: Sequence[str], run_dir: Path, update: bool = False) -> list[str]:
    """Copy the files of the user's rewards into ``<run>/rewards``, once in the life of a run; ``update`` changed ones.

    Return a note for each file that is gone, that differs from the copy, or that takes the copy's place.
    """
    notes = []
    changed = changed_copies(filter(is_user_reward, names), run_dir / REWARD_COPIES) if update else []
    # A file may have several rewards.
    for copy, spec in {copy_path(spec, run_dir / REWARD_COPIES): spec for spec in changed}.items():
        old = copy.with_suffix(f".{hashlib.sha256(copy.read_bytes()).hexdigest()[:8]}.py")
        copy.replace(old)
        notes.append(f"--update-rewards: {split_spec(spec)[0]} as it is now is used; the copy of before is {old.name}")
    for spec in filter(is_user_reward, names):
        copy, original = copy_path(spec, run_dir / REWARD_COPIES), source_path(spec)
        if not copy.exists():
            copy_source(spec, run_dir / REWARD_COPIES)
        elif original is None:
            notes.append(f"the file of reward {spec} is gone; this run has its copy {display_path(copy)}")
        elif original.read_bytes() != copy.read_bytes():
            own = split_spec(spec)[0].endswith(".py")
            used = "the copy, --update-rewards the file as it is now" if own else "the module as it is now"
            notes.append(
                f"{display_path(original)} has changed since this run began (copy: {display_path(copy)});"
                f" it uses {used}"
            )
    return list(dict.fromkeys(notes))


def load_rewards(
    script_args: Any, args: Any, run_dir: Path, left_out: Mapping[str, str] = MappingProxyType({})
) -> list[Reward]:
    """Return the rewards of a recipe's two configs, in its order, as TRL calls them.

    The user's own, and those of ours whose work has no bound, are called in child processes; the pool they share is
    started here. With ``reward_isolation: none`` the user's own are called in this process. ``run_dir`` has, or gets,
    copies of the user's files, and keeps the scores that limits decide. A file that does not exist is a ConfigError,
    one that cannot be loaded otherwise a RewardFailed. ``left_out`` has the columns that rewards do not get, and why.
    """
    names, copies = script_args.reward_funcs, run_dir / REWARD_COPIES
    keep_rewards(names, run_dir)
    apart = script_args.reward_isolation == "completion"
    in_children = rewards_in_children()
    isolated = [name for name in dict.fromkeys(names) if name in in_children or (is_user_reward(name) and apart)]
    pool = RewardPool(
        *sorted(
            isolated, key=is_user_reward
        ),  # ours first: a user's folder must not come before our rewards on the path
        workers=script_args.reward_workers,
        timeout=script_args.reward_timeout,
        memory_gib=script_args.reward_memory_gib,
        copies=copies,
        environment=script_args.reward_environment,
        concurrency=script_args.reward_concurrency,
    )
    records = LimitRecords(copies / f"limits_{os.environ.get('RANK', '0')}.jsonl")
    short = [split_spec(name)[1] or name for name in names]
    mixture, keys = script_args.dataset_mixture, ("dataset_solution_column", "eval_dataset_solution_column")
    solutions = solution_names([getattr(script_args, key) for key in keys], mixture)
    rewards: list[Reward] = []
    for name, end in zip(names, short, strict=True):
        label = end if short.count(end) == 1 else name  # the name for metrics
        if name in isolated:
            code = hashlib.sha256(copy_path(name, copies).read_bytes()).hexdigest() if is_user_reward(name) else ""
            further = solutions if is_user_reward(name) else ()
            rewards.append(IsolatedReward(pool, name, label, records, code, further, left_out, args.seed))
        elif name == SOURCE_REWARD:
            rewards.append(EpisodeReward())
        elif is_user_reward(name):
            rewards.append(RewardWrapper(load_reward(name, copies), name, label, solutions, left_out))
        else:
            rewards.append(make_reward(name, script_args, args))
    if isolated:
        pool.start()
    return rewards


@contextlib.contextmanager
def lent_rewards(
    settings: Any, run_dir: Path, left_out: Mapping[str, str] = MappingProxyType({})
) -> Iterator[list[Reward]]:
    """Lend the rewards of a recipe, whose keys are attributes of ``settings``; their child processes end afterwards."""
    rewards = load_rewards(settings, settings, run_dir, left_out)
    try:
        yield rewards
    finally:
        for reward in rewards:
            if isinstance(reward, IsolatedReward):
                reward.pool.close()


class IsolatedReward(RewardWrapper):
    """A reward of a pool, called once for equal arguments, and not again where a limit decided before.

    ``code`` is a hash of the user's code, since other code may end otherwise. ``run_seed`` and the generation decide
    the random numbers that a call draws.
    """

    def __init__(
        self, pool: RewardPool, spec: str, name: str, records: LimitRecords, code: str = "",
        solutions: Collection[str] = (), left_out: Mapping[str, str] = MappingProxyType({}), run_seed: int = 0,
    ):  # fmt: skip
        super().__init__(pool.score, spec, name, solutions, left_out)
        self.pool, self.timeout, self._records, self._run_seed = pool, pool.timeout, records, run_seed
        self._identity = (spec, code, pool.timeout, pool.memory_gib)

    def _score(self, rows: int, columns: dict[str, Any]) -> list[Score]:
        """Return the score of each row; only rows without a record are called."""
        plain = {name: values for name, values in columns.items() if name not in LIVE_OBJECTS}
        arguments = select_columns(plain, self.pool.takes[self.spec])
        keys = [
            key_of(self._identity, {name: values[row] for name, values in arguments.items()}) for row in range(rows)
        ]
        first: dict[str, int] = {}
        same_as = [row if key is None else first.setdefault(key, row) for row, key in enumerate(keys)]
        known = {row: self._records.known(keys[row], self.generation) for row in same_as}
        new_rows = [row for row, score in known.items() if score is None]
        # A call's seed depends on its arguments, not on its order: calls are shared by equal rows, or repeated.
        seeds = [call_seed(self._run_seed, self.generation, self.spec, keys[row] or row) for row in new_rows]
        columns = {name: [values[row] for row in new_rows] for name, values in arguments.items()}
        completions = columns.pop("completions")
        stopped = self.watch or (self.stop.cuts if self.stop else lambda: False)
        scores = self.pool.score(self.spec, completions, columns, self.give_up_after, stopped, seeds=seeds)
        for row, score in zip(new_rows, scores, strict=True):
            self._records.add(keys[row], self.generation, score)
        by_row = known | dict(zip(new_rows, scores, strict=True))
        return [by_row[row] for row in same_as]


class EpisodeReward(RewardWrapper):
    """The reward that an episode had, unscored where its environment failed."""

    def __init__(self) -> None:
        super().__init__(make_reward(SOURCE_REWARD), SOURCE_REWARD, SOURCE_REWARD)

    def _score(self, rows: int, columns: dict[str, Any]) -> list[Score]:
        values = self._function(**columns)
        return [Score(value, reason) for value, reason in zip(values, columns["episode_failed"], strict=True)]


class LimitRecords:
    """The scores of one rank that a time limit, a memory limit or a death decided, so that a resumed run repeats them.

    A record counts from the generation it was made in: what was called before it in the run is called again when the
    run is redone from a checkpoint, and what was not called after it is not called then.
    """

    def __init__(self, file: Path):
        self._file = file
        self._records: dict[str, tuple[int, str]] = {}
        text = file.read_bytes() if file.exists() else b""
        whole = without_damaged_end(text)
        if whole != text:  # no other record may continue a damaged one
            write_atomically(file, whole.decode())
        for record in filter(None, map(json_mapping, whole.splitlines())):
            self._records.setdefault(record["key"], (record["generation"], record["reason"]))

    def known(self, key: str | None, generation: int) -> Score | None:
        """Return the recorded score for these arguments, or None."""
        made, reason = self._records.get(key or "", (generation + 1, ""))
        return Score(None, reason, by_limit=True, replayed=True) if made <= generation else None

    def add(self, key: str | None, generation: int, score: Score) -> None:
        """Keep a score that a limit decided, on disk before the update that it leads to."""
        if key is None or not score.by_limit or score.reason is None:
            return
        self._records[key] = (generation, score.reason)
        self._file.parent.mkdir(exist_ok=True)
        with self._file.open("a") as file:
            file.write(json.dumps({"key": key, "generation": generation, "reason": score.reason}) + "\n")


def key_of(reward: Sequence[Any], arguments: dict[str, Any]) -> str | None:
    """Return a hash of a call's arguments and of what else its score depends on: which reward, and its limits.

    None where an argument is not plain data and so has no stable hash.
    """
    with contextlib.suppress(TypeError, ValueError):
        return hashlib.sha256(json.dumps([*reward, arguments], sort_keys=True).encode()).hexdigest()[:32]
    return None
