"""Checks of tokens, proxies, hosts and ports. Only the first characters of a token are ever looked at."""

from __future__ import annotations

import contextlib
import netrc
import re
import socket
import urllib.error
import urllib.request
from pathlib import Path
from urllib.parse import urlsplit

import psutil

from grpo_recipes.doctor.examine import Machine
from grpo_recipes.fetch.hub import endpoint, is_offline
from grpo_recipes.paths import shown
from grpo_recipes.plan.ports import DEFAULT_PORTS, is_free, listener, plan_ports
from grpo_recipes.recipe.keys import ENVIRONMENT_KEYS
from grpo_recipes.runs.finding import PROBLEM, WARNING, Finding, ok, problem, together, warning
from grpo_recipes.slurm.client import slurm_job

_WANDB = "https://api.wandb.ai"
_WANDB_OFF = ("offline", "disabled", "dryrun")
_SECONDS = 3.0
_PROXIES = ("http_proxy", "https_proxy", "all_proxy")


def hub_token(machine: Machine) -> Finding:
    """Whether there is a token of the hub (HF_TOKEN, or the file of `hf auth login`), and who may read it."""
    variables = machine.environment
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        if token := variables.get(name):
            if re.fullmatch(r"hf_\S+", token):
                return ok(f"{name} is set")
            fix = f"export {name}=hf_… without quotes or blanks around"
            return warning(f"{name} is set, but the hub makes no tokens like it", fix)
    folder = Path(variables.get("HF_HOME") or machine.home / ".cache/huggingface")
    path = Path(variables.get("HF_TOKEN_PATH") or folder / "token")
    if not path.is_file():
        return ok("none: public models and datasets only (hf auth login, or HF_TOKEN)")
    return _private(path, f"in {shown(path)}")


def _private(path: Path, what: str) -> Finding:
    """Return where a secret is, with a warning if others may read it."""
    mode = path.stat().st_mode & 0o777
    if mode & 0o077:
        return warning(f"{what}, which others may read (mode {mode:03o})", f"chmod 600 {shown(path)}")
    return ok(what)


def wandb_login(machine: Machine) -> Finding:
    """Whether there is a login of W&B (WANDB_API_KEY, or ~/.netrc), where the recipe reports to it."""
    if machine.environment.get("WANDB_API_KEY"):
        return ok("WANDB_API_KEY is set")
    path = Path(machine.environment.get("NETRC") or machine.home / ".netrc")
    host = urlsplit(machine.environment.get("WANDB_BASE_URL") or _WANDB).hostname or ""
    with contextlib.suppress(netrc.NetrcParseError, OSError):
        if netrc.netrc(path).authenticators(host) is not None:
            return _private(path, f"for {host} in {shown(path)}")
    if _reports_to_wandb(machine) and machine.environment.get("WANDB_MODE") not in _WANDB_OFF:
        return problem("none, and the recipe reports to W&B", "wandb login, or export WANDB_MODE=offline")
    return ok("none, none needed")


def _reports_to_wandb(machine: Machine) -> bool:
    return machine.recipe is not None and "wandb" in (machine.recipe["report_to"] or [])


def proxies(machine: Machine) -> Finding:
    """The proxies set, without their credentials; loopback never goes through them."""
    given = {name: value for name, value in machine.environment.items() if name.lower() in _PROXIES and value}
    if not given:
        return ok("none set")
    clashing = [name for name in given if name.islower() and given.get(name.upper(), given[name]) != given[name]]
    if clashing:
        return warning(f"{', '.join(clashing)} and its upper-case form differ", "set both to the same, or one of them")
    what = ", ".join(f"{name}={_bare(value)}" for name, value in sorted(given.items()))
    direct = machine.environment.get("no_proxy") or machine.environment.get("NO_PROXY") or ""
    return ok(what + ("" if "127.0.0.1" in direct.split(",") else " (NO_PROXY lacks 127.0.0.1: a run adds it)"))


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


def wandb_host(machine: Machine) -> Finding:
    """Whether W&B answers from here within 3 s, where the recipe reports to it."""
    mode = machine.environment.get("WANDB_MODE")
    if mode in _WANDB_OFF or not _reports_to_wandb(machine):
        return ok(f"not asked: WANDB_MODE={mode}" if mode in _WANDB_OFF else "not asked: no recipe here reports to it")
    fix = "export WANDB_MODE=offline and run wandb sync later, or report_to: none"
    return _answer(machine.environment.get("WANDB_BASE_URL") or _WANDB, PROBLEM, fix)


def _answer(address: str, status: str, fix: str) -> Finding:
    """Ask an address, and return ``status`` where it is silent; urllib takes the proxies from the variables itself."""
    request = urllib.request.Request(address, method="HEAD", headers={"User-Agent": "grpo-recipes"})
    silence = ""
    try:
        urllib.request.build_opener().open(request, timeout=_SECONDS).close()
    except urllib.error.HTTPError as error:
        # the host answers; only a proxy that refuses is in the way
        silence = "the proxy wants other credentials" if error.code == 407 else ""
    except (OSError, ValueError) as error:
        silence = str(getattr(error, "reason", error)) or type(error).__name__
    return Finding(status, f"{_bare(address)}: {silence}", fix) if silence else ok(f"{_bare(address)} answers")


def ports(machine: Machine) -> Finding:
    """Whether the ports of a run are free (8000, 51216, 29525 outside Slurm), and who holds them."""
    recipe = machine.recipe
    if recipe is not None:
        numbers = plan_ports(recipe, slurm_job(machine.environment)).by_key()
        return together(_port(key, port, recipe.given(key)) for key, port in numbers.items())
    if machine.in_job:
        return ok("a separate block of ports for the job")
    given = {key: machine.environment.get(name, "") for name, key in ENVIRONMENT_KEYS.items() if key in DEFAULT_PORTS}
    named = {key: int(text) for key, text in given.items() if text.isdigit()}
    return together(_port(key, port, key in named) for key, port in {**DEFAULT_PORTS, **named}.items())


def _port(key: str, port: int, given: bool) -> Finding:
    if is_free("0.0.0.0", port):
        return ok(f"{port} free")
    pid = listener(port)
    process = psutil.Process(pid) if pid else None
    holder = f"{process.name()} (pid {pid}, user {process.username()})" if process else "a process of another user"
    what = f"{port} ({key}) is held by {holder}"
    if given:
        return problem(what, f"free it, or name another {key}")
    return warning(what, "nothing: a launch takes the next free one")


def host_name(machine: Machine) -> Finding:
    """Whether this machine's own name has an address: training processes look it up to find each other."""
    name = socket.gethostname()
    try:
        return ok(f"{name} is {socket.gethostbyname(name)}")
    except OSError as error:
        return warning(f"{name} has no address ({error.strerror})", f"add {name} to /etc/hosts, or ask the admins")
