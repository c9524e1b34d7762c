"""Run a recipe, here or as a job: which run, its processes on every node, supervision, and its end. No torch."""
