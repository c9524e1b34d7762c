"""Launch a recipe here or as a Slurm job: find the run, start and supervise its processes, and end them. No torch."""
