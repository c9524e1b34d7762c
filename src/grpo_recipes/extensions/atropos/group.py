"""A scored group as Atropos' run-api hands it out, why one must not be trained on, and its rows as arrays.

run-api checks no group for sense: rows of unequal lengths, masks of other tokens and log-probs of +1 all pass it. So
``problem_of`` comes before ``trajectories``, which takes a group without problems.
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

from grpo_recipes.numbers import LARGEST_REWARD, LOWEST_LOGPROB, reward_problem

UNTRAINED = -100  # in the masks of the wire, at each token that is not trained on
UNTRAINED_LOGPROB = 1.0  # likewise in its log-probs: no log-prob of a token is positive
_SETTINGS = ("generation_params", "group_overrides")  # of a whole group, free-form
# With one row for each trajectory, in the order of the wire; messages and distillation are passed on as they are.
_PER_TOKEN = ("inference_logprobs", "advantages", "ref_logprobs")
_PASSED_ON = ("messages", "distill_token_ids", "distill_logprobs")
Rows = list[list[float]]
_LEAST_TEMPERATURE, _MOST_TEMPERATURE = 1e-4, 1e4  # logits divided by other ones overflow float32, or are all equal


@dataclass(frozen=True)
class Group:
    """A scored group: some trajectories, mostly completions of one prompt, each a row of every field that has rows.

    ``[]`` and null of the wire, which mean the same, are None here, or empty.
    """

    tokens: list[list[int]]  # prompt and completion
    masks: list[list[int]]  # as long: the token where it is trained on, else -100
    scores: list[float]  # the reward of each trajectory
    inference_logprobs: Rows | None = None  # as long as tokens: of each sampled token, under the policy that sampled it
    advantages: Rows | None = None  # as long as tokens
    ref_logprobs: Rows | None = None  # as long as tokens
    messages: list[list[dict[str, Any]]] | None = None
    generation_params: dict[str, Any] = field(default_factory=dict)
    overrides: list[dict[str, Any]] = field(default_factory=list)  # one for each trajectory, {} where it has none
    group_overrides: dict[str, Any] = field(default_factory=dict)
    images: Any = None
    env_id: int | None = None  # by the order in which environments joined
    distill_token_ids: list[list[list[int]]] | None = None
    distill_logprobs: list[list[list[float]]] | None = None

    @classmethod
    def of_wire(cls, plain: Any) -> Group:
        """Return the group that run-api, or a record of one, gives as JSON; ValueError for anything else."""
        needed = ("tokens", "masks", "scores")
        if not isinstance(plain, Mapping) or not all(isinstance(plain.get(name), list) for name in needed):
            raise ValueError("a scored group is a mapping with the lists tokens, masks and scores")
        lists: dict[str, Any] = {name: plain.get(name) or None for name in (*_PER_TOKEN, *_PASSED_ON)}
        settings: dict[str, Any] = {name: plain.get(name) or {} for name in _SETTINGS}
        overrides = [entry or {} for entry in plain.get("overrides") or [{}] * len(plain["tokens"])]
        if wrong := [name for name, value in lists.items() if not isinstance(value, list | None)]:
            raise ValueError(f"{wrong[0]} of a scored group is no list")
        if not all(isinstance(value, dict) for value in (*settings.values(), *overrides)):
            raise ValueError("generation_params, group_overrides and each of the overrides of a group are mappings")
        own: dict[str, Any] = {name: plain[name] for name in needed}
        images = None if (images := plain.get("images")) == [] else images
        return cls(**own, **lists, **settings, overrides=overrides, images=images, env_id=plain.get("env_id"))

    def as_wire(self) -> dict[str, Any]:
        """Return the group as run-api takes and gives it: 14 keys, null where there is nothing."""
        lists = {name: getattr(self, name) for name in ("tokens", "masks", "scores", *_PER_TOKEN, *_PASSED_ON)}
        settings = {name: getattr(self, name) or None for name in _SETTINGS}
        overrides = self.overrides if any(self.overrides) else None
        return {**lists, **settings, "overrides": overrides, "images": self.images, "env_id": self.env_id}

    @property
    def policy_version(self) -> int | None:
        """The optimizer step whose weights sampled it, where its environment says so."""
        version = self.generation_params.get("policy_version")
        return version if type(version) is int else None

    def temperature(self, row: int) -> float | None:
        """Return the temperature that a trajectory was sampled at: its own, else the group's; None where unknown."""
        found = (places.get("temperature") for places in self._settings_of(row))
        return next((value for value in found if value is not None), None)

    def is_zeroed(self, row: int) -> bool:
        """Return whether the environment asks for an advantage of 0 in the place of this trajectory's."""
        return bool(self.overrides[row].get("set_advantage_to_zero"))

    def _settings_of(self, row: int) -> list[dict[str, Any]]:
        own = self.overrides[row] if row < len(self.overrides) else {}
        return [own, self.generation_params, self.group_overrides]

    @cached_property
    def _flat(self) -> _Flat:
        return _Flat(self)

    @cached_property
    def _problem(self) -> str | None:
        """What is wrong with it whatever model trains on it; looked for once."""
        try:
            return _shape_problem(self) or _mask_problem(self._flat) or _number_problem(self) or _setting_problem(self)
        except ValueError as error:  # of _flat
            return str(error)


