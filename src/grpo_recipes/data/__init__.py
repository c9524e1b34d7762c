"""Datasets: from a file or the hub to prompts and solutions.

Read ``rows`` (sources), ``problems`` (columns, mixtures), ``prompts`` (templates and lengths), ``sharing`` (ranks).
"""

from grpo_recipes.data.prompts import Prompts, load_eval_prompts, load_prompts
from grpo_recipes.data.rows import Fetched, read_rows

__all__ = ["Fetched", "Prompts", "load_eval_prompts", "load_prompts", "read_rows"]
