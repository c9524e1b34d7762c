"""Rewards: our own in ``functions`` and ``math_verify``, the user's through ``load``; names in ``recipe.registry``.

A reward is a function ``reward(completions, **columns) -> list[float | None]`` that TRL calls with one entry per
completion; None leaves the completion unscored.
"""
