"""GRPO on the scored groups of Atropos environments: convert flags to one `grpo launch`.

    python src/atropos_grpo.py --model-name smoke:sums --environment arithmetic --dry-run

Any Python 3 runs this file. It continues in the environment of `make setup`, where
``grpo_recipes.extensions.atropos.main`` reads the flags.
"""

import os
import sys

# A copy of this file, such as Slurm's, finds the repository in the variables that training.sh also reads.
FOLDERS = [os.path.dirname(os.path.dirname(os.path.realpath(__file__)))]
FOLDERS += [os.environ[name] for name in ("SLURM_SUBMIT_DIR", "GRPO_HOME") if os.environ.get(name)]
sys.path[:0] = [os.path.join(folder, "scripts") for folder in FOLDERS]
from find_environment import continue_in_environment  # noqa: E402

if __name__ == "__main__":
    continue_in_environment("grpo_recipes.extensions.atropos.main")
