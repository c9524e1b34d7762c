"""How a run ended: its summary, its logs, known messages in them, and one line of advice; findings of any check."""

import itertools
import re
import signal
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from grpo_recipes.errors import ConfigError
from grpo_recipes.paths import display_path, shell_path
from grpo_recipes.recipe.extensions import parts
from grpo_recipes.recipe.registry import NO_ANSWER
from grpo_recipes.recipe.user_code import REWARD_COPIES, changed_copies
from grpo_recipes.runs.checkpoints import checkpoint_folders, complete_checkpoints
from grpo_recipes.runs.rundir import Run

OK, WARNING, PROBLEM = "ok", "warning", "problem"
_SEVERITY = (OK, WARNING, PROBLEM)


@dataclass(frozen=True)
class Finding:
    """One check's result."""

    status: str
    value: str  # what was found, one line
    fix: str = ""  # what to do, one line; empty when ok


ok = partial(Finding, OK)
warning = partial(Finding, WARNING)  # a run may suffer from it
problem = partial(Finding, PROBLEM)  # a run fails on it, or is not what it seems


def combine_findings(findings: Iterable[Finding]) -> Finding:
    """Return findings of one check as one: the worst status with all that is not ok, the worst first."""
    found = sorted(findings, key=lambda finding: -_SEVERITY.index(finding.status))
    named = [finding for finding in found if finding.status != OK] or found
    fixes = dict.fromkeys(finding.fix for finding in named if finding.fix)
    return Finding(found[0].status, "; ".join(finding.value for finding in named), "; ".join(fixes))


@dataclass(frozen=True)
class Message:
    """A message that libraries write when something outside the recipe is wrong; one line of the log is enough."""

    pattern: str
    means: str
    fix: str


