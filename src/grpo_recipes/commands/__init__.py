"""The commands of `grpo`, one module each.

A module has ``HELP``, ``TAKES_RECIPE``, ``add_arguments(parser)`` and ``run(options, flags)``, which returns the exit
code. It imports what is heavy (torch, TRL, datasets) inside ``run``: `grpo check` takes less than a second.
"""
