"""One of two processes of supervised fine-tuning, which stops after two of four steps or resumes. A test starts them.

python -m extensions.sft.sft_ranks FOLDER MODEL STEP    # STEP: the step after which the training stops, or 0
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from trainers.tiny_training import ON_CPU, SUMS, as_dataset
from transformers import TrainerCallback

from grpo_recipes import smoke
from grpo_recipes.data.problems import Counts
from grpo_recipes.data.prompts import Prompts
from grpo_recipes.extensions.sft.trainer import SFTTrainer, make_config, make_rows
from grpo_recipes.recipe.configs import RowsConfig
from grpo_recipes.runs.checkpoints import find_newest_complete
from grpo_recipes.runs.rundir import stop_file
from grpo_recipes.runs.stop_request import StoppedOnRequest, StopRequest
from grpo_recipes.trainers.model import save_model
from grpo_recipes.trainers.rank import allow_fsdp_on_cpu

ROWS = 4


class StopAfter(TrainerCallback):
    """Request a stop after a step."""

    def __init__(self, step: int, request: Path) -> None:
        self._step, self._request = step, request

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self._step:
            self._request.touch()


def train(folder: Path, model: str, ranks: int, stop_after: int = 0) -> None:
    """Train to step 4, from the newest checkpoint if there is one, and save the model in ``folder/model``."""
    args = RowsConfig(
        output_dir=str(folder / "checkpoints"), max_steps=4, learning_rate=1e-3, gradient_accumulation_steps=1,
        per_device_train_batch_size=ROWS // ranks, model_init_kwargs={"dtype": "float32"}, **ON_CPU,
    )  # fmt: skip
    allow_fsdp_on_cpu()  # the arguments have set up the processes
    folder.mkdir(exist_ok=True)
    trainer = SFTTrainer(
        model=model, args=make_config(args), train_dataset=make_rows(Prompts(as_dataset(SUMS), Counts(), ""), None),
        processing_class=smoke.build_tokenizer(), run_dir=folder, stop=StopRequest(folder),
        callbacks=[StopAfter(stop_after, stop_file(folder))],
    )  # fmt: skip
    checkpoint = find_newest_complete(folder / "checkpoints")
    try:
        trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    except StoppedOnRequest as stopped:
        print(f"stopped {stopped}", flush=True)
        return
    save_model(trainer, folder / "model")


if __name__ == "__main__":
    train(Path(sys.argv[1]), sys.argv[2], ranks=2, stop_after=int(sys.argv[3]))
    torch.distributed.destroy_process_group()  # a thread of gloo that outlives Python aborts the process
