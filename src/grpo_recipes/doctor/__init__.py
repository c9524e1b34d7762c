"""What is wrong on a machine, in a recipe on it, or in a run that ended badly: one small function a check.

A check looks at one thing and returns a ``Finding``: ok, warning or problem, the value found, and what to do about it.
``examine.py`` lists the checks and runs them side by side within a time limit. They never import torch: ``--deep``
asks it in a child process. ``deep_check.py`` is `grpo check --deep`, and alone does import torch.
"""
