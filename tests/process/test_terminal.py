"""Test the launcher's output at a terminal and elsewhere, and its ``launch.log``."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from pathlib import Path

import pytest

from grpo_recipes.process.terminal import LOG, OUTPUT, collapse_library_frames, strip_control_codes

TOKEN = "hf_" + "a" * 20
# Prints as a launcher does: a line before the run directory exists, lines, a live line and a last line.
LAUNCHER = """
import sys, time
from pathlib import Path
from grpo_recipes.process.reports import print_line, say
from grpo_recipes.process.terminal import OUTPUT
with OUTPUT.store_lines():
    say("before the run directory")
    OUTPUT.start_log(Path(sys.argv[1]))
    say("note: hf_" + "a" * 20)
    for number in range(int(sys.argv[2])):
        print_line(f"step {number}/9  reward 0.500  left 0:00:00")
        OUTPUT.show_live(f"sampling {number} s " + "x" * 200)
    time.sleep(float(sys.argv[3]))
    OUTPUT.show_live("updating 2 s")
    print_line("at the end \\x1b]0;title\\x07", error=True)
"""


@pytest.fixture
def terminal() -> Iterator[tuple[int, int]]:
    """Open a terminal of 80 columns; yield the test's end and the launcher's end."""
    our_end, launcher_end = pty.openpty()
    fcntl.ioctl(launcher_end, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    yield our_end, launcher_end
    for end in (our_end, launcher_end):
        with contextlib.suppress(OSError):
            os.close(end)


def start(folder: Path, out: int, lines: int = 3, seconds: float = 0.0, **variables: str) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "TERM": "xterm", **variables}
    if "NO_COLOR" not in variables:
        environment.pop("NO_COLOR", None)
    argv = [sys.executable, "-c", LAUNCHER, str(folder), str(lines), str(seconds)]
    return subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=environment)


def read_all(our_end: int, child: subprocess.Popen[bytes]) -> str:
    content = b""
    while child.poll() is None or select.select([our_end], [], [], 0.2)[0]:
        if select.select([our_end], [], [], 0.05)[0]:
            content += os.read(our_end, 1 << 16)
    assert child.returncode == 0
    return content.decode()


def test_a_terminal_gets_colours_and_a_live_line_no_wider_than_itself(tmp_path, terminal):
    told = read_all(terminal[0], start(tmp_path, terminal[1], seconds=0.1))
    assert "\x1b[33mgrpo: note:\x1b[0m ********" in told and TOKEN not in told
    live = re.findall(r"\r\x1b\[K(sampling [^\r]*)", told)
    assert live and max(map(len, live)) == 79
    assert "\r\x1b[Kat the end ]0;title\r\n" in told, "the live line gives way to it, and it sets no title"
    assert told.endswith("\r\x1b[K"), "nothing of the live line is left"


def test_a_long_line_is_broken_at_spaces_unless_it_has_a_command(terminal):
    """The second part of a line begins below the text of the first."""
    texts = ["word " * 20, "status  " + "word " * 20, "next    run it " + "x " * 40, "a: b. Fix: " + "run it " * 12]
    prints = f"from grpo_recipes.process.reports import say; [say(text.strip()) for text in {texts}]"
    child = subprocess.Popen([sys.executable, "-c", prints], stdout=terminal[1], stderr=terminal[1])
    text = re.sub(r"\x1b\[\d*m", "", read_all(terminal[0], child))
    assert text.splitlines() == [
        "grpo: " + " ".join(["word"] * 15), " " * 6 + " ".join(["word"] * 5),
        "grpo: status  " + " ".join(["word"] * 13), " " * 14 + " ".join(["word"] * 7),
        *(f"grpo: {line.strip()}" for line in texts[2:]),
    ]  # fmt: skip


@pytest.mark.parametrize(("variables", "live"), [({"NO_COLOR": "1"}, True), ({"TERM": "dumb"}, False)])
def test_a_terminal_that_takes_no_colours_gets_none(tmp_path, terminal, variables, live):
    told = read_all(terminal[0], start(tmp_path, terminal[1], **variables))
    assert "\x1b[33m" not in told and "\x1b[1m" not in told
    assert ("\r\x1b[K" in told) == live
    assert "step 2/9  reward 0.500" in told


def test_a_pipe_gets_lines_alone(tmp_path):
    child = start(tmp_path, subprocess.PIPE)
    told = child.communicate(timeout=30)[0].decode()
    assert told.splitlines() == [
        "grpo: before the run directory", "grpo: note: ********",
        *(f"step {number}/9  reward 0.500  left 0:00:00" for number in range(3)),
    ]  # fmt: skip


@pytest.mark.parametrize("end", ["unread", "closed", "an unread pipe"])
def test_a_terminal_that_nobody_reads_or_that_is_gone_does_not_hold_up_the_launcher(tmp_path, terminal, end):
    our_end, launcher_end = terminal
    if end == "an unread pipe":  # of `grpo launch | less`
        our_end, launcher_end = os.pipe()
    many = 5000 if end == "an unread pipe" else 1500
    child = start(tmp_path, launcher_end, lines=many, SHELL="x")
    if end == "closed":
        os.read(our_end, 10)
        os.close(launcher_end)
        os.close(our_end)
    assert child.wait(20) == 0
    lines = (tmp_path / LOG).read_text().splitlines()
    assert (
        lines[-2].startswith("step 4999/9" if end == "an unread pipe" else "step 1499/9")
        and lines[-1] == "at the end ]0;title"
    )


def test_the_log_has_every_attempt_with_its_time_and_command_masked(tmp_path):
    for _ in range(2):
        start(tmp_path, subprocess.DEVNULL, lines=1).wait(30)
    attempts = (tmp_path / LOG).read_text().split("grpo: before the run directory\n")
    assert len(attempts) == 3
    assert re.match(r"grpo: \d{4}-\d\d-\d\d \d\d:\d\d:\d\d -c ", attempts[0])
    assert attempts[2] == "grpo: note: ********\nstep 0/9  reward 0.500  left 0:00:00\nat the end ]0;title\n"
    assert (tmp_path / LOG).stat().st_mode & 0o777 == 0o600


def test_a_launch_whose_output_is_that_file_already_writes_each_line_once(tmp_path):
    with (tmp_path / LOG).open("ab") as file:
        assert start(tmp_path, file.fileno()).wait(30) == 0
    lines = (tmp_path / LOG).read_text().splitlines()
    assert sorted(lines)[0] == "at the end ]0;title" and len(lines) == len(set(lines)) == 7


def test_a_log_that_cannot_be_written_stops_nothing(tmp_path, capsys):
    with OUTPUT.store_lines():
        OUTPUT.start_log(tmp_path / "missing")
        OUTPUT.print_line("said all the same")
    with Path("/dev/full").open("w"), OUTPUT.store_lines():
        (tmp_path / LOG).symlink_to("/dev/full")
        OUTPUT.start_log(tmp_path)
        OUTPUT.print_line("and so is this")
    assert capsys.readouterr().out == "said all the same\nand so is this\n"


def test_a_log_is_read_without_bars_colours_and_control_characters():
    assert (
        strip_control_codes("a\r\n 0%|\r50%|\r100%| done\nb\x1b[1;31mc\x1b[0m\x07\x9b\td\n") == "a\n100%| done\nbc\td\n"
    )
    assert strip_control_codes("begun\rstill going") == "still going"


def test_of_a_traceback_the_users_own_lines_remain():
    trl_frame = 'File "/opt/env/lib/python3.11/site-packages/trl/trainer.py", line 5, in step\n    go()\n    ^^^^\n'
    pool_frame = 'File "/src/grpo_recipes/rewards/pool.py", line 5, in work\n    function()\n'
    user_frame = 'File "/home/me/rewards.py", line 3, in score\n    return gold[0]\n'
    for rank in ("", "[rank0]: "):
        frames = "".join(f"{rank}  {line}\n" for line in (trl_frame + pool_frame + user_frame).splitlines())
        frames = frames.replace(f"{rank}      ", f"{rank}    ")
        text = collapse_library_frames(f"{rank}Traceback (most recent call last):\n{frames}{rank}KeyError: 0\n")
        assert "2 frames of libraries" in text and "trl" not in text and "grpo_recipes" not in text
        assert "/home/me/rewards.py" in text and "return gold[0]" in text and text.endswith(f"{rank}KeyError: 0\n")
