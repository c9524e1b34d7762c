"""The reward ``code_tests``: programs in the real jail, called in child processes as in a training."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from other_user import NOBODY, needs_root

from grpo_recipes.extensions.code.jail import find_jail_problem, run_program
from grpo_recipes.extensions.code.reward import Case, is_expected, list_programs, read_cases
from grpo_recipes.rewards.pool import RewardPool
from grpo_recipes.rewards.score import Score

KEYS = dict(
    code_sandbox="bwrap", code_server_url=None, code_score="fraction", reward_timeout=8.0, reward_memory_gib=1.0
)  # fmt: skip
SQUARES = {"inputs": ["7", "2\n", "0"], "outputs": ["49", "4\n", "0"]}
PROBLEM = find_jail_problem()
needs_jail = pytest.mark.skipif(PROBLEM is not None, reason=str(PROBLEM))


@pytest.fixture(scope="module")
def pool() -> Iterator[RewardPool]:
    with RewardPool("code_tests", workers=1, timeout=8.0, keys={"code_tests": KEYS}) as pool:
        yield pool


def fence(program: str, tag: str = "python") -> str:
    return f"A program:\n```{tag}\n{program}\n```\nDone."


def score(pool: RewardPool, *completions: str, **columns: Any) -> list[Score]:
    """Return the scores of completions for the tests in ``columns``, by default of squares as in verl's data."""
    columns = {"answer": json.dumps(SQUARES), **columns}
    rows = {name: [value] * len(completions) for name, value in columns.items()}
    return pool.score("code_tests", [[{"role": "assistant", "content": text}] for text in completions], rows)


@needs_jail
def test_the_last_block_is_run_on_all_tests(pool: RewardPool) -> None:
    right = fence("print(int(input()) ** 2)")
    completions = [
        right, fence("print(49)"), f"{right}{fence('print(1)')}", f"{fence('print(1)')}{right}", fence("print(", ""),
        "print(int(input()) ** 2)", "```python\nprint(int(input()) ** 2)", f"<think>{right}</think>none",
        fence("print(int(input()) ** 2); raise SystemExit(1)"),
    ]  # fmt: skip
    scores = score(pool, *completions)
    assert [row.value for row in scores] == [1.0, 1 / 3, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0], scores


@needs_jail
def test_shapes_of_the_tests_of_open_r1_and_of_functions(pool: RewardPool) -> None:
    case = {"input": "3 4\n", "output": "7\n", "type": "stdin_stdout", "fn_name": None}
    info = {"language": "python", "test_cases": [case]}
    adds = fence("a, b = map(int, input().split())\nprint(a + b)")
    for given in (info, json.dumps(info)):
        assert score(pool, adds, answer="gold program", verification_info=given)[0].value == 1.0
    functions = {"fn_name": "add", "inputs": ["[1, 2]\n3", "[]\n5"], "outputs": ["6", "[5]"]}
    solution = "class Solution:\n    def add(self, values: List[int], more: int):\n        print(values)\n"
    for program in (f"{solution}        return sum(values) + more", "def add(values, more): return sum(values) + more"):
        assert score(pool, fence(program), answer=json.dumps(functions))[0].value == 1.0
    assert score(pool, fence("def add(values, more): return 6"), answer=json.dumps(functions))[0].value == 0.5


@needs_jail
@pytest.mark.parametrize("answer", ["42", '{"inputs": []}', '{"language": "cpp", "test_cases": [1]}'])
def test_a_row_without_tests_is_unscored(pool: RewardPool, answer: str) -> None:
    (unscored,) = score(pool, fence("print(1)"), answer=answer)
    assert unscored.value is None and "tests" in str(unscored.reason)


@needs_jail
def test_all_needs_every_test() -> None:
    keys = {**KEYS, "code_score": "all"}
    with RewardPool("code_tests", workers=1, keys={"code_tests": keys}) as pool:
        scores = score(pool, fence("print(49)"), fence("print(int(input()) ** 2)"))
    assert [row.value for row in scores] == [0.0, 1.0]


@needs_jail
@pytest.mark.parametrize(
    "tests",
    [SQUARES, {"fn_name": "f", "inputs": ["[1]\n2", "[]\n3"], "outputs": ["3", "[4, 5]"]},
     [{"input": [1, 2], "output": ["3", "4"]}],
     {"inputs": ['[1,2]\n{"a":3.0}\n\n', "[2,1]\n{}"], "outputs": ["6", "3"], "fn_name": "f"}],
)  # fmt: skip
def test_the_programs_of_check_rewards_pass_and_fail(pool: RewardPool, tests: Any) -> None:
    right, wrong = list_programs({"answer": json.dumps(tests)}) or ([], [])
    scores = score(pool, *map(fence, [*right, *wrong]), answer=json.dumps(tests))
    assert [row.value for row in scores] == [1.0, 0.0]