class _Flat:
    """The rows of a group end to end, (N,), converted once; ValueError for a value that is no number.

    Attributes:
        lengths: tokens of each trajectory, (G,).
        starts: where each begins, (G,).
        trained: whether a token is trained on, (N,).
        columns: log-probs, advantages and reference log-probs in float64, by name, those that the group has.
    """

    def __init__(self, group: Group):
        self.lengths = np.array([len(row) for row in group.tokens], np.int64)
        self.starts = np.cumsum(self.lengths) - self.lengths
        self.tokens = _joined(group.tokens, "q", "tokens")
        self.labels = _joined(group.masks, "q", "masks")
        self.trained = self.labels != UNTRAINED
        columns = {name: rows for name in _PER_TOKEN if (rows := getattr(group, name)) is not None}
        self.columns = {name: _joined(rows, "d", name) for name, rows in columns.items()}

    def row(self, wrong: np.ndarray) -> int:
        """Return the trajectory of the first token for which ``wrong``, (N,), is true."""
        return int(np.searchsorted(self.starts, np.argmax(wrong), side="right")) - 1

    def first_trained(self) -> np.ndarray:
        """Return where the first trained token of each trajectory is, (G,); each must have one."""
        positions = np.flatnonzero(self.trained)
        return positions[np.searchsorted(positions, self.starts)]


def _joined(rows: Sequence[Any], kind: str, name: str) -> np.ndarray:
    """Return rows of numbers end to end, as int64 (``q``) or float64 (``d``).

    ``array`` converts a list twice as fast as numpy, and takes no number for another kind of number.
    """
    flat = array(kind)
    for index, row in enumerate(rows):
        try:
            flat.fromlist(row)
        except (TypeError, OverflowError) as error:
            raise ValueError(f"trajectory {index}: {name} hold a value that does not belong there ({error})") from None
    return np.frombuffer(flat, dtype=kind) if flat else np.empty(0, kind)


def problem_of(group: Group, *, size: int, longest: int | None, vocabulary: int | None) -> str | None:
    """Return why a group must not be trained on, with the index of the trajectory; None where nothing is wrong.

    Args:
        group: as run-api handed it out.
        size: trajectories that it must have.
        longest: most tokens of a trajectory, prompt included.
        vocabulary: token ids that the model knows, from 0.
    """
    if len(group.tokens) != size or not size:
        return f"{len(group.tokens)} trajectories where {size} make a group"
    if group._problem is not None:
        return group._problem
    flat = group._flat
    if longest is not None and (wrong := flat.lengths > longest).any():
        row = int(np.argmax(wrong))
        return f"trajectory {row}: {flat.lengths[row]} tokens where at most {longest} are allowed"
    if vocabulary is not None and (wrong := flat.tokens >= vocabulary).any():
        token = flat.tokens[np.argmax(wrong)]
        return f"trajectory {flat.row(wrong)}: token id {token}, and the model knows 0 to {vocabulary - 1}"
    return None


