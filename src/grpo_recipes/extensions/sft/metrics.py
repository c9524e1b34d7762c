"""How the report draws the metrics of supervised fine-tuning."""

from grpo_recipes.runs.metric import Metric

METRICS = {
    "mean_token_accuracy": Metric("Token accuracy", "share of solution tokens that the model ranks first", shares=True)
}
