"""Read a scored group from Atropos' run-api, find out why it must not be trained on, and convert its rows to arrays.

run-api does not validate groups: rows of unequal lengths, masks of other tokens and log-probs of +1 all pass. So call
``find_group_problem`` before ``to_trajectories``, which requires a group without problems.

Shapes: G trajectories of a group, N tokens of all trajectories, and in one trajectory P tokens of the prompt and T from
the first trained token on.
"""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from grpo_recipes.numbers import LARGEST_REWARD, LOWEST_LOGPROB, find_reward_problem

UNTRAINED = -100  # mask of a token that is not trained on
UNTRAINED_LOGPROB = 1.0  # log-prob of such a token; real log-probs are never positive
_SETTINGS = ("generation_params", "group_overrides")  # free-form settings of a whole group
# Fields with one row for each trajectory. Messages and distillation fields are passed on unread.
_PER_TOKEN = ("inference_logprobs", "advantages", "ref_logprobs")
_PASSED_ON = ("messages", "distill_token_ids", "distill_logprobs")
Rows = list[list[float]]
_MIN_TEMPERATURE, _MAX_TEMPERATURE = 1e-4, 1e4  # beyond these, divided logits overflow float32 or are all equal


@dataclass(frozen=True)
class Group:
    """A scored group: trajectories, usually completions of one prompt; each is a row of every list field.

    ``[]`` and null mean the same in JSON. Here both are None, or an empty container.
    """

    tokens: list[list[int]]  # prompt and completion
    masks: list[list[int]]  # the token if it is trained on, else -100; same lengths as tokens
    scores: list[float]  # the reward of each trajectory
    inference_logprobs: Rows | None = None  # log-probs under the policy that sampled; same lengths
    advantages: Rows | None = None  # advantages of tokens; same lengths
    ref_logprobs: Rows | None = None  # log-probs under a reference model; same lengths
    messages: list[list[dict[str, Any]]] | None = None
    generation_params: dict[str, Any] = field(default_factory=dict)
    overrides: list[dict[str, Any]] = field(default_factory=list)  # one for each trajectory, {} if it has none
    group_overrides: dict[str, Any] = field(default_factory=dict)
    images: Any = None
    env_id: int | None = None  # number of the environment, in the order of joining
    distill_token_ids: list[list[list[int]]] | None = None
    distill_logprobs: list[list[list[float]]] | None = None

    @classmethod
    def from_json(cls, content: Any) -> Group:
        """Create a Group from an entry of run-api's JSON; raise ValueError if fields are missing or of a wrong type."""
        required = ("tokens", "masks", "scores")
        if not isinstance(content, Mapping) or not all(isinstance(content.get(name), list) for name in required):
            raise ValueError("a scored group is a mapping with the lists tokens, masks and scores")
        lists: dict[str, Any] = {name: content.get(name) or None for name in (*_PER_TOKEN, *_PASSED_ON)}
        settings: dict[str, Any] = {name: content.get(name) or {} for name in _SETTINGS}
        overrides = [entry or {} for entry in content.get("overrides") or [{}] * len(content["tokens"])]
        if wrong := [name for name, value in lists.items() if not isinstance(value, list | None)]:
            raise ValueError(f"{wrong[0]} of a scored group is not a list")
        if not all(isinstance(value, dict) for value in (*settings.values(), *overrides)):
            raise ValueError("generation_params, group_overrides and each of the overrides of a group are mappings")
        columns: dict[str, Any] = {name: content[name] for name in required}
        images = None if (images := content.get("images")) == [] else images
        return cls(**columns, **lists, **settings, overrides=overrides, images=images, env_id=content.get("env_id"))

    def to_json(self) -> dict[str, Any]:
        """Return the group as run-api accepts and hands it out: 14 keys, None for an empty field."""
        lists = {name: getattr(self, name) for name in ("tokens", "masks", "scores", *_PER_TOKEN, *_PASSED_ON)}
        settings = {name: getattr(self, name) or None for name in _SETTINGS}
        overrides = self.overrides if any(self.overrides) else None
        return {**lists, **settings, "overrides": overrides, "images": self.images, "env_id": self.env_id}

    @property
    def policy_version(self) -> int | None:
        """The optimizer step of the weights that sampled the group, or None if the environment does not send it."""
        version = self.generation_params.get("policy_version")
        return version if type(version) is int else None

    def find_temperature(self, row: int) -> float | None:
        """Return the sampling temperature of a trajectory: its own, else the group's, or None if it is unknown."""
        overrides = self.overrides[row] if row < len(self.overrides) else {}
        temperatures = (
            settings.get("temperature") for settings in (overrides, self.generation_params, self.group_overrides)
        )
        return next((value for value in temperatures if value is not None), None)

    def is_zeroed(self, row: int) -> bool:
        """Return whether the environment replaces this trajectory's advantage with 0."""
        return bool(self.overrides[row].get("set_advantage_to_zero"))

    @cached_property
    def _flat(self) -> _FlatRows:
        """The group's rows as concatenated arrays, converted once; raises ValueError if a value is not a number."""
        return _FlatRows(self)

    @cached_property
    def _problem(self) -> str | None:
        """The first problem that makes this group unusable for every model, or None; computed once."""
        try:
            return (
                _find_shape_problem(self)
                or _find_mask_problem(self._flat)
                or _find_number_problem(self)
                or _find_setting_problem(self)
            )
        except ValueError as error:  # raised by _flat
            return str(error)


