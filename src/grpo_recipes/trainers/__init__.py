"""The training process: TRL's GRPO trainer with our overrides (``grpo``, ``maxent``), and their helpers."""
