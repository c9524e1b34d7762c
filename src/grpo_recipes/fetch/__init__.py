"""Models and datasets of a recipe on this machine: what is needed, what is here, and bringing what is missing.

Read ``assets`` (what a recipe names, and records of what was fetched), ``sources`` (what a run uses), ``download`` (the
hub's clients), ``hub`` (whether it answers).
"""
