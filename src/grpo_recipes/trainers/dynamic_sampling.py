"""Replace groups of equal rewards by groups of other prompts, before the update (DAPO, arXiv:2503.14476).

Such a group has advantages of 0: it costs samples and teaches nothing. After sampling, the rewards of all groups are
computed. In rounds, each group without a signal is replaced by a new prompt's group that has one, until no such group
is left or ``dynamic_sampling_max_rounds`` is reached. The update keeps its size and its cost.

The run's server samples the next round while a round is scored. The number of its groups is the expected number of
groups without a signal, from the fraction of groups dropped so far. Other samplers wait for the rewards.

The prompts of a round depend only on the seed, the generation, the round, and the groups dropped before, so a resumed
run draws the same prompts. Several ranks replace the same groups as a single rank.

    dynamic = DynamicSampling(trainer)
    dynamic.start_generation(rows, "3/12")
    generated = trl_generate(prompts)
    dynamic.replace_groups(prompts, generated, trl_generate)  # in place
    rewards_BR = dynamic.take_rewards()
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from accelerate.utils import gather_object
from datasets import IterableDataset

from grpo_recipes.algorithms.maxent import find_different_rewards
from grpo_recipes.evaluate.scores import sum_weighted_rewards
from grpo_recipes.trainers.protocol import InnerTrainer

Row = dict[str, Any]  # a row of the training set
Columns = tuple[Any, ...]  # the result of TRL's ``_generate``
Generate = Callable[[list[Any]], Columns]  # TRL's ``_generate``: prompts of this rank -> columns

# The columns of TRL's ``_generate`` with a value for each completion: token ids of prompt and completion, its text or
# messages, and its log-probs. The other columns are None or empty without a source of rollouts.
_PROMPT_IDS, _COMPLETION_IDS, _COMPLETIONS, _LOGPROBS = _COLUMNS = (0, 1, 3, 4)


@dataclass(frozen=True)
class Completion:
    """A completion of a new group: its row, its prompt, and its values in ``_COLUMNS``."""

    row: Row
    prompt: Any
    values: tuple[Any, ...]


@dataclass(frozen=True)
class Draw:
    """The groups of a round."""

    groups: int
    rewards_BR: torch.Tensor  # of all ranks
    useful: list[int]  # numbers of the groups with a signal
    completions: dict[int, list[Completion]]  # of the useful groups, by the group's number
    tokens: int  # sampled tokens of all ranks


class DynamicSampling:
    """Replace the groups of equal rewards in a generation, on every rank.

    Raise ValueError if the training set is a stream.
    """

    def __init__(self, trainer: InnerTrainer) -> None:
        if isinstance(trainer.train_dataset, IterableDataset):
            problem = "dynamic_sampling: the other prompts of a stream are unknown"
            raise ValueError(f"{problem}. Fix: pass a Dataset, or remove dynamic_sampling")
        self._trainer = trainer
        self._rows: list[Row] = []
        self._name = ""
        self._rewards_BR: torch.Tensor | None = None
        self._drawn: set[int] = set()  # rows of the training set that were drawn in this generation
        self._ahead: list[int] = []  # rows of the round that the server samples ahead

    def start_generation(self, rows: list[Row], name: str) -> None:
        """Store this rank's rows of a training generation, which ``replace_groups`` changes, and the generation's name.

        The name must be the same on every rank, and differ from the names of other generations.
        """
        self._rows, self._name, self._rewards_BR, self._drawn = rows, name, None, set()

    def take_rewards(self) -> torch.Tensor | None:
        """Return the rewards of the completed generation, (B, rewards), of all ranks. A second call returns None."""
        rewards_BR, self._rewards_BR = self._rewards_BR, None
        return rewards_BR

    def replace_groups(self, prompts: list[Any], generated: Columns, generate: Generate) -> None:
        """Replace groups of equal rewards in this rank's ``prompts`` and columns, in place. Called by every rank.

        The new groups are sampled and scored here. ``generated`` are the columns that TRL's ``generate`` returned for
        ``prompts``. Afterwards, ``take_rewards`` returns the rewards of all groups. Log ``dynamic_sampling/*``.
        """
        trainer, size = self._trainer, self._trainer.num_generations
        groups = len(prompts) * trainer.accelerator.num_processes // size
        self._start_round(1, groups * self._read_dropped_fraction())
        rewards_BR = trainer._calculate_rewards(
            self._rows, prompts, generated[_COMPLETIONS], generated[_COMPLETION_IDS]
        )
        first_reward = sum_weighted_rewards(rewards_BR, trainer.reward_weights).nanmean().item()
        equal, rounds = self._find_equal_groups(rewards_BR), 0
        drawn, dropped, tokens = groups, len(equal), self._count_tokens(generated)
        while equal and rounds < trainer.args.dynamic_sampling_max_rounds:
            rounds += 1
            draw = self._draw_groups(len(equal), rounds, 1 - dropped / drawn, generate)
            drawn, tokens = drawn + draw.groups, tokens + draw.tokens
            dropped += draw.groups - len(draw.useful)
            for group, new_group in zip(equal, draw.useful, strict=False):
                new_rows = slice(new_group * size, (new_group + 1) * size)
                rewards_BR[group * size : (group + 1) * size] = draw.rewards_BR[new_rows]
                self._insert(group, draw.completions[new_group], prompts, generated)
            equal = equal[len(draw.useful) :]
        trainer.rollouts.restore_pending_generation(None)  # a round that is not needed
        self._rewards_BR = rewards_BR
        metrics = {
            "dynamic_sampling/rounds": rounds,
            "dynamic_sampling/groups_drawn": drawn,
            "dynamic_sampling/groups_dropped": dropped,
            "dynamic_sampling/groups_equal": len(equal),
            "dynamic_sampling/first_reward": first_reward,
            "dynamic_sampling/tokens_per_useful_group": tokens / max(groups - len(equal), 1),
        }
        for name, value in metrics.items():
            trainer.add_metric(name, float(value))

    def _find_equal_groups(self, rewards_BR: torch.Tensor) -> list[int]:
        """Return the numbers of the groups without a signal.

        All their rewards are equal, or at most one completion is scored. If TRL normalizes each
        reward by itself, a group has a signal if one of its rewards differs.
        """
        trainer = self._trainer
        rewards = [sum_weighted_rewards(rewards_BR, trainer.reward_weights)]
        if trainer.args.multi_objective_aggregation == "normalize_then_sum":
            rewards = list(rewards_BR.unbind(dim=1))
        differ_RP = torch.stack([find_different_rewards(row.view(-1, trainer.num_generations)) for row in rewards])
        numbers: list[int] = (~differ_RP.any(dim=0)).nonzero().flatten().tolist()
        return numbers

    def _count_tokens(self, generated: Columns) -> int:
        """Return the number of sampled tokens of all ranks."""
        return sum(gather_object([sum(map(len, generated[_COMPLETION_IDS]))]))

    def _draw_groups(self, missing: int, number: int, useful_fraction: float, generate: Generate) -> Draw:
        """Sample and score groups of other prompts in the round with this number, and return them as a Draw.

        After sampling, let the server start the next round. A round has the groups that the server sampled ahead, or
        else ``missing`` groups. The next round will have as many as are expected to be missing, if ``useful_fraction``
        of this round's groups have a signal. All ranks sample the same number of groups, so the last prompt is sampled
        several times if necessary. Its repetitions are ignored.
        """
        trainer, size = self._trainer, self._trainer.num_generations
        name = f"{self._name}/round-{number}"  # prompts and sampling seeds of the round derive from it
        chosen = self._ahead or self._choose_indices(missing, name)
        filled, count = self._fill_ranks(chosen), len(chosen)
        per_rank = len(filled) // trainer.accelerator.num_processes
        first = trainer.accelerator.process_index * per_rank
        rows = [dict(trainer.train_dataset[i]) for i in filled[first : first + per_rank] for _ in range(size)]
        prompts = [row["prompt"] for row in rows]
        trainer.rollouts.seeds.name_generation(name)
        generated = generate(prompts)
        trainer.rollouts.seeds.name_generation(self._name)
        self._start_round(number + 1, missing - count * useful_fraction)
        rewards_BR = trainer._calculate_rewards(rows, prompts, generated[_COMPLETIONS], generated[_COMPLETION_IDS])
        rewards_BR = rewards_BR[: count * size]
        equal = self._find_equal_groups(rewards_BR)
        useful = [group for group in range(count) if group not in equal]
        columns = [generated[column] or [None] * len(rows) for column in _COLUMNS]  # TRL may return no such column
        completions = {
            first + group: [
                Completion(rows[row], prompts[row], tuple(column[row] for column in columns))
                for row in range(group * size, (group + 1) * size)
            ]
            for group in range(per_rank)
            if first + group in useful
        }
        gathered = dict(gather_object(list(completions.items())))
        return Draw(count, rewards_BR, useful, gathered, self._count_tokens(generated))

    def _start_round(self, number: int, expected: float) -> None:
        """Let the server sample the round with this number, with ``expected`` groups, rounded up.

        ``_ahead`` gets the rows of this round, or becomes empty if none is started. Start nothing if the sampler
        can't sample ahead, or the generation has no such round.
        """
        trainer, self._ahead = self._trainer, []
        count = math.ceil(round(expected, 6))
        if trainer.rollouts.samples_rounds and count > 0 and number <= trainer.args.dynamic_sampling_max_rounds:
            name = f"{self._name}/round-{number}"
            self._ahead = self._choose_indices(count, name)
            prompts = [trainer.train_dataset[index]["prompt"] for index in self._fill_ranks(self._ahead)]
            trainer.rollouts.start_round(name, prompts)

    def _read_dropped_fraction(self) -> float:
        """Return the fraction of groups that the last logged step dropped, which checkpoints contain. 0 if none did."""
        for logs in reversed(self._trainer.state.log_history):
            if drawn := logs.get("dynamic_sampling/groups_drawn"):
                return float(logs["dynamic_sampling/groups_dropped"] / drawn)
        return 0.0

    def _fill_ranks(self, indices: list[int]) -> list[int]:
        """Repeat the last of these rows of the training set until their number is a multiple of the ranks."""
        ranks: int = self._trainer.accelerator.num_processes
        return indices + indices[-1:] * (-len(indices) % ranks)

    def _choose_indices(self, count: int, seed: str) -> list[int]:
        """Choose ``count`` rows of the training set at random, the same on every rank.

        A row that was drawn in this generation is not chosen again before all rows were drawn. The chosen rows
        count as drawn. ``seed`` is a name that is combined with the run's seed.
        """
        random, rows = Random(f"{self._trainer.args.seed}/{seed}"), len(self._trainer.train_dataset)
        indices: list[int] = []
        while len(indices) < count:
            index = random.randrange(rows)
            if index not in self._drawn or len(self._drawn) == rows:
                indices.append(index)
                self._drawn.add(index)
        return indices

    def _insert(self, group: int, completions: list[Completion], prompts: list[Any], generated: Columns) -> None:
        """Replace this rank's rows of ``group`` by ``completions``, the completions of the whole new group.

        ``prompts`` and ``generated`` are this rank's prompts and columns. Both are changed in place. A group can cover
        rows of two ranks, so each rank writes only its own rows.
        """
        first = group * len(completions) - self._trainer.accelerator.process_index * len(prompts)
        for row, completion in enumerate(completions, first):
            if 0 <= row < len(prompts):
                self._rows[row], prompts[row] = completion.row, completion.prompt
                for column, value in zip(_COLUMNS, completion.values, strict=True):
                    if generated[column] is not None:
                        generated[column][row] = value
