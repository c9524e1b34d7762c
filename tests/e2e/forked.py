"""Start the programs of whole runs by fork instead of exec, from a process that has imported vLLM and transformers.

    template = Template(environment)
    process = template.start(["grpo", "launch", "recipe.yaml"], folder, environment, output)
    process.wait(600)

About two thirds of the processor time of a whole run of few steps go into imports, which are the same in each run. Here
they happen once, in a template: the launcher is forked from it, the process guards are forked from the launcher, and
the server and the trainer from the guards. They are real processes with their usual parents, sessions and signals.
The launcher, the guards, the servers and the trainers each have other copies of this project's modules, fresh from
their import: a guard does not see what the launcher has changed in a module. A forked process has its own variables and
command line, also in ``/proc``, its own random seeds, and only the open files that exec would leave.

Some differences remain. Libraries have read their variables in the template, so a server or trainer whose variables
differ in a name of ``_READ_ON_IMPORT`` is started by exec, like all programs that are not in ``_PROGRAMS``. An import
that is missing in our code, or fails, is not noticed. All processes of a template share the seed of string hashes:
where a test compares two runs bit by bit, one of them is started by exec. vLLM's workers do not replace kernels
themselves, so a failure there shows only in a run that is started by exec.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import gc
import importlib
import importlib.metadata
import io
import json
import os
import random
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import traceback
import types
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

REPOSITORY = Path(__file__).resolve().parents[2]
# Modules, and scripts by their file name, that are started by fork.
_GUARD, _SERVER = "grpo_recipes.launch.processes", "grpo_recipes.server.serve"
_GRPO = "grpo_recipes"  # the module that is grpo
_GRPO_PROGRAM = str(Path(sys.executable).with_name("grpo"))
_PROGRAMS = {"grpo_recipes.launch.accelerate", _SERVER}
_SCRIPTS = {"grpo.py", "maxent-grpo.py", "sft.py"}
# Entry scripts, and the launcher's module that they become (scripts/find_environment.py).
_ENTRY_SCRIPTS = {
    "run_offline_grpo.py": "grpo_recipes.extensions.offline.main",
    "run_colocated_grpo.py": "grpo_recipes.extensions.colocated.main",
}
# What each kind of process imports of this project and of TRL.
_LAUNCHER, _TRAINER = "launcher", "trainer"
_IMPORTED = {
    _LAUNCHER: ("grpo_recipes.cli.runs", "grpo_recipes.launch.run", "grpo_recipes.launch.resolve"),
    _GUARD: (_GUARD,),
    _SERVER: (_SERVER,),
    _TRAINER: ("grpo_recipes.launch.accelerate", "grpo_recipes.trainers.entry", "grpo_recipes.trainers.maxent"),
}
_COPIED = {"grpo_recipes", "trl"}  # packages
_HIDDEN = "vllm"  # from TRL, in trainers that have a server
_FLAGS = {"-P", "-s", "-u"}  # flags of Python that a forked program can have
# Prefixes of variables that libraries read when they are imported; a final space means the whole name.
_READ_ON_IMPORT = (
    "HF_HOME ", "HF_HUB_OFFLINE ", "HF_ENDPOINT ", "HF_DATASETS_", "HF_HUB_CACHE ", "TRANSFORMERS_", "PYTHONPATH ",
    "PYTHONHASHSEED ", "PYTHONWARNINGS ", "LD_", "MKL_", "KMP_", "OPENBLAS_", "VLLM_LOGGING_",
    "VLLM_CONFIGURE_LOGGING ", "VLLM_TARGET_DEVICE ", "VLLM_PLUGINS ", "VLLM_BATCH_INVARIANT ",
    "TORCH_LOGS ", "TORCHINDUCTOR_COMPILE_THREADS ", "ATEN_", "OMP_PLACES ", "OMP_PROC_BIND ", "GOMP_",
    "HF_TOKEN_PATH ",
)  # fmt: skip
_PADDING = 100_000  # bytes for the command line, and for the variables, that /proc shows of a forked process
_PR_SET_PDEATHSIG, _PR_SET_NAME, _PR_SET_MM, _PR_SET_MM_MAP = 1, 15, 35, 14  # prctl(2)


class ForkedProcess:
    """A process that the template has started, with the methods of ``subprocess.Popen`` that tests use."""

    def __init__(self, args: list[str], connection: socket.socket) -> None:
        self.args = args
        self.returncode: int | None = None
        self._connection = connection
        self._answers = connection.makefile("r")
        self.pid = self._read_number()

    def poll(self) -> int | None:
        """Return the exit code as ``Popen`` gives it, or None while the process runs."""
        return self._read_code(0)

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code. Raise TimeoutExpired after ``timeout`` seconds."""
        code = self._read_code(timeout)
        if code is None:
            assert timeout is not None
            raise subprocess.TimeoutExpired(self.args, timeout)
        return code

    def send_signal(self, number: int) -> None:
        """Send the signal, unless the process has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.kill(self.pid, number)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def _read_code(self, seconds: float | None) -> int | None:
        if self.returncode is None and select.select([self._connection], [], [], seconds)[0]:
            self.returncode = self._read_number()
        return self.returncode

    def _read_number(self) -> int:
        line = self._answers.readline()
        if not line:
            raise ConnectionError("the template has ended, see its output above")
        return int(line)


class Template:
    """A process with the imported libraries, and the variables ``environment``; it ends with this process.

    The constructor does not wait for the imports; ``start`` does.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="template-")
        self._address = str(Path(self._folder.name) / "socket")
        ready_reader, ready_writer = os.pipe()
        argv = [sys.executable, "-P", __file__, self._address, str(ready_writer), str(os.getpid()), "x" * _PADDING]
        variables = {**environment, "SPT_NOENV": "1", "GRPO_TEMPLATE_PADDING": "x" * _PADDING}
        self._process = subprocess.Popen(argv, env=variables, stdin=subprocess.DEVNULL, pass_fds=[ready_writer])
        os.close(ready_writer)
        self._ready = ready_reader

    def start(
        self, argv: Sequence[str], folder: Path, environment: Mapping[str, str], output: io.BufferedIOBase
    ) -> ForkedProcess:
        """Start a program with both of its output streams in ``output``, and no input.

        Raise ConnectionError if the template has ended, for example because Linux does not allow prctl(2).
        """
        if self._ready >= 0:
            os.read(self._ready, 1)  # the end of the file: the imports are done, or have failed
            os.close(self._ready)
            self._ready = -1
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.settimeout(60)  # for the start; the template answers at once
        try:
            connection.connect(self._address)
        except FileNotFoundError as error:
            raise ConnectionError("the template has ended, see its output above") from error
        request = {"argv": list(argv), "cwd": str(folder), "env": dict(environment)}
        with open(os.devnull) as no_input:
            socket.send_fds(connection, [b"."], [no_input.fileno(), output.fileno()])
            connection.sendall(json.dumps(request).encode() + b"\n")
            return ForkedProcess(list(argv), connection)

    def is_alive(self) -> bool:
        """Return whether the template runs."""
        return self._process.poll() is None


