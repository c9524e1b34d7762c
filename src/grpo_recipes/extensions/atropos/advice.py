"""What to do about a lost run-api or environment, by what the launcher says of it."""

# fmt: off
ADVICE = {
    r"run-api died before": "its last lines are above; python -m atroposlib.cli.run_api starts it alone",
    r"run-api was not ready": "see in its log what it waits for: its packages may come from a slow file system",
    r"run-api \(pid \d+\)": "its log has the reason; server_restarts: N starts it and the trainers again N times",
    r"environment \S+ \(pid \d+\).* code 2": "correct what its log names, then launch the recipe anew",
    r"environment \S+ \(pid \d+\)":
        "its log has the reason; correct it there and add --update-rewards to the resume; server_restarts: N starts it "
        "again N times",
}
# fmt: on
