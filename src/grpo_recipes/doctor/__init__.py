"""What ails a machine, a recipe on it, or a run that ended badly: one small function a check.

A check looks at one thing and returns a ``Finding``: ok, warning or problem, the value found, and what to do about it.
``registry.py`` lists the checks, ``examine.py`` runs them side by side within a time limit. torch is never imported
here: ``--deep`` asks it in a child process.
"""