# What follows runs in the template and in the forked processes.


class _State:
    """The state of the template after its imports, to which each forked process returns."""

    def __init__(
        self, variables: dict[str, str], copies: dict[str, dict[str, types.ModuleType]], torch_packages: list[Any]
    ) -> None:
        stat = _read_stat()
        self.copies = copies  # of this project's modules, for each kind of process
        self.torch_packages = torch_packages  # what torch could load before the import of these copies
        self.arguments_at, self.variables_at = stat[48], stat[50]  # addresses
        self.path = list(sys.path)
        self.modules = set(sys.modules)
        self.variables = variables  # before the imports
        self.added_variables = {name: value for name, value in os.environ.items() if name not in variables}  # by them
        self.files = _list_files()
        self.exit_functions: list[Callable[..., object]] = []  # registered since the fork
        self.exec = subprocess.Popen._execute_child  # type: ignore[attr-defined]
        self.streams = sys.stdin, sys.stdout, sys.stderr
        self.shown_variables: dict[str, str] = {}  # of /proc/self/environ
        self.dropped_modules: list[object] = []  # torch may still call their functions

    def record_exit_functions(self) -> None:
        """Add the functions that are registered with ``atexit`` from now on to ``exit_functions``."""
        register = atexit.register

        def recorded(function: Callable[..., object], *args: Any, **options: Any) -> Callable[..., object]:
            self.exit_functions.append(function)
            return register(function, *args, **options)

        atexit.register = recorded  # type: ignore[assignment]


def starts_runs(argv: Sequence[str]) -> bool:
    """Return whether a command line starts grpo launch, grpo sweep or an entry script in this environment."""
    if argv[0] == _GRPO_PROGRAM:
        return argv[1] in ("launch", "sweep")
    return _is_entry_script(argv)


def _is_entry_script(argv: Sequence[str]) -> bool:
    if len(argv) < 2 or argv[0] != sys.executable:
        return False
    script = Path(argv[1])
    return script.name in _ENTRY_SCRIPTS and script.parent == REPOSITORY


