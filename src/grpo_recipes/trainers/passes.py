"""Forward passes over rows of about one length: TRL pads every row to the longest prompt and the longest completion.

The rows that TRL passes are ordered by length and fed in as many passes as keep padding below a tenth, or, with
``padding_free``, one after the other in a single row; the log-probs come back in TRL's order and shape, so its loss,
whichever it is, is that of the same rows.
"""

from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch.nn.functional import pad

MOST_FED = 1.1  # tokens that a pass is fed per real one; one row alone has no padding at all

Computed = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]  # log-probs, entropies, loss of the routers


def in_trimmed_passes(
    trainer: Any, compute: Callable[..., Computed], model: Any, input_ids: torch.Tensor, attention_mask: torch.Tensor,
    logits_to_keep: int, batch_size: int | None = None, compute_entropy: bool = False, *args: Any, **kwargs: Any,
) -> Computed:  # fmt: skip
    """Return what TRL's ``compute`` does for rows, (B, L), of a left-padded prompt and a right-padded completion.

    Every rank calls it, and makes as many passes as the others: sharded models gather their weights in each. Images,
    and the load-balancing loss of a mixture of experts, which is a mean over a whole pass, take TRL's own way; so do
    rows with little padding, bit for bit.
    """
    rows, width = input_ids.shape
    prompts = (attention_mask[:, :-logits_to_keep] != 0).sum(dim=1)
    lengths = prompts + (attention_mask[:, -logits_to_keep:] != 0).sum(dim=1)
    free = trainer.args.padding_free
    multiple = 1 if free else trainer.args.pad_to_multiple_of or 1
    widths = -(-lengths // multiple) * multiple
    groups = passes(widths.tolist(), (batch_size or rows) * width, free)
    padded = free or rows * width > MOST_FED * int(widths.sum())
    special = bool((prompts == 0).any()) or any(value not in (None, False) for value in (*args, *kwargs.values()))
    count, padded, special = _most_of_any_rank(trainer, len(groups), padded, special)
    if special or not padded:
        return compute(model, input_ids, attention_mask, logits_to_keep, batch_size, compute_entropy, *args, **kwargs)
    groups = split(groups, count)
    parts: list[list[torch.Tensor]] = []
    for group in groups:
        # A rank without rows of its own takes a pass too if others need it; nothing of this pass is kept.
        fed = torch.tensor(group or [0], device=input_ids.device)
        prompts_b, lengths_b = prompts[fed], lengths[fed]
        longest = int(widths[fed].max())
        places_bW = (width - logits_to_keep - prompts_b).unsqueeze(1) + torch.arange(longest, device=fed.device)
        mask_bW = torch.arange(longest, device=fed.device) < lengths_b.unsqueeze(1)
        ids_bW = input_ids[fed].gather(1, places_bW.clamp(max=width - 1))
        kept = max(longest - int(prompts_b.min()), 1)
        given = partial(_in_one_row, model) if free else model
        found = compute(given, ids_bW, mask_bW.to(attention_mask.dtype), kept, compute_entropy=compute_entropy)
        first_b = prompts_b - (longest - kept)  # the column of the first token of the completion
        aligned = [_aligned(one, first_b, lengths_b - prompts_b, logits_to_keep) for one in found if one is not None]
        parts.append([one[: len(group)] for one in aligned])
    back = torch.tensor([row for group in groups for row in group], device=input_ids.device).argsort()
    logps, *entropies = [torch.cat(one)[back] for one in zip(*parts, strict=True)]
    return logps, entropies[0] if entropies else None, None


def passes(lengths: Sequence[int], most: float, padding_free: bool = False) -> list[list[int]]:
    """Return rows in passes, the longest first: each is fed at most ``MOST_FED`` tokens per real one, and ``most``."""
    found: list[list[int]] = []
    real = 0
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        real += lengths[row]
        tokens = real if padding_free or not found else (len(found[-1]) + 1) * lengths[found[-1][0]]
        if not found or tokens > min(MOST_FED * real, most):
            found.append([])
            real = lengths[row]
        found[-1].append(row)
    return found


def split(groups: list[list[int]], count: int) -> list[list[int]]:
    """Return the passes as ``count`` of them, none fed more than before; empty ones where there are too few rows."""
    groups = list(groups)
    while len(groups) < count:
        largest = max(range(len(groups)), key=lambda place: len(groups[place]))
        rows = groups[largest]
        groups[largest : largest + 1] = [rows[: (len(rows) + 1) // 2], rows[(len(rows) + 1) // 2 :]]
    return groups


def _in_one_row(
    model: Any, input_ids: torch.Tensor, attention_mask: torch.Tensor, labels: torch.Tensor, **kwargs: Any
) -> SimpleNamespace:
    """Return what TRL reads of the output of its fused head, (b, L - 1), from rows fed one after the other.

    Attention sees by the positions, which begin anew with each row, where one ends.
    """
    real_bL = attention_mask.bool()
    positions_bL = real_bL.long().cumsum(dim=1) - 1
    ids, positions, labels_1N = (one[real_bL].unsqueeze(0) for one in (input_ids, positions_bL, labels))
    output = model(input_ids=ids, position_ids=positions, labels=labels_1N, **kwargs)

    def placed(values_1N: torch.Tensor | None) -> torch.Tensor | None:
        if values_1N is None:
            return None
        whole = values_1N.new_zeros(real_bL.shape)
        return whole.masked_scatter(real_bL, pad(values_1N[0], (1, 0)))[:, 1:]  # no token predicts the first

    return SimpleNamespace(log_probs=placed(output.log_probs), entropy=placed(output.entropy))


def _aligned(values_bK: torch.Tensor, first_b: torch.Tensor, lengths_b: torch.Tensor, width: int) -> torch.Tensor:
    """Return values, (b, width), from the column ``first_b`` on, and 0 where a row has no more."""
    steps = torch.arange(int(lengths_b.max()), device=values_bK.device)
    columns = (first_b.unsqueeze(1) + steps).clamp(0, values_bK.shape[1] - 1)
    there = steps < lengths_b.unsqueeze(1)
    return pad(values_bK.gather(1, columns).masked_fill(~there, 0.0), (0, width - len(steps)))


def _most_of_any_rank(trainer: Any, *values: float) -> tuple[int, ...]:
    if trainer.accelerator.num_processes == 1:
        return tuple(int(value) for value in values)
    own = torch.tensor([values], device=trainer.accelerator.device, dtype=torch.long)
    return tuple(trainer.accelerator.gather(own).amax(dim=0).tolist())
