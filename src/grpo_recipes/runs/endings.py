"""Explain how a run ended, and give one line of advice.

The evidence is the run's ``summary.json``, its logs, and known messages of libraries in these logs. The functions that
return a ``Finding`` are checks of `grpo doctor`, which prints one line for each and names it after the function.

    print(advice(run, run.cause))
"""

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
from grpo_recipes.runs.checkpoints import list_checkpoint_folders, list_complete_checkpoints
from grpo_recipes.runs.commands import fill_commands, format_launch_command, format_test_command
from grpo_recipes.runs.rundir import Run

OK, WARNING, PROBLEM = "ok", "warning", "problem"
_SEVERITY = (OK, WARNING, PROBLEM)


@dataclass(frozen=True)
class Finding:
    """The result of one check."""

    status: str  # OK, WARNING or PROBLEM
    value: str  # the observation, one line
    fix: str = ""  # what to do, one line; empty if the status is OK


ok = partial(Finding, OK)
warning = partial(Finding, WARNING)  # a run may suffer from it
problem = partial(Finding, PROBLEM)  # a run fails because of it, or its results are wrong


def combine_findings(findings: Iterable[Finding]) -> Finding:
    """Combine the findings of one check to a single finding with the worst status.

    If a finding is not ok, the values and fixes of all findings that are not ok are joined, worst first; otherwise all
    values are joined. ``findings`` must not be empty.
    """
    worst_first = sorted(findings, key=lambda finding: -_SEVERITY.index(finding.status))
    reported = [finding for finding in worst_first if finding.status != OK] or worst_first
    fixes = dict.fromkeys(finding.fix for finding in reported if finding.fix)
    return Finding(worst_first[0].status, "; ".join(finding.value for finding in reported), "; ".join(fixes))


@dataclass(frozen=True)
class Message:
    """A known message of a library or the kernel, which appears if something outside the recipe is wrong."""

    pattern: str  # regular expression, found in one line of a log
    means: str
    fix: str  # with placeholders, see ``commands.py``


MESSAGES = (
    # vLLM: v1/worker/utils.py, v1/core/kv_cache_utils.py
    Message(r"Free memory on device .* is less than desired GPU memory utilization",
            "another process uses memory of the server's GPU",
            "end that process (grpo doctor shows it), use another GPU, or lower vllm_gpu_memory_utilization"),
    Message(r"No available memory for the cache blocks|larger than the available KV cache",
            "the server has too little memory for one sequence",
            "raise vllm_gpu_memory_utilization, or lower vllm_max_model_length"),
    # huggingface_hub
    Message(r"GatedRepoError|Cannot access gated repo", "the model or dataset is gated by a license",
            "accept the license on its page and log in: hf auth login"),
    Message(r"LocalEntryNotFoundError|OfflineModeIsEnabled|Cannot reach https://huggingface\.co"
            r"|couldn't connect to 'https://huggingface\.co",
            "a download was needed, but the hub cannot be reached from that node",
            "download first, on a node with internet: grpo fetch RECIPE"),
    # Error texts of the kernel. vLLM's advice about ulimit quotes one of them in backticks.
    Message(r"No space left on device|Disk quota exceeded", "a disk, /dev/shm or a quota was full",
            "find it with grpo doctor, then free space or lower save_total_limit"),
    Message(r"(?<!`)OSError: \[Errno 24\]|\(os error 24\)", "the limit of open files was reached",
            "run ulimit -n 65536 before sbatch"),
    Message(r"AF_UNIX path too long|ipc path .* is longer than \d+ characters", "TMPDIR is too long for unix sockets",
            "set TMPDIR to a short path on the node, e.g. /tmp"),
    Message(r"Bus error", "shared memory was full",
            "enlarge /dev/shm (docker run --shm-size); grpo doctor shows its size"),
    Message(r"Address already in use|EADDRINUSE", "another process had the port",
            "remove the port from recipe and variables, so that the launcher finds a free port"),
    # torch
    Message(r"Watchdog caught collective operation timeout|NCCL error|ncclSystemError|ncclRemoteError",
            "the training processes lost their connection",
            "find the process that died first in the log; NCCL_DEBUG=INFO logs more"),
    Message(r"CUDA driver version is insufficient|NVIDIA driver on your system is too old",
            "the NVIDIA driver is too old for this torch",
            "update the driver; grpo doctor shows its version"),
    Message(r"no kernel image is available for execution on the device",
            "torch or vLLM was not built for this GPU", "use a newer GPU, or build torch and vLLM for this GPU"),
    Message(r"uncorrectable ECC error|CUDA error: unspecified launch failure", "the GPU failed",
            "exclude the node (sbatch --exclude) and report it to the admins"),
    Message(r"CUDA error: (an illegal memory access|device-side assert)", "a kernel failed on the GPU",
            "resume with CUDA_LAUNCH_BLOCKING=1 exported: the traceback then names the kernel"),
    Message(r"ModuleNotFoundError: No module named", "a package is missing",
            "run make setup; grpo doctor shows it under versions"),
    # Slurm
    Message(r"DUE TO TIME LIMIT", "the job reached its time limit",
            "continue with grpo launch --resume RUN, and request more time"),
)  # fmt: skip
# Causes that the launcher and the trainers record, each with its fix. ``commands.py`` has the placeholders.
_CAUSES = {
    r"NotFinite":
        "start a new run with that change (grpo launch RECIPE), since a resume keeps the learning rate; to start from "
        "a checkpoint, set model_name_or_path: RUN/checkpoints/checkpoint-N",
    r"probability tensor contains either": "lower learning_rate: the model's probabilities are no longer finite",
    r"died before it was ready":
        "read its last lines above; grpo check --deep RECIPE loads the same model and libraries",
    r"was not ready after": "raise vllm_server_timeout, or read in its log why it waits",
    r"port \d+ was taken":
        "launch again to use another port (grpo launch RECIPE); a port set in the recipe must be free",
    r"RewardFailed": "fix the reward named there; test it with grpo check-rewards RECIPE",
    r"TooManyWithoutVerdict":
        "fix the reward named there, or raise reward_timeout; test with grpo check-rewards RECIPE",
    r"it is not started again": "fix the error; its traceback is in the log",
    r"BadAnswer": "read the reason in the server's log, named there",
    r"vLLM (API server|engine process)|vLLM server":
        "read the reason in its log; server_restarts: N restarts it up to N times",
    r"the launcher \(pid \d+\) died":
        "it was killed by a person, or by the kernel if memory ran out: see dmesg, and request more memory",
    r"planned \d+ processes|planned accelerator": "remove CONFIG_FILE, or change it to match the accelerator key",
}  # fmt: skip
_MEMORY_GPU = r"CUDA out of memory|torch\.OutOfMemoryError|torch\.cuda\.OutOfMemoryError|CUBLAS_STATUS_ALLOC_FAILED"
_MEMORY_HOST = (
    r"(?m)can't allocate memory|Cannot allocate memory|\boom[-_]kill|Out Of Memory|^MemoryError|std::bad_alloc"
)


