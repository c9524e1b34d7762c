"""Rewards: one small file each, named in ``registry.REWARDS``.

A reward is a function ``reward(completions, **columns) -> list[float | None]`` that TRL calls with one entry per
completion; ``None`` means no verdict.
"""