class _FlatRows:
    """The concatenated rows of a group, (N,), converted once; raises ValueError if a value is not a number.

    Attributes:
        lengths: number of tokens of each trajectory, (G,).
        starts: index of the first token of each trajectory, (G,).
        tokens: token ids, (N,).
        labels: masks, (N,).
        trained: whether a token is trained on, (N,).
        columns: log-probs, advantages and reference log-probs in float64, by name; only the fields of the group.
    """

    def __init__(self, group: Group):
        """Concatenate the rows of a group; raise ValueError with trajectory and field if a value is not a number."""
        self.lengths = np.array([len(row) for row in group.tokens], np.int64)
        self.starts = np.cumsum(self.lengths) - self.lengths
        self.tokens = _concatenate(group.tokens, "q", "tokens")
        self.labels = _concatenate(group.masks, "q", "masks")
        self.trained = self.labels != UNTRAINED
        columns = {name: rows for name in _PER_TOKEN if (rows := getattr(group, name)) is not None}
        self.columns = {name: _concatenate(rows, "d", name) for name, rows in columns.items()}

    def find_row(self, wrong: np.ndarray) -> int:
        """Return the index of the trajectory with the first true value of ``wrong``, (N,)."""
        return int(np.searchsorted(self.starts, np.argmax(wrong), side="right")) - 1

    def find_first_trained(self) -> np.ndarray:
        """Return the index of the first trained token of each trajectory, (G,); each trajectory must have one."""
        positions = np.flatnonzero(self.trained)
        return positions[np.searchsorted(positions, self.starts)]


def _concatenate(rows: Sequence[Any], kind: str, name: str) -> np.ndarray:
    """Concatenate rows to one array of int64 (``kind`` q) or float64 (``kind`` d).

    Raise ValueError with the trajectory and the field ``name`` if a value is not a number of this kind. ``array``
    converts a list twice as fast as numpy, and rejects a float among integers.
    """
    flat = array(kind)
    for index, row in enumerate(rows):
        try:
            flat.fromlist(row)
        except (TypeError, OverflowError) as error:
            raise ValueError(f"trajectory {index}: {name} contain an invalid value ({error})") from None
    return np.frombuffer(flat, dtype=kind) if flat else np.empty(0, kind)