def ending(run: Run) -> Finding:
    """Check status, exit code and cause of a run, as the launcher recorded them.

    Ok: completed, running or requeued by Slurm. Warning: stopped on request. Problem: failed, or the launcher was
    killed.
    """
    status, resume = run.summary.get("status", "unknown"), f"grpo launch --resume {shell_path(run.folder)}"
    steps = f"{run.summary.get('steps', len(run.rows))} steps"
    if status == "completed" or (status == "running" and run.is_running()):
        return ok(f"{status}, {steps}")
    if status == "running":
        observation = f"the launcher was killed after {len(run.rows)} steps, before it could record a cause"
        return problem(observation, f"continue with {resume}")
    cause = run.cause or "no cause recorded"
    observation = f"{status} with exit code {run.summary.get('exit_code')} after {steps}: {cause}"
    if status == "requeued":
        return ok(f"{observation}; Slurm starts it again")
    if status == "stopped":
        return warning(observation, f"continue with {resume}")
    return problem(observation, _join_reward_fix(run, run.cause) or f"fix the problem first (see below), then {resume}")


def checkpoints(run: Run) -> Finding:
    """Check for complete checkpoints, which a resume needs.

    Problem: only incomplete checkpoints, so a resume is rejected. Warning: none, so a resume starts at step 0. Ok if
    one is complete, the run is completed, or it has no steps.
    """
    folder = run.folder / "checkpoints"
    if complete := list_complete_checkpoints(folder):
        return ok(", ".join(path.name for path in complete))
    if run.summary.get("status") == "completed" or not run.rows:
        return ok("none")
    if damaged := list_checkpoint_folders(folder):
        observation = f"{', '.join(path.name for path in damaged)}: none complete, so a resume is rejected"
        fix = "start a new run with grpo launch RECIPE, or move checkpoints/ away to start again from step 0"
        return problem(observation, fill_commands(fix, run))
    fix = f"lower save_steps (now {run.value('save_steps'):g})"
    return warning("none complete, so a resume starts again from step 0", fix)