MESSAGES = (
    # vLLM: v1/worker/utils.py, v1/core/kv_cache_utils.py
    Message(r"Free memory on device .* is less than desired GPU memory utilization",
            "another process holds memory of the server's GPU",
            "end it or take another GPU (grpo doctor shows who), or lower vllm_gpu_memory_utilization"),
    Message(r"No available memory for the cache blocks|larger than the available KV cache",
            "the server has too little memory for one sequence",
            "raise vllm_gpu_memory_utilization, or lower vllm_max_model_length"),
    # huggingface_hub
    Message(r"GatedRepoError|Cannot access gated repo", "the model or dataset is behind a licence",
            "accept it on its page and log in: hf auth login"),
    Message(r"LocalEntryNotFoundError|OfflineModeIsEnabled|Cannot reach https://huggingface\.co"
            r"|couldn't connect to 'https://huggingface\.co",
            "something had to be downloaded and the hub does not answer from there",
            "bring it first: grpo fetch RECIPE"),
    # the kernel's error texts; vLLM's own advice about ulimit quotes one of them in backticks
    Message(r"No space left on device|Disk quota exceeded", "a disk, /dev/shm or a quota was full",
            "grpo doctor shows which; make room, lower save_total_limit"),
    Message(r"(?<!`)OSError: \[Errno 24\]|\(os error 24\)", "the limit of open files was reached",
            "ulimit -n 65536 before sbatch"),
    Message(r"AF_UNIX path too long|ipc path .* is longer than \d+ characters", "TMPDIR is too long for unix sockets",
            "set TMPDIR to a short path on the node, e.g. /tmp"),
    Message(r"Bus error", "shared memory was full", "make /dev/shm larger (docker run --shm-size), see grpo doctor"),
    Message(r"Address already in use|EADDRINUSE", "another process had the port",
            "remove the port from recipe and variables: the launcher then finds a free one"),
    # torch
    Message(r"Watchdog caught collective operation timeout|NCCL error|ncclSystemError|ncclRemoteError",
            "the training processes lost each other",
            "look for the process that died first in the log; NCCL_DEBUG=INFO shows more"),
    Message(r"CUDA driver version is insufficient|NVIDIA driver on your system is too old",
            "the driver is too old for this torch", "see gpus in grpo doctor"),
    Message(r"no kernel image is available for execution on the device",
            "torch or vLLM was not built for this GPU", "take a newer GPU, or build for it"),
    Message(r"uncorrectable ECC error|CUDA error: unspecified launch failure", "the GPU failed",
            "leave the node out (sbatch --exclude) and report it to the admins"),
    Message(r"ModuleNotFoundError: No module named", "a package is missing",
            "run make setup; see versions in grpo doctor"),
    # Slurm
    Message(r"DUE TO TIME LIMIT", "the job's time was over", "grpo launch --resume continues it; ask for more time"),
)  # fmt: skip
# Causes that the launcher and the trainers note themselves, and what to do about each.
_CAUSES = {
    r"NotFinite": "start anew with that change (a resume keeps its learning rate); a checkpoint can be the model: "
                  "model_name_or_path: RUN/checkpoints/checkpoint-N",
    r"probability tensor contains either": "the model gives no finite probabilities any more: lower learning_rate",
    r"died before it was ready": "its last lines are above; grpo check --deep RECIPE loads what it loads",
    r"was not ready after": "raise vllm_server_timeout, or see in its log what it waits for",
    r"port \d+ was taken": "launch again: another port is chosen; a port named in the recipe must be free",
    r"RewardFailed": "correct the reward it names: grpo check-rewards RECIPE",
    r"TooManyWithoutVerdict": "correct the reward it names, or raise reward_timeout: grpo check-rewards RECIPE",
    r"it is not started again": "correct what the error says; the log has its traceback",
    r"BadAnswer": "the server's log, which it names, has the reason",
    r"vLLM (API server|engine process)|vLLM server":
        "its log has the reason; server_restarts: N restarts it N times",
    r"the launcher \(pid \d+\) died": "it was killed from outside: by a person, or by the kernel for want of memory",
    r"planned \d+ processes|planned accelerator": "remove CONFIG_FILE, or make it fit the accelerator key",
}  # fmt: skip
_MEMORY_GPU = r"CUDA out of memory|torch\.OutOfMemoryError|torch\.cuda\.OutOfMemoryError|CUBLAS_STATUS_ALLOC_FAILED"
_MEMORY_HOST = (
    r"(?m)can't allocate memory|Cannot allocate memory|\boom[-_]kill|Out Of Memory|^MemoryError|std::bad_alloc"
)


def ending(run: Run) -> Finding:
    """Status, exit code and cause, as the launcher noted them."""
    status, resume = run.summary.get("status", "unknown"), f"grpo launch --resume {shell_path(run.folder)}"
    steps = f"{run.summary.get('steps', len(run.rows))} steps"
    if status == "completed" or (status == "running" and run.is_running()):
        return ok(f"{status}, {steps}")
    if status == "running":
        what = f"the launcher was killed after {len(run.rows)} steps, before it could say why"
        return problem(what, f"continue with {resume}")
    what = f"{status} with exit code {run.summary.get('exit_code')} after {steps}: {run.cause or 'no cause noted'}"
    if status == "requeued":
        return ok(f"{what}; Slurm starts it again")
    if status == "stopped":
        return warning(what, f"continue with {resume}")
    return problem(what, reward_fix(run, run.cause) or f"correct it first (see below), then {resume}")


def checkpoints(run: Run) -> Finding:
    """Complete checkpoints, from which the run can go on."""
    folder = run.folder / "checkpoints"
    if found := complete_checkpoints(folder):
        return ok(", ".join(path.name for path in found))
    if run.summary.get("status") == "completed" or not run.rows:
        return ok("none")
    if damaged := checkpoint_folders(folder):
        what = f"{', '.join(path.name for path in damaged)}: none complete, so that a resume is refused"
        return problem(what, "launch the recipe as a new run, or move checkpoints/ away to start again from step 0")
    fix = f"lower save_steps (now {run.value('save_steps'):g})"
    return warning("none complete: a resume starts again from step 0", fix)