_Program = tuple[str, str, list[str]]  # ("-m", module, arguments) or ("script", path, arguments)


def _find_program(argv: Sequence[str], variables: Mapping[str, str], state: _State) -> _Program | None:
    """Return the program to fork for this command line, or None if it has to be started by exec."""

    def read_on_import(name: str) -> bool:
        return f"{name} ".startswith(_READ_ON_IMPORT)

    words = [os.fspath(word) for word in argv]
    if words[0] == _GRPO_PROGRAM:
        return ("script", words[0], words[1:])
    if words[0] != sys.executable:
        return None
    if _is_entry_script(words):
        return ("-m", _ENTRY_SCRIPTS[Path(words[1]).name], words[2:])
    del words[0]
    while words and words[0] in _FLAGS:
        del words[0]
    if words[:2] in (["-m", _GUARD], ["-m", _GRPO]):
        return ("-m", words[1], words[2:])
    for name in {*variables, *state.variables}:
        if read_on_import(name) and variables.get(name) != state.variables.get(name):
            return None
    if words[:1] == ["-m"] and words[1] in _PROGRAMS:
        return ("-m", words[1], words[2:])
    if words and Path(words[0]).name in _SCRIPTS and Path(words[0]).is_relative_to(REPOSITORY):
        return ("script", words[0], words[1:])
    return None


def _patch_popen(state: _State) -> None:
    """Let ``subprocess.Popen`` start the programs of ``_find_program`` by fork."""

    def execute_child(
        self: Any, args: Any, executable: Any, preexec_fn: Any, close_fds: bool, pass_fds: Any, cwd: Any, env: Any,
        startupinfo: Any, creationflags: Any, shell: bool, p2cread: int, p2cwrite: int, c2pread: int, c2pwrite: int,
        errread: int, errwrite: int, restore_signals: bool, gid: Any, gids: Any, uid: Any, umask: int,
        start_new_session: bool, process_group: int,
    ) -> None:  # fmt: skip
        variables = dict(os.environ if env is None else env)
        is_plain = not shell and executable is None and not isinstance(args, str | bytes | os.PathLike)
        program = _find_program(args, variables, state) if is_plain and process_group == -1 else None
        if program is None or threading.active_count() > 1:  # a fork in the middle of another thread's work can hang
            state.exec(
                self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo, creationflags, shell,
                p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite, restore_signals, gid, gids, uid, umask,
                start_new_session, process_group,
            )  # fmt: skip
            return
        for stream in (sys.stdout, sys.stderr, *state.streams[1:]):
            stream.flush()
        set_up_reader, set_up_writer = os.pipe()
        signals = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # for the handlers of the parent
        self.pid = os.fork()
        if not self.pid:
            try:
                os.close(set_up_reader)
                streams = {0: p2cread, 1: c2pwrite, 2: errwrite}
                _set_up(streams, cwd, bool(start_new_session), preexec_fn, {*pass_fds, set_up_writer}, state)
                _forget_parent(program, list(map(os.fspath, args)), variables, state)
                os.close(set_up_writer)
                signal.pthread_sigmask(signal.SIG_SETMASK, signals)
                _run(program)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(255)
        signal.pthread_sigmask(signal.SIG_SETMASK, signals)
        os.close(set_up_writer)
        os.read(set_up_reader, 1)  # waits for the end of the file, as Popen waits for exec
        os.close(set_up_reader)
        self._child_created = True
        self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)

    subprocess.Popen._execute_child = execute_child  # type: ignore[attr-defined]


def _set_up(
    streams: dict[int, int], cwd: Any, new_session: bool, preexec_fn: Any, kept_files: set[int], state: _State
) -> None:
    """Do what ``Popen`` does between fork and exec, and close the files that exec would close."""
    copies = {number: os.dup(file) for number, file in streams.items() if file != -1}
    for number, file in copies.items():
        os.dup2(file, number)
    if cwd is not None:
        os.chdir(cwd)
    signal.set_wakeup_fd(-1)
    faulthandler.cancel_dump_traceback_later()
    faulthandler.disable()
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        with contextlib.suppress(RuntimeError):  # a signal of faulthandler.enable
            faulthandler.unregister(number)
        if number in (signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_IGN)  # as Python does when it starts
        elif signal.getsignal(number) not in (signal.SIG_IGN, signal.SIG_DFL):
            signal.signal(number, signal.SIG_DFL)
    if new_session:
        os.setsid()
    if preexec_fn is not None:
        preexec_fn()
    if signal.getsignal(signal.SIGINT) == signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    for file in _list_files() - state.files - kept_files - {0, 1, 2}:
        os.close(file)