def server_log(run: Run) -> Finding:
    """Check the server's log, and find the error if the server died while starting. Ok for a run without a server.

    Warning: no log was found. Problem: the server died, or its log is empty and the run has no steps. Then the server
    did not start, perhaps because it got no GPUs.
    """
    if not any(process.get("role") == "server" for process in run.plan.get("processes", [])):
        return ok("no server in this run")
    if "server" not in run.logs:
        observation = "its log was not found (looked in logs/ of this folder and of the repository)"
        return warning(observation, "run grpo doctor in the folder where the run was started")
    path, text = run.logs["server"], run.texts["server"]
    if not text and not run.rows:
        fix = "check that GPUs were allocated: nvidia-smi -L in a job, sbatch --gres=gpu:8; see gpus in grpo doctor"
        return problem(f"{display_path(path)} is empty: the server never started", fix)
    if not run.rows and "died before it was ready" in run.cause:
        errors = re.findall(r"(?:^|\s)((?:[A-Za-z_.]*(?:Error|Exception|NotFound)): [^\n]{1,200})", text)
        last = errors[-1] if errors else "no error in its log"
        return problem(f"the server died while starting: {last}", f"read {display_path(path)}")
    return ok(f"{display_path(path)}, {path.stat().st_size // 1000} kB")


def out_of_memory(run: Run) -> Finding:
    """Check whether GPU or host memory ran out, or the kernel killed a process (problem); the fix names keys to change.

    Otherwise ok, also if there are no logs to search.
    """
    when = f"after {len(run.rows)} steps" if run.rows else "before the first step"
    for role, text in run.texts.items():
        if re.search(_MEMORY_GPU, text):
            fix = _suggest_server_memory_fix(run) if role == "server" else _suggest_trainer_memory_fix(run)
            return problem(f"the {role} ran out of GPU memory {when}", fix)
    roles = [role for role, text in run.texts.items() if re.search(_MEMORY_HOST, text)]
    more_memory = "more memory (sbatch --mem=128G)" if run.job_id else "more memory"
    fix = f"request {more_memory}, or lower {_describe_key(run, 'per_device_train_batch_size')}"
    if roles:
        return problem(f"the {roles[0]} ran out of host memory {when}", fix)
    if f"signal {signal.SIGKILL.value}" in run.cause:
        who = "by a person, or by the kernel because memory ran out"
        return problem(f"{run.cause} {when}: {who}", f"if dmesg shows that memory ran out, {fix}")
    return ok("no sign of it in the logs" if run.texts else "no logs found")


def _describe_key(run: Run, key: str) -> str:
    """Return a recipe key with its value in the run, for a fix: "save_steps (now 100)"."""
    return f"{key} (now {run.value(key)})"


def _suggest_server_memory_fix(run: Run) -> str:
    """Return the keys to change if the server ran out of GPU memory, with their current values."""
    keys = (_describe_key(run, key) for key in ("vllm_gpu_memory_utilization", "vllm_max_model_length"))
    return f"lower {' or '.join(keys)}"


def _suggest_trainer_memory_fix(run: Run) -> str:
    """Return the keys to change if a trainer ran out of GPU memory, with their current values, as one text."""
    per_device = run.value("per_device_train_batch_size")
    fixes = [] if run.value("gradient_checkpointing") else ["set gradient_checkpointing: true (now false)"]
    if per_device > 1:
        same_step = ", the step stays the same" if run.value("prompts_per_step") else ""
        fixes.append(f"set per_device_train_batch_size: {per_device // 2} (now {per_device}{same_step})")
    fixes.append(f"lower {_describe_key(run, 'max_completion_length')} or {_describe_key(run, 'num_generations')}")
    if run.plan.get("mode") == "colocate" or run.plan.get("bridge") == "shared":
        fixes.append(
            f"lower {_describe_key(run, 'vllm_gpu_memory_utilization')}, the share that vLLM uses of the same GPU"
        )
    elif run.value("accelerator") not in ("zero3", "fsdp2"):
        fixes.append("or set accelerator: zero3")
    return "; ".join(fixes)


def weights_guard(run: Run) -> Finding:
    """Check whether the weight guard stopped the run because vLLM and the trainer had different weights (problem).

    Warning: ``weight_guard: false``, so the weights were not compared.
    """
    if "WeightsDiffer" in run.cause or any("WeightsDiffer:" in text for text in run.texts.values()):
        bridge = run.plan.get("bridge") or run.plan.get("mode")
        alternative = ", or set weight_sync: file" if bridge == "nccl" else ""
        fix = f"look up the message on the Weights page of the docs{alternative}"
        return problem(f"vLLM and the trainer had different weights (sent through {bridge})", fix)
    if run.value("weight_guard") is False:
        observation = "weight_guard: false, so nothing proves which weights were sampled from"
        return warning(observation, "remove weight_guard: false")
    return ok("no difference found" if run.rows else "no step was sampled")


