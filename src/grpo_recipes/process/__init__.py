"""Processes of this machine: their tree, files they leave, phases they report, and hosts they reach."""
