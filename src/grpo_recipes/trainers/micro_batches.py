"""Micro-batches of a token budget: the completions of an optimizer step by length, whatever TRL's own are.

TRL cuts a step into micro-batches of ``per_device_train_batch_size`` rows and pads each to its longest row. Here those
are only collected. With the last one of a step their rows are spread over the ranks by what they cost, ordered by
length, and cut into micro-batches of at most ``tokens_per_micro_batch`` tokens, each of which is a forward and a
backward pass with TRL's own loss.

The gradient is that of TRL's micro-batches. TRL's loss is a sum over rows in which the factor of a row is one over the
rows of its micro-batch, over their tokens, or over the tokens of the generation, by ``loss_type``. The gradient of a
row in another micro-batch is multiplied by the factor that it should have over the one that it got. TRL's loss and
metrics are then computed once more from the log-probs that were found, in its own micro-batches.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from accelerate.utils import DistributedType
from torch.nn.functional import pad

from grpo_recipes.attributes import replaced
from grpo_recipes.recipe.learning import own_micro_batches
from grpo_recipes.trainers.passes import fed, passes, split

Rows = dict[str, Any]  # what TRL's loss reads: tensors with a row for each completion, and others
Loss = Callable[[Any, Rows], torch.Tensor]  # TRL's, of a model and rows
_PROMPT = ("prompt_ids", "prompt_mask")  # padded on the left; what is as wide as the completions, on the right
_NEUTRAL = {"importance_sampling_ratio": 1, "tool_mask": 1}  # what pads them; 0 pads the others
# What divides a row in the loss, by loss_type: the tokens or rows of its micro-batch, or the generation's tokens.
_DIVISORS = {"bnpo": "tokens", "cispo": "items", "dapo": "items", "vespo": "items"}
_COUNTS = ("rows", "tokens", "items")
_UNEVEN = 1.02  # the cost of the busiest rank over the mean, from which rows are sent to other ranks


class MicroBatches:
    """Collect TRL's micro-batches of an optimizer step, and take all of its backward passes at the end."""

    def __init__(self, trainer: Any):
        self._trainer = trainer
        self._parts: list[Rows] = []
        self._inside = False  # inside ``collecting``; elsewhere a loss is that of the rows that are passed
        self._backward, self._gather = trainer.accelerator.backward, trainer.accelerator.gather
        # Nor does a mean over a whole pass of a mixture of experts allow for others.
        self._on = own_micro_batches(vars(trainer.args)) is None and not trainer.aux_loss_enabled

    def clear(self) -> None:
        """Forget what was collected of a step that was not taken."""
        self._parts.clear()

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Leave out the backward pass inside where ``loss`` has taken it: what that returns has no gradient."""

        def unless_taken(loss: torch.Tensor, **kwargs: Any) -> None:
            if loss.requires_grad:
                self._backward(loss, **kwargs)

        with replaced(self._trainer.accelerator, backward=unless_taken), replaced(self, _inside=self._on):
            yield

    def take(self, rows: Rows) -> bool:
        """Return whether ``loss`` takes these rows: those of a training step, without images, which are no rows."""
        return self._inside and "num_images" not in rows

    def loss(self, compute: Loss, model: Any, rows: Rows) -> torch.Tensor:
        """Return TRL's loss of a step, its gradients taken, with the last of its micro-batches; with the others 0.

        ``compute`` is TRL's loss. Called by every rank.
        """
        self._parts.append(rows)
        if not self._trainer.accelerator.sync_gradients:
            return torch.zeros((), device=rows["completion_ids"].device)
        parts, self._parts = self._parts, []
        spread = Spread(self._trainer, joined([part | _counts(part) for part in parts]))
        found = self._take_passes(compute, model, spread)
        metrics = self._trainer._metrics["train"]
        metrics["micro_batches"].append(len(spread.groups))
        metrics["fed_per_real_token"].append(spread.fed_per_real_token)
        return self._in_own_micro_batches(compute, model, parts, *spread.back(found))

    def _take_passes(self, compute: Loss, model: Any, spread: Spread) -> list[torch.Tensor]:
        """Take the forward and backward passes; return log-probs and entropies of the rows that this rank took."""
        trainer, accelerator = self._trainer, self._trainer.accelerator
        deepspeed = accelerator.distributed_type == DistributedType.DEEPSPEED
        by, width = _DIVISORS.get(trainer.loss_type, "rows"), spread.rows["completion_ids"].shape[1]
        found: list[list[torch.Tensor]] = []
        for number, group in enumerate(spread.groups, start=1):
            last = number == len(spread.groups)
            accelerator.gradient_state._set_sync_gradients(last)
            # A rank with fewer micro-batches than the others repeats a row, and takes no gradient of it.
            rows = trimmed(spread.rows, group or [0])
            theirs = {name: rows.pop(name) for name in _COUNTS}
            rows["num_items_in_batch"] = theirs["items"][0]
            own = {name: one[0] for name, one in _counts(rows).items()}
            factors = [(own[name] / theirs[name] * bool(group)).unsqueeze(1) for name in (by, "tokens")]
            parts_found: list[torch.Tensor] = []
            inner = partial(self._forward, trainer._get_per_token_logps_and_entropies, factors, parts_found)
            unread = {"train": defaultdict(list)}  # metrics of a micro-batch that is not TRL's
            alone = nullcontext() if last else accelerator.no_sync(model)
            # TRL gathers them by row, and the ranks have other numbers of rows here.
            own_alone = replaced(accelerator, gather=lambda one: one, reduce=lambda one, *_, **__: one)
            with alone, own_alone, replaced(trainer, _get_per_token_logps_and_entropies=inner, _metrics=unread):
                self._backward(compute(model, rows), **({"scale_wrt_gas": False} if deepspeed else {}))
            found.append([pad(one, (0, width - one.shape[1]))[: len(group)] for one in parts_found])
        order = torch.tensor([row for group in spread.groups for row in group]).argsort()
        return [torch.cat(one)[order.to(one[0].device)] for one in zip(*found, strict=True)]

    def _forward(
        self, compute: Callable[..., Any], factors: Sequence[torch.Tensor], found: list[torch.Tensor],
        *args: Any, **kwargs: Any,
    ) -> Any:  # fmt: skip
        """Return log-probs and entropies as TRL does, with the gradient of each row times its factor; keep them.

        The ranks agree here on how many passes they make, as they do everywhere.
        """
        with replaced(self._trainer.accelerator, gather=self._gather):
            logps, entropies, loss_of_routers = compute(*args, **kwargs)
        for values, factor in zip((logps, entropies), factors, strict=True):
            values.register_hook(factor.to(values.dtype).mul)  # a hook must keep the dtype of the gradient
            found.append(values.detach())
        return logps, entropies, loss_of_routers

    def _in_own_micro_batches(
        self, compute: Loss, model: Any, parts: Sequence[Rows], logps_BT: torch.Tensor, entropies_BT: torch.Tensor
    ) -> torch.Tensor:
        """Return TRL's loss of its own micro-batches, whose metrics it logs, from log-probs and entropies."""
        trainer, start, losses = self._trainer, 0, []
        for number, rows in enumerate(parts, start=1):
            end, width = start + len(rows["completion_ids"]), rows["completion_ids"].shape[1]
            known = logps_BT[start:end, :width], entropies_BT[start:end, :width], None
            trainer.accelerator.gradient_state._set_sync_gradients(number == len(parts))
            with torch.no_grad(), replaced(trainer, _get_per_token_logps_and_entropies=lambda *_, k=known, **__: k):
                losses.append(compute(model, rows))
            start = end
        return torch.stack(losses).sum()


