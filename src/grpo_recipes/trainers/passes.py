"""Feed rows of similar length in common forward passes. TRL pads every row to the longest prompt and completion.

The rows of a call are ordered by length and fed in several passes, so that padding stays below a tenth. With
``padding_free`` they are fed one after another in a single row. The log-probs return in TRL's order and shape, so TRL's
loss is computed from the same rows.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch.nn.functional import pad

from grpo_recipes.trainers.protocol import Computed, InnerTrainer

MOST_FED = 1.1  # tokens that a pass may feed per real token; a single row has no padding


def compute_in_trimmed_passes(
    trainer: InnerTrainer, compute: Callable[..., Computed], model: Any, input_ids: torch.Tensor,
    attention_mask: torch.Tensor, logits_to_keep: int, batch_size: int | None = None, compute_entropy: bool = False,
    *args: Any, **kwargs: Any,
) -> Computed:  # fmt: skip
    """Call TRL's ``compute`` on groups of rows of similar length, with less padding; return the results of all rows.

    Rows are (B, L): left-padded prompt, right-padded completion. Called by every rank. All ranks make the same number
    of passes, because sharded models gather their weights in each. Rows with images, with the load-balancing loss of a
    mixture of experts (a mean over a whole pass), or with little padding use TRL's own pass, bit for bit.
    """
    rows, width = input_ids.shape
    prompt_lengths_B = (attention_mask[:, :-logits_to_keep] != 0).sum(dim=1)
    lengths_B = prompt_lengths_B + (attention_mask[:, -logits_to_keep:] != 0).sum(dim=1)
    padding_free = trainer.args.padding_free
    multiple = 1 if padding_free else trainer.args.pad_to_multiple_of or 1
    widths_B = -(-lengths_B // multiple) * multiple
    groups = group_rows(widths_B.tolist(), (batch_size or rows) * width, padding_free, few_sizes=multiple > 1)
    is_padded = padding_free or rows * width > MOST_FED * int(widths_B.sum())
    has_options = any(value not in (None, False) for value in (*args, *kwargs.values()))
    is_special = bool((prompt_lengths_B == 0).any()) or has_options
    most_passes, any_padded, any_special = _gather_maximum(trainer, len(groups), is_padded, is_special)
    if any_special or not any_padded:
        return compute(model, input_ids, attention_mask, logits_to_keep, batch_size, compute_entropy, *args, **kwargs)
    groups = split_passes(groups, most_passes)
    parts: list[list[torch.Tensor]] = []
    for group in groups:
        # A rank without rows makes the pass too, because other ranks need it, and drops the results.
        fed_rows = torch.tensor(group or [0], device=input_ids.device)
        prompt_lengths_b, lengths_b = prompt_lengths_B[fed_rows], lengths_B[fed_rows]
        longest = int(widths_B[fed_rows].max())
        steps_W = torch.arange(longest, device=fed_rows.device)
        columns_bW = (width - logits_to_keep - prompt_lengths_b).unsqueeze(1) + steps_W
        mask_bW = steps_W < lengths_b.unsqueeze(1)
        ids_bW = input_ids[fed_rows].gather(1, columns_bW.clamp(max=width - 1))
        computed_width = longest - int(prompt_lengths_b.min())
        computed_width = max(min(-(-computed_width // multiple) * multiple, longest - 1), 1)
        results = compute(
            partial(_compute_in_one_row, model) if padding_free else model,
            ids_bW, mask_bW.to(attention_mask.dtype), computed_width, compute_entropy=compute_entropy,
        )  # fmt: skip
        first_b = prompt_lengths_b - (longest - computed_width)  # column of the first token of the completion
        aligned = [
            _align_columns(values, first_b, lengths_b - prompt_lengths_b, logits_to_keep)
            for values in results
            if values is not None
        ]
        parts.append([values[: len(group)] for values in aligned])
    to_input_order = torch.tensor([row for group in groups for row in group], device=input_ids.device).argsort()
    logps, *entropies = [torch.cat(columns)[to_input_order] for columns in zip(*parts, strict=True)]
    return logps, entropies[0] if entropies else None, None


def group_rows(
    lengths: Sequence[int], most: float, padding_free: bool = False, few_sizes: bool = False
) -> list[list[int]]:
    """Return the row indices of each pass, for rows with these lengths, longest first.

    A pass has at most ``most`` tokens, padding included, and at most ``MOST_FED`` times its tokens without padding.
    With ``padding_free``, passes have no padding. With ``few_sizes``, their numbers of rows are powers of two. A row
    that is longer than ``most`` has its own pass.
    """
    groups: list[list[int]] = []
    rows = sorted(range(len(lengths)), key=lambda row: -lengths[row])
    while rows:
        count = real_tokens = 0
        for row in rows:
            real_tokens += lengths[row]
            fed_tokens = real_tokens if padding_free else (count + 1) * lengths[rows[0]]
            if count and fed_tokens > min(MOST_FED * real_tokens, most):
                break
            count += 1
        if few_sizes:
            count = 1 << (count.bit_length() - 1)
        groups.append(rows[:count])
        rows = rows[count:]
    return groups


def split_passes(groups: list[list[int]], count: int) -> list[list[int]]:
    """Halve the largest pass until there are ``count`` passes, and return them. With too few rows, some are empty."""
    groups = list(groups)
    while len(groups) < count:
        largest = max(range(len(groups)), key=lambda index: len(groups[index]))
        rows = groups[largest]
        groups[largest : largest + 1] = [rows[: (len(rows) + 1) // 2], rows[(len(rows) + 1) // 2 :]]
    return groups


def _compute_in_one_row(
    model: Any, input_ids: torch.Tensor, attention_mask: torch.Tensor, labels: torch.Tensor, **kwargs: Any
) -> SimpleNamespace:
    """Feed the tokens of all rows in a single row. Return ``log_probs`` and ``entropy``, (b, L - 1), like TRL's head.

    Padding has 0. A result that the head does not compute is None. The positions restart with each row. Attention
    detects the borders of rows by them.
    """
    real_bL = attention_mask.bool()
    positions_bL = real_bL.long().cumsum(dim=1) - 1
    ids_1N, positions_1N, labels_1N = (
        values_bL[real_bL].unsqueeze(0) for values_bL in (input_ids, positions_bL, labels)
    )
    output = model(input_ids=ids_1N, position_ids=positions_1N, labels=labels_1N, **kwargs)

    def as_rows(values_1N: torch.Tensor | None) -> torch.Tensor | None:
        """Return the values of the single row as (b, L - 1), with 0 for padding. None stays None."""
        if values_1N is None:
            return None
        zeros_bL = values_1N.new_zeros(real_bL.shape)
        return zeros_bL.masked_scatter(real_bL, pad(values_1N[0], (1, 0)))[:, 1:]  # no token predicts the first

    return SimpleNamespace(log_probs=as_rows(output.log_probs), entropy=as_rows(output.entropy))


def _align_columns(values_bK: torch.Tensor, first_b: torch.Tensor, lengths_b: torch.Tensor, width: int) -> torch.Tensor:
    """Shift each row left by ``first_b`` columns, and return (b, width). Columns after a row's length are 0."""
    steps = torch.arange(int(lengths_b.max()), device=values_bK.device)
    columns = (first_b.unsqueeze(1) + steps).clamp(0, values_bK.shape[1] - 1)
    is_past_end = steps >= lengths_b.unsqueeze(1)
    return pad(values_bK.gather(1, columns).masked_fill(is_past_end, 0.0), (0, width - len(steps)))


