"""Checks of tokens, proxies, hosts and ports. No token is ever read further than its first characters."""

from __future__ import annotations

import netrc
import socket
import stat
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

import psutil

from grpo_recipes.doctor.machine import Machine
from grpo_recipes.paths import shown
from grpo_recipes.plan.ports import plan_ports
from grpo_recipes.recipe import Recipe
from grpo_recipes.recipe.keys import ENVIRONMENT_KEYS
from grpo_recipes.runs.finding import Finding, ok, problem, together, warning
from grpo_recipes.slurm.job import slurm_job

HUB = "https://huggingface.co"
WANDB = "https://api.wandb.ai"
_SECONDS = 3.0
_PROXIES = ("http_proxy", "https_proxy", "all_proxy")
DEFAULT_PORTS = {"vllm_server_port": 8000, "vllm_group_port": 51216, "main_process_port": 29525}
_VARIABLES = {name: key for name, key in ENVIRONMENT_KEYS.items() if key in DEFAULT_PORTS}
_OFFLINE = ("1", "ON", "YES", "TRUE")  # as huggingface_hub reads HF_HUB_OFFLINE


def hub_token(machine: Machine) -> Finding:
    """Whether there is a token of the hub (HF_TOKEN, or the file of `hf auth login`), and who may read it."""
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        if token := machine.environment.get(name, ""):
            return _in_variable(name, token)
    path = token_file(machine)
    if not path.is_file():
        return ok("none: public models and datasets only (hf auth login, or HF_TOKEN)")
    return _private(path, f"in {shown(path)}")


def _in_variable(name: str, token: str) -> Finding:
    if token != token.strip() or not token.startswith("hf_"):
        return warning(
            f"{name} is set, but is no token as the hub makes them",
            f"export {name}=hf_… without quotes or blanks around",
        )
    return ok(f"{name} is set")


def token_file(machine: Machine) -> Path:
    """Where `hf auth login` writes."""
    home = machine.environment.get("HF_HOME") or Path(machine.environment.get("HOME", "/")) / ".cache/huggingface"
    return Path(machine.environment.get("HF_TOKEN_PATH") or Path(home) / "token")


def _private(path: Path, what: str) -> Finding:
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & 0o077:
        return warning(f"{what}, which others may read (mode {mode:03o})", f"chmod 600 {shown(path)}")
    return ok(what)


def wandb_login(machine: Machine) -> Finding:
    """Whether there is a login of W&B (WANDB_API_KEY, or ~/.netrc), where the recipe reports to it."""
    if machine.environment.get("WANDB_API_KEY"):
        return ok("WANDB_API_KEY is set")
    path = Path(machine.environment.get("NETRC") or Path(machine.environment.get("HOME", "/")) / ".netrc")
    host = urlsplit(machine.environment.get("WANDB_BASE_URL") or WANDB).hostname or ""
    if path.is_file() and _has_login(path, host):
        return _private(path, f"for {host} in {shown(path)}")
    mode = machine.environment.get("WANDB_MODE")
    if reports_to_wandb(machine.recipe) and mode not in ("offline", "disabled", "dryrun"):
        return problem("none, and the recipe reports to W&B", "wandb login, or export WANDB_MODE=offline")
    return ok("none, none needed")


def _has_login(path: Path, host: str) -> bool:
    try:
        return netrc.netrc(path).authenticators(host) is not None
    except netrc.NetrcParseError:
        return False


def reports_to_wandb(recipe: Recipe | None) -> bool:
    """Whether a recipe has ``report_to: wandb``."""
    return recipe is not None and "wandb" in (recipe["report_to"] or [])


def proxies(machine: Machine) -> Finding:
    """The proxies set, without their credentials; loopback is never asked of them."""
    given = {name: value for name, value in machine.environment.items() if name.lower() in _PROXIES and value}
    if not given:
        return ok("none set")
    values = {
        name.lower(): {value for other, value in given.items() if other.lower() == name.lower()} for name in given
    }
    if clashing := [name for name, found in values.items() if len(found) > 1]:
        return warning(f"{', '.join(clashing)} and its upper-case form differ", "set both to the same, or one of them")
    told = ", ".join(f"{name}={_bare(value)}" for name, value in sorted(given.items()))
    spared = machine.environment.get("no_proxy") or machine.environment.get("NO_PROXY") or ""
    loopback = "" if "127.0.0.1" in spared.split(",") else " (NO_PROXY lacks 127.0.0.1: a run adds it)"
    return ok(told + loopback)