def find_group_problem(group: Group, *, size: int, longest: int | None, vocabulary: int | None) -> str | None:
    """Return why a group must not be trained on, with the index of the trajectory, or None if it is valid.

    Args:
        group: the group to check.
        size: required number of trajectories.
        longest: most tokens of a trajectory, including the prompt; None for no limit.
        vocabulary: number of token ids that the model knows; None skips the check.
    """
    if len(group.tokens) != size or not size:
        return f"{len(group.tokens)} trajectories, expected {size}"
    if group._problem is not None:
        return group._problem
    flat = group._flat
    if longest is not None and (wrong := flat.lengths > longest).any():
        row = int(np.argmax(wrong))
        return f"trajectory {row}: {flat.lengths[row]} tokens, at most {longest} are allowed"
    if vocabulary is not None and (wrong := flat.tokens >= vocabulary).any():
        token = flat.tokens[np.argmax(wrong)]
        return f"trajectory {flat.find_row(wrong)}: token id {token}, but the model knows only 0 to {vocabulary - 1}"
    return None


def _find_shape_problem(group: Group) -> str | None:
    """Return a message about the first field with a wrong number of rows, or row with a wrong length; None if valid.

    Missing ``inference_logprobs``, a row without tokens, and a row that is not a list are problems too.
    """
    count = len(group.tokens)
    if group.inference_logprobs is None:
        return "no inference_logprobs"
    token_fields = {name: rows for name in ("masks", *_PER_TOKEN) if (rows := getattr(group, name)) is not None}
    for name, rows in {"scores": group.scores, "overrides": group.overrides, **token_fields}.items():
        if len(rows) != count:
            return f"{name} have {len(rows)} trajectories, tokens have {count}"
    for index, tokens in enumerate(group.tokens):
        for name, rows in {"tokens": group.tokens, **token_fields}.items():
            if not isinstance(rows[index], list):
                return f"trajectory {index}: its {name} are not a list"
            if len(rows[index]) != len(tokens):
                return f"trajectory {index}: {len(tokens)} tokens, but {len(rows[index])} {name}"
        if not tokens:
            return f"trajectory {index}: no tokens"
    return None


def _find_mask_problem(flat: _FlatRows) -> str | None:
    """Return a message about the first wrong token id or mask, or None if all are valid.

    A mask must be the token or -100. Each trajectory must train on a token, but not on its first token.
    """
    if (wrong := flat.tokens < 0).any():
        return f"trajectory {flat.find_row(wrong)}: token id {flat.tokens[np.argmax(wrong)]}"
    if (wrong := flat.trained & (flat.labels != flat.tokens)).any():
        index = np.argmax(wrong)
        labels = f"mask {flat.labels[index]} at token {flat.tokens[index]}"
        return f"trajectory {flat.find_row(wrong)}: {labels}, expected the token or -100"
    trained = np.add.reduceat(flat.trained, flat.starts, dtype=np.int64)
    if not trained.all():
        return f"trajectory {int(np.argmin(trained))}: no token is trained on"
    if (wrong := flat.trained[flat.starts]).any():
        return f"trajectory {int(np.argmax(wrong))}: its first token is trained on, but no token precedes it"
    return None


def _find_number_problem(group: Group) -> str | None:
    """Return a message about the first unusable log-prob, score or advantage; None if all are valid.

    A log-prob of a trained token must be from -104 to 0. Scores, advantages and reference log-probs must be finite and
    at most 1e15 in size.
    """
    flat = group._flat
    logprobs = flat.columns["inference_logprobs"]
    if (wrong := flat.trained & ~np.isfinite(logprobs)).any():
        return f"trajectory {flat.find_row(wrong)}: inference log-prob {logprobs[np.argmax(wrong)]} of a trained token"
    if (wrong := flat.trained & (logprobs < LOWEST_LOGPROB)).any():
        logprob = logprobs[np.argmax(wrong)]
        return (
            f"trajectory {flat.find_row(wrong)}: inference log-prob {logprob:g} of a trained token, below "
            f"{LOWEST_LOGPROB:g}: float32 can't represent this probability"
        )
    if (wrong := flat.trained & (logprobs > 0)).any():
        logprob = logprobs[np.argmax(wrong)]
        return f"trajectory {flat.find_row(wrong)}: inference log-prob {logprob:g} > 0 of a trained token"
    for index, score in enumerate(group.scores):
        if isinstance(score, bool) or not isinstance(score, int | float):
            return f"trajectory {index}: score {score!r}"
        if problem := find_reward_problem(_to_float(score)):
            return f"trajectory {index}: score {problem}"
    for name in ("advantages", "ref_logprobs"):
        values = flat.columns.get(name)
        if values is not None and (wrong := ~(np.abs(values) <= LARGEST_REWARD)).any():
            problem = find_reward_problem(float(values[np.argmax(wrong)]))
            return f"trajectory {flat.find_row(wrong)}: {problem} among its {name}"
    return None


