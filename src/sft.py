"""Supervised fine-tuning on a recipe's solutions: one training process of `grpo launch`.

    grpo launch recipes/smoke/sft.yaml recipes/smoke/sft_grpo.yaml     # or: bash training.sh, sbatch training.sh

The launcher starts this file with accelerate, without a server, with the frozen recipe of the run directory.
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
    from grpo_recipes.extensions.sft.entry import train

if __name__ == "__main__":
    train()
    exit_at_once()
