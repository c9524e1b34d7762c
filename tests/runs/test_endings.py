"""Diagnose how a run ended, from directories of this project and messages of the real libraries."""

from __future__ import annotations

import fcntl
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from grpo_recipes.runs import endings
from grpo_recipes.runs.checkpoints import publish_checkpoint
from grpo_recipes.runs.rundir import Run, write_json
from grpo_recipes.slurm.client import SlurmJob

CUDA_OOM = (
    "[rank2]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 18.55 GiB. GPU 0 has a total capacity of "
    "79.14 GiB of which 9.31 GiB is free."
)
JOB = SlurmJob(7, "slurm", 1, 4)


def test_how_it_ended(make_run, row):
    assert endings.ending(make_run(status="completed", rows=[row(1), row(2)])).value == "completed, 2 steps"
    failed = endings.ending(make_run(cause="rank 2: ValueError: no"))
    assert failed.status == "problem" and "exit code 1 after 0 steps: rank 2: ValueError: no" in failed.value
    assert "grpo launch --resume" in failed.fix
    assert endings.ending(make_run(status="stopped", cause="stopped by SIGTERM")).status == "warning"
    requeued = endings.ending(make_run(status="requeued", cause="rank 0: stopped on request"))
    assert requeued.status == "ok" and requeued.value.endswith("Slurm starts it again")


def test_a_launcher_that_was_killed_and_one_that_lives(make_run):
    run = make_run(status="running")
    killed = endings.ending(run)
    assert killed.status == "problem" and "killed" in killed.value
    with (run.folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert endings.ending(run).value == "running, 0 steps"


def test_checkpoints(make_run, row):
    run = make_run(rows=[row()], save_steps=500)
    finding = endings.checkpoints(run)
    assert finding.status == "warning" and "save_steps (now 500)" in finding.fix
    staged = run.folder / "checkpoints/partial/checkpoint-5"
    staged.mkdir(parents=True)
    publish_checkpoint(staged, run.folder / "checkpoints", 5, 3)
    assert endings.checkpoints(run).value == "checkpoint-5"
    (run.folder / "checkpoints/checkpoint-5/COMPLETE").unlink()
    finding = endings.checkpoints(run)
    assert finding.status == "problem" and finding.value == "checkpoint-5: none complete, so a resume is rejected"
    assert endings.checkpoints(make_run()).status == "ok"


def test_an_empty_server_log_asks_for_the_gpus(make_run):
    finding = endings.server_log(make_run(logs={"server": ""}))
    assert finding.status == "problem" and "is empty" in finding.value
    assert "nvidia-smi -L" in finding.fix and "--gres" in finding.fix
    assert endings.server_log(make_run(logs={"server": "INFO: started"})).status == "ok"


def test_a_server_that_died_shows_its_error(make_run):
    log = "INFO loading\nValueError: Free memory on device cuda:0 (3.1/79.1 GiB) on startup is less than desired\n"
    finding = endings.server_log(make_run(logs={"server": log}, cause="the vLLM server died before it was ready"))
    assert finding.status == "problem" and "Free memory on device" in finding.value


def test_no_server_and_no_log(make_run):
    assert endings.server_log(make_run(vllm_mode="colocate")).value == "no server in this run"
    assert endings.server_log(make_run()).status == "warning"


def test_a_process_without_a_role_in_a_damaged_plan_is_passed_over(make_run):
    run = make_run()
    write_json(run.folder / "plan.json", {"processes": [{}, {"role": "trainer"}]})
    assert endings.server_log(Run(run.folder)).value == "no server in this run"


def test_gpu_memory_of_the_trainer_names_the_knobs_with_their_values(make_run):
    run = make_run(
        logs={"trainer": CUDA_OOM}, per_device_train_batch_size=8, gradient_checkpointing=False, prompts_per_step=24
    )
    finding = endings.out_of_memory(run)
    assert finding.status == "problem" and finding.value == "the trainer ran out of GPU memory before the first step"
    for part in (
        "gradient_checkpointing: true (now false)",
        "per_device_train_batch_size: 4 (now 8, the step stays the same)",
        "max_completion_length (now 512) or num_generations (now 4)",
        "accelerator: zero3",
    ):
        assert part in finding.fix, part


def test_gpu_memory_of_the_server(make_run):
    finding = endings.out_of_memory(make_run(logs={"server": CUDA_OOM}, vllm_gpu_memory_utilization=0.95))
    assert finding.fix == "lower vllm_gpu_memory_utilization (now 0.95) or vllm_max_model_length (now 2048)"


@pytest.mark.parametrize("keys", [{"vllm_mode": "colocate"}, {"weight_sync": "shared", "dtype": "float32"}])
def test_gpu_memory_of_a_vllm_on_the_trainers_gpu(make_run, keys):
    run = make_run(logs={"trainer": CUDA_OOM}, vllm_gpu_memory_utilization=0.4, **keys)
    share = "vllm_gpu_memory_utilization (now 0.4), the share that vLLM uses of the same GPU"
    assert share in endings.out_of_memory(run).fix


def test_host_memory(make_run, row):
    cause = "rank 1 (pid 7) was killed by signal 9"
    killed = endings.out_of_memory(make_run(rows=[row()], cause=cause))
    assert killed.status == "problem" and killed.value.startswith(f"{cause} after 1 steps: by a person, or")
    lower = "request more memory, or lower per_device_train_batch_size (now 8)"
    assert killed.fix == f"if dmesg shows that memory ran out, {lower}"
    in_job = endings.out_of_memory(make_run(rows=[row()], cause=cause, job=JOB)).fix
    assert in_job == killed.fix.replace("more memory", "more memory (sbatch --mem=128G)")
    step = (
        "slurmstepd: error: Detected 1 oom_kill event in StepId=7.batch. Some of the step tasks have been OOM Killed."
    )
    finding = endings.out_of_memory(make_run(logs={"slurm.err": step}, job=JOB))
    assert finding.status == "problem" and "slurm.err" in finding.value
    assert finding.fix == lower.replace("more memory", "more memory (sbatch --mem=128G)")
    assert endings.out_of_memory(make_run(logs={"trainer": "all is well"})).status == "ok"


@pytest.mark.parametrize("program", ["bytes(2**62)", "import torch; torch.empty(2**58)"])
def test_host_memory_as_python_and_torch_say_it(make_run, program):
    message = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False).stderr
    assert endings.out_of_memory(make_run(logs={"trainer": message})).status == "problem", message


