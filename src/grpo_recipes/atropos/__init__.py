"""Atropos: scored groups from environments, its run-api's client, and environments of ours."""
