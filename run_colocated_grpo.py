"""Train with vLLM inside the training processes; see docs/migrate.md.

python run_colocated_grpo.py --gpus 4
"""

import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.realpath(__file__)), "scripts"))
from find_environment import continue_in_environment

if __name__ == "__main__":
    continue_in_environment("grpo_recipes.extensions.colocated.main")
