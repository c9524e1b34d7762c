"""The one line of advice at the end of a run that failed."""

from __future__ import annotations

import re
from pathlib import Path

from grpo_recipes.paths import shown
from grpo_recipes.runs.endings import MESSAGES, out_of_memory, weights_guard
from grpo_recipes.runs.find import RunFiles
from grpo_recipes.runs.finding import PROBLEM

# How the causes read that the launcher and the trainers note themselves, and what mends each.
_CAUSES = (
    (r"NotFinite", "start anew with that change (a resume keeps its learning rate); a checkpoint can be the model: "
     "model_name_or_path: RUN/checkpoints/checkpoint-N"),
    (r"probability tensor contains either", "the model gives no finite probabilities any more: lower learning_rate"),
    (r"died before it was ready", "its last lines are above; grpo check --deep RECIPE loads what it loads"),
    (r"was not ready after", "raise vllm_server_timeout, or see in its log what it waits for"),
    (r"port \d+ was taken", "launch again: another port is chosen; a port named in the recipe must be free"),
    (r"TooManyWithoutVerdict", "mend the reward it names, or raise reward_timeout; try it: grpo check-rewards RECIPE"),
    (r"vLLM (API server|engine process)|vLLM server", "its log has the reason; server_restarts: N restarts it N times"),
    (r"the launcher \(pid \d+\) died", "it was killed from outside: by a person, or by the kernel for want of memory"),
    (r"planned \d+ processes|planned accelerator", "remove CONFIG_FILE, or make it fit the accelerator key"),
)  # fmt: skip


def advice(folder: Path, cause: str) -> str:
    """What to do about a failed run: by its cause where that is known, else by what its logs say.

    Args:
        folder: the run directory.
        cause: as its ``summary.json`` has it, unless the disk is full.
    """
    run = RunFiles(folder)
    by_cause = [(message.pattern, message.fix) for message in MESSAGES] + list(_CAUSES)
    for pattern, fix in by_cause:
        if re.search(pattern, cause):
            return fix
    for finding in (weights_guard(run), out_of_memory(run)):
        if finding.status == PROBLEM:
            return finding.fix
    in_logs = [
        message.fix for message in MESSAGES if any(re.search(message.pattern, text) for text in run.texts.values())
    ]
    return in_logs[0] if in_logs else f"its log says more; grpo doctor --run {shown(folder)} looks further"