def _shape_problem(group: Group) -> str | None:
    """Return which number of rows, or of values in a row, is wrong."""
    count = len(group.tokens)
    if group.inference_logprobs is None:
        return "no inference_logprobs"
    by_token = {name: rows for name in ("masks", *_PER_TOKEN) if (rows := getattr(group, name)) is not None}
    for name, rows in {"scores": group.scores, "overrides": group.overrides, **by_token}.items():
        if len(rows) != count:
            return f"{name} of {len(rows)} trajectories, tokens of {count}"
    for index, tokens in enumerate(group.tokens):
        for name, rows in {"tokens": group.tokens, **by_token}.items():
            if not isinstance(rows[index], list):
                return f"trajectory {index}: its {name} are no list"
            if len(rows[index]) != len(tokens):
                return f"trajectory {index}: {len(tokens)} tokens, but {len(rows[index])} {name}"
        if not tokens:
            return f"trajectory {index}: no tokens"
    return None


def _mask_problem(flat: _Flat) -> str | None:
    """Return which token, or which mask, is wrong."""
    if (wrong := flat.tokens < 0).any():
        return f"trajectory {flat.row(wrong)}: token id {flat.tokens[np.argmax(wrong)]}"
    if (wrong := flat.trained & (flat.labels != flat.tokens)).any():
        at = np.argmax(wrong)
        return f"trajectory {flat.row(wrong)}: mask {flat.labels[at]} at token {flat.tokens[at]}; it is that or -100"
    trained = np.add.reduceat(flat.trained, flat.starts, dtype=np.int64)
    if not trained.all():
        return f"trajectory {int(np.argmin(trained))}: no token is trained on"
    if (wrong := flat.trained[flat.starts]).any():
        return f"trajectory {int(np.argmax(wrong))}: its first token is trained on, which no token precedes"
    return None


def _number_problem(group: Group) -> str | None:
    """Return which log-prob, score or advantage is no number to train on."""
    flat = group._flat
    logprobs = flat.columns["inference_logprobs"]
    if (wrong := flat.trained & ~np.isfinite(logprobs)).any():
        return f"trajectory {flat.row(wrong)}: inference log-prob {logprobs[np.argmax(wrong)]} of a trained token"
    if (wrong := flat.trained & (logprobs < LOWEST_LOGPROB)).any():
        at = np.argmax(wrong)
        return (
            f"trajectory {flat.row(wrong)}: inference log-prob {logprobs[at]:g} of a trained token, below "
            f"{LOWEST_LOGPROB:g}: float32 has no such probability"
        )
    if (wrong := flat.trained & (logprobs > 0)).any():
        at = np.argmax(wrong)
        return f"trajectory {flat.row(wrong)}: inference log-prob {logprobs[at]:g} > 0 of a trained token"
    for index, score in enumerate(group.scores):
        if isinstance(score, bool) or not isinstance(score, int | float):
            return f"trajectory {index}: score {score!r}"
        if problem := reward_problem(_as_float(score)):
            return f"trajectory {index}: score {problem}"
    for name in ("advantages", "ref_logprobs"):
        values = flat.columns.get(name)
        if values is not None and (wrong := ~(np.abs(values) <= LARGEST_REWARD)).any():
            problem = reward_problem(float(values[np.argmax(wrong)]))
            return f"trajectory {flat.row(wrong)}: {problem} among its {name}"
    return None


def _as_float(number: float) -> float:
    """Return a number of JSON, in which integers have no limit, as a float."""
    try:
        return float(number)
    except OverflowError:
        return math.inf


def _setting_problem(group: Group) -> str | None:
    """Return which of the free-form settings that we know cannot be followed."""
    if group.group_overrides.get("sft"):
        return "a group for supervised fine-tuning (group_overrides.sft)"
    for index in range(len(group.tokens)):
        value: Any = group.temperature(index)
        numeric = isinstance(value, int | float) and not isinstance(value, bool)
        if value is not None and not (numeric and (value == 0 or _LEAST_TEMPERATURE <= value <= _MOST_TEMPERATURE)):
            return f"trajectory {index}: temperature {value!r}"
    return None


