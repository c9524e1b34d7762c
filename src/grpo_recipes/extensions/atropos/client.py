"""The trainer's client of Atropos' run-api: register, wait for groups, and keep the groups that can be trained on.

run-api hands each batch out once and forgets it, cannot distinguish trainers, and never validates a group. So every
request has a deadline, possibly lost batches are counted, a run-api with another registration is rejected, and a wait
that takes too long ends with a report of everything that run-api shows.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from grpo_recipes.errors import translate_errors
from grpo_recipes.extensions.atropos.connection import (
    AtroposError,
    Connection,
    RequestFailed,
    WaitAborted,
    describe_response,
)
from grpo_recipes.extensions.atropos.diagnosis import diagnose_missing_batch
from grpo_recipes.extensions.atropos.group import Group, find_group_problem, join_parts

__all__ = ["AtroposClient", "AtroposError", "NoLogprobs", "Registration", "WaitAborted"]

_MAX_PRINTED_REJECTIONS = 10
_NO_LOGPROBS = (
    "GRPO requires inference_logprobs for importance sampling! There are none in {}. Fix: use a server class that "
    "returns log-probs: --openai.server_type vllm (not openai), or server_cls = RunServer of "
    "grpo_recipes.extensions.atropos.server"
)
_ONE_TRAINER = (
    "A run-api accepts one registration in its life, and keeps the groups of the last training. Fix: restart it, then "
    "start the trainer, then its environments"
)
_NO_BATCH = "Failed to retrieve batch from Atropos after all retry attempts"


class NoLogprobs(AtroposError, ValueError):
    """A group has no log-probs of the policy that sampled it; the loss needs them for its ratio."""


@dataclass(frozen=True)
class Registration:
    """The fields that a trainer registers with; all are required, and run-api ignores every later registration."""

    wandb_group: str
    wandb_project: str
    batch_size: int  # sequences, not groups
    max_token_len: int  # environments drop a group if one of its sequences has this many tokens
    checkpoint_dir: str
    save_checkpoint_interval: int
    starting_step: int
    num_steps: int

    def __post_init__(self) -> None:
        """Raise AtroposError if a value has the wrong type, or batch_size or max_token_len is below 1."""
        for field in fields(self):
            value, expected = getattr(self, field.name), str if field.type == "str" else int
            if type(value) is not expected:
                problem = f"{field.name} is {value!r}, not of type {field.type}"
                raise AtroposError(f"Invalid registration data format: {problem}")
        for name in ("batch_size", "max_token_len"):
            if getattr(self, name) < 1:
                raise AtroposError(f"Invalid registration data format: {name} is {getattr(self, name)}, below 1")

    @classmethod
    def from_mapping(cls, data: Any) -> Registration:
        """Convert a mapping of field names to a Registration; return ``data`` itself if it is a Registration.

        Other keys are ignored. Raise AtroposError if ``data`` is not a mapping, a field is missing, or a value has the
        wrong type.
        """
        if isinstance(data, cls):
            return data
        if not isinstance(data, Mapping):
            raise AtroposError("Invalid registration data format")
        names = [field.name for field in fields(cls)]
        if missing := [name for name in names if name not in data]:
            raise AtroposError(f"Missing required registration field: {missing[0]}")
        return cls(**{name: data[name] for name in names})


class AtroposClient:
    """A client of the run-api at ``url``, for one thread.

    Attributes:
        counts: totals by name. "batches" and "groups" were received. Some of these groups are "rejected", too old
            ("stale"), or without a policy version ("unknown_version"). Batches that did not come are "lost_batches"
            if run-api may have lost them, and "stolen_batches" if another client took them.
        last_seen: ``time.monotonic()`` of the last group of each environment, by ``env_id``.
        seconds: duration of the last request to each path.
    """

    def __init__(
        self,
        url: str,
        *,
        timeout: float = 30.0,
        attempts: int = 8,
        delay: float = 0.3,
        max_wait: float = 600.0,
        stopped: Callable[[], bool] = lambda: False,
        say: Callable[[str], object] = print,
        describe_run: Callable[[], list[str]] = list,
        explain_wait: Callable[[], str] = str,
        compressed: bool | None = None,
    ):
        """Create a client; no request is sent yet.

        Args:
            url: URL of run-api.
            timeout: seconds for one answer, and for run-api to become reachable.
            attempts: how often a request without an answer, or with a server error, is tried.
            delay: seconds before a request is repeated; each time half as long again, at most 2 s.
            max_wait: longest wait in seconds for the groups of one step.
            stopped: returns whether the run stops and no answer is needed anymore.
            say: prints a line.
            describe_run: returns lines about the run for the report at the end of a wait.
            explain_wait: returns why no groups come if the caller knows the reason, else an empty text.
            compressed: whether answers are compressed. The default compresses only the answers of a remote run-api: on
                loopback, compression takes longer than the transfer.
        """
        self._api = Connection(
            url, timeout=timeout, attempts=attempts, delay=delay, stopped=stopped, compressed=compressed
        )
        self.url, self.seconds = self._api.url, self._api.seconds
        self._max_wait, self._say = max_wait, say
        self._describe_run, self._explain_wait = describe_run, explain_wait
        self.counts = dict.fromkeys(
            ("batches", "groups", "rejected", "stale", "lost_batches", "stolen_batches", "unknown_version"), 0
        )
        self.last_seen: dict[int | None, float] = {}
        self._registration: Registration | None = None
        self._early_batches: list[list[Group]] = []  # came with the registration, before anything waited for them
        self._ready_groups: list[Group] = []  # valid groups for the next call of take_groups
        self._parts: list[Group] = []  # valid parts of groups; the other parts may still come
        self._sizes: set[int] = set()  # sizes of the groups that came
        self._last_rejection = ""  # message of the last rejection in the current wait

    def status(self) -> dict[str, Any]:
        """Return run-api's ``current_step`` (number of packed batches) and ``queue_size`` (groups not yet packed).

        Raise AtroposError if run-api does not answer.
        """
        return dict(self._api.request("GET", "/status"))

    def info(self) -> dict[str, Any]:
        """Return ``batch_size`` and ``max_token_len`` of run-api's registration, both -1 if no trainer has registered.

        Raise AtroposError if run-api does not answer.
        """
        return dict(self._api.request("GET", "/info"))

    # --- registration ----------------------------------------------------------------------------------------------

    def register(self, registration: Registration | Mapping[str, Any]) -> int:
        """Register this training with a run-api that is not in use; return the uuid that run-api assigns.

        After the registration, request a batch once, because environments can join only after a request. A batch that
        comes is stored for ``next_batch``. Raise AtroposError if a field is missing, run-api does not answer within the
        timeout, or it has another registration. Raise WaitAborted if the run stops.
        """
        requested = Registration.from_mapping(registration)
        self._connect()
        if (info := self.info())["batch_size"] != -1:
            state = {**info, **self.status()}
            raise AtroposError(f"the run-api at {self.url} already has a trainer ({state}). {_ONE_TRAINER}")
        uuid = int(self._api.request("POST", "/register", asdict(requested))["uuid"])
        self._say(f"Trainer successfully registered with UUID: {uuid}")
        self._check_registration(requested)
        self._registration = requested
        # Environments can join only after a trainer has requested a batch.
        if (batch := self._request_batch_with_retries(time.monotonic() + self._max_wait)) is not None:
            self._early_batches.append(batch)
        return uuid

    def _connect(self) -> None:
        """Request ``/status`` until run-api answers; raise AtroposError if it does not within ``timeout`` seconds.

        Raise WaitAborted if the run stops.
        """
        deadline = time.monotonic() + self._api.timeout
        for pause in self._api.pauses():
            status, reason = self._api.try_get("/status")
            if "current_step" in status:
                self._say("Atropos API connectivity confirmed")
                return
            if time.monotonic() + pause > deadline:
                reason = reason or f"answered {status}, unlike a run-api"
                raise AtroposError(f"Atropos API not reachable at {self.url}: it {reason}, for {self._api.timeout:g} s")
            self._api.sleep(pause)

    def _check_registration(self, requested: Registration) -> None:
        """Raise AtroposError unless run-api has the requested batch size, length limit and step.

        The error explains whether run-api has another trainer, or received groups before any trainer registered.
        """
        info, step = self.info(), self.status()["current_step"]
        if info["batch_size"] == -1:
            raise AtroposError(
                f"the run-api at {self.url} received groups before a trainer registered, and rejects registrations "
                "since. Fix: restart it, then start the trainer, then its environments; if no environment runs, GET "
                "/reset_data is enough"
            )
        expected = (requested.batch_size, requested.max_token_len, requested.starting_step)
        actual = (info["batch_size"], info["max_token_len"], step)
        if actual != expected:
            raise AtroposError(
                f"the run-api at {self.url} already has a trainer: batch_size, max_token_len and step are {actual}, "
                f"not {expected}. {_ONE_TRAINER}"
            )

    # --- batches ---------------------------------------------------------------------------------------------------

    def next_batch(self) -> list[Group]:
        """Wait for the next batch of run-api and return its groups without validating them.

        Raise AtroposError with a diagnosis if no batch comes within ``max_wait`` seconds, run-api is not reachable, or
        it has forgotten this training. Raise WaitAborted if the run stops.
        """
        self._last_rejection = ""
        return self._wait_for_batch(time.monotonic() + self._max_wait)

    def _wait_for_batch(self, deadline: float) -> list[Group]:
        """Request batches from run-api until one comes, and return it.

        A batch that came during the registration is returned first. Raise AtroposError once the monotonic time
        ``deadline`` has passed, and WaitAborted if the run stops.
        """
        if self._early_batches:
            return self._early_batches.pop(0)
        for pause in self._api.pauses():
            if (batch := self._request_batch_with_retries(deadline)) is not None:
                return batch
            self._check_deadline(deadline)
            self._api.sleep(min(pause, max(0.0, deadline - time.monotonic())))
        raise AssertionError("pauses never end")

    def _check_deadline(self, deadline: float) -> None:
        """Print and raise AtroposError with the reason why no groups came if the monotonic time ``deadline`` passed."""
        if time.monotonic() >= deadline:
            reason, lines = self._diagnose()
            if self._last_rejection:
                reason = f"groups came but were rejected, the last: {self._last_rejection}"
            elif not self.counts["groups"]:
                reason = self._explain_wait() or reason
            timed_out = f"Maximum wait time ({float(self._max_wait)}s) exceeded"
            for line in (timed_out, _NO_BATCH):
                self._say(line)
            raise AtroposError("\n  ".join([f"{timed_out}: {reason}\n{_NO_BATCH}", *lines]))

    def _request_batch_with_retries(self, deadline: float) -> list[Group] | None:
        """Request a batch and repeat failed requests; return the batch, or None if run-api has no batch yet.

        Raise AtroposError with a report after ``attempts`` failures, or once the monotonic time ``deadline`` has
        passed. Other errors of ``_request_batch`` are raised at once, and WaitAborted if the run stops.
        """
        for attempt, pause in enumerate(self._api.pauses(), 1):
            try:
                return self._request_batch()
            except RequestFailed as error:
                if attempt >= self._api.attempts:
                    lines = [f"Atropos API not reachable at {self.url}: it {error}\n{_NO_BATCH}", *self._diagnose()[1]]
                    raise AtroposError("\n  ".join(lines)) from error
            self._check_deadline(deadline)
            self._api.sleep(pause)
        raise AssertionError("pauses never end")

    def _request_batch(self) -> list[Group] | None:
        """Send one request for a batch and count the result; return its groups, or None if run-api has no batch yet.

        Raise RequestFailed if there is no answer or a server error. Raise AtroposError if repeating the request cannot
        help, e.g. because run-api has lost the registration. Raise WaitAborted if the run stops.
        """
        self._api.raise_if_stopped()
        try:
            response = self._api.send("GET", "/batch")
        except RequestFailed as error:
            if error.sent:  # run-api hands each batch out once, and may have sent one
                self._count_lost_batch(f"/batch {error}")
            raise
        if response.status_code == 500:
            if self._registration is not None and self._api.try_get("/info")[0].get("batch_size") == -1:
                raise self._make_unregistered_error("it was reset.")
            # For example, a batch with NaN is not valid JSON: run-api fails to send it, and has dropped it.
            self._count_lost_batch(f"/batch answered {describe_response(response)}")
        if response.status_code >= 500:
            raise RequestFailed(f"answered {describe_response(response)}", sent=True)
        content = self._api.read_json(response)
        if not isinstance(content, dict) or "batch" not in content:
            raise AtroposError(f"the server at {self.url}/batch is not a run-api: {describe_response(response)}")
        if content.get("status") == "error":
            raise self._make_unregistered_error(str(content.get("message")))
        if content["batch"] is None:
            self._count_stolen_batches()
            return None
        with translate_errors(ValueError, lambda error: AtroposError(f"run-api at {self.url} handed out {error}")):
            groups = [Group.from_json(entry) for entry in content["batch"]]
        sequences = sum(len(group.tokens) for group in groups)
        self.counts["batches"] += 1
        self.counts["groups"] += len(groups)
        self._sizes |= {len(group.tokens) for group in groups}
        self.last_seen |= dict.fromkeys((group.env_id for group in groups), time.monotonic())
        self._say(
            f"Successfully retrieved batch with {len(groups)} items ({len(groups)} groups, {sequences} sequences)"
        )
        return groups

    def _count_stolen_batches(self) -> None:
        """Request run-api's step; if it has handed out more batches than came here, count and print the difference.

        Call this after ``/batch`` was empty. Then each batch of run-api's ``current_step`` went to a client, and the
        missing batches went to another client. Do nothing without a registration or an answer.
        """
        status, _ = self._api.try_get("/status")
        if self._registration is None or "current_step" not in status:
            return
        stolen = int(status["current_step"]) - self._registration.starting_step - self._count_removed_batches()
        if stolen > 0:
            self.counts["stolen_batches"] += stolen
            self._say(
                f"another client of run-api at {self.url} took {stolen} batches of this training. Fix: give each "
                "trainer its own run-api"
            )

    def _count_removed_batches(self) -> int:
        """Return how many batches of this training have left run-api: received, lost and stolen ones."""
        return self.counts["batches"] + self.counts["lost_batches"] + self.counts["stolen_batches"]

    def count_waiting_groups(self, size: int) -> int:
        """Request run-api's status and return how many groups of ``size`` rows wait for this trainer.

        They wait at run-api, queued or packed, or in this client. Raise AtroposError if run-api does not answer.
        """
        status = self.status()
        waiting = int(status["queue_size"]) + len(self._ready_groups)
        if self._registration is not None:
            packed = int(status["current_step"]) - self._registration.starting_step - self._count_removed_batches()
            waiting += max(0, packed) * self._registration.batch_size // size
            waiting += sum(len(batch) for batch in self._early_batches)
        return waiting

    def _count_lost_batch(self, reason: str) -> None:
        """Count and print, with the reason, a batch that run-api removed from its queue but may not have delivered."""
        self.counts["lost_batches"] += 1
        self._say(f"run-api at {self.url} may have lost a batch: {reason}")

    def _diagnose(self) -> tuple[str, list[str]]:
        """Ask run-api why no batch comes; return the likely reason, and a report in lines: run-api, counts and run."""
        size = None if self._registration is None else self._registration.batch_size
        reason, lines = diagnose_missing_batch(self._api, size, self.last_seen, self._sizes)
        counts = ", ".join(f"{name} {count}" for name, count in self.counts.items())
        return reason, [*lines, f"since the start: {counts}", *self._describe_run()]

    def _make_unregistered_error(self, reason: str) -> AtroposError:
        """Return an AtroposError that says that run-api does not know this training, why, and how to fix it."""
        return AtroposError(f"the run-api at {self.url} does not know this training: {reason} {_ONE_TRAINER}")

    # --- groups to train on ----------------------------------------------------------------------------------------

    def take_groups(
        self,
        count: int,
        *,
        size: int,
        longest: int | None,
        vocabulary: int | None,
        step: int,
        max_staleness: int | None,
    ) -> list[Group]:
        """Wait for ``count`` groups that can be trained on; return them, groups of the newest policy first.

        Parts of groups are joined. Groups with a problem, or of a policy that is too old, are dropped and counted.
        Surplus groups are kept for the next call. Raise AtroposError if the groups do not come within ``max_wait``
        seconds, NoLogprobs if a group has no log-probs, and WaitAborted if the run stops.

        Args:
            count: number of groups.
            size: trajectories of a group.
            longest: most tokens of a trajectory, including the prompt; None for no limit.
            vocabulary: number of token ids that the model knows; None skips the check.
            step: optimizer step of the weights that are trained.
            max_staleness: most optimizer steps that a group's policy may be behind; None accepts all.
        """
        deadline, self._last_rejection = time.monotonic() + self._max_wait, ""
        while True:
            self._ready_groups = [
                group for group in self._ready_groups if self._accept_policy_age(group, step, max_staleness)
            ]
            self._parts = [group for group in self._parts if self._accept_policy_age(group, step, max_staleness)]
            if len(self._ready_groups) >= count:
                break
            self._check_deadline(deadline)  # batches may come without a single usable group
            self._add_valid_groups(self._wait_for_batch(deadline), size, longest, vocabulary)
        self._ready_groups.sort(
            key=lambda group: -1 if group.policy_version is None else group.policy_version, reverse=True
        )
        groups, self._ready_groups = self._ready_groups[:count], self._ready_groups[count:]
        return groups

    def _add_valid_groups(self, batch: Sequence[Group], size: int, longest: int | None, vocabulary: int | None) -> None:
        """Add the valid groups of a batch to the groups for ``take_groups``; keep parts until their other parts come.

        Count other groups as rejected. If more rows wait for other parts than the batch has, and more than ``size``,
        reject the oldest parts too. Raise NoLogprobs if a group has no log-probs. ``take_groups`` documents the other
        arguments.
        """
        valid = []
        for index, group in enumerate(batch):
            where = f"group {index} of batch {self.counts['batches']}, of environment {group.env_id}"
            if group.tokens and group.inference_logprobs is None:
                raise NoLogprobs(_NO_LOGPROBS.format(where))
            expected_size = len(group.tokens) if 0 < len(group.tokens) < size else size
            if problem := find_group_problem(group, size=expected_size, longest=longest, vocabulary=vocabulary):
                self._count_rejection(f"{where}, is not trained on: {problem}")
                continue
            self.counts["unknown_version"] += group.policy_version is None
            valid.append(group)
        complete, parts = join_parts([*self._parts, *valid], size)
        self._ready_groups += complete
        max_pending = max(size, sum(len(group.tokens) for group in batch))
        while sum(len(part.tokens) for part in parts) > max_pending:
            oldest = parts.pop(0)
            came = f"only {len(oldest.tokens)} of its {size} trajectories came"
            self._count_rejection(f"a group of environment {oldest.env_id} is not trained on: {came}")
        self._parts = parts

    def _accept_policy_age(self, group: Group, step: int, max_staleness: int | None) -> bool:
        """Return whether a group's policy is at most ``max_staleness`` steps older than ``step``, or unknown.

        None allows any older policy. A group with an older policy is counted as stale. A policy of a later step belongs
        to another training, so its group is counted as rejected.
        """
        version = group.policy_version
        if version is not None and version > step:
            problem = f"weights of step {version} sampled it, but this training is at step {step}"
            self._count_rejection(f"a group of environment {group.env_id} is not trained on: {problem}")
            return False
        if version is not None and max_staleness is not None and version < step - max_staleness:
            self.counts["stale"] += 1
            return False
        return True

    def _count_rejection(self, message: str) -> None:
        """Count a rejected group, remember the message for a later error, and print it for the first 10 groups."""
        self.counts["rejected"] += 1
        self._last_rejection = message
        if self.counts["rejected"] <= _MAX_PRINTED_REJECTIONS:
            is_last = self.counts["rejected"] == _MAX_PRINTED_REJECTIONS
            self._say(message + "; further rejections are only counted" * is_last)
