"""Batch jobs: what a site wants of them, the script that is made of it, and Slurm's own commands."""
