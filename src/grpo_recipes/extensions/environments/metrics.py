"""Titles and units of the episode metrics in the report."""

from grpo_recipes.runs.metric import Metric

# fmt: off
METRICS = {
    "episodes/won": Metric("Won", "share of episodes", shares=True),
    "episodes/legal": Metric("Legal actions", "share of the policy's actions, mean over episodes", shares=True),
    "episodes/turns": Metric("Episode length", "mean turns of the policy", unit="turns"),
    "episodes/unfinished": Metric("Unfinished episodes", "share that ran out of turns or tokens", shares=True),
    "episodes/tool_calls": Metric("Tool calls", "mean per episode", unit="calls"),
    "episodes/tool_failures": Metric("Failed tool calls", "mean per episode", unit="calls"),
    "episodes/unscored": Metric("Failed episodes", "share without a score", shares=True),
}
# fmt: on
