"""The live view of runs in a browser: `grpo dashboard` serves a list of runs and their reports on 127.0.0.1."""
