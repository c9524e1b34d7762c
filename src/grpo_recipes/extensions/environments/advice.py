"""What to do about environments that fail, by what the trainers say of them."""

# fmt: off
ADVICE = {
    r"TooManyWithoutVerdict.*Reward 'environment'":
        "correct the environment and add --update-rewards to the resume, or raise environment_timeout where it says "
        "time limit; grpo check --deep RECIPE plays it",
}
# fmt: on
