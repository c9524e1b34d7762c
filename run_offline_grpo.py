"""Train by iterations over seeded problems: python run_offline_grpo.py train.iterations=3; docs/offline-trainer.md."""

import os
import runpy

runpy.run_path(os.path.join(os.path.dirname(os.path.realpath(__file__)), "src/offline_grpo.py"), run_name="__main__")
