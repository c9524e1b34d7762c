"""Advice for runs that stop because an environment fails, by patterns of the trainer's error."""

# fmt: off
ADVICE = {
    r"TooManyWithoutVerdict.*Reward 'environment'":
        "fix the environment and add --update-rewards to the resume, or raise environment_timeout if the reason is "
        "the time limit; grpo check --deep RECIPE plays one episode",
}
# fmt: on