def server_log(run: Run) -> Finding:
    """Whether the server wrote anything: an empty log means that it did not start, as without its GPUs."""
    if not any(process.get("role") == "server" for process in run.plan.get("processes", [])):
        return ok("no server in this run")
    if "server" not in run.logs:
        what = "its log is not here (looked in logs/ of this folder and of the repository)"
        return warning(what, "run grpo doctor where the run was started")
    path, text = run.logs["server"], run.texts["server"]
    if not text and not run.rows:
        fix = "were GPUs allocated? nvidia-smi -L in a job, sbatch --gres=gpu:8; see gpus and slurm in grpo doctor"
        return problem(f"{display_path(path)} is empty: the server never started", fix)
    if not run.rows and "died before it was ready" in run.cause:
        errors = re.findall(r"(?:^|\s)((?:[A-Za-z_.]*(?:Error|Exception|NotFound)): [^\n]{1,200})", text)
        last = errors[-1] if errors else "no error in its log"
        return problem(f"the server died while starting: {last}", f"read {display_path(path)}")
    return ok(f"{display_path(path)}, {path.stat().st_size // 1000} kB")


def out_of_memory(run: Run) -> Finding:
    """In which process GPU or host memory ran out, and which keys to change, with their values."""
    when = f"after {len(run.rows)} steps" if run.rows else "before the first step"
    for role, text in run.texts.items():
        if re.search(_MEMORY_GPU, text):
            server = f"lower {_now(run, 'vllm_gpu_memory_utilization')} or {_now(run, 'vllm_max_model_length')}"
            fix = server if role == "server" else _trainer_memory_fix(run)
            return problem(f"the {role} ran out of GPU memory {when}", fix)
    what = [f"the {role} ran out of host memory" for role, text in run.texts.items() if re.search(_MEMORY_HOST, text)]
    more = "more memory (sbatch --mem=128G)" if run.job_id else "more memory"
    fix = f"ask for {more}, or lower {_now(run, 'per_device_train_batch_size')}"
    if what:
        return problem(f"{what[0]} {when}", fix)
    if f"signal {signal.SIGKILL.value}" in run.cause:
        who = "by a person, or by the kernel for want of memory"
        return problem(f"{run.cause} {when}: {who}", f"if memory ran out, which dmesg says, {fix}")
    return ok("no sign of it in the logs" if run.texts else "no logs to look in")


def _now(run: Run, key: str) -> str:
    return f"{key} (now {run.value(key)})"


def _trainer_memory_fix(run: Run) -> str:
    per_device = run.value("per_device_train_batch_size")
    keys = [] if run.value("gradient_checkpointing") else ["write gradient_checkpointing: true (now false)"]
    if per_device > 1:
        same = ", the step stays the same" if run.value("prompts_per_step") else ""
        keys.append(f"write per_device_train_batch_size: {per_device // 2} (now {per_device}{same})")
    keys.append(f"lower {_now(run, 'max_completion_length')} or {_now(run, 'num_generations')}")
    if run.plan.get("mode") == "colocate" or run.plan.get("bridge") == "shared":
        keys.append(f"lower {_now(run, 'vllm_gpu_memory_utilization')}, which vLLM takes of the same GPU")
    elif run.value("accelerator") not in ("zero3", "fsdp2"):
        keys.append("or write accelerator: zero3")
    return "; ".join(keys)


def weights_guard(run: Run) -> Finding:
    """Whether the guard found other weights in the server than in the trainer."""
    said = [role for role, text in run.texts.items() if "WeightsDiffer:" in text]
    if "WeightsDiffer" in run.cause or said:
        bridge = run.plan.get("bridge") or run.plan.get("mode")
        other = "; weight_sync: file is another way" if bridge == "nccl" else ""
        fix = f"the Weights page of the docs says what each message means{other}"
        return problem(f"vLLM had other weights than the trainer (through {bridge})", fix)
    if run.value("weight_guard") is False:
        what = "weight_guard: false: nothing proves which weights were sampled from"
        return warning(what, "remove weight_guard: false")
    return ok("found nothing wrong" if run.rows else "no step was sampled")


