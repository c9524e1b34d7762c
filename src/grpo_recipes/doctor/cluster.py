"""Checks of Slurm: the partitions it shows, the job we are in, and what of the header would keep a job pending."""

from __future__ import annotations

import re
import socket
from dataclasses import dataclass

from grpo_recipes.doctor.machine import Machine, NoAnswer
from grpo_recipes.paths import home
from grpo_recipes.runs.finding import Finding, ok, problem, warning
from grpo_recipes.slurm.job import slurm_job

# partition, its time limit, nodes, generic resources, state of the nodes, their names
_SINFO = ("sinfo", "-h", "-o", "%R|%l|%D|%G|%T|%N")
_NO_SLURM = "no Slurm here"
_UNUSABLE = ("down", "drain", "fail", "maint", "inval", "unk")


@dataclass(frozen=True)
class Nodes:
    """A line of sinfo: nodes of one partition in one state."""

    partition: str
    time_limit: str
    count: int
    gres: str
    state: str
    names: str

    @property
    def gpus(self) -> bool:
        """Whether they have GPUs."""
        return re.search(r"(^|,)gpu\b", self.gres) is not None

    @property
    def usable(self) -> bool:
        """Whether a job could start on them now or later."""
        return not any(word in self.state.lower() for word in _UNUSABLE)


def nodes_of(machine: Machine) -> list[Nodes] | None:
    """What sinfo shows; None without Slurm.

    Raises:
        NoAnswer: the controller does not answer.
    """
    answer = machine.ask(*_SINFO)
    if answer is None:
        return None
    if answer.code != 0:
        raise NoAnswer(f"sinfo fails: {answer.complaint}")
    rows = [line.split("|") for line in answer.out.splitlines()]
    return [Nodes(row[0], row[1], int(row[2]), *row[3:]) for row in rows if len(row) == 6]


def _told(machine: Machine) -> list[Nodes]:
    """What sinfo shows, nothing where it shows nothing: the check ``slurm`` says why."""
    try:
        return nodes_of(machine) or []
    except NoAnswer:
        return []


def slurm(machine: Machine) -> Finding:
    """Whether sbatch and sinfo are there, and the partitions and GPUs that Slurm shows."""
    try:
        nodes = nodes_of(machine)
    except NoAnswer as error:
        return warning(str(error), "load the site's Slurm module, or ask the admins: sbatch will not work either")
    if nodes is None:
        return ok(_NO_SLURM)
    if machine.ask("sbatch", "--version") is None:
        return warning("sinfo is there, sbatch is not", "load the site's Slurm module, or work on the login node")
    partitions = sorted({row.partition for row in nodes})
    granted = sorted({part for row in nodes for part in row.gres.split(",") if part.startswith("gpu")})
    what = f"partitions {', '.join(partitions) or 'none'}; {', '.join(granted) or 'no GPUs'}"
    if machine.flavour == "cuda" and not granted:
        return warning(what, "Slurm grants no GPUs here: ask the admins how they are asked for")
    if machine.flavour == "cpu" and granted:
        return warning(f"{what}, but this is a CPU environment", "to train on them: DEVICE=cuda make setup")
    return ok(what)


def nodes(machine: Machine) -> Finding:
    """Nodes that are down or drained; a problem where no node with GPUs is left."""
    found = _told(machine)
    if not found:
        return ok("not known: see slurm")
    wanted = [row for row in found if row.gpus] or found
    # a node of two partitions is in two lines, under one name
    lost = {row.names: f"{row.names} {row.state}" for row in wanted if not row.usable}
    usable = {row.names: row.count for row in wanted if row.usable}
    if not usable:
        return problem(f"none is up: {', '.join(lost.values())}", "sinfo -R says why; ask the admins")
    what = f"{sum(usable.values())} up" + (f", lost: {', '.join(lost.values())}" if lost else "")
    return ok(what)


def time_limit(machine: Machine) -> Finding:
    """Time limits of the partitions against the one in training.sh: a job that asks for more stays pending."""
    nodes = _told(machine)
    if not nodes:
        return ok("not known: see slurm")
    asked = re.search(r"^#SBATCH --time=(\S+)", (home() / "training.sh").read_text(), re.MULTILINE)
    wanted = asked[1] if asked else "0"
    short = {row.partition: row.time_limit for row in nodes if _minutes(row.time_limit) < _minutes(wanted)}
    if not short:
        return ok(f"{wanted} in training.sh, no partition ends earlier")
    what = ", ".join(f"{name} ends at {limit}" for name, limit in short.items())
    longest = max(short.values(), key=_minutes)
    fix = f"submit there with sbatch --time={longest} training.sh; a run that ends then is continued with --resume"
    return warning(f"{wanted} in training.sh, but {what}", fix)


def _minutes(text: str) -> float:
    """A time as Slurm writes it: days-hours:minutes:seconds, minutes:seconds, minutes, or infinite."""
    if not re.fullmatch(r"[\d:-]+", text):
        return float("inf")
    days, _, rest = text.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    if days:
        hours, minutes = (*parts, 0)[:2]
    elif len(parts) == 3:
        hours, minutes = parts[:2]
    else:
        hours, minutes = 0, parts[0]
    return int(days or 0) * 1440 + hours * 60 + minutes


def job(machine: Machine) -> Finding:
    """The Slurm job we are in: its nodes, and whether this is one of them."""
    found = slurm_job(machine.environment)
    if found is None:
        return ok("none: a login node, or a machine without Slurm")
    what = f"job {found.id} on {machine.environment.get('SLURM_JOB_NODELIST', '?')}"
    if "SLURMD_NODENAME" not in machine.environment:
        fix = "salloc leaves its shell on the login node: go on with srun --pty bash"
        return warning(f"{what}, but this is {socket.gethostname()}, outside it", fix)
    return ok(what)