def _to_float(number: float) -> float:
    """Convert a number to a float; return infinity for an integer that is too large for a float."""
    try:
        return float(number)
    except OverflowError:
        return math.inf


def _find_setting_problem(group: Group) -> str | None:
    """Return a message if a group is for supervised fine-tuning or has an impossible temperature, else None.

    A temperature must be unknown, 0, or from 1e-4 to 1e4.
    """
    if group.group_overrides.get("sft"):
        return "a group for supervised fine-tuning (group_overrides.sft)"
    for index in range(len(group.tokens)):
        value: Any = group.find_temperature(index)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if value is not None and not (is_number and (value == 0 or _MIN_TEMPERATURE <= value <= _MAX_TEMPERATURE)):
            return f"trajectory {index}: temperature {value!r}"
    return None


def join_parts(groups: Sequence[Group], size: int) -> tuple[list[Group], list[Group]]:
    """Join parts of groups to groups of ``size`` trajectories; return all complete groups, and the parts that remain.

    If an environment posts a group in parts, run-api delivers the parts, mixed with parts of other groups. Parts are
    joined if they have the same environment, prompt and sampling settings, because an advantage compares completions of
    one prompt. A joined group has the oldest policy version of its parts.
    """
    complete: list[Group] = []
    parts: dict[Any, list[Group]] = {}
    for group in groups:
        if len(group.tokens) >= size:
            complete.append(group)
            continue
        waiting = parts.setdefault(_make_part_key(group), [])
        waiting.append(group)
        for start in range(len(waiting)):
            if chosen := _choose_parts(waiting[start:], size):
                complete.append(_merge_parts([waiting[start + index] for index in chosen]))
                for index in reversed(chosen):
                    del waiting[start + index]
                break
    remaining = {id(group) for waiting in parts.values() for group in waiting}
    return complete, [group for group in groups if id(group) in remaining]


def _choose_parts(parts: Sequence[Group], size: int) -> list[int]:
    """Choose parts in order, each that still fits, until they have ``size`` trajectories; return their indices.

    Return [] if the chosen parts have fewer trajectories in total.
    """
    chosen: list[int] = []
    for index, part in enumerate(parts):
        if len(part.tokens) <= size:
            chosen.append(index)
            size -= len(part.tokens)
        if not size:
            return chosen
    return []


def _make_part_key(group: Group) -> Any:
    """Return a hashable key for parts that may be joined: same environment, prompt, settings and present fields."""
    prompt: tuple[int, ...] = ()
    if group.tokens and group.masks:
        mask = group.masks[0]
        prompt = tuple(
            group.tokens[0][: next((index for index, label in enumerate(mask) if label != UNTRAINED), len(mask))]
        )
    sampled = {name: value for name, value in group.generation_params.items() if name != "policy_version"}
    settings = json.dumps([sampled, group.group_overrides], sort_keys=True, default=repr)
    present = tuple(name for name in (*_PER_TOKEN, *_PASSED_ON, "images") if getattr(group, name) is not None)
    return group.env_id, prompt, settings, present


