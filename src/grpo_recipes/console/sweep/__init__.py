"""`grpo sweep`: run a recipe at several values of some keys, and compare the runs. Nothing here imports torch.

``spec`` parses the command line to trials, ``folder`` reads and writes the sweep directory, ``run`` runs the trials,
and ``search`` lets Optuna choose them.
"""
