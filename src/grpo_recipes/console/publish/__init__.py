"""Publishing the trained model on the hub: by the launcher, from complete checkpoints and the final model alone.

Read ``push`` (where, asked before a run starts; and one commit, in a process of its own), ``publisher`` (what is pushed
when), ``card`` with ``card.md.j2`` (the model's page).
"""
