"""The imports that the ranks of tests share: `rank_processes` forks the ranks from a process with this module.

No rank needs vLLM. TRL would import it wherever it is installed, which takes 8 s.
"""

from __future__ import annotations

import functools
import importlib.metadata

from grpo_recipes.process.startup import fast_imports

importlib.metadata.metadata = functools.cache(importlib.metadata.metadata)  # as in conftest.py
with fast_imports("vllm"):
    import grpo_recipes.trainers.entry
    import grpo_recipes.trainers.maxent  # noqa: F401