def _list_files() -> set[int]:
    """Return the numbers of the open files of this process."""
    numbers = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the file of this listing
            os.fstat(int(name))
            numbers.add(int(name))
    return numbers


def _forget_parent(program: _Program, argv: list[str], variables: dict[str, str], state: _State) -> None:
    """Give this process the command line and variables of the program, and the template's other state."""
    gc.freeze()  # objects of the parent must not close files of this process with the same number
    for function in state.exit_functions:
        atexit.unregister(function)
    state.exit_functions.clear()
    weakref.finalize._registry.clear()  # type: ignore[attr-defined]  # would delete folders of the parent
    weakref.finalize._registered_with_atexit = False  # type: ignore[attr-defined]
    os.environ.clear()
    os.environ.update(variables)
    _write_proc_fields(argv, variables, state)
    state.shown_variables = variables
    hidden_packages = variables.get("GRPO_HIDDEN_PACKAGES", "").split()
    for name in list(sys.modules):
        if name not in state.modules or name.split(".")[0] in hidden_packages:
            state.dropped_modules.append(sys.modules.pop(name))
    sys.path[:] = state.path
    kind, target, arguments = program
    process_kind = _find_kind(target)
    if process_kind != _TRAINER or hidden_packages == [_HIDDEN]:
        sys.modules.update(state.copies[process_kind])
        if target != _GRPO:  # a package, whose module __main__ runs
            sys.modules.pop(target, None)
    else:  # with vLLM in the trainer, TRL is imported differently
        sys.modules["torch"].serialization._package_registry[:] = state.torch_packages
    is_safe = "-P" in argv[1:5] or variables.get("PYTHONSAFEPATH")
    if kind == "script" and not is_safe:
        sys.path.insert(0, str(Path(target).resolve().parent))
    sys.argv = [target, *arguments]
    sys.dont_write_bytecode = bool(variables.get("PYTHONDONTWRITEBYTECODE"))
    sys.stdin, sys.stdout, sys.stderr = state.streams
    sys.stdout.reconfigure(write_through="-u" in argv[1:5] or bool(variables.get("PYTHONUNBUFFERED")))  # type: ignore[union-attr]
    tempfile.tempdir = None
    random.seed()
    sys.modules["numpy"].random.seed()
    if process_kind in (_LAUNCHER, _GUARD):  # they do not use torch
        return
    if target == _SERVER:
        os.environ.update({name: value for name, value in state.added_variables.items() if name not in variables})
    torch = sys.modules["torch"]
    torch.set_num_threads(int(variables.get("OMP_NUM_THREADS", os.cpu_count() or 1)))
    torch._dynamo.config.disable = variables.get("TORCHDYNAMO_DISABLE") == "1"


def _find_kind(target: str) -> str:
    """Return the key of ``_IMPORTED`` for a program's module or script."""
    if target in _IMPORTED:
        return target
    return _TRAINER if target in _PROGRAMS or Path(target).name in _SCRIPTS else _LAUNCHER


def _write_proc_fields(argv: list[str], variables: dict[str, str], state: _State) -> None:
    """Let /proc show this command line and these variables, in the memory where the template's were."""
    ends = []
    for address, words in (
        (state.arguments_at, argv), (state.variables_at, [f"{name}={value}" for name, value in variables.items()])
    ):  # fmt: skip
        block = "".join(f"{word}\0" for word in words).encode(errors="surrogateescape")
        assert len(block) <= _PADDING, "raise _PADDING"
        ctypes.memmove(address, block, len(block))
        ends.append(address + len(block))
    stat = _read_stat()
    libc = ctypes.CDLL(None, use_errno=True)
    libc.sbrk.restype = ctypes.c_void_p
    layout = struct.pack(
        "11QPII", stat[26], stat[27], stat[45], stat[46], stat[47], libc.sbrk(0), stat[28],
        state.arguments_at, ends[0], state.variables_at, ends[1], 0, 0, 0xFFFFFFFF,
    )  # fmt: skip
    if libc.prctl(_PR_SET_MM, _PR_SET_MM_MAP, ctypes.c_char_p(layout), ctypes.c_ulong(len(layout)), ctypes.c_ulong(0)):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_MM_MAP)")


def _read_stat() -> dict[int, int]:
    """Return the fields 4 to 52 of /proc/self/stat, by their number in proc(5)."""
    fields = Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[1:]
    return dict(enumerate(map(int, fields), start=4))


