"""Check that the CUDA lock installs from the package index and imports, on a machine without a GPU.

    python bench/gpu_lock.py [--out bench/results/gpu_lock.json]

Runs ``DEVICE=cuda bash scripts/setup.sh`` in a new folder (about 10 GB, removed afterwards) and imports the packages of
a run there. This shows that the lock is complete and consistent. No kernel runs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
import time
from pathlib import Path

from made_by import begin, write_record

from grpo_recipes.paths import find_code_root

IMPORTS = """
import json
import deepspeed, torch, transformers, trl, vllm
import grpo_recipes.trainers.grpo, vllm.entrypoints.openai.api_server
print(json.dumps({one.__name__: one.__version__ for one in (torch, transformers, trl, vllm, deepspeed)}
                 | {"torch's CUDA": torch.version.cuda, "GPUs": torch.cuda.device_count()}))
"""


def main() -> None:
    """Install, import, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=find_code_root() / "bench/results/gpu_lock.json")
    options = parser.parse_args()
    origin = begin(options.out)
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "DEVICE": "cuda", "ENV_DIR": f"{folder}/env"}
        began = time.time()
        subprocess.run(["bash", str(find_code_root() / "scripts/setup.sh")], env=environment, check=True)
        seconds = time.time() - began
        python = f"{folder}/env/bin/python"
        listed = subprocess.run([python, "-m", "pip", "list", "--format=json"], capture_output=True, check=True)
        du = subprocess.run(["du", "-sb", f"{folder}/env"], capture_output=True, text=True, check=True)
        imported = subprocess.run([python, "-c", IMPORTS], capture_output=True, text=True, check=True)
    result = {
        "what": "DEVICE=cuda bash scripts/setup.sh on a new folder, then the imports of a run; no GPU",
        "packages": len(json.loads(listed.stdout)),
        "seconds": round(seconds),
        "gigabytes": round(int(du.stdout.split()[0]) / 1e9, 1),
        "imports": json.loads(imported.stdout.splitlines()[-1]),
    }
    write_record(options.out, result, origin)
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
