"""GRPO by iterations over seeded problems: convert Hydra keys to one `grpo launch`, or with -m to one sweep.

    python src/offline_grpo.py model.train_id=smoke:sums data.problems=arithmetic train.iterations=3 --dry-run

Any Python 3 runs this file. It continues in the environment of `make setup`, where
``grpo_recipes.extensions.offline.main`` reads the keys.
"""

import os
import sys

# A copy of this file, such as Slurm's, finds the repository in the variables that training.sh also reads.
FOLDERS = [os.path.dirname(os.path.dirname(os.path.realpath(__file__)))]
FOLDERS += [os.environ[name] for name in ("SLURM_SUBMIT_DIR", "GRPO_HOME") if os.environ.get(name)]
sys.path[:0] = [os.path.join(folder, "scripts") for folder in FOLDERS]
from find_environment import continue_in_environment  # noqa: E402

if __name__ == "__main__":
    continue_in_environment("grpo_recipes.extensions.offline.main")