def _patch_process_titles(state: _State) -> None:
    """Let setproctitle name a process where /proc now shows its command line; vLLM names its processes with it."""

    def set_title(title: str) -> None:
        _write_proc_fields([title], state.shown_variables, state)
        ctypes.CDLL(None).prctl(_PR_SET_NAME, title.encode())

    sys.modules["setproctitle"].setproctitle = set_title  # type: ignore[attr-defined]


def _run(program: _Program) -> NoReturn:
    """Run the program as Python would, and end this process with its exit code."""
    kind, target, _ = program
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    code: Any = 0
    try:
        if kind == "-m":
            runpy._run_module_as_main(target)  # type: ignore[attr-defined]
        else:
            main.__file__ = target
            exec(compile(Path(target).read_bytes(), target, "exec"), main.__dict__)
    except SystemExit as error:
        code = error.code
        if code is not None and not isinstance(code, int):
            print(code, file=sys.stderr)
            code = 1
    except KeyboardInterrupt:
        sys.excepthook(*sys.exc_info())
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit((code or 0) & 0xFF)


def _import_libraries() -> None:
    """Import the libraries of servers and trainers, except TRL."""
    import accelerate.commands.launch  # noqa: F401
    import datasets  # noqa: F401
    import deepspeed  # noqa: F401
    import peft  # noqa: F401
    import setproctitle  # noqa: F401
    import tabulate  # noqa: F401
    import torch.distributed.elastic.rendezvous.static_tcp_rendezvous  # noqa: F401
    import transformers.trainer  # noqa: F401
    import vllm.entrypoints.cli.serve
    import vllm.entrypoints.launchers.cli_args
    import vllm.entrypoints.openai.api_server
    import vllm.v1.engine.core
    import vllm.v1.executor.multiproc_executor
    import vllm.v1.worker.cpu_worker  # noqa: F401
    import wandb  # noqa: F401
    from vllm.platforms.cpu import CpuPlatform

    # vLLM's workers replace kernels in all modules, which takes 0.4 s where so many are imported. Here it happens once.
    CpuPlatform.register_triton_kernel_overrides()
    CpuPlatform.register_triton_kernel_overrides = classmethod(lambda _: None)  # type: ignore[method-assign, assignment]

    # TRL reads the metadata of all packages for this while it is imported.
    packages = importlib.metadata.packages_distributions()
    importlib.metadata.packages_distributions = lambda: packages


def _import_copies() -> dict[str, dict[str, types.ModuleType]]:
    """Import this project's modules for each kind of process, and return them; ``sys.modules`` does not keep them."""
    copies = {}
    for kind, names in _IMPORTED.items():
        hidden = {}
        if kind == _TRAINER:
            hidden = {name: module for name, module in sys.modules.items() if name.split(".")[0] == _HIDDEN}
            sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]  # Python takes None for a missing module
        for name in names:
            importlib.import_module(name)
        sys.modules.update(hidden)
        copied = [name for name in sys.modules if name.split(".")[0] in _COPIED]
        copies[kind] = {name: sys.modules.pop(name) for name in copied}
    return copies


def _serve(address: str, ready_writer: int, parent: int) -> None:
    """Fork a process for each connection, and answer with its pid and its exit code. End with the parent."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    variables = dict(os.environ)
    gc.disable()
    _import_libraries()
    thresholds, torch_packages = gc.get_threshold(), list(sys.modules["torch"].serialization._package_registry)
    copies = _import_copies()
    gc.set_threshold(*thresholds)  # the server's module, which sets another one, runs again in a server
    gc.collect()
    gc.freeze()
    gc.enable()
    state = _State(variables, copies, torch_packages)
    state.files.discard(ready_writer)
    state.record_exit_functions()
    _patch_process_titles(state)
    _patch_popen(state)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(address)
    listener.listen()
    os.close(ready_writer)
    running: list[tuple[subprocess.Popen[bytes], socket.socket]] = []
    while os.getppid() == parent:
        if select.select([listener], [], [], 0.02)[0]:
            connection, _ = listener.accept()
            _, files, _, _ = socket.recv_fds(connection, 1, 2)
            request = json.loads(connection.makefile().readline())
            child = subprocess.Popen(
                request["argv"], cwd=request["cwd"], env=request["env"],
                stdin=files[0], stdout=files[1], stderr=files[1],
            )  # fmt: skip
            for file in files:
                os.close(file)
            connection.sendall(f"{child.pid}\n".encode())
            running.append((child, connection))
        for child, connection in list(running):
            if child.poll() is not None:
                running.remove((child, connection))
                with contextlib.suppress(OSError):  # nobody waits any more
                    connection.sendall(f"{child.returncode}\n".encode())
                connection.close()


if __name__ == "__main__":
    _serve(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
