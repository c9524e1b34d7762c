"""Reward functions, and the code that loads and calls them.

Our rewards are in ``functions`` and ``math_verify``, and ``recipe.registry`` lists their names. ``load`` loads the
user's own rewards, ``pool`` and ``child`` call them in child processes with limits, and ``probe`` tests whether they
distinguish right from wrong answers. A reward is a function ``reward(completions, **columns) -> list[float | None]``.
TRL passes lists with an entry per completion. None leaves the completion unscored.
"""