@pytest.mark.parametrize(
    ("output", "expected", "same"),
    [("1 2\n3", "1  2 \n3\n\n", True), ("1\n2", "1 2", False), ("0.3333333", "0.33333333", True),
     ("1000001", "1000000", False), ("0.5", "0.6", False), ("", "1", False), ("x", "1.5", False), ("no", "No", False)],
)  # fmt: skip
def test_outputs_are_compared_by_words_and_lines(output: str, expected: str, same: bool) -> None:
    assert is_expected(output, Case("", expected)) is same


def test_a_result_is_the_last_line_and_may_be_wrapped_in_a_list() -> None:
    assert is_expected("debug\n\n[1, 2]\n", Case("", "[1, 2]", "f"))
    assert is_expected("3\n", Case("", "[3]", "f")) and not is_expected("3\n", Case("", "[3, 4]", "f"))
    assert not is_expected("1\n\n", Case("", "1", "f")) and is_expected("x" * 99_999 + "\n1", Case("", "1", "f"))
    assert not is_expected("", Case("", "null", "f")) and not is_expected("text\n", Case("", "1", "f"))


@pytest.mark.parametrize("answer", ["[1, 2]", '["a"]', '[{"input": "1"}]', '{"inputs": 3}', '{"test_cases": {"a": 1}}'])
def test_solutions_of_other_rewards_are_no_tests(answer: str) -> None:
    """check-rewards asks for the programs of every row, e.g. with the interval [1, 2] as solution."""
    assert list_programs({"answer": answer}) is None
    with pytest.raises(ValueError, match="has tests"):
        read_cases(None, answer)


def test_inputs_of_functions_become_lines_of_json() -> None:
    listed = read_cases({"test_cases": [{"fn_name": "f", "input": [[1], "a"], "output": "b"}]})
    assert listed == [Case('[1]\n"a"', '"b"', "f")]


HOSTILE = {
    "fork bomb": "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass",
    "threads": "import threading, time\nwhile True:\n    threading.Thread(target=time.sleep, args=[99]).start()",
    "endless loop": "while True: pass",
    "ignores signals": "import signal, time\nfor number in range(1, 65):\n    try:\n        signal.signal(number, "
    "signal.SIG_IGN)\n    except (OSError, ValueError):\n        pass\ntime.sleep(99)",
    "daemon": "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n        time.sleep(99)\n"
    "    os._exit(0)\ntime.sleep(99)",
    "kills its parent": "import os, signal\nos.kill(os.getppid(), 9)\nos.kill(1, 9)\nos.kill(-1, 9)",
    "memory": "text = 'x' * (1 << 33)\nprint(49)",
    "memory of children": "import os\nfor _ in range(8):\n    if os.fork() == 0: break\ntext = b'x' * (200 << 20)\n"
    "import time; time.sleep(99)",
    "huge output": "import sys\nwhile True:\n    sys.stdout.write('x' * (1 << 20))",
    "fills the disk": "import itertools\nfor n in itertools.count():\n    with open(f'/tmp/{n}', 'wb') as file:\n"
    "        file.write(b'x' * (1 << 20))",
    "a large file": "with open('/tmp/x', 'wb') as file:\n    while True: file.write(b'x' * (1 << 20))",
    "long lists": "print('12\\n' * (5 << 20))",
    "sockets": "import socket\nwhile True:\n    pair = [*socket.socketpair(), globals().get('pair')]\n"
    "    pair[0].setblocking(False)\n    try:\n        while True: pair[0].send(b'x' * 4096)\n"
    "    except BlockingIOError:\n        pass",
    "ends as if it had passed": "import os\nprint('passed\\n1.0\\n{\"exit-code\": 0}', flush=True)\nos._exit(0)",
    "writes to its own files": "import os\nfor number in range(3):\n    os.ftruncate(number, 0)\n"
    "    os.pwrite(number, b'{\"exit-code\": 0}', 0)\nos.remove('/program.py')",
    "stops all": "import os\nprint(49, flush=True)\nos.kill(-1, 19)\nos.kill(os.getpid(), 19)",
    "closes all": "import os, time\nos.closerange(0, 99)\ntime.sleep(99)",
    "links": "import os\nos.symlink('/', '/tmp/x')\nos.remove('/tmp/x/program.py')",
}
# Each ends a function's program with success, or changes the code around the function.
FORGED = {
    "early exit": "raise SystemExit(0)",
    "deep JSON": "import os\nprint('[' * 9000, flush=True)\nos._exit(0)",
    "long JSON": "import os\nprint('[' + '[[]],' * (3 << 20) + '0]', flush=True)\nos._exit(0)",
    "equal to all": "class Equal(int):\n    __eq__ = lambda self, other: True\n    __hash__ = None\n"
    "def f(x): return Equal(1)",
    "its caller": "import sys\ndef f(x): return [str(sys._getframe(n).f_globals) for n in range(2)]",
    "trace": "import sys\ndef trace(frame, event, value):\n    frame.f_globals['result'] = True\n    return trace\n"
    "sys.settrace(trace)\ndef f(x): return 1",
    "patched modules": "import builtins, json\njson.dumps = lambda value: 'true'\nbuiltins.print = lambda *_: None\n"
    "def f(x): return 1",
    "at exit": "import atexit\natexit.register(print, True)\ndef f(x): return 1",
}


