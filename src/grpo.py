"""GRPO on a recipe's prompts: one training process of `grpo launch`.

    grpo launch recipes/smoke/grpo.yaml        # or: bash training.sh, sbatch training.sh

The launcher starts this file with accelerate, next to a vLLM server, with the frozen recipe of the run directory.
"""

import os
import signal

from grpo_recipes.process.reports import run_folder
from grpo_recipes.process.startup import HIDDEN_PACKAGES, exit_at_once, fast_imports
from grpo_recipes.process.tree import die_with_parent

# Before the slow imports: a process without its launcher must end, and must not take SIGTERM as a request to save.
run_folder()
die_with_parent(os.getppid(), signal.SIGKILL)
signal.signal(signal.SIGTERM, signal.SIG_DFL)  # accelerate ignores it

with fast_imports(*os.environ.get(HIDDEN_PACKAGES, "").split()):
    from grpo_recipes.trainers.entry import train
    from grpo_recipes.trainers.grpo import GRPOTrainer

if __name__ == "__main__":
    train(GRPOTrainer)
    exit_at_once()