def _merge_parts(parts: Sequence[Group]) -> Group:
    """Return one group with the rows of all parts, the settings of the first part, and the oldest policy version.

    If any part has no policy version, the group has none.
    """
    row_fields = ("tokens", "masks", "scores", "overrides", *_PER_TOKEN, *_PASSED_ON)
    rows: dict[str, Any] = {
        name: None if getattr(parts[0], name) is None else [row for part in parts for row in getattr(part, name)]
        for name in row_fields
    }
    images = None if parts[0].images is None else [part.images for part in parts]
    versions = [part.policy_version for part in parts]
    params = {name: value for name, value in parts[0].generation_params.items() if name != "policy_version"}
    known = [version for version in versions if version is not None]
    if len(known) == len(versions):
        params["policy_version"] = min(known)
    overrides = parts[0].group_overrides
    return Group(**rows, generation_params=params, group_overrides=overrides, images=images, env_id=parts[0].env_id)


@dataclass(frozen=True, eq=False)
class Trajectory:
    """One row of a group as arrays: P tokens of the prompt, and T tokens from the first trained token on."""

    prompt_ids: np.ndarray  # (P,) int64
    completion_ids: np.ndarray  # (T,) int64
    mask: np.ndarray  # (T,) bool: whether the token is trained on; false for the environment's messages between turns
    logprobs: np.ndarray  # (T,) float32, 0 at tokens that are not trained on
    advantages: np.ndarray | None  # (T,) float32
    score: float
    temperature: float | None
    zeroed: bool  # whether its advantage is 0 regardless of its score
    policy_version: int | None
    env_id: int | None
    # For from_trajectories: settings of the group, and fields of the row that the arrays do not represent exactly.
    settings: Mapping[str, Any] = field(default_factory=dict)
    extras: Mapping[str, Any] = field(default_factory=dict)


def to_trajectories(group: Group) -> list[Trajectory]:
    """Convert each row of a group to a Trajectory of arrays; raise ValueError if the group has a problem."""
    if group._problem is not None or not group.tokens:
        raise ValueError(group._problem or "no trajectories")
    flat = group._flat
    narrow = {name: flat.columns[name].astype(np.float32) for name in flat.columns if name != "ref_logprobs"}
    narrow["inference_logprobs"][~flat.trained] = 0
    exact = _find_exact_rows(flat, narrow)
    settings = {"generation_params": group.generation_params, "group_overrides": group.group_overrides}
    settings |= {"images": group.images} if group.images is not None else {}
    starts, firsts, lengths = flat.starts.tolist(), flat.find_first_trained().tolist(), flat.lengths.tolist()
    passed_on = [name for name in (*_PASSED_ON, "ref_logprobs") if getattr(group, name) is not None]
    trajectories = []
    for row, (start, first, length) in enumerate(zip(starts, firsts, lengths, strict=True)):
        end = start + length
        names = [*passed_on, *(name for name, rows in exact.items() if not rows[row])]
        extras = {name: getattr(group, name)[row] for name in names}
        if group.overrides[row]:
            extras["overrides"] = group.overrides[row]
        trajectories.append(
            Trajectory(
                prompt_ids=flat.tokens[start:first],
                completion_ids=flat.tokens[first:end],
                mask=flat.trained[first:end],
                logprobs=narrow["inference_logprobs"][first:end],
                advantages=narrow["advantages"][first:end] if "advantages" in narrow else None,
                score=float(group.scores[row]),
                temperature=group.find_temperature(row),
                zeroed=group.is_zeroed(row),
                policy_version=group.policy_version,
                env_id=group.env_id,
                settings=settings,
                extras=extras,
            )
        )
    return trajectories