def test_the_guard(make_run, row):
    cause = "rank 0: WeightsDiffer: weights did not reach the server through the 'nccl' bridge"
    finding = endings.weights_guard(make_run(cause=cause))
    assert finding.status == "problem" and "through nccl" in finding.value and "weight_sync: file" in finding.fix
    inside = endings.weights_guard(make_run(cause=cause, vllm_mode="colocate"))
    assert "through colocate" in inside.value and "weight_sync" not in inside.fix
    assert endings.weights_guard(make_run(rows=[row()], weight_guard=False)).status == "warning"
    assert endings.weights_guard(make_run(rows=[row()])).value == "no difference found"


def traceback_of(code: str, limit: int | None = None) -> str:
    """Return Python's traceback of ``code`` with at most ``limit`` open files."""
    limited = f"import resource; resource.setrlimit(resource.RLIMIT_NOFILE, ({limit}, {limit}))\n" if limit else ""
    done = subprocess.run([sys.executable, "-c", limited + code], capture_output=True, text=True, check=False)
    assert done.returncode != 0
    return done.stderr


def known(make_run, text: str) -> str:
    return endings.known_messages(make_run(logs={"trainer": text})).value


def test_real_messages_of_the_kernel(make_run, small_disk: Path):
    assert "open files" in known(make_run, traceback_of("a = [open('/dev/null') for _ in range(99)]", limit=20))
    assert "too long for unix" in known(
        make_run, traceback_of(f"import socket; socket.socket(socket.AF_UNIX).bind('/{'x' * 120}')")
    )
    zmq = f"import zmq; zmq.Context().socket(zmq.REP).bind('ipc:///{'x' * 120}')"
    assert "too long for unix" in known(make_run, traceback_of(zmq))
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        bind = f"import socket; socket.socket().bind(('127.0.0.1', {listener.getsockname()[1]}))"
        assert "had the port" in known(make_run, traceback_of(bind))
    assert "package is missing" in known(make_run, traceback_of("import no_such_module"))


def test_a_disk_that_is_full_says_so(make_run, small_disk: Path):
    if not small_disk.is_mount():
        pytest.skip("needs root to mount a small disk")
    assert "was full" in known(make_run, traceback_of(f"open('{small_disk}/file', 'wb').write(bytes(2**20))"))


def test_the_advice_of_vllm_about_ulimit_is_no_error(make_run):
    advice = (
        "WARNING Found ulimit of 20000. This can cause fd limit errors like `OSError: [Errno 24] Too many open files`."
    )
    assert known(make_run, advice) == "none"


@pytest.mark.parametrize(("package", "file", "parts"), [
    ("vllm", "v1/worker/utils.py", ["Free memory on device", "is less than desired GPU memory utilization"]),
    ("vllm", "v1/core/kv_cache_utils.py", ["No available memory for the cache blocks"]),
    ("vllm", "v1/core/kv_cache_utils.py", ["larger than the available KV cache"]),
    ("huggingface_hub", "utils/_http.py", ["Cannot access gated repo"]),
    ("huggingface_hub", "errors.py", ["class LocalEntryNotFoundError"]),
    ("transformers", "utils/hub.py", ["couldn't connect to '"]),
])  # fmt: skip
def test_messages_are_those_that_the_libraries_write(package, file, parts):
    import importlib.util

    spec = importlib.util.find_spec(package)
    assert spec is not None and spec.origin is not None
    text = (Path(spec.origin).parent / file).read_text()
    patterns = " ".join(message.pattern for message in endings.MESSAGES)
    for part in parts:
        assert part in text
        assert part.removeprefix("class ") in patterns, part


def test_several_messages_are_told_with_their_logs(make_run):
    logs = {"server": "OfflineModeIsEnabled: Cannot reach it", "slurm.err": "*** JOB 7 CANCELLED DUE TO TIME LIMIT ***"}
    finding = endings.known_messages(make_run(logs=logs, job=JOB))
    assert finding.status == "problem"
    assert "(server log)" in finding.value and "(slurm.err log)" in finding.value
    assert "grpo fetch" in finding.fix and "--resume" in finding.fix


def test_a_completed_run_is_not_searched(make_run):
    assert endings.known_messages(make_run(logs={"trainer": "Bus error"}, status="completed")).status == "ok"


def test_patterns_compile_and_every_message_says_what_to_do():
    for message in endings.MESSAGES:
        re.compile(message.pattern)
        assert message.means and message.fix
