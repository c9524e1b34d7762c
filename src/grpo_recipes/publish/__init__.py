"""Publishing the trained model on the hub: by the launcher, from complete checkpoints and the final model alone.

Read ``rules`` (what a recipe can get wrong), ``preflight`` (before a run starts), ``publisher`` (what is pushed when),
``push`` (one commit, in a process of its own), ``card`` (the model's page).
"""
