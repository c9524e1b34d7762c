"""Choose and render the completions in ``samples.jsonl``: some steps, and prompts at their first and last step.

The file is read once to see which prompts recur, and once more to render the chosen rows.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

from markupsafe import Markup

from grpo_recipes.console.report.page import render_fragment
from grpo_recipes.console.report.read import Scored, read_scored_rows
from grpo_recipes.console.report.tokens import read_tokens
from grpo_recipes.console.report.transcripts import Transcript, read_transcript
from grpo_recipes.runs.health import drop_missing, finite_number

_MAX_STEPS, _MAX_MARKUP = 24, 155_000  # limits of the completions on a page: number of steps, and characters
_TOKEN_LIMITS = (512, 256, 128, 64, 32)  # shown tokens of each completion, at most
_MAX_PAIRS = 4  # prompts at their first and last step

Shown = tuple[Mapping[str, Any], Transcript | None]  # a sample, and its episode if it has one
Key = tuple[Any, ...]


@dataclass(frozen=True)
class SampledGroup:
    """The sampled completions of a prompt in one step."""

    key: Key  # the prompt and, for an episode, its environment and seed
    samples: list[Shown]

    @property
    def rewards(self) -> list[float]:
        """The rewards of all completions of the prompt in this step that have a score; [] in old runs."""
        sample, _ = self.samples[0]
        rewards = sample.get("group_rewards")
        return drop_missing(map(finite_number, rewards)) if isinstance(rewards, list) else []


@dataclass(frozen=True)
class PromptPair:
    """A prompt at two steps. If no prompt recurs, the two steps have different prompts."""

    first: tuple[int, SampledGroup]
    last: tuple[int, SampledGroup]

    @property
    def is_same_prompt(self) -> bool:
        """Whether both steps have the same prompt."""
        return self.first[1].key == self.last[1].key


def group_samples(samples: Sequence[Mapping[str, Any]]) -> list[SampledGroup]:
    """Split the samples of a step into groups of the same prompt."""
    shown = [(sample, read_transcript(sample)) for sample in samples]
    return [SampledGroup(key, list(members)) for key, members in groupby(shown, _get_group_key)]


def _get_group_key(shown: Shown) -> Key:
    """Return the key to group samples by: the prompt and, for an episode, its environment and seed."""
    sample, episode = shown
    return sample.get("prompt"), *((episode.environment, episode.seed) if episode else ())


def render_steps(path: Path, last: int) -> list[Markup]:
    """Return the HTML of the completions, one entry for each of at most 24 steps of the run.

    The steps are spread evenly and include the row ``last``, the index of the last row. If the HTML exceeds 155,000
    characters, fewer tokens of each completion are shown. Then the number of steps is halved until it fits or one step
    is left.
    """
    chosen = {round(index * last / (_MAX_STEPS - 1)) for index in range(_MAX_STEPS)}
    rows = [
        (scored, group_samples(samples), index == last)
        for index, (scored, samples) in enumerate(read_scored_rows(path))
        if index in chosen and samples
    ]
    while True:
        for most in _TOKEN_LIMITS:
            view = partial(read_tokens, most=most)
            steps: list[Markup] = []
            for row in rows:
                steps.append(render_fragment("completions.html.j2", "step", *row, view))
                if sum(map(len, steps)) > _MAX_MARKUP:  # too long; if it is the only step, it is complete here
                    break
            else:
                return steps
        if len(rows) < 2:
            return steps
        rows = [*rows[:-2:2], rows[-1]]


def pair_prompts(path: Path) -> list[PromptPair]:
    """Return prompts with their completions at the first and the last step that sampled them, at most 4.

    Prompts with the most steps in between come first. Without a recurring prompt, return the first groups of the first
    and the last step as one pair; return [] for fewer than two steps with completions.
    """
    spans: dict[int, list[int]] = {}  # hash of a group's key -> index of its first and of its last row
    rows: list[int] = []
    for index, _, groups in _read_groups(path):
        rows.append(index)
        for group in groups:
            spans.setdefault(hash(str(group.key)), [index, index])[1] = index
    if len(rows) < 2:
        return []
    recurring = sorted(spans.items(), key=lambda item: item[1][0] - item[1][1])[:_MAX_PAIRS]
    ends = {code: span for code, span in recurring if span[0] < span[1]}
    groups_by_code: dict[int, list[tuple[int, SampledGroup]]] = {code: [] for code in ends}
    first_and_last: list[tuple[int, SampledGroup]] = []
    for index, scored, groups in _read_groups(path):
        for group in groups:
            code = hash(str(group.key))
            if index in ends.get(code, ()):
                groups_by_code[code].append((scored.step, group))
        if index in (rows[0], rows[-1]):
            first_and_last.append((scored.step, groups[0]))
    pairs = [PromptPair(groups[0], groups[-1]) for groups in groups_by_code.values()]
    return pairs or [PromptPair(first_and_last[0], first_and_last[-1])]


def _read_groups(path: Path) -> Iterator[tuple[int, Scored, list[SampledGroup]]]:
    """Yield the index, the rewards and the groups of each row with completions."""
    for index, (scored, samples) in enumerate(read_scored_rows(path)):
        if samples:
            yield index, scored, group_samples(samples)
