"""The trainer's client of Atropos' run-api: register, wait for groups, keep those that can be trained on.

run-api hands each batch out once and forgets it, knows no trainer again, and says of everything that it received it. So
every request has a deadline, a batch that may be lost is counted, a run-api that another training used is refused, and
whoever waits too long learns what there was to see.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from grpo_recipes.errors import translate
from grpo_recipes.extensions.atropos.connection import AtroposError, Connection, RequestFailed, WaitAborted, shown
from grpo_recipes.extensions.atropos.diagnosis import diagnosis
from grpo_recipes.extensions.atropos.group import Group, problem_of, rejoined

__all__ = ["AtroposClient", "AtroposError", "NoLogprobs", "Registration", "WaitAborted"]

_MOST_SAID = 10  # rejections that are printed
_NO_LOGPROBS = (
    "GRPO requires inference_logprobs for importance sampling! There are none in {}. Fix: let the environment's server "
    "return log-probs: --openai.server_type vllm (not openai), or server_cls = RunServer of "
    "grpo_recipes.extensions.atropos.server"
)
_ONE_TRAINER = (
    "A run-api takes one registration in its life, and keeps the groups of the last training. Fix: start it again, and "
    "its environments after the trainer"
)
_NO_BATCH = "Failed to retrieve batch from Atropos after all retry attempts"


class NoLogprobs(AtroposError, ValueError):
    """A group came without the log-probs of the policy that sampled it, which the loss divides by."""


@dataclass(frozen=True)
class Registration:
    """What a trainer registers: all of it is needed, and only the first trainer of a run-api is heard."""

    wandb_group: str
    wandb_project: str
    batch_size: int  # sequences, not groups
    max_token_len: int  # environments drop a group of which one sequence has as many tokens
    checkpoint_dir: str
    save_checkpoint_interval: int
    starting_step: int
    num_steps: int

    def __post_init__(self) -> None:
        for one in fields(self):
            value, wanted = getattr(self, one.name), str if one.type == "str" else int
            if type(value) is not wanted:
                raise AtroposError(f"Invalid registration data format: {one.name} is {value!r}, not of type {one.type}")
        for name in ("batch_size", "max_token_len"):
            if getattr(self, name) < 1:
                raise AtroposError(f"Invalid registration data format: {name} is {getattr(self, name)}, below 1")

    @classmethod
    def of(cls, data: Any) -> Registration:
        """Return the registration that a mapping holds; AtroposError names the first field that is missing."""
        if isinstance(data, cls):
            return data
        if not isinstance(data, Mapping):
            raise AtroposError("Invalid registration data format")
        names = [one.name for one in fields(cls)]
        if missing := [name for name in names if name not in data]:
            raise AtroposError(f"Missing required registration field: {missing[0]}")
        return cls(**{name: data[name] for name in names})


class AtroposClient:
    """A client of the run-api at ``url``, for one thread.

    Attributes:
        counts: batches and groups that were handed out, groups that were rejected, stale, or of an unknown policy
            version, batches that run-api may have handed out to nobody, and batches that another client took.
        last_seen: when the last group of each environment came, by ``env_id``, as ``time.monotonic`` says.
        seconds: of the last request to each path.
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
        diagnose: Callable[[], list[str]] = list,
        likely: Callable[[], str] = str,
        compressed: bool | None = None,
    ):
        """Connect to nothing yet.

        Args:
            url: of run-api.
            timeout: seconds that one answer may take, and that run-api may take to be there at all.
            attempts: how often a request is tried that is answered with an error of the server, or not at all.
            delay: seconds before a request is repeated; each time half as long again, at most 2 s.
            max_wait: longest wait in seconds for the groups of one step.
            stopped: whether the run stops, and no answer is needed any more.
            say: prints a line.
            diagnose: lines that an error at the end of a wait gets next to ours.
            likely: why no groups come, if the caller knows it better than run-api shows it; else empty.
            compressed: whether answers are compressed; by default where run-api is on another machine, since that
                takes it longer than loopback takes to carry them.
        """
        self._api = Connection(
            url, timeout=timeout, attempts=attempts, delay=delay, stopped=stopped, compressed=compressed
        )
        self.url, self.seconds = self._api.url, self._api.seconds
        self._max_wait, self._say, self.diagnose, self._likely = max_wait, say, diagnose, likely
        self.counts = dict.fromkeys(
            ("batches", "groups", "rejected", "stale", "lost_batches", "stolen_batches", "unknown_version"), 0
        )
        self.last_seen: dict[int | None, float] = {}
        self._registration: Registration | None = None
        self._early: list[list[Group]] = []  # batches that came before anybody waited for one
        self._kept: list[Group] = []  # valid groups for the next take
        self._parts: list[Group] = []  # valid parts of groups, whose other parts may still come
        self._sizes: set[int] = set()  # of groups as they came
        self._last_rejection = ""  # of this wait

    def status(self) -> dict[str, Any]:
        """Return run-api's ``current_step``, batches that it has made, and ``queue_size``, groups it has not."""
        return dict(self._api.ask("GET", "/status"))

    def info(self) -> dict[str, Any]:
        """Return the ``batch_size`` and ``max_token_len`` that run-api was registered with; -1 where it was not."""
        return dict(self._api.ask("GET", "/info"))

    # --- registration ----------------------------------------------------------------------------------------------

    def register(self, registration: Registration | Mapping[str, Any]) -> int:
        """Register this training with a run-api that no other has used; return the uuid that it answers.

        From then on environments can join. AtroposError where a field is missing, nobody answers within the timeout, or
        run-api holds another registration.
        """
        wanted = Registration.of(registration)
        self._connect()
        if (info := self.info())["batch_size"] != -1:
            held = {**info, **self.status()}
            raise AtroposError(f"the run-api at {self.url} already has a trainer ({held}). {_ONE_TRAINER}")
        uuid = int(self._api.ask("POST", "/register", asdict(wanted))["uuid"])
        self._say(f"Trainer successfully registered with UUID: {uuid}")
        self._need_registered(wanted)
        self._registration = wanted
        # Environments can join once a trainer has asked for a batch.
        if (batch := self._polled(time.monotonic() + self._max_wait)) is not None:
            self._early.append(batch)
        return uuid

    def _connect(self) -> None:
        """Wait until run-api answers, at most ``timeout`` seconds."""
        deadline = time.monotonic() + self._api.timeout
        for pause in self._api.pauses():
            found, reason = self._api.look("/status")
            if "current_step" in found:
                self._say("Atropos API connectivity confirmed")
                return
            if time.monotonic() + pause > deadline:
                reason = reason or f"answered {found}, as no run-api does"
                raise AtroposError(f"Atropos API not reachable at {self.url}: it {reason}, for {self._api.timeout:g} s")
            self._api.sleep(pause)

    def _need_registered(self, wanted: Registration) -> None:
        """Raise unless run-api holds what was sent."""
        info, step = self.info(), self.status()["current_step"]
        held = (info["batch_size"], info["max_token_len"], step)
        if info["batch_size"] == -1:
            raise AtroposError(
                f"the run-api at {self.url} was sent groups before a trainer registered, and takes no registration any "
                "more. Fix: start it again, and its environments after the trainer; where none runs, GET /reset_data"
            )
        if held != (wanted.batch_size, wanted.max_token_len, wanted.starting_step):
            raise AtroposError(
                f"the run-api at {self.url} already has a trainer: batch_size, max_token_len and step are {held}, not "
                f"{(wanted.batch_size, wanted.max_token_len, wanted.starting_step)}. {_ONE_TRAINER}"
            )

    # --- batches ---------------------------------------------------------------------------------------------------

    def next_batch(self) -> list[Group]:
        """Wait for the next batch; return its groups as they were handed out.

        AtroposError with a diagnosis where none comes within ``max_wait`` seconds, run-api is gone, or has forgotten
        this training.
        """
        self._last_rejection = ""
        return self._next(time.monotonic() + self._max_wait)

    def _next(self, deadline: float) -> list[Group]:
        if self._early:
            return self._early.pop(0)
        for pause in self._api.pauses():
            if (batch := self._polled(deadline)) is not None:
                return batch
            self._need_time(deadline)
            self._api.sleep(min(pause, max(0.0, deadline - time.monotonic())))
        raise AssertionError("pauses never end")

    def _need_time(self, deadline: float) -> None:
        if time.monotonic() >= deadline:
            raise self._too_late()

    def _polled(self, deadline: float) -> list[Group] | None:
        """Ask for a batch until there is a right answer; return the batch, or None where there is none yet."""
        for attempt, pause in enumerate(self._api.pauses(), 1):
            try:
                return self._poll()
            except RequestFailed as error:
                if attempt >= self._api.attempts:
                    lines = [f"Atropos API not reachable at {self.url}: it {error}\n{_NO_BATCH}", *self._diagnosis()[1]]
                    raise AtroposError("\n  ".join(lines)) from error
            self._need_time(deadline)
            self._api.sleep(pause)
        raise AssertionError("pauses never end")

    def _poll(self) -> list[Group] | None:
        """Ask for a batch once; RequestFailed where there is no right answer."""
        self._api.need_going_on()
        try:
            answer = self._api.once("GET", "/batch")
        except RequestFailed as error:
            if error.sent:  # run-api hands a batch out once, and may have done so
                self._lose(f"/batch {error}")
            raise
        if answer.status_code == 500:
            if self._registration is not None and self._api.look("/info")[0].get("batch_size") == -1:
                raise self._forgotten("it was reset.")
            self._lose(f"/batch answered {shown(answer)}")  # with NaN in it: that is no JSON, and the batch is gone
        if answer.status_code >= 500:
            raise RequestFailed(f"answered {shown(answer)}", sent=True)
        content = self._api.content(answer)
        if not isinstance(content, dict) or "batch" not in content:
            raise AtroposError(f"no run-api answers at {self.url}/batch: {shown(answer)}")
        if content.get("status") == "error":
            raise self._forgotten(str(content.get("message")))
        if content["batch"] is None:
            self._count_stolen()
            return None
        with translate(ValueError, lambda error: AtroposError(f"run-api at {self.url} handed out {error}")):
            groups = [Group.of_wire(plain) for plain in content["batch"]]
        self._count(groups)
        return groups

    def _count(self, groups: Sequence[Group]) -> None:
        """Note what was handed out."""
        sequences = sum(len(group.tokens) for group in groups)
        self.counts["batches"] += 1
        self.counts["groups"] += len(groups)
        self._sizes |= {len(group.tokens) for group in groups}
        self.last_seen |= dict.fromkeys((group.env_id for group in groups), time.monotonic())
        self._say(
            f"Successfully retrieved batch with {len(groups)} items ({len(groups)} groups, {sequences} sequences)"
        )

    def _count_stolen(self) -> None:
        """Count the batches that another client of run-api took.

        Call this after ``/batch`` had none: then run-api holds no packed batch, so each batch that ``current_step``
        counts went to a client.
        """
        packed, _ = self._api.look("/status")
        if self._registration is None or "current_step" not in packed:
            return
        ours = self.counts["batches"] + self.counts["lost_batches"] + self.counts["stolen_batches"]
        stolen = int(packed["current_step"]) - self._registration.starting_step - ours
        if stolen > 0:
            self.counts["stolen_batches"] += stolen
            self._say(
                f"another client of run-api at {self.url} took {stolen} batches of this training. Fix: give each "
                "trainer its own run-api"
            )

    def waiting(self, size: int) -> int:
        """Return the groups of ``size`` that wait for this trainer: queued or packed at run-api, and kept here."""
        status = self.status()
        waiting = int(status["queue_size"]) + len(self._kept)
        if self._registration is not None:
            ours = self.counts["batches"] + self.counts["lost_batches"] + self.counts["stolen_batches"]
            packed = int(status["current_step"]) - self._registration.starting_step - ours
            waiting += max(0, packed) * self._registration.batch_size // size
            waiting += sum(len(batch) for batch in self._early)
        return waiting

    def _lose(self, why: str) -> None:
        self.counts["lost_batches"] += 1
        self._say(f"run-api at {self.url} may have lost a batch: {why}")

    def _too_late(self) -> AtroposError:
        """Return the error of a wait that ends without groups: the likely reason first, then all there is to see."""
        reason, lines = self._diagnosis()
        if self._last_rejection:
            reason = f"groups came that were rejected, the last one: {self._last_rejection}"
        elif not self.counts["groups"]:
            reason = self._likely() or reason
        why = f"Maximum wait time ({float(self._max_wait)}s) exceeded"
        for line in (why, _NO_BATCH):
            self._say(line)
        return AtroposError("\n  ".join([f"{why}: {reason}\n{_NO_BATCH}", *lines]))

    def _diagnosis(self) -> tuple[str, list[str]]:
        size = None if self._registration is None else self._registration.batch_size
        reason, lines = diagnosis(self._api, size, self.last_seen, self._sizes)
        counted = ", ".join(f"{name} {count}" for name, count in self.counts.items())
        return reason, [*lines, f"since the start: {counted}", *self.diagnose()]

    def _forgotten(self, why: str) -> AtroposError:
        return AtroposError(f"the run-api at {self.url} does not know this training: {why} {_ONE_TRAINER}")

    # --- groups to train on ----------------------------------------------------------------------------------------

    def take(
        self,
        groups: int,
        *,
        size: int,
        longest: int | None,
        vocabulary: int | None,
        current: int,
        max_staleness: int | None,
    ) -> list[Group]:
        """Wait for so many groups that can be trained on; return them, those of the newest policy first.

        Parts of groups are joined. Groups with a problem, and those whose policy is too old, are dropped and counted;
        what is left over is kept for the next time: fewer groups than were asked for, and a batch.

        Args:
            groups: how many.
            size: trajectories of a group.
            longest: most tokens of a trajectory.
            vocabulary: token ids that the model knows.
            current: optimizer step of the weights that train on them.
            max_staleness: most steps that a group's weights may be behind; None keeps all.
        """
        deadline, self._last_rejection = time.monotonic() + self._max_wait, ""
        while True:
            self._kept = [group for group in self._kept if self._is_recent(group, current, max_staleness)]
            self._parts = [group for group in self._parts if self._is_recent(group, current, max_staleness)]
            if len(self._kept) >= groups:
                break
            self._need_time(deadline)  # also where batches come, but nothing that can be trained on
            self._add(self._next(deadline), size, longest, vocabulary)
        self._kept.sort(key=lambda group: -1 if group.policy_version is None else group.policy_version, reverse=True)
        taken, self._kept = self._kept[:groups], self._kept[groups:]
        return taken

    def _add(self, batch: Sequence[Group], size: int, longest: int | None, vocabulary: int | None) -> None:
        """Keep the groups of a batch that can be trained on, and the parts of such."""
        valid = []
        for index, group in enumerate(batch):
            where = f"group {index} of batch {self.counts['batches']}, of environment {group.env_id}"
            if group.tokens and group.inference_logprobs is None:
                raise NoLogprobs(_NO_LOGPROBS.format(where))
            part = len(group.tokens) if 0 < len(group.tokens) < size else size
            if problem := problem_of(group, size=part, longest=longest, vocabulary=vocabulary):
                self._reject(f"{where}, is not trained on: {problem}")
                continue
            self.counts["unknown_version"] += group.policy_version is None
            valid.append(group)
        whole, parts = rejoined([*self._parts, *valid], size)
        self._kept += whole
        most = max(size, sum(len(group.tokens) for group in batch))
        while sum(len(part.tokens) for part in parts) > most:
            lone = parts.pop(0)
            self._reject(f"{_of(lone)}: only {len(lone.tokens)} of its {size} trajectories came")
        self._parts = parts

    def _is_recent(self, group: Group, current: int, max_staleness: int | None) -> bool:
        """Return whether a group's policy is of this training and recent enough; count it otherwise."""
        version = group.policy_version
        if version is not None and version > current:
            self._reject(f"{_of(group)}: weights of step {version} sampled it, and this training is at step {current}")
            return False
        if version is not None and max_staleness is not None and version < current - max_staleness:
            self.counts["stale"] += 1
            return False
        return True

    def _reject(self, why: str) -> None:
        self.counts["rejected"] += 1
        self._last_rejection = why
        if self.counts["rejected"] <= _MOST_SAID:
            more = "; further ones are only counted" if self.counts["rejected"] == _MOST_SAID else ""
            self._say(why + more)


def _of(group: Group) -> str:
    return f"a group of environment {group.env_id} is not trained on"