def rejoined(groups: Sequence[Group], size: int) -> tuple[list[Group], list[Group]]:
    """Return the groups with smaller ones joined to groups of ``size``, and the smaller ones that are left over.

    run-api delivers a group that its environment posts in parts as the parts, in an order that other parts may
    interrupt, and completes ``size`` with parts of other groups too. So parts are joined by environment, prompt and
    sampling settings: an advantage compares completions of one prompt. The policy version is the oldest of the parts'.
    """
    whole: list[Group] = []
    parts: dict[Any, list[Group]] = {}
    for group in groups:
        if len(group.tokens) >= size:
            whole.append(group)
            continue
        waiting = parts.setdefault(_kind(group), [])
        waiting.append(group)
        for start in range(len(waiting)):
            if chosen := _filling(waiting[start:], size):
                whole.append(_join([waiting[start + index] for index in chosen]))
                for index in reversed(chosen):
                    del waiting[start + index]
                break
    left = {id(group) for waiting in parts.values() for group in waiting}
    return whole, [group for group in groups if id(group) in left]


def _filling(parts: Sequence[Group], size: int) -> list[int]:
    """Return which parts, the first one and then each that still fits, make ``size``; none where they do not."""
    chosen: list[int] = []
    for index, part in enumerate(parts):
        if len(part.tokens) <= size:
            chosen.append(index)
            size -= len(part.tokens)
        if not size:
            return chosen
    return []


def _kind(group: Group) -> Any:
    """Return what parts of one group have in common."""
    prompt: tuple[int, ...] = ()
    if group.tokens and group.masks:
        mask = group.masks[0]
        prompt = tuple(group.tokens[0][: next((at for at, label in enumerate(mask) if label != UNTRAINED), len(mask))])
    sampled = {name: value for name, value in group.generation_params.items() if name != "policy_version"}
    settings = json.dumps([sampled, group.group_overrides], sort_keys=True, default=repr)
    filled = tuple(name for name in (*_PER_TOKEN, *_PASSED_ON, "images") if getattr(group, name) is not None)
    return group.env_id, prompt, settings, filled


