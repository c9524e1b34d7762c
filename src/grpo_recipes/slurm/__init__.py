"""Slurm: site profiles, the batch script that is rendered from a profile, and a client for Slurm's commands."""
