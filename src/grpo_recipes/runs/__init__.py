"""Run directories: create, find, read and write them, and assess the runs."""
