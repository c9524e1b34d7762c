"""Titles and units of the Atropos metrics in the report."""

from grpo_recipes.runs.metric import Metric

# fmt: off
METRICS = {
    "atropos/wait_seconds": Metric("Wait for groups", "seconds per generation", unit="s"),
    "atropos/queue": Metric("Queue of run-api", "groups waiting for the trainer", unit="groups"),
    "atropos/staleness_mean":
        Metric("Staleness", "optimizer steps between sampling and training, mean", unit="steps"),
    "atropos/staleness_max": Metric("Greatest staleness", "oldest group of a step", compared=False, unit="steps"),
    "atropos/stale":
        Metric("Groups too old", "dropped by atropos_max_staleness", smooth=False, compared=False, unit="groups"),
    "atropos/rejected":
        Metric("Groups rejected", "malformed or too long", smooth=False, compared=False, unit="groups"),
    "atropos/lost_batches":
        Metric("Batches lost", "run-api failed to send them", smooth=False, compared=False, unit="batches"),
    "atropos/stolen_batches":
        Metric("Batches stolen", "another client took them", smooth=False, compared=False, unit="batches"),
    "atropos/batches_per_minute": Metric("Batches from run-api", "rate of arrival", compared=False, unit="per minute"),
    "atropos/tokens_per_second":
        Metric("Tokens from run-api", "tokens of trained groups", compared=False, unit="per second"),
    "atropos/api_seconds": Metric("Latency of run-api", "request of the last batch", compared=False, unit="s"),
}
# fmt: on
