"""The newcomer's path of README, typed as written: a recipe of `grpo new`, README's own reward, a report at the end."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
from real_runs import REPOSITORY, clean_environment, marked_processes
from test_your_own_run import make_environment

SECTION = (REPOSITORY / "README.md").read_text().split("\n## Train on your own data\n")[1].split("\n| Command")[0]


def block(language: str) -> str:
    """Return the only code block of that language in README's section."""
    (text,) = re.findall(rf"^```{language}\n(.*?)^```$", SECTION, re.MULTILINE | re.DOTALL)
    return text


def last_reward(text: str) -> float:
    """Return the reward of the last steps from the closing lines of a launch."""
    (reward,) = re.findall(r"(?m)^grpo: reward  \S+ -> (\S+), .* of 60 steps$", text)
    return float(reward)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_commands_of_readme_train_with_its_own_reward_and_leave_a_report(tmp_path: Path) -> None:
    """R1, M3: new, check, check-rewards and launch work as README shows them, with the reward that README shows."""
    mark = f"readme-{tmp_path.name}-{os.getpid()}"
    environment = clean_environment(tmp_path, mark, CACHE_ROOT=os.environ.get("CACHE_ROOT", str(REPOSITORY / ".cache")))
    del environment["RUN_ROOT"]
    clone = tmp_path / "grpo-recipes"
    subprocess.run(["git", "clone", "--quiet", str(REPOSITORY), str(clone)], check=True)
    make_environment(clone, ".venv", "cpu")
    commands = block("bash").splitlines()
    assert [command.split()[:2] for command in commands[1:]] == [
        ["grpo", "new"], ["grpo", "check"], ["grpo", "check-rewards"], ["grpo", "launch"],
    ]  # fmt: skip
    assert "repeat the last three commands" in SECTION

    def type_commands(lines: list[str]) -> str:
        script = "\n".join(["set -e", *lines])
        try:
            done = subprocess.run(
                ["bash", "-c", script], cwd=clone, env=environment, capture_output=True, text=True, timeout=1000
            )
        finally:
            for process in marked_processes(mark):
                process.kill()
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
        return done.stdout

    type_commands(commands[:-1])  # the launch of this recipe is the smoke run
    (clone / "my_reward.py").write_text(block("python"))
    recipe, line = (clone / "my.yaml").read_text(), block("yaml")
    assert re.findall("^reward_funcs: .*\n", line) == [line]
    (clone / "my.yaml").write_text(re.sub("^reward_funcs: .*\n", line, recipe, flags=re.MULTILINE))
    assert last_reward(type_commands([commands[0], *commands[-3:]])) > 0.7
    (report,) = clone.glob("runs/*/report.html")
    assert "ends_with_answer" in report.read_text()
