"""A number per tensor that changes when any element does, and adds up over the rows of fused tensors."""

from __future__ import annotations

import torch

_INTEGER_VIEWS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_CHUNK = 1 << 22  # elements at a time: 8 bytes each while they are summed, on a GPU that vLLM has filled


def fingerprint(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum of the elements' bit patterns, each mixed by a multiplicative hash, as an int64 scalar.

    It does not depend on the order of the elements, so that the parts of a fused tensor (q, k and v in ``qkv_proj``),
    or its shards, add up to the whole; zero padding adds nothing. Sums wrap around at 64 bits.
    """
    bits = tensor.detach().contiguous().view(-1).view(_INTEGER_VIEWS[tensor.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for chunk in bits.split(_CHUNK):
        # Without mixing, one step of the last bit up in one element and down in another would cancel.
        mixed = chunk.to(torch.int64) * 0x9E3779B97F4A7C1
        mixed ^= mixed >> 29
        total += (mixed * 0x3C79AC492BA7B653).sum()
    return total
