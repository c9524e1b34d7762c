"""Check the offline trainer with its vLLM server on a GPU: python test_gpu_integration.py [--cpu].

One run of one iteration, and four checks of its files. It prints "4/4 passed" and exits with 0, or with 1 if a check
fails. Without a GPU it prints why it is skipped. With --cpu it uses the vLLM of a CPU environment.

    python test_gpu_integration.py --stages [--cpu] [--only STAGE...]

runs all parts of the main job, like `make gpu`.
"""

import glob
import json
import os
import socket
import subprocess
import sys
import tempfile

from smoke_test import EVAL, ROOT, TRAIN, call, metrics, need_environment, train

RUN = (
    "model.train_id=smoke:sums", "train.lr=1e-4", "eval.replicates=4", "--dtype=float32", "--bf16=false",
    "--vllm_max_model_length=256",
)  # fmt: skip
_DEVICES = """
import os
from grpo_recipes.plan.devices import find_resources
resources = find_resources(os.environ)
print(resources.device, len(resources.gpus))
"""


def count_gpus(python):
    """Return the device of the environment, ``cpu`` or ``cuda``, and the number of GPUs."""
    device, gpus = call([python, "-P", "-s", "-c", _DEVICES], ROOT).split()[-2:]
    return device, int(gpus)


def reason_to_skip(device, gpus, cpu):
    """Return why the checks can't run here, or None."""
    if cpu:
        return None if device == "cpu" else "--cpu needs a CPU environment (DEVICE=cpu make setup)"
    if device == "cpu":
        return "this environment has the CPU build; --cpu runs the same checks with its vLLM"
    return None if gpus else "no GPU is visible"


def rows(run, name):
    """Return the rows of a file of a run."""
    with open(os.path.join(run, name)) as file:
        return [json.loads(line) for line in file]


def rollouts(run, folder):
    """The server got the weights before it sampled, and no completion is empty."""
    first = rows(run, "metrics.jsonl")[0]
    samples = [sample for row in rows(run, "samples.jsonl") for sample in row["samples"]]
    assert first["syncs"] >= 1 and os.path.exists(os.path.join(run, "processes", "server.json"))
    assert samples and all(sample["completion"] for sample in samples)


def training(run, folder):
    """Both steps have finite losses, and gradients."""
    assert metrics(folder, "train", TRAIN)["grad_norm"] > 0
    assert [row["step"] for row in rows(run, "metrics.jsonl")] == [1, 2]


def evaluation(run, folder):
    """The server's completions of problems that are not trained on have scores."""
    assert 0 <= metrics(folder, "eval", EVAL)["pass@1"] <= 1
    trained = {seed for row in rows(run, "metrics.jsonl") for seed in row.get("problem_seeds", [])}
    evaluated = {seed for row in rows(run, "eval.jsonl") for seed in row["problem_seeds"]}
    assert evaluated and not evaluated & trained


def iteration(run, folder):
    """The run is complete: its summary, its checkpoint and its model."""
    with open(os.path.join(run, "summary.json")) as file:
        assert json.load(file)["status"] == "completed"
    for path in ("checkpoints/iter_000/COMPLETE", os.path.join(run, "model/model.safetensors")):
        assert os.path.exists(os.path.join(folder, "run", path)), path


CHECKS = {
    "vLLM server rollout generation": rollouts,
    "training epoch with server-backed data": training,
    "evaluator with vLLM server": evaluation,
    "end-to-end iteration": iteration,
}


def passed(check, run, folder):
    """Return whether a check passes; print its error if it does not."""
    try:
        check(run, folder)
    except (AssertionError, SystemExit, OSError, KeyError, IndexError) as error:
        print(f"{type(error).__name__}: {error}")
        return False
    return True


def main():
    """Train one iteration and check it, or run the stages of `make gpu`."""
    python, options = need_environment(), sys.argv[1:]
    if "--stages" in options:
        options.remove("--stages")
        return subprocess.call([python, os.path.join(ROOT, "bench", "gpu_main_job.py"), *options])
    device, gpus = count_gpus(python)
    reason = reason_to_skip(device, gpus, "--cpu" in options)
    if reason:
        print(f"skipped: {reason}")
        return 0
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        one_gpu = ["--vllm_gpu=shared"] if gpus == 1 else []
        train(python, folder, [*RUN, f"generation.base_url=http://127.0.0.1:{port}", *one_gpu])
        (run,) = glob.glob(os.path.join(folder, "run", "offline-*"))
        results = {name: passed(check, run, folder) for name, check in CHECKS.items()}
    for name, is_passed in results.items():
        print("passed" if is_passed else "FAILED", name)
    print(f"{sum(results.values())}/{len(results)} passed")
    return 0 if all(results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
