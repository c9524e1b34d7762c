"""Checks that import torch, vLLM and TRL, in a child process with a time limit: ``--deep`` alone runs them."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from grpo_recipes.doctor.machine import Machine, NoAnswer
from grpo_recipes.plan.environment import base_environment
from grpo_recipes.runs.finding import Finding, ok, problem, warning

_TORCH = """
import json, torch
gpus = torch.cuda.is_available() and torch.cuda.device_count() or 0
if gpus:
    (torch.ones(64, 64, device="cuda") @ torch.ones(64, 64, device="cuda")).sum().item()
print(json.dumps({
    "version": torch.__version__, "gpus": gpus, "cuda": torch.version.cuda, "threads": torch.get_num_threads(),
    "bf16": bool(gpus) and torch.cuda.is_bf16_supported(),
    "nccl": ".".join(map(str, torch.cuda.nccl.version())) if gpus else None,
}))
"""
_TRL = "import trl, json; from trl import GRPOTrainer, GRPOConfig; print(json.dumps(trl.__version__))"
_VLLM = "import vllm, json; import vllm.entrypoints.openai.api_server; print(json.dumps(vllm.__version__))"
_SETUP = "run bash scripts/setup.sh --rebuild"


def torch(machine: Machine) -> Finding:
    """torch imports, and computes on the GPUs it sees (--deep)."""
    found = _child(machine, _TORCH)
    if isinstance(found, Finding):
        return found
    what = f"{found['version']}, {found['gpus']} GPUs" + (f", NCCL {found['nccl']}" if found["nccl"] else "")
    if machine.flavour == "cuda" and not found["gpus"]:
        return problem(what, "see driver and gpus above")
    if found["gpus"] and not found["bf16"]:
        return warning(f"{what}, no bfloat16", "write bf16: false and dtype: float32")
    return ok(f"{what}, {found['threads']} threads")


def trl(machine: Machine) -> Finding:
    """TRL's GRPO trainer imports (--deep)."""
    found = _child(machine, _TRL)
    return found if isinstance(found, Finding) else ok(str(found))


def vllm(machine: Machine) -> Finding:
    """vLLM's server imports (--deep)."""
    found = _child(machine, _VLLM)
    return found if isinstance(found, Finding) else ok(str(found))


def _child(machine: Machine, program: str) -> Any:
    """What a Python child printed last, as JSON, or a finding when it failed. Its environment is that of a run."""
    variables = {**base_environment(machine.environment), "PYTHONNOUSERSITE": "1"}
    try:
        done = subprocess.run(
            [sys.executable, "-c", program],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=machine.patience,
            env=variables,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise NoAnswer(f"its import did not end within {machine.patience:.0f} s") from None
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"ended by signal {-done.returncode}"]
        return problem(lines[-1], _SETUP)
    return json.loads(done.stdout.strip().splitlines()[-1])
