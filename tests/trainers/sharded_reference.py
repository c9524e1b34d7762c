"""One of two processes that share a reference model. A test starts them."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from safetensors.torch import load_file

from grpo_recipes import smoke
from grpo_recipes.trainers.rank import allow_fsdp_on_cpu, shards_weights

from .fixed_completions import make_trainer


def main(model: Path) -> None:
    """Compare this process's shard of the reference with the file."""
    build_tokenizer = smoke.build_tokenizer

    def after_the_arguments():  # the processes are set up by then
        allow_fsdp_on_cpu()
        return build_tokenizer()

    smoke.build_tokenizer = after_the_arguments
    keys = {"maxent_objective": "listwise", "maxent_beta": 1.0, "per_device_train_batch_size": 4}
    trainer = make_trainer(model.parent / "sharded", str(model), **keys)
    assert shards_weights(trainer.accelerator)
    initial = load_file(model / "model.safetensors")
    compared = 0
    for name, parameter in trainer.ref_model.named_parameters():
        name = name.removeprefix("module.")
        if name in initial:
            assert torch.equal(whole(parameter), initial[name].float()), name
            compared += 1
    assert compared == len(initial) > 0
    print("the reference is the initial model", flush=True)
    torch.distributed.destroy_process_group()  # a thread of gloo that outlives Python aborts the process


def whole(parameter: torch.nn.Parameter) -> torch.Tensor:
    if hasattr(parameter, "ds_tensor"):
        import deepspeed

        with deepspeed.zero.GatheredParameters([parameter]):
            return parameter.detach().clone()
    return parameter.full_tensor().detach()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