def _join(parts: Sequence[Group]) -> Group:
    """Return one group of the rows of all parts."""
    by_row = ("tokens", "masks", "scores", "overrides", *_PER_TOKEN, *_PASSED_ON)
    rows: dict[str, Any] = {
        name: None if getattr(parts[0], name) is None else [row for part in parts for row in getattr(part, name)]
        for name in by_row
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
    """One row of a group as arrays: P tokens of the prompt, and T from the first trained token on."""

    prompt_ids: np.ndarray  # (P,) int64
    completion_ids: np.ndarray  # (T,) int64
    mask: np.ndarray  # (T,) bool: trained on; false at what an environment says between turns
    logprobs: np.ndarray  # (T,) float32, 0 where not trained on
    advantages: np.ndarray | None  # (T,) float32
    score: float
    temperature: float | None
    zeroed: bool  # its advantage is 0, whatever its score
    policy_version: int | None
    env_id: int | None
    # What the fields above leave out, for the way back: settings of the group, and by name what the row alone has.
    settings: Mapping[str, Any] = field(default_factory=dict)
    rest: Mapping[str, Any] = field(default_factory=dict)


def trajectories(group: Group) -> list[Trajectory]:
    """Return the rows of a group as arrays; ValueError for one that ``problem_of`` finds a problem in."""
    if group._problem is not None or not group.tokens:
        raise ValueError(group._problem or "no trajectories")
    flat = group._flat
    narrow = {name: flat.columns[name].astype(np.float32) for name in flat.columns if name != "ref_logprobs"}
    narrow["inference_logprobs"][~flat.trained] = 0
    exact = _exact_rows(flat, narrow)
    settings = {"generation_params": group.generation_params, "group_overrides": group.group_overrides}
    settings |= {"images": group.images} if group.images is not None else {}
    starts, firsts, lengths = flat.starts.tolist(), flat.first_trained().tolist(), flat.lengths.tolist()
    passed_on = [name for name in (*_PASSED_ON, "ref_logprobs") if getattr(group, name) is not None]
    made = []
    for row, (start, first, length) in enumerate(zip(starts, firsts, lengths, strict=True)):
        end = start + length
        kept = [*passed_on, *(name for name, rows in exact.items() if not rows[row])]
        rest = {name: getattr(group, name)[row] for name in kept}
        if group.overrides[row]:
            rest["overrides"] = group.overrides[row]
        made.append(
            Trajectory(
                prompt_ids=flat.tokens[start:first],
                completion_ids=flat.tokens[first:end],
                mask=flat.trained[first:end],
                logprobs=narrow["inference_logprobs"][first:end],
                advantages=narrow["advantages"][first:end] if "advantages" in narrow else None,
                score=float(group.scores[row]),
                temperature=group.temperature(row),
                zeroed=group.is_zeroed(row),
                policy_version=group.policy_version,
                env_id=group.env_id,
                settings=settings,
                rest=rest,
            )
        )
    return made


def _exact_rows(flat: _Flat, narrow: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return for each column which trajectories, (G,), can be made again from float32 and what stands for untrained."""
    beside = {"inference_logprobs": np.where(flat.trained, np.nan, UNTRAINED_LOGPROB)}
    before = np.arange(len(flat.tokens)) < np.repeat(flat.first_trained(), flat.lengths)
    beside["advantages"] = np.where(before, 0.0, np.nan)
    exact = {}
    for name, values in narrow.items():
        expected = np.where(np.isnan(beside[name]), values, beside[name])
        exact[name] = np.logical_and.reduceat(expected == flat.columns[name], flat.starts)
    return exact


def group_of(rows: Sequence[Trajectory]) -> Group:
    """Return the group whose trajectories these are: the way back, exact to the last bit.

    A field that was replaced since then wins over what the row had; ValueError for rows of several groups.
    """
    if not rows:
        raise ValueError("no trajectories")
    first, with_rows = rows[0], [name for name in (*_PASSED_ON, "ref_logprobs") if name in rows[0].rest]
    if any(_of_group(row) != _of_group(first) for row in rows):
        raise ValueError("trajectories of different groups")
    params = dict(first.settings.get("generation_params", {}))
    if params.get("policy_version") != first.policy_version:
        params["policy_version"] = first.policy_version
    group = Group(
        tokens=(tokens := [row.prompt_ids.tolist() + row.completion_ids.tolist() for row in rows]),
        masks=[_labels(row, own) for row, own in zip(rows, tokens, strict=True)],
        scores=[row.score for row in rows],
        inference_logprobs=[_logprobs(row) for row in rows],
        advantages=None if first.advantages is None else [_advantages(row) for row in rows],
        generation_params=params,
        overrides=[dict(row.rest.get("overrides", {})) for row in rows],
        group_overrides=dict(first.settings.get("group_overrides", {})),
        images=first.settings.get("images"),
        env_id=first.env_id,
        **{name: [row.rest[name] for row in rows] for name in with_rows},
    )
    for index, row in enumerate(rows):
        own = group.overrides[index]
        if group.temperature(index) != row.temperature:
            own["temperature"] = row.temperature
        if group.is_zeroed(index) != row.zeroed:
            own["set_advantage_to_zero"] = row.zeroed
    return group


def _of_group(row: Trajectory) -> Any:
    """Return what all rows of a group have in common."""
    filled = {*row.rest} & {*_PASSED_ON, "ref_logprobs"}
    return row.env_id, row.policy_version, row.settings, row.advantages is None, filled


def _labels(row: Trajectory, tokens: list[int]) -> list[int]:
    before = len(row.prompt_ids)
    if row.mask.all():
        return [UNTRAINED] * before + tokens[before:]
    return [UNTRAINED] * before + np.where(row.mask, row.completion_ids, UNTRAINED).tolist()


def _logprobs(row: Trajectory) -> list[float]:
    trained = row.logprobs if row.mask.all() else np.where(row.mask, row.logprobs, UNTRAINED_LOGPROB)
    made = [UNTRAINED_LOGPROB] * len(row.prompt_ids) + trained.tolist()
    own = row.rest.get("inference_logprobs")
    if own is None:
        return made
    held = np.where(row.mask, np.array(own[len(row.prompt_ids) :], np.float32), 0)
    return own if np.array_equal(held, row.logprobs) else made


def _advantages(row: Trajectory) -> list[float]:
    assert row.advantages is not None
    own = row.rest.get("advantages")
    if own is not None and np.array_equal(np.array(own[len(row.prompt_ids) :], np.float32), row.advantages):
        return own
    return [0.0] * len(row.prompt_ids) + row.advantages.tolist()
