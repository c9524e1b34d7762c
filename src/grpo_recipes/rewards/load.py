"""From the names in a recipe to the rewards the trainer calls: ours, and the user's own. No torch."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from grpo_recipes.paths import shown
from grpo_recipes.recipe.registry import IN_CHILDREN, Reward, make_reward, reward_keys
from grpo_recipes.recipe.user_code import copy_path, copy_source, load_object, source_path, split_spec
from grpo_recipes.rewards.pool import PoolReward, RewardPool
from grpo_recipes.rewards.wrapper import BatchReward, IsolatedReward, LimitRecords

_COPIES = "rewards"  # folder of the run directory


def is_own(name: str) -> bool:
    """Return whether a recipe's reward is the user's own: ``module:function`` or ``file.py:function``."""
    return ":" in name


def keep_rewards(names: Sequence[str], run_dir: Path) -> list[str]:
    """Copy the files of the user's rewards into ``<run>/rewards``, once in the life of a run.

    Return a note for each file that is gone, or differs from the copy.
    """
    notes = []
    for spec in filter(is_own, names):
        copy, original = copy_path(spec, run_dir / _COPIES), source_path(spec)
        if not copy.exists():
            copy_source(spec, run_dir / _COPIES)
        elif original is None:
            notes.append(f"the file of reward {spec} is gone; this run has its copy {shown(copy)}")
        elif original.read_bytes() != copy.read_bytes():
            used = "the copy" if split_spec(spec)[0].endswith(".py") else "the module as it is now"
            notes.append(f"{shown(original)} has changed since this run began (copy: {shown(copy)}); it uses {used}")
    return notes


def load_rewards(script_args: Any, args: Any, run_dir: Path) -> list[Reward]:
    """Return the rewards of a recipe's two configs, in its order, as TRL calls them.

    The user's own, and those of ours whose work has no bound, are called in child processes; the pool they share is
    started here. With ``reward_isolation: none`` the user's own are called in this process. ``run_dir`` has, or gets,
    copies of the user's files, and keeps the scores that limits decide.

    Raises:
        ConfigError: a file, module or function is not there.
        RewardFailed: one cannot be loaded.
    """
    names = script_args.reward_funcs
    keep_rewards(names, run_dir)
    apart = script_args.reward_isolation == "completion"
    isolated = [name for name in dict.fromkeys(names) if name in IN_CHILDREN or (is_own(name) and apart)]
    pool = _start_pool(isolated, script_args, args, run_dir) if isolated else None
    records = LimitRecords(run_dir / _COPIES / f"limits_{os.environ.get('RANK', '0')}.jsonl")
    rewards: list[Reward] = []
    for name, label in zip(names, _labels(names), strict=True):
        if name in isolated:
            assert pool is not None
            rewards.append(IsolatedReward(pool, name, label, records, _code_hash(name, run_dir)))
        elif is_own(name):
            rewards.append(BatchReward(load_object(_place(name, run_dir), run_dir / _COPIES), name, label))
        else:
            rewards.append(make_reward(name, script_args, args))
    return rewards


def _start_pool(names: list[str], script_args: Any, args: Any, run_dir: Path) -> RewardPool:
    ordered = sorted(names, key=is_own)  # a user's folder must not come before our rewards on the path
    pool = RewardPool(
        *[PoolReward(name, reward_keys(name, script_args, args), _place(name, run_dir)) for name in ordered],
        workers=script_args.reward_workers,
        timeout=script_args.reward_timeout,
        memory_gib=script_args.reward_memory_gib,
        copies=run_dir / _COPIES,
    )
    pool.start()
    return pool


def _place(name: str, run_dir: Path) -> str:
    """Return what is loaded for a name: the copy, where a user's module is gone; of a file the copy is taken anyway."""
    if not is_own(name) or split_spec(name)[0].endswith(".py") or source_path(name) is not None:
        return name
    return f"{copy_path(name, run_dir / _COPIES)}:{split_spec(name)[1]}"


def _code_hash(name: str, run_dir: Path) -> str:
    return hashlib.sha256(copy_path(name, run_dir / _COPIES).read_bytes()).hexdigest() if is_own(name) else ""


def _labels(names: Sequence[str]) -> list[str]:
    """Return the names for metrics: the function's, or the whole where two are called alike."""
    short = [split_spec(name)[1] if is_own(name) else name for name in names]
    return [label if short.count(label) == 1 else name for name, label in zip(names, short, strict=True)]