def _bare(value: str) -> str:
    """Scheme, host and port of a proxy: what stands before the @ may be a password."""
    parts = urlsplit(value if "://" in value else f"http://{value}")
    return f"{parts.scheme}://{parts.hostname or '?'}{f':{parts.port}' if parts.port else ''}"


def hub(machine: Machine) -> Finding:
    """Whether the hub answers from here within 3 s, unless HF_HUB_OFFLINE says not to ask."""
    if any(
        machine.environment.get(name, "").upper() in _OFFLINE for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    ):
        return ok("not asked: HF_HUB_OFFLINE is set")
    fix = "fetch on a node that has a route: grpo fetch RECIPE; jobs then read with HF_HUB_OFFLINE=1"
    return _answer(machine.environment.get("HF_ENDPOINT") or HUB, warning, fix)


def wandb_host(machine: Machine) -> Finding:
    """Whether W&B answers from here within 3 s, where the recipe reports to it."""
    mode = machine.environment.get("WANDB_MODE")
    if mode in ("offline", "disabled", "dryrun"):
        return ok(f"not asked: WANDB_MODE={mode}")
    if not reports_to_wandb(machine.recipe):
        return ok("not asked: no recipe here reports to it")
    fix = "export WANDB_MODE=offline and run wandb sync later, or report_to: none"
    return _answer(machine.environment.get("WANDB_BASE_URL") or WANDB, problem, fix)


def _answer(address: str, when_silent: Callable[[str, str], Finding], fix: str) -> Finding:
    """Whether an address answers, and what to make of it where it does not."""
    silence = _silence(address)
    return ok(f"{_bare(address)} answers") if silence is None else when_silent(f"{_bare(address)}: {silence}", fix)


def _silence(address: str) -> str | None:
    """Why an address gave no answer, None when it did. urllib takes the proxies from the variables itself."""
    request = urllib.request.Request(address, method="HEAD", headers={"User-Agent": "grpo-recipes"})
    try:
        urllib.request.build_opener().open(request, timeout=_SECONDS).close()
    except urllib.error.HTTPError as error:
        # the host answers; only a proxy that refuses stands in the way
        return "the proxy wants other credentials" if error.code == 407 else None
    except urllib.error.URLError as error:
        return str(error.reason)
    except (OSError, ValueError) as error:
        return str(error) or type(error).__name__
    return None


def ports(machine: Machine) -> Finding:
    """Whether the ports of a run are free (8000, 51216, 29525 outside Slurm), and who holds them."""
    recipe = machine.recipe
    if recipe is not None:
        planned = plan_ports(recipe, slurm_job(machine.environment))
        numbers = dict(zip(DEFAULT_PORTS, (planned.server, planned.group, planned.main_process), strict=True))
        return together(_port(key, port, recipe.given(key)) for key, port in numbers.items())
    if machine.in_job:
        return ok("a block of ports of the job's own")
    given = {key: int(machine.environment[name]) for name, key in _VARIABLES.items() if _is_number(machine, name)}
    return together(_port(key, port, key in given) for key, port in {**DEFAULT_PORTS, **given}.items())


def _is_number(machine: Machine, name: str) -> bool:
    return machine.environment.get(name, "").isdigit()


def _port(key: str, port: int, given: bool) -> Finding:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("0.0.0.0", port))
            return ok(f"{port} free")
        except OSError:
            what = f"{port} ({key}) is held by {_holder(port)}"
    if given:
        return problem(what, f"free it, or name another {key}")
    return warning(what, "nothing: a launch takes the next free one")


def _holder(port: int) -> str:
    for connection in psutil.net_connections(kind="tcp"):
        if connection.status == psutil.CONN_LISTEN and connection.laddr and connection.laddr.port == port:
            if connection.pid is None:
                break
            process = psutil.Process(connection.pid)
            return f"{process.name()} (pid {process.pid}, user {process.username()})"
    return "a process of another user"


def host_name(machine: Machine) -> Finding:
    """Whether this machine's own name has an address: training processes look it up to find each other."""
    name = socket.gethostname()
    try:
        return ok(f"{name} is {socket.gethostbyname(name)}")
    except OSError as error:
        return warning(f"{name} has no address ({error.strerror})", f"add {name} to /etc/hosts, or ask the admins")
