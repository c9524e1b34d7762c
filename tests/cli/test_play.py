"""`grpo play`: a user plays the policy's turns from a terminal or a pipe, with the limits of training."""

from __future__ import annotations

import contextlib
import os
import pty
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from documented import documented
from grpo_command import run_grpo

ROOT = Path(__file__).resolve().parents[2]
WILD = ROOT / "tests/rollouts/wild_environment.py"
EXAMPLE = "recipes/examples/two_sums.yaml"


def run_play(*words: str, stdin: str = "", code: int = 0) -> str:
    """Return the stdout of the command with a file as stdin, or its stderr if ``code`` is not 0."""
    done = run_grpo("play", *words, cwd=ROOT, input=stdin)
    assert done.returncode == code, done.stderr
    return done.stderr if code else done.stdout


def recipe(folder: Path, *lines: str) -> str:
    path = folder / "own.yaml"
    path.write_text(f"base: {ROOT / EXAMPLE}\n" + "\n".join(lines))
    return str(path)


def test_an_episode_of_the_example_is_played_to_its_end() -> None:
    _, _, *words = documented("grpo play recipes/examples/two_sums.yaml --seed 3")
    lines = run_play(*words, stdin="<answer>7</answer>\n3\n").splitlines()
    assert lines[1:] == [
        "[user] 2+5=", "turn 1 of 2> <answer>7</answer>", "reward 0.5  right 1", "[user] 3+6=", "turn 2 of 2> 3",
        "reward 0  right 0", "grpo: ended in turn 2, reward 0.5",
    ]  # fmt: skip
    assert "two_sums.py:TwoSums, seed 3" in lines[0] and "at most 2" in lines[0]


def test_without_a_seed_one_is_drawn_and_shown() -> None:
    (first, question, *_) = run_play(EXAMPLE).splitlines()
    seed = first.partition("seed ")[2].partition(";")[0]
    assert run_play(EXAMPLE, "--seed", seed).splitlines()[:2] == [first, question]


def test_the_end_of_stdin_leaves_and_the_limit_of_turns_ends_the_episode(tmp_path: Path) -> None:
    assert run_play(EXAMPLE, "--seed", "3", stdin="<answer>7</answer>\n").endswith("grpo: left in turn 2, reward 0.5\n")
    recipe_path = recipe(tmp_path, f"environment: {WILD}:Sums", "environment_args: {exactly: 3}")
    assert run_play(recipe_path, stdin="abc\nde\nf\n").endswith(
        "grpo: unfinished (environment_max_turns) in turn 2, reward 1.25\n"
    )


def test_an_environment_of_a_mixture_is_chosen_by_its_place(tmp_path: Path) -> None:
    entries = [f"{{id: '{WILD}:Sums', args: {{exactly: {turns}}}}}" for turns in (1, 2)]
    recipe_path = recipe(
        tmp_path, "environment: null", f"environment_mixture: {{environments: [{', '.join(entries)}]}}"
    )
    for index, turns in (("1", 1), ("2", 2)):
        assert run_play(recipe_path, "--entry", index, stdin="abc\n" * 4).count("reward 0.75  letters 3") == turns
    assert "Fix: use 1 (" in run_play(recipe_path, "--entry", "3", code=2)


def test_what_hangs_dies_or_raises_ends_by_its_limit_with_one_error(tmp_path: Path) -> None:
    recipe_path = recipe(tmp_path, f"environment: {WILD}:Wild", "environment_timeout: 0.5")
    for move, why in (("h", "time limit of 0.5 s"), ("k", "SIGKILL"), ("r", "ValueError: a rule was broken")):
        began = time.monotonic()
        *traceback, line = run_play(recipe_path, stdin=f"{move}\n", code=2).splitlines()
        assert "failed in turn 1: " in line and why in line, line
        assert bool(traceback) == (move == "r")  # the lines of the environment's author
        assert time.monotonic() - began < 30


