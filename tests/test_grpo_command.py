"""``grpo_command`` runs commands like new processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import grpo_command
import pytest
from grpo_command import run_grpo, run_python

HEAVY = ("torch", "trl", "transformers", "vllm", "datasets", "accelerate", "huggingface_hub")
FACTS = """
import json, os, sys
names = ("PATH", "HOME", "ONLY", "LOADED")
facts = {name: os.environ.get(name) for name in names}
facts |= {"cwd": os.getcwd(), "argv": sys.argv, "path": sys.path, "stdin": sys.stdin.read(), "main": __name__}
facts["streams"] = [stream.isatty() for stream in (sys.stdin, sys.stdout, sys.stderr)]
facts["files"] = sorted(os.listdir("/proc/self/fd"))
print(json.dumps(facts)); print("error", file=sys.stderr); sys.exit(3)
"""


def test_it_is_like_a_new_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOADED", "by the tests")
    words, env = ["-c", FACTS, "--flag", "two words"], {"PATH": os.environ["PATH"], "HOME": "/x", "ONLY": "é"}
    forked = run_python(*words, cwd=tmp_path, env=env, input="typed\n")
    new = subprocess.run(
        [sys.executable, *words], cwd=tmp_path, env=env, input="typed\n", capture_output=True, text=True, check=False
    )
    assert (forked.returncode, forked.stderr) == (new.returncode, new.stderr) == (3, "error\n")
    facts, expected = json.loads(forked.stdout), json.loads(new.stdout)
    assert facts.pop("path") == [str(tmp_path), *expected.pop("path")[1:]]
    assert facts == expected


def test_each_process_starts_without_what_another_did(tmp_path: Path) -> None:
    code = "import os, grpo_recipes.errors as errors; assert not hasattr(errors, 'x'); errors.x = os.environ['A'] = '1'"
    for _ in range(2):
        assert run_python("-c", code, env={}).stderr == ""


def test_nothing_is_imported_that_takes_seconds_or_reads_variables() -> None:
    done = run_python("-c", f"import sys; print(sorted({{*{HEAVY}}} & sys.modules.keys()))")
    assert done.stdout == "[]\n"


def test_a_signal_is_its_exit_code_and_an_exception_a_traceback() -> None:
    assert run_python("-c", "import os; os.kill(os.getpid(), 9)").returncode == -9
    failed = run_python("-c", "import atexit; atexit.register(print, 'end'); raise ValueError('wrong')")
    assert (failed.returncode, failed.stdout) == (1, "end\n") and failed.stderr.endswith("ValueError: wrong\n")


def test_what_hangs_is_killed_and_the_next_is_run() -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        run_python("-c", "import time; time.sleep(600)", timeout=1)
    server = grpo_command._server()._process.pid
    assert Path(f"/proc/{server}/task/{server}/children").read_text() == ""
    assert "is not a command" in run_grpo("lunch").stderr


def test_another_server_is_started_after_a_test_that_ended_all_processes_below_pytest() -> None:
    run_python("-c", "")
    server = grpo_command._server()._process
    server.kill()
    server.wait()
    assert run_python("-c", "print('again')").stdout == "again\n"


def test_the_server_ends_with_the_tests() -> None:
    code = (
        f"import sys; sys.path.insert(0, {str(Path(grpo_command.__file__).parent)!r})\n"
        "import grpo_command; grpo_command.run_python('-c', ''); print(grpo_command._server()._process.pid)\n"
        "import os; sys.stdout.flush(); os.kill(os.getpid(), 9)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    end = time.monotonic() + 20
    while (process := Path("/proc", done.stdout.strip(), "cmdline")).exists() and process.read_bytes():
        assert time.monotonic() < end
        time.sleep(0.05)
