"""Fixtures shared with the tests of `grpo doctor`: run directories of every ending, and a small disk."""

from run_folders import make_run, row_fixture, small_disk

__all__ = ["make_run", "row_fixture", "small_disk"]