def known_messages(run: Run) -> Finding:
    """Check the logs of an unsuccessful run for ``MESSAGES``, known messages with a cause outside the recipe (problem).

    Ok for a completed run, and if no message is found.
    """
    if run.summary.get("status") == "completed":
        return ok("the run completed")
    texts = {**run.texts, "summary": run.cause}
    roles = {message: role for role, text in reversed(texts.items()) for message in _find_messages(text)}
    if not roles:
        return ok("none" if run.texts else "no logs found")
    messages = [message for message in MESSAGES if message in roles]
    observation = "; ".join(f"{message.means} ({roles[message]} log)" for message in messages)
    return problem(observation, fill_commands("; ".join(message.fix for message in messages), run))


def _find_messages(text: str) -> list[Message]:
    """Return the entries of ``MESSAGES`` with a pattern that occurs in a text."""
    return [message for message in MESSAGES if re.search(message.pattern, text)]


def find_reward_fix(run: Run, cause: str) -> list[tuple[str, str]]:
    """Return the fix if ``cause`` says that a user reward or a reward's server ended the run, otherwise an empty list.

    The fix is pairs of a text and the command that follows it. The run uses its copy of the reward's file. The user
    edits the file itself, and a flag of the resume updates the copy.
    """
    failed = re.search(r"(?:RewardFailed|TooManyWithoutVerdict).*?[Rr]eward '([^']+)'", cause)
    if failed is None or (":" not in failed[1] and NO_ANSWER not in cause):
        return []
    file = failed[1].rpartition(":")[0] or failed[1]
    launch, resume, flags, update = "start a new run", "resume", "", ""
    if variable := re.search(r"(?:set|write) reward_environment: \[(\w+)\]", cause):
        edit = f"export {variable[1]} before the launch and test the reward"
        flags = f" --reward_environment {variable[1]}"
    elif NO_ANSWER in cause:
        edit = f"start the server that {file} calls, or correct its address, and test it"
    elif not file.endswith(".py"):
        edit = f"fix {file} and test it"
    else:
        edit, update = f"fix {file} (not the run's copy) and test it", " --update-rewards"
        launch, resume = f"{launch}, which copies it again", "copy it again and resume"
        with suppress(ConfigError):  # a damaged recipe.yaml
            if changed_copies(run.value("reward_funcs"), run.folder / REWARD_COPIES):
                edit = f"test {file}, which has changed since this run's copy,"
    test = f"{edit} with ", format_test_command(run) + flags
    if not list_complete_checkpoints(run.folder / "checkpoints"):
        return [test, (f", then {launch}, since there is no checkpoint: ", format_launch_command(run) + flags)]
    slow = ", or raise reward_timeout (--reward_timeout N)" if "time limit" in cause else ""
    return [test, (f"{slow}, then {resume}: ", f"grpo launch --resume {shell_path(run.folder)}{flags}{update}")]


def _join_reward_fix(run: Run, cause: str) -> str:
    """Return the result of ``find_reward_fix`` as one text."""
    return "".join(text + command for text, command in find_reward_fix(run, cause))


def _find_lost_roles(run: Run, cause: str) -> list[str]:
    """Return the roles of the processes that the cause reports as dead: ``server``, or an extension's process."""
    if re.search(r"the vLLM (?:server died|API server|engine process)", cause):
        return ["server"]
    titles = {process.get("role", ""): process.get("title") for process in run.plan.get("processes", [])}
    return [role for role, title in titles.items() if title and re.search(rf"\b{re.escape(title)}\b", cause)]


def advice(run: Run, cause: str) -> str:
    """Return the fix of a failed run as text for the user: by its ``cause`` if that is known, else by its logs.

    There is always a fix; the last resort is to read the log. A known cause needs no file of the run, since files may
    be damaged, or missing after a full disk. Only if a server died, the reason is read from its log.
    """
    if fix := _join_reward_fix(run, cause):
        return fix
    fixes = [message.fix for message in _find_messages(cause)]
    with suppress(ConfigError):  # a file is damaged
        for role in _find_lost_roles(run, cause):  # only the log of that process has the reason
            if role == "server" and re.search(_MEMORY_GPU, run.texts.get(role, "")):
                fixes.append(_suggest_server_memory_fix(run))
            fixes += [message.fix for message in _find_messages(run.texts.get(role, ""))]
    known_causes = itertools.chain(*(causes.items() for causes in parts("advice")), _CAUSES.items())
    fixes += [fix for pattern, fix in known_causes if re.search(pattern, cause)]
    if fixes:
        return fill_commands(fixes[0], run)
    with suppress(ConfigError):  # a file is damaged
        checks = (weights_guard, out_of_memory)
        fixes += [finding.fix for check in checks if (finding := check(run)).status == PROBLEM]
        fixes += [message.fix for message in _find_messages("\n".join(run.texts.values()))]
    return fill_commands([*fixes, "read its log, or run grpo doctor --run RUN"][0], run)
