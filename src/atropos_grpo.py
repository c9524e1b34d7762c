"""GRPO on the scored groups of Atropos environments: its flags become one `grpo launch`.

    python src/atropos_grpo.py --model-name smoke:sums --environment arithmetic --dry-run

Any Python 3 runs this file, as ``colocated_grpo.py`` beside it: it goes on in the environment of `make setup`, with
``grpo_recipes.extensions.atropos.main``, which reads the flags.
"""

import os
import runpy

door = runpy.run_path(os.path.join(os.path.dirname(os.path.realpath(__file__)), "colocated_grpo.py"))

if __name__ == "__main__":
    door["main"]("grpo_recipes.extensions.atropos.main")
