"""One of two processes that train with and without padding. A test starts them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object

from grpo_recipes import smoke
from grpo_recipes.trainers import passes
from grpo_recipes.trainers.grpo import GRPOTrainer
from grpo_recipes.trainers.rank import allow_fsdp_on_cpu

from . import fixed_completions
from .fixed_completions import make_trainer
from .sharded_reference import whole


def main(model: str, folder: Path) -> None:
    """Compare the weights after some steps, and check that the ranks need different numbers of passes."""
    build_tokenizer = smoke.build_tokenizer

    def after_the_arguments() -> Any:  # the processes are set up by then
        allow_fsdp_on_cpu()
        return build_tokenizer()

    smoke.build_tokenizer = after_the_arguments
    counts: list[tuple[int, int]] = []
    split = passes.split_passes

    def watched(groups: list[list[int]], count: int) -> list[list[int]]:
        counts.append((len(groups), count))
        return split(groups, count)

    passes.split_passes = watched
    fixed_completions.LONGEST = 30  # lengths that differ more
    whole_step = {"per_device_train_batch_size": 16, "gradient_accumulation_steps": 1}
    # Rows of `bnpo` keep TRL's order; rows of `dapo` are sorted, and its metrics are over the whole step.
    for loss_type, padded in (("bnpo", {}), ("dapo", whole_step)):
        ends = []
        for trimmed in (True, False):
            keys = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 2, "max_steps": 4, "beta": 0.1}
            keys |= {"loss_type": loss_type, "trim_padding": trimmed} | ({} if trimmed else padded)
            trainer = make_trainer(folder / f"{loss_type}_{trimmed}", model, GRPOTrainer, **keys)
            torch.manual_seed(5)  # TRL shuffles the rows of a generation
            trainer.train()
            ends.append([_whole(parameter) for parameter in trainer.model.parameters()])
            logged = [row for row in trainer.state.log_history if "loss" in row]
            ends[-1] += [torch.tensor([row[name] for row in logged]) for name in ("loss", "entropy", "kl")]
        assert all(
            torch.allclose(values, expected, rtol=1e-4, atol=1e-5) for values, expected in zip(*ends, strict=True)
        )
    fewer = any(passes_here < passes_everywhere for passes_here, passes_everywhere in counts)
    assert any(gather_object([fewer])), counts
    print("the steps are those of padded rows", flush=True)
    torch.distributed.destroy_process_group()  # a thread of gloo that outlives Python aborts the process


def _whole(parameter: torch.nn.Parameter) -> torch.Tensor:
    sharded = hasattr(parameter, "ds_tensor") or hasattr(parameter, "full_tensor")
    return whole(parameter) if sharded else parameter.detach().clone()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
