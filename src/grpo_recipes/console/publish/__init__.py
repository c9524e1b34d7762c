"""Publish the trained model on the hub: one push at the end of a run.

``push`` checks the target before the run starts, and makes the commit in a separate process. ``publisher`` starts the
push at the end of the run and writes the model card from ``card.md.j2``.
"""
