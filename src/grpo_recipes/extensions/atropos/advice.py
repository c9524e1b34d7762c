"""Advice for a lost run-api or environment: a pattern of the launcher's message, and what to do."""

# fmt: off
ADVICE = {
    r"run-api died before": "read its last lines above; to start it without a run: python -m atroposlib.cli.run_api",
    r"run-api was not ready": "read its log to see why it is slow; its packages may be on a slow file system",
    r"run-api \(pid \d+\)": "read the reason in its log; server_restarts: N restarts it and the trainers up to N times",
    r"environment \S+ \(pid \d+\).* code 2": "fix the error in its log, then grpo launch RECIPE",
    r"environment \S+ \(pid \d+\)":
        "read the reason in its log, fix the code, and resume with --update-rewards; server_restarts: N restarts it up "
        "to N times",
}
# fmt: on
