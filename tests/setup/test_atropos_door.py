"""src/atropos_grpo.py with any Python, and run_atropos_grpo.sh: their first checks, and their environment."""

from __future__ import annotations

import http.server
import re
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from setup_checkout import REPOSITORY, Checkout

from grpo_recipes.extensions.atropos.flags import VARIABLES

SCRIPT = "run_atropos_grpo.sh"
DOOR = "python -P -s -m grpo_recipes.extensions.atropos.main"
UNREACHABLE = "ERROR: Atropos API unreachable\n"
Done = subprocess.CompletedProcess[str]


@pytest.fixture
def script(tmp_path: Path) -> Callable[..., Done]:
    """``script(*arguments, VARIABLE=...)`` in a copy with a training.sh that prints its arguments."""
    root = tmp_path / "repository"
    (root / "src/grpo_recipes").mkdir(parents=True)
    shutil.copy(REPOSITORY / SCRIPT, root)
    says = 'printf "%s\\n" "$@"\necho "door=$GRPO_DOOR"\ngrep SigIgn "/proc/$$/status"\n'
    (root / "training.sh").write_text(says)

    def run(*arguments: str, file: Path | None = None, **variables: str) -> Done:
        return subprocess.run(
            ["bash", str(file or root / SCRIPT), *arguments], env={"PATH": "/usr/bin:/bin", **variables}, cwd=tmp_path,
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip

    return run


@pytest.fixture
def api() -> Iterator[tuple[str, list[str]]]:
    """A server that only answers /status, like run-api: its address, and the requested paths."""
    paths: list[str] = []

    class FakeStatus(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            paths.append(self.path)
            self.send_response(200 if self.path == "/status" else 404)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), FakeStatus)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", paths
    server.shutdown()
    server.server_close()


def nobody() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{free.getsockname()[1]}"


def handed_on(done: Done) -> list[str]:
    assert done.returncode == 0, done.stderr
    *words, variables, ignored = done.stdout.splitlines()
    assert int(ignored.split()[1], 16) & (1 << 9)  # USR1 is for the launcher
    assert variables == "door=atropos"
    return words


def test_words_and_variables_go_on_to_the_door(script) -> None:
    done = script("--environment", "dataset", "--env.name", "x y")
    assert handed_on(done) == ["--read-variables", "--environment", "dataset", "--env.name", "x y"]
    assert handed_on(script("--help")) == ["--help"]


def test_a_run_api_of_the_variable_is_asked_first(script, api) -> None:
    address, paths = api
    assert handed_on(script(ATROPOS_API_URL=address)) == ["--read-variables"]
    assert handed_on(script(ATROPOS_API_URL=f"{address}/")) == ["--read-variables"]
    assert paths == ["/status", "/status"]
    done = script(ATROPOS_API_URL=f"{address}/elsewhere")
    assert done.returncode == 1 and done.stderr.startswith(UNREACHABLE)


def test_one_that_does_not_answer_ends_it_before_anything_starts(script) -> None:
    address = nobody()
    done = script("--environment", "arithmetic", ATROPOS_API_URL=address)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"{UNREACHABLE}{address}/status does not answer; start it with run-api --port PORT\n"
    proxied = script(ATROPOS_API_URL=address, http_proxy="http://127.0.0.1:9")
    assert proxied.returncode == 1


@pytest.mark.parametrize(
    "word", ["--atropos-url", "--atropos-url=http://b", "--dry-run", "--help", "--atropos_api_url"]
)
def test_nobody_is_asked_where_a_flag_names_another_or_nothing_starts(script, word: str) -> None:
    assert word in handed_on(script(word, ATROPOS_API_URL=nobody()))


def test_without_the_variable_nobody_is_asked(script, api) -> None:
    assert handed_on(script()) == ["--read-variables"] and api[1] == []


def test_a_job_finds_the_repository_it_was_submitted_from(script, tmp_path: Path) -> None:
    spooled = Path(shutil.copy(REPOSITORY / SCRIPT, tmp_path / "spooled"))
    for name in ("SLURM_SUBMIT_DIR", "GRPO_HOME"):
        assert handed_on(script(file=spooled, **{name: str(tmp_path / "repository")})) == ["--read-variables"]
    done = script(file=spooled, SLURM_SUBMIT_DIR="/elsewhere")
    assert done.returncode == 2 and "submitted from /elsewhere, which is not the repository" in done.stderr


def test_its_header_is_that_of_training_sh_and_its_first_command_ignores_usr1() -> None:
    text = (REPOSITORY / SCRIPT).read_text()
    headers = [
        re.findall("^#SBATCH .*$", (REPOSITORY / name).read_text(), re.MULTILINE) for name in (SCRIPT, "training.sh")
    ]
    assert headers[0] == headers[1]
    assert next(line for line in text.splitlines() if line and not line.startswith("#")) == "trap '' USR1"


def test_it_names_the_variables_that_the_door_reads() -> None:
    about = " ".join(re.findall(r"^# (.*)$", (REPOSITORY / SCRIPT).read_text(), re.MULTILINE))
    names = {row.name for row in VARIABLES.rows if row.script} | {"ATROPOS_API_URL"}
    assert all(name in about for name in names)


def test_the_shell_accepts_it() -> None:
    shellcheck = Path(sys.executable).parent / "shellcheck"
    done = subprocess.run([str(shellcheck), SCRIPT, "training.sh"], cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def environment_that_says(checkout: Checkout) -> Path:
    """Make an environment with a Python that prints the words of its command line."""
    prefix = checkout.make_environment()
    python = prefix / "bin/python"
    interpreter = python.rename(prefix / "bin/interpreter")
    python.write_text(f'#!/bin/bash\n[[ $* != *atropos.* ]] || {{ echo "$0 $*"; exit; }}\nexec {interpreter} "$@"\n')
    python.chmod(0o755)
    return prefix


def test_training_sh_goes_on_with_the_door_in_its_environment(checkout: Checkout) -> None:
    prefix = environment_that_says(checkout)
    shutil.copy(REPOSITORY / SCRIPT, checkout.root)
    for start in ("training.sh", SCRIPT):
        options = ["--read-variables"] if start == SCRIPT else []
        done = checkout.run(start, "--environment", "my own.py:Env", GRPO_DOOR="atropos")
        assert done.returncode == 0, done.stderr
        line = done.stdout.splitlines()[-1]
        assert line == f"{prefix}/bin/{DOOR} {' '.join([*options, '--environment', 'my own.py:Env'])}"
        help_ = checkout.run(start, "--help", GRPO_DOOR="atropos")
        assert help_.stdout == f"{prefix}/bin/{DOOR} --help\n"
    assert "grpo launch --a b" in checkout.run("training.sh", "--a", "b").stdout


def test_any_python_goes_on_in_the_environment_with_the_same_words(checkout: Checkout) -> None:
    prefix = environment_that_says(checkout)
    shutil.copy(REPOSITORY / "src/atropos_grpo.py", checkout.root / "src")
    command = [sys.executable, "-S", str(checkout.root / "src/atropos_grpo.py"), "--env.name", "x y"]
    done = subprocess.run(command, env=checkout.env, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, f"{prefix}/bin/{DOOR} --env.name x y\n")
