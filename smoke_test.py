"""Run an iteration of the offline trainer with a tiny random model: no server, no network, under a minute on CPU.

python smoke_test.py        # ends with 0 and two lines of metrics, or with 1 and one line that says what is wrong
"""

import json
import math
import os
import subprocess
import sys
import tempfile

ROOT = os.path.dirname(os.path.realpath(__file__))
sys.path.insert(0, os.path.join(ROOT, "scripts"))
from find_environment import need_environment  # noqa: E402

TRAIN = ("loss_total", "loss_pg", "loss_kl", "loss_entropy", "kl_divergence", "reward_mean", "grad_norm")
EVAL = ("pass@1", "mean@1", "best@1")
RUN = (
    "data.problems=sums", "generation.max_new_tokens=8", "generation.temperature=1.0", "train.iterations=1",
    "train.lr=1e-3", "train.batch_size=8", "eval.num_ids=8", "eval.replicates=1", "hydra.run.dir=run",
)  # fmt: skip
PACKAGES = "from grpo_recipes.plan.preflight import require_packages; require_packages('transformers')"
# A random model has no answer right. Rewards of the length give it something to learn, and the losses a value.
RANDOM = (
    "--use_vllm=false", "--bf16=false", "--dtype=float32", "--reward_funcs", "pure_accuracy_math", "cosine_length",
    "--cosine_max_len=8",
)  # fmt: skip


def call(words, folder):
    """Run a command and return what it says; exit with 1 and its last line where it fails."""
    variables = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        words, cwd=folder, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    )
    if done.returncode:
        fail((done.stdout.strip().splitlines() or ["without a word"])[-1])
    return done.stdout


def train(python, folder, words):
    """Run the offline trainer; what it leaves is in ``folder``/run."""
    call([python, os.path.join(ROOT, "run_offline_grpo.py"), *RUN, *words], folder)


def metrics(folder, name, keys):
    """Return the metrics of the first iteration; exit with 1 where one is missing or not finite."""
    path = os.path.join(folder, "run", "metrics", f"{name}_iter_000.json")
    try:
        with open(path) as file:
            found = json.load(file)
    except (OSError, ValueError) as error:
        fail(f"{name} metrics cannot be read: {error}")
    wrong = [key for key in keys if not isinstance(found.get(key), (int, float)) or not math.isfinite(found[key])]
    if wrong:
        fail(f"{name} metrics without a finite {', '.join(wrong)}")
    return {key: round(found[key], 4) for key in keys}


def fail(what):
    """Say what is wrong, and exit with 1."""
    sys.exit(f"{os.path.basename(sys.argv[0])}: {what}")


def main():
    """Make the model, train, and print the metrics."""
    python = need_environment()
    with tempfile.TemporaryDirectory() as folder:
        call([python, "-P", "-s", "-c", PACKAGES], folder)
        call([python, "-P", "-s", "-m", "grpo_recipes.smoke", os.path.join(folder, "made"), "--untrained"], folder)
        model = os.path.join(folder, "made", "model")
        train(python, folder, [f"model.train_id={model}", *RANDOM])
        print("Train metrics:", metrics(folder, "train", TRAIN))
        print("Eval metrics:", metrics(folder, "eval", EVAL))


if __name__ == "__main__":
    main()