class Spread:
    """The rows of a step that this rank takes, in micro-batches, where the ranks share the work evenly.

    The work of a row of L tokens grows with 6 x hidden units x L, its matrices, and with L squared, its attention.
    """

    def __init__(self, trainer: Any, rows: Rows):
        self._accelerator, args = trainer.accelerator, trainer.args
        rank, world = self._accelerator.process_index, self._accelerator.num_processes
        lengths_B = rows["prompt_mask"].sum(dim=1) + rows["completion_mask"].sum(dim=1)
        self._count = len(lengths_B)  # the same on every rank
        lengths = [int(length) for length in self._gathered(lengths_B).tolist()]  # of all ranks
        hidden = getattr(trainer.model.config.get_text_config(), "hidden_size", 0)
        costs = [6 * hidden * length + length**2 for length in lengths]
        self._places = places(costs, world)
        self._moved = self._places != places([0] * len(costs), world)
        most = args.tokens_per_micro_batch or args.per_device_train_batch_size * max(lengths)
        of_ranks = [
            passes([lengths[row] for row in place], most, args.padding_free) for place in self._places
        ]  # every rank knows those of all
        self.groups = split(of_ranks[rank], max(map(len, of_ranks)))
        self.rows = self._sent(rows, self._places[rank]) if self._moved else rows
        counts = zip(self._places, of_ranks, strict=True)
        total = sum(fed([lengths[row] for row in place], groups, args.padding_free) for place, groups in counts)
        self.fed_per_real_token = total / max(1, sum(lengths))

    def _gathered(self, values: torch.Tensor) -> torch.Tensor:
        if self._accelerator.num_processes == 1:
            return values
        kind = values.dtype
        sent = values.to(torch.uint8) if kind == torch.bool else values  # gloo gathers no bool
        return self._accelerator.gather(sent.contiguous()).to(kind)

    def _sent(self, rows: Rows, place: Sequence[int]) -> Rows:
        """Return the rows of all ranks that this one takes."""
        index, found = torch.tensor(place, device=rows["completion_ids"].device), {}
        for name, value in rows.items():
            if value.ndim > 1:
                padding = {"pad_index": _NEUTRAL.get(name, 0), "pad_first": name in _PROMPT}
                value = self._accelerator.pad_across_processes(value, dim=1, **padding)
            found[name] = self._gathered(value)[index]
        return found

    def back(self, found: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return log-probs and entropies of the rows that TRL gave this rank, in its order."""
        if not self._moved:
            return list(found)
        longest = max(map(len, self._places))
        at = {
            row: rank * longest + number for rank, place in enumerate(self._places) for number, row in enumerate(place)
        }
        first = self._accelerator.process_index * self._count
        index = torch.tensor([at[row] for row in range(first, first + self._count)], device=found[0].device)
        return [self._gathered(pad(one, (0, 0, 0, longest - len(one))))[index] for one in found]


def places(costs: Sequence[float], ranks: int) -> list[list[int]]:
    """Return which rows of all ranks each rank takes: its own, unless another share of the costs is more even."""
    count = len(costs) // ranks
    own = [list(range(rank * count, (rank + 1) * count)) for rank in range(ranks)]
    if max(sum(costs[row] for row in place) for place in own) * ranks <= _UNEVEN * sum(costs):
        return own
    found: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0.0] * ranks
    for row in sorted(range(len(costs)), key=lambda row: -costs[row]):
        rank = min(range(ranks), key=loads.__getitem__)
        found[rank].append(row)
        loads[rank] += costs[row]
    return found


def joined(parts: Sequence[Rows]) -> Rows:
    """Return the rows of several micro-batches as one; they may be of generations of other widths."""
    widths = {name: max(part[name].shape[1] for part in parts) for name in ("prompt_ids", "completion_ids")}
    return {
        name: torch.cat([_widened(name, part, widths) for part in parts])
        for name, value in parts[0].items()
        if torch.is_tensor(value) and value.ndim
    }


def _widened(name: str, part: Rows, widths: dict[str, int]) -> torch.Tensor:
    value: torch.Tensor = part[name]
    if name in _PROMPT:
        return pad(value, (widths["prompt_ids"] - value.shape[1], 0))
    if not _by_token(name, part):
        return value
    return pad(value, (0, widths["completion_ids"] - value.shape[1]), value=_NEUTRAL.get(name, 0))


def _by_token(name: str, rows: Rows) -> bool:
    return name not in _PROMPT and rows[name].ndim > 1 and rows[name].shape[1] == rows["completion_ids"].shape[1]


def trimmed(rows: Rows, group: Sequence[int]) -> Rows:
    """Return these rows without the columns in which all of them are padded."""
    index = torch.tensor(group, device=rows["completion_ids"].device)
    found = {name: value[index] for name, value in rows.items()}
    prompt, completion = (max(1, int(found[f"{part}_mask"].sum(dim=1).max())) for part in ("prompt", "completion"))
    return {
        name: value[:, -prompt:] if name in _PROMPT else value[:, :completion] if _by_token(name, rows) else value
        for name, value in found.items()
    }


def _counts(rows: Rows) -> Rows:
    """Return what may divide each row of a micro-batch in TRL's loss, by name, (B,) in float32."""
    mask_BT, items = rows["completion_mask"] * rows.get("tool_mask", 1), rows["num_items_in_batch"]
    counts = {"rows": len(mask_BT), "tokens": mask_BT.sum().clamp(min=1), "items": items.clamp(min=1)}
    return {name: mask_BT.new_full((len(mask_BT),), float(one), dtype=torch.float32) for name, one in counts.items()}
