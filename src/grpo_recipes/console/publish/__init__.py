"""Publishing the trained model on the hub: one push at the end of a run.

Read ``push`` (the target, checked before a run starts; and one commit, in a process of its own) and ``publisher`` (the
push at the end, and the model card from ``card.md.j2``).
"""
