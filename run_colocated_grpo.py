"""Train with vLLM inside the training processes: python run_colocated_grpo.py --gpus 4 (see docs/colocated.md)."""

import os
import runpy

runpy.run_path(os.path.join(os.path.dirname(os.path.realpath(__file__)), "src/colocated_grpo.py"), run_name="__main__")
