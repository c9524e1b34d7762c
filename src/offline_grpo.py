"""GRPO by iterations over seeded problems: Hydra keys become one `grpo launch`, or with -m one sweep.

    python src/offline_grpo.py model.train_id=smoke:sums data.problems=arithmetic train.iterations=3 --dry-run

Any Python 3 runs this file, as ``colocated_grpo.py`` beside it: it goes on in the environment of `make setup`, with
``grpo_recipes.extensions.offline.main``, which reads the keys.
"""

import os
import runpy

door = runpy.run_path(os.path.join(os.path.dirname(os.path.realpath(__file__)), "colocated_grpo.py"))

if __name__ == "__main__":
    door["main"]("grpo_recipes.extensions.offline.main")