def _find_exact_rows(flat: _FlatRows, narrow: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return for each column of ``narrow`` whether each trajectory, (G,), can be restored exactly from float32.

    Values of untrained tokens are not stored in float32: they must have the values that ``from_trajectories`` fills in.
    """
    filled_in = {"inference_logprobs": np.where(flat.trained, np.nan, UNTRAINED_LOGPROB)}
    is_prompt = np.arange(len(flat.tokens)) < np.repeat(flat.find_first_trained(), flat.lengths)
    filled_in["advantages"] = np.where(is_prompt, 0.0, np.nan)
    exact = {}
    for name, values in narrow.items():
        expected = np.where(np.isnan(filled_in[name]), values, filled_in[name])
        exact[name] = np.logical_and.reduceat(expected == flat.columns[name], flat.starts)
    return exact


def from_trajectories(rows: Sequence[Trajectory]) -> Group:
    """Build a Group from its trajectories: the inverse of ``to_trajectories``, exact to the last bit.

    A changed field of a trajectory overrides the original value. Raise ValueError if the rows belong to several groups,
    or there are none.
    """
    if not rows:
        raise ValueError("no trajectories")
    first, passed_on = rows[0], [name for name in (*_PASSED_ON, "ref_logprobs") if name in rows[0].extras]
    if any(_make_group_key(row) != _make_group_key(first) for row in rows):
        raise ValueError("trajectories of different groups")
    params = dict(first.settings.get("generation_params", {}))
    if params.get("policy_version") != first.policy_version:
        params["policy_version"] = first.policy_version
    group = Group(
        tokens=(tokens := [row.prompt_ids.tolist() + row.completion_ids.tolist() for row in rows]),
        masks=[_restore_masks(row, row_tokens) for row, row_tokens in zip(rows, tokens, strict=True)],
        scores=[row.score for row in rows],
        inference_logprobs=[_restore_logprobs(row) for row in rows],
        advantages=None if first.advantages is None else [_restore_advantages(row) for row in rows],
        generation_params=params,
        overrides=[dict(row.extras.get("overrides", {})) for row in rows],
        group_overrides=dict(first.settings.get("group_overrides", {})),
        images=first.settings.get("images"),
        env_id=first.env_id,
        **{name: [row.extras[name] for row in rows] for name in passed_on},
    )
    for index, row in enumerate(rows):
        overrides = group.overrides[index]
        if group.find_temperature(index) != row.temperature:
            overrides["temperature"] = row.temperature
        if group.is_zeroed(index) != row.zeroed:
            overrides["set_advantage_to_zero"] = row.zeroed
    return group


def _make_group_key(row: Trajectory) -> Any:
    """Return a key of a trajectory that is equal for all rows of a group, and differs between most groups."""
    passed_on = {*row.extras} & {*_PASSED_ON, "ref_logprobs"}
    return row.env_id, row.policy_version, row.settings, row.advantages is None, passed_on


def _restore_masks(row: Trajectory, tokens: list[int]) -> list[int]:
    """Return a trajectory's masks in run-api's format, with the prompt's: the token if it is trained on, else -100."""
    prompt_length = len(row.prompt_ids)
    if row.mask.all():
        return [UNTRAINED] * prompt_length + tokens[prompt_length:]
    labels: list[int] = np.where(row.mask, row.completion_ids, UNTRAINED).tolist()
    return [UNTRAINED] * prompt_length + labels


def _restore_logprobs(row: Trajectory) -> list[float]:
    """Return a trajectory's log-probs in run-api's format, for prompt and completion: 1 for tokens not trained on.

    Return the original float64 values if the trajectory's float32 log-probs are unchanged.
    """
    trained = row.logprobs if row.mask.all() else np.where(row.mask, row.logprobs, UNTRAINED_LOGPROB)
    restored: list[float] = [UNTRAINED_LOGPROB] * len(row.prompt_ids) + trained.tolist()
    original: list[float] | None = row.extras.get("inference_logprobs")
    if original is None:
        return restored
    narrow = np.where(row.mask, np.array(original[len(row.prompt_ids) :], np.float32), 0)
    return original if np.array_equal(narrow, row.logprobs) else restored


def _restore_advantages(row: Trajectory) -> list[float]:
    """Return a trajectory's advantages in run-api's format, for prompt and completion: 0 in the prompt.

    Return the original float64 values if the trajectory's float32 advantages are unchanged.
    """
    assert row.advantages is not None
    original: list[float] | None = row.extras.get("advantages")
    if original is not None and np.array_equal(np.array(original[len(row.prompt_ids) :], np.float32), row.advantages):
        return original
    advantages: list[float] = row.advantages.tolist()
    return [0.0] * len(row.prompt_ids) + advantages
