"""Models and datasets of a recipe on this machine: what is needed, what is here, and bringing what is missing.

Read ``assets`` (what a recipe names, and what of it is here), ``download`` (the hub's clients), ``hub`` (whether it
answers).
"""
