"""GRPO on a recipe's prompts, one process of those `grpo launch` starts.

    grpo launch recipes/smoke/grpo.yaml        # or: bash training.sh, sbatch training.sh

The launcher starts this file under accelerate, beside a vLLM server, with the frozen recipe of the run directory.
"""

import os
import signal

from grpo_recipes.process.reports import run_folder
from grpo_recipes.process.tree import die_with_parent

# Before the imports, which take seconds. SIGTERM will be a request to save, which an orphan must not do.
run_folder()
die_with_parent(os.getppid(), signal.SIGKILL)
signal.signal(signal.SIGTERM, signal.SIG_DFL)  # accelerate ignores it

from grpo_recipes.trainers.entry import train  # noqa: E402
from grpo_recipes.trainers.grpo import GRPOTrainer  # noqa: E402

if __name__ == "__main__":
    train(GRPOTrainer)