def known_messages(run: Run) -> Finding:
    """Messages in the logs that are known to come from outside the recipe."""
    if run.summary.get("status") == "completed":
        return ok("the run completed")
    texts = {**run.texts, "summary": run.cause}
    found = {message: role for role, text in reversed(texts.items()) for message in _messages_in(text)}
    if not found:
        return ok("none" if run.texts else "no logs to look in")
    first = [message for message in MESSAGES if message in found]
    what = "; ".join(f"{message.means} ({found[message]} log)" for message in first)
    return problem(what, "; ".join(message.fix for message in first))


def _messages_in(text: str) -> list[Message]:
    return [message for message in MESSAGES if re.search(message.pattern, text)]


def reward_fix(run: Run, cause: str) -> str:
    """Return what to do where a reward of the user's ended the run, an empty text where none did.

    The run has a copy of its file, so that a resume alone would fail again.
    """
    failed = re.search(r"(?:RewardFailed|TooManyWithoutVerdict).*?[Rr]eward '([^']+):\w+'", cause)
    if failed is None:
        return ""
    file, resume = failed[1], f"grpo launch --resume {shell_path(run.folder)}"
    if wanted := re.search(r"write reward_environment: \[(\w+)\]", cause):
        edit, resume = f"export {wanted[1]} where you launch", f"{resume} --reward_environment {wanted[1]}"
    elif NO_ANSWER in cause:
        edit = f"start the server that {file} asks, or correct its address"
    elif not file.endswith(".py"):
        edit = f"correct {file}"
    else:
        edit, resume = f"edit {file}, of which the run has a copy", f"{resume} --update-rewards"
        with suppress(ConfigError):  # a damaged recipe.yaml
            if changed_copies(run.value("reward_funcs"), run.folder / REWARD_COPIES):
                edit = f"{file} has changed since this run's copy of it: try it"
    if not complete_checkpoints(run.folder / "checkpoints"):
        return f"{edit} (grpo check-rewards RECIPE), then launch the recipe anew: there is no checkpoint"
    slow = ", or raise reward_timeout (--reward_timeout N)" if "time limit" in cause else ""
    return f"{edit} (grpo check-rewards RECIPE){slow}, then {resume}"


def _lost_roles(run: Run, cause: str) -> list[str]:
    """Return the roles of processes whose loss is the cause: the server, or processes of extensions by their titles."""
    if re.search(r"the vLLM (?:server died|API server|engine process)", cause):
        return ["server"]
    titles = {process.get("role", ""): process.get("title") for process in run.plan.get("processes", [])}
    return [role for role, title in titles.items() if title and re.search(rf"\b{re.escape(title)}\b", cause)]


def advice(run: Run, cause: str) -> str:
    """Return what to do about a failed run: by its ``cause`` where that is known, else by what its logs say.

    A known cause reads no file of the run, which may be damaged, or unwritten on a full disk; that of a server which
    died is looked for in its log.
    """
    if fix := reward_fix(run, cause):
        return fix
    fixes = [message.fix for message in _messages_in(cause)]
    with suppress(ConfigError):  # a file is damaged
        for role in _lost_roles(run, cause):  # only its own log has the reason
            fixes += [message.fix for message in _messages_in(run.texts.get(role, ""))]
    known = itertools.chain(*(causes.items() for causes in parts("advice")), _CAUSES.items())
    fixes += [fix for pattern, fix in known if re.search(pattern, cause)]
    if fixes:
        return fixes[0]
    with suppress(ConfigError):  # a file is damaged
        fixes += [finding.fix for look in (weights_guard, out_of_memory) if (finding := look(run)).status == PROBLEM]
        fixes += [message.fix for message in _messages_in("\n".join(run.texts.values()))]
    return [*fixes, f"its log says more; grpo doctor --run {shell_path(run.folder)} looks further"][0]