def test_an_error_names_the_line_of_the_environment(tmp_path: Path) -> None:
    entries = f"environment_mixture:\n  environments:\n    - id: {WILD}:Sums\n    - id: {WILD}:Wild\n"
    recipe_path = recipe(tmp_path, "environment: null", entries)
    line = run_play(recipe_path, "--entry", "2", stdin="r\n", code=2).splitlines()[-1]
    assert line.startswith(f"grpo: {recipe_path}:6: '{WILD}:Wild' failed in turn 1"), line


def test_an_environment_gets_the_variables_that_the_recipe_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own.py").write_text(
        "import os\n\n\nclass Needs:\n"
        "    def reset(self, seed):\n        return os.environ['GAME_DATA']\n"
        "    def step(self, action):\n        return '', 1.0, True\n"
    )
    monkeypatch.setenv("GAME_DATA", "boards")
    named = f"environment: {tmp_path}/own.py:Needs"
    assert "set reward_environment: [GAME_DATA]" in run_play(recipe(tmp_path, named), code=2)
    assert "[user] boards" in run_play(recipe(tmp_path, named, "reward_environment: [GAME_DATA]"))


def test_a_closed_stdin_leaves() -> None:
    command = ["bash", "-c", '"$@" <&-', "-", sys.executable, "-m", "grpo_recipes", "play", EXAMPLE, "--seed", "3"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "grpo: left in turn 1, reward 0"), done.stderr


def test_who_expects_a_model_is_told_that_moves_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("textarena")
    for opponents, told in (("policy", True), ("random", False)):
        lines = f"environment: textarena:TicTacToe-v0\nenvironment_args: {{opponents: {opponents}}}"
        assert ("; opponents play random moves" in run_play(recipe(tmp_path, lines), "--seed", "1")) == told


def test_wrong_recipes_and_options_are_refused() -> None:
    assert "has no environment to play" in run_play("recipes/smoke/grpo.yaml", code=2)
    assert "--seed: expected 0 or more, got -1" in run_play(EXAMPLE, "--seed", "-1", code=2)


def test_a_terminal_is_not_controlled_by_what_an_environment_says(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "class Loud:\n"
        "    def reset(self, seed):\n        return '\\x1b[2Jhello'\n"
        "    def step(self, action):\n        return '', 1.0, True, {'end': 'x\\x1b[31my'}\n"
    )
    out = run_play(recipe(tmp_path, f"environment: {tmp_path}/own.py:Loud"), stdin="a\n")
    assert "\x1b" not in out and "[user] hello" in out and "end: xy" in out


@pytest.mark.parametrize(("key", "code"), [("\x03", 130), ("\x04", 0)])
def test_ctrl_c_and_ctrl_d_leave_nothing_behind(key: str, code: int) -> None:
    pid, fd = pty.fork()
    if pid == 0:
        os.chdir(ROOT)
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a background test run ignores SIGINT, and the child would too
        words = ["play", EXAMPLE, "--seed", "3", "--environment_workers", "3"]
        os.execv(sys.executable, [sys.executable, "-m", "grpo_recipes", *words])
    shown, end = b"", time.monotonic() + 60
    try:
        while b"turn 1 of 2>" not in shown and (part := _read(fd, end)):
            shown += part
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        while b"grpo: left" not in shown and time.monotonic() < end:
            os.write(fd, key.encode())  # repeat it: Python sees a key late if it comes before the wait
            while part := _read(fd, time.monotonic() + 5):
                shown += part
        assert time.monotonic() < end, shown
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == code, shown
        assert b"grpo: left in turn 1, reward 0" in shown and b"Traceback" not in shown
        assert len(children) == 1 and not any(Path(f"/proc/{child}").exists() for child in children)
    finally:
        os.close(fd)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _read(fd: int, end: float) -> bytes:
    """Read the next bytes of the terminal. Return b"" after ``end`` or when the terminal is closed."""
    if not select.select([fd], [], [], max(0.0, end - time.monotonic()))[0]:
        return b""
    try:
        return os.read(fd, 4096)
    except OSError:  # Linux raises this for a closed terminal
        return b""


def test_playing_imports_no_torch() -> None:
    heavy = "{'torch', 'trl', 'transformers', 'accelerate'} & sys.modules.keys()"
    code = f"import sys, grpo_recipes.extensions.environments.play; print({heavy})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "set()\n"