def _gather_maximum(trainer: InnerTrainer, *values: float) -> tuple[int, ...]:
    """Return the maximum of each value over all ranks. Called by every rank.

    Values are counts or flags. Fractions are cut off.
    """
    if trainer.accelerator.num_processes == 1:
        return tuple(int(value) for value in values)
    of_rank = torch.tensor([values], device=trainer.accelerator.device, dtype=torch.long)
    return tuple(trainer.accelerator.gather(of_rank).amax(dim=0).tolist())


class SharedComputation:
    """Log-probs that several computations of a loss share, so that the forward pass is made once."""

    _is_shared = False
    _computed: Computed | None = None
    _read: Callable[[torch.Tensor], None] | None = None

    @contextmanager
    def reading(self, read: Callable[[torch.Tensor], None]) -> Iterator[None]:
        """In the block, let ``reuse`` call ``read`` with the log-probs of completions, (B, T), before TRL gets them."""
        self._read = read
        try:
            yield
        finally:
            self._read = None

    @contextmanager
    def shared(self) -> Iterator[None]:
        """In the block, let the first call of ``reuse`` compute the log-probs, and all later calls return the same."""
        self._is_shared = True
        try:
            yield
        finally:
            self._is_shared, self._computed = False, None

    def reuse(self, compute: Callable[[], Computed]) -> Computed:
        """Return the log-probs that a call in the same ``shared`` block computed, or else call ``compute``.

        Inside a ``shared`` block, store them for later calls. Inside a ``reading`` block, pass them to its function.
        """
        computed = self._computed or compute()
        if self._is_shared:
            self._computed = computed
        if self._read is not None:
            self._read(computed[0])
        return computed
