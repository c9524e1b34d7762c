"""Check the offline trainer with its vLLM server on two GPUs: python test_gpu_integration.py.

One run of one iteration, and four checks of what it left. It ends with "4/4 passed" and 0, or with 1; where there are
no two GPUs it says why it is skipped, and ends with 0. With --cpu the vLLM of a CPU environment serves.
"""

import glob
import json
import os
import socket
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
found = find_resources(os.environ)
print(found.device, len(found.gpus))
"""


def reason_to_skip(python, cpu):
    """Return why the checks cannot run here, or None."""
    device, gpus = call([python, "-P", "-s", "-c", _DEVICES], ROOT).split()[-2:]
    if cpu:
        return None if device == "cpu" else "--cpu needs a CPU environment (DEVICE=cpu make setup)"
    if device == "cpu":
        return "this environment has the CPU build; --cpu checks the same with its vLLM"
    return None if int(gpus) >= 2 else f"two GPUs are needed, one to serve and one to train; {gpus} visible"


def rows(run, name):
    """Return the rows of a file of a run."""
    with open(os.path.join(run, name)) as file:
        return [json.loads(line) for line in file]


def rollouts(run, folder):
    """The server got the weights before it sampled, and no completion is empty."""
    first = rows(run, "metrics.jsonl")[0]
    samples = [one for row in rows(run, "samples.jsonl") for one in row["samples"]]
    assert first["syncs"] >= 1 and os.path.exists(os.path.join(run, "processes", "server.json"))
    assert samples and all(one["completion"] for one in samples)


def training(run, folder):
    """Both steps have finite losses, and gradients."""
    found = metrics(folder, "train", TRAIN)
    assert found["grad_norm"] > 0 and [row["step"] for row in rows(run, "metrics.jsonl")] == [1, 2]


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
    """Return whether a check holds, and say what does not."""
    try:
        check(run, folder)
    except (AssertionError, SystemExit, OSError, KeyError, IndexError) as error:
        print(f"{type(error).__name__}: {error}")
        return False
    return True


def main():
    """Train one iteration and check it."""
    python, cpu = need_environment(), "--cpu" in sys.argv[1:]
    reason = reason_to_skip(python, cpu)
    if reason:
        print(f"skipped: {reason}")
        return 0
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        train(python, folder, [*RUN, f"generation.base_url=http://127.0.0.1:{port}"])
        (run,) = glob.glob(os.path.join(folder, "run", "offline-*"))
        found = {name: passed(check, run, folder) for name, check in CHECKS.items()}
    for name, holds in found.items():
        print("passed" if holds else "FAILED", name)
    print(f"{sum(found.values())}/{len(found)} passed")
    return 0 if all(found.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
