"""How the report draws the metrics of groups from run-api."""

from grpo_recipes.runs.metric import Metric

# fmt: off
METRICS = {
    "atropos/wait_seconds": Metric("Wait for groups", "of a step's generation", unit="s"),
    "atropos/queue": Metric("Queue of run-api", "groups that wait for the trainer", unit="groups"),
    "atropos/staleness_mean":
        Metric("Staleness", "steps by which the weights of a step's groups are behind, mean", unit="steps"),
    "atropos/staleness_max": Metric("Greatest staleness", "of a step's groups", compared=False, unit="steps"),
    "atropos/stale":
        Metric("Groups too old", "dropped for atropos_max_staleness", smooth=False, compared=False, unit="groups"),
    "atropos/rejected":
        Metric("Groups rejected", "malformed or too long", smooth=False, compared=False, unit="groups"),
    "atropos/lost_batches":
        Metric("Batches lost", "that run-api could not send", smooth=False, compared=False, unit="batches"),
    "atropos/stolen_batches":
        Metric("Batches stolen", "that another client took", smooth=False, compared=False, unit="batches"),
    "atropos/batches_per_minute": Metric("Batches from run-api", "as they come", compared=False, unit="per minute"),
    "atropos/tokens_per_second":
        Metric("Tokens from run-api", "of the groups that are trained on", compared=False, unit="per second"),
    "atropos/api_seconds": Metric("Latency of run-api", "of its last batch", compared=False, unit="s"),
}
# fmt: on
