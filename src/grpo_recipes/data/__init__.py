"""Datasets: from a file or the hub to prompts and solutions.

Read ``problems`` (sources, columns, mixtures), then ``prompts`` (templates, lengths, ranks) and
``store`` (the prompts of earlier attempts).
"""

from grpo_recipes.data.problems import Fetched, read_rows
from grpo_recipes.data.prompts import Prompts, load_eval_prompts, load_prompts

__all__ = ["Fetched", "Prompts", "load_eval_prompts", "load_prompts", "read_rows"]