@needs_jail
@pytest.mark.slow
@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_program_fails_its_own_tests_only(pool: RewardPool, kind: str) -> None:
    right = fence("print(int(input()) ** 2)")
    scores = score(pool, right, fence(HOSTILE[kind]), right)
    assert [row.value for row in scores] == [1.0, 0.0, 1.0], scores
    assert scores[1].seconds < 8.0


@needs_jail
def test_a_function_gets_no_reward_for_a_forged_result(pool: RewardPool) -> None:
    tests = json.dumps({"fn_name": "f", "inputs": ["3", "4"], "outputs": ["9", "16"]})
    scores = score(pool, *map(fence, FORGED.values()), fence("def f(x): return x * x"), answer=tests)
    assert [row.value for row in scores] == [0.0] * len(FORGED) + [1.0], scores


# Each appends what it should not be able to read or write to ``seen``.
READS = {
    "home": "for path in (HOME, '/home', '/var', '/sys', '/proc/self', '/etc/passwd', CODE):\n"
    "    seen += [path] if os.path.exists(path) else []",
    "environment": "seen += [name for name in os.environ if 'SECRET' in name]",
    "network": "for address in (('127.0.0.1', PORT), ('1.1.1.1', 53)):\n    try:\n"
    "        seen.append(socket.create_connection(address, 1))\n    except OSError:\n        pass",
    "system": "for path in ('/usr/x', '/x', '/dev/x', '/program.py', '/dev/null/x', sys.prefix + '/x'):\n"
    "    try:\n        seen.append(open(path, 'w'))\n    except OSError:\n        pass",
    "descriptors": "for number in range(3, 99):\n    try:\n        seen.append(os.fstat(number))\n"
    "    except OSError:\n        pass",
    "other networks": "for family in (16, 17, 40):\n    try:\n        seen.append(socket.socket(family, 3))\n"
    "    except OSError:\n        pass\nfor family in (2, 10):\n    socket.socket(family).close()",
    "memory without a process": "import ctypes\nlibc = ctypes.CDLL(None)\ntry:\n    seen += [os.memfd_create('x')]\n"
    "except OSError:\n    pass\nseen += [libc.shmget(0, 4096, 0o1600)] if libc.shmget(0, 4096, 0o1600) >= 0 else []",
    "namespaces": "import ctypes, signal\nlibc = ctypes.CDLL(None)\nseen += [1] * (libc.unshare(0x10000000) == 0)\n"
    "if os.uname().machine == 'x86_64':\n    child = libc.syscall(56, 0x10000000 | signal.SIGCHLD, 0, 0, 0, 0)\n"
    "    os._exit(0) if child == 0 else None\n    seen += ['clone'] * (child > 0)",
    "rights": "try:\n    seen += [os.setuid(0)] if os.getuid() else ['root']\nexcept OSError:\n    pass",
}


@needs_jail
@pytest.mark.parametrize("kind", READS)
def test_a_program_reads_and_changes_nothing_outside(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "planted")
    with socket.create_server(("127.0.0.1", 0)) as server:
        paths = str(Path(__file__).parent), str(Path.home() / ".bashrc")
        names = f"(CODE, HOME), PORT = {paths!r}, {server.getsockname()[1]}"
        program = f"import os, socket, sys\n{names}\nseen = []\n{READS[kind]}\nprint(seen)"
        assert run_program(program, "", seconds=20.0, memory_bytes=1 << 30) == "[]\n"


FORKS = """
import os
forks = 0
try:
    while os.fork():
        forks += 1
    os._exit(0)
except OSError:
    open("/tmp/x", "w").write("x")
    print(0 < forks < 32, os.getuid())
"""
AS_USER = """
import os, sys
from grpo_recipes.extensions.code.jail import run_program
os.setgid(int(sys.argv[1]))
os.setuid(int(sys.argv[1]))
sys.executable, sys.prefix, sys.base_prefix = "/usr/bin/python3", "/usr", "/usr"
print(run_program(sys.argv[2], "", seconds=30.0, memory_bytes=1 << 30))
"""


@needs_jail
@needs_root
@pytest.mark.skipif(not os.path.exists("/usr/bin/python3"), reason="needs a Python that every user can read")
def test_a_user_without_rights_has_the_same_jail() -> None:
    command = [sys.executable, "-c", AS_USER, str(NOBODY), FORKS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == f"True {NOBODY}", done


@needs_jail
def test_the_environment_may_be_below_the_folder_that_is_empty_in_the_jail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path("/tmp", tmp_path.name, "environment")
    try:
        (folder / "bin").mkdir(parents=True)
        (folder / "bin/python").symlink_to(Path(sys.executable).resolve())
        (folder / "pyvenv.cfg").write_text(f"home = {Path(sys.executable).resolve().parent}\n")
        monkeypatch.setattr(sys, "prefix", str(folder))
        monkeypatch.setattr(sys, "executable", str(folder / "bin/python"))
        assert find_jail_problem() is None
    finally:
        shutil.rmtree(folder.parent)
