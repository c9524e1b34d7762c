"""Check in seconds that a node can run a recipe, before anything heavy starts.

The checks cover packages, scratch folders (inodes, shared memory, socket names) and the limit of open files. With
GPUs, they also cover the driver, compilers, cores and memory. Ports are checked elsewhere.

The limits are defined only here. `grpo doctor` shows them, `grpo launch` checks them on every node, and `grpo submit`
checks the resources that a job requests.
"""

import contextlib
import importlib.metadata
import importlib.util
import math
import os
import re
import resource
import shutil
import sysconfig
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil

from grpo_recipes.errors import Problem, config_error
from grpo_recipes.plan.devices import run_nvidia_smi
from grpo_recipes.process.reports import format_bytes
from grpo_recipes.process.scratch import SHARED_MEMORY, node_folder
from grpo_recipes.recipe.registry import COLOCATE, built_for_cpu

# Oldest driver branch for a CUDA major version (NVIDIA, CUDA minor version compatibility, table 1).
_OLDEST_DRIVER = {"11": 450, "12": 525, "13": 580}
# A GPU needs two cores: one for its process and one for data, rewards or the engine. Its process with torch, CUDA and
# vLLM takes 4 to 6 GB of the machine's memory before it loads weights.
_LEAST_CORES, _LEAST_MEMORY = 2, 8e9
GOOD_CORES, GOOD_GIB = 8, 32  # for each GPU, as in the shipped profiles
FEWEST_INODES = 500  # new files of a run: checkpoints, logs, records, compiled kernels
FEWEST_FILES = 1024  # open files: vLLM and torch use one for each connection, engine and shared tensor
_MANY_FILES = 65536
FLASHINFER_SAMPLER = "VLLM_USE_FLASHINFER_SAMPLER"
SHARED_BYTES = 320 * 2**20  # ten chunks of 24 MiB for the message queue of a vLLM engine, and buffers of NCCL or torch
SOCKET_BYTES = 107  # sizeof(sockaddr_un.sun_path) - 1
# A run's folder below TMPDIR, and a uuid, with which vLLM names its sockets.
_SOCKET_NAME = "/grpo-xxxxxxxx/" + 36 * "x"
_TORCH_COMPANIONS = ("torchvision", "torchaudio", "torchcodec")
_CGROUPS = Path("/sys/fs/cgroup")
_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def node_problems(gpus: int, environment: Mapping[str, str]) -> list[Problem]:
    """Return the problems of this node that would end a run with ``gpus`` GPUs on it.

    The checks cover scratch folders and file limits, and with GPUs the driver, compilers, cores and memory.
    """
    problems = list(_find_scratch_problems(environment))
    if gpus:
        version = (run_nvidia_smi("--query-gpu=driver_version", "--format=csv,noheader") or "").split("\n")[0].strip()
        if driver_problem := find_driver_problem(version, environment):
            problems.append(Problem("NVIDIA driver", *driver_problem))
        problems += [*compiler_problems(environment), *sampler_problems(environment)]
        cores, (memory, _) = min(len(os.sched_getaffinity(0)), cgroup_cores()), cgroup_memory()
        most_cores, most_memory = os.cpu_count() or 1, psutil.virtual_memory().total
        for shortage, option in find_shortages(gpus, cores, memory, most_cores, most_memory):
            fix = f"add the line #SBATCH {option}, or submit with sbatch {option}"
            fix = fix if environment.get("SLURM_JOB_ID") else f"request {option}"
            problems.append(Problem("this node", shortage, fix))
    return problems


def require_packages(mode: str) -> None:
    """Raise ConfigError if vLLM is missing in a run that uses it, or if packages for CUDA break the torch for CPU."""
    if packages := cuda_packages_with_cpu_torch():
        problem = f"{', '.join(packages)} for CUDA can't be combined with torch for CPU: importing a model fails"
        raise config_error("environment", problem, f"pip uninstall {' '.join(packages)}")
    if mode in ("server", COLOCATE) and importlib.util.find_spec("vllm") is None:
        device = "cpu" if built_for_cpu() else "cuda"
        fix = f"run make setup, or pip install -e '.[{device}]', or uv sync --extra {device}"
        raise config_error("environment", "this run needs vLLM, but it is not installed", fix)


def cuda_packages_with_cpu_torch() -> list[str]:
    """Return packages such as torchvision that are built for CUDA although torch is built for CPU.

    PyPI only has builds for CUDA.
    """
    versions = {
        name: distribution.version
        for name in _TORCH_COMPANIONS
        for distribution in importlib.metadata.distributions(name=name)
    }
    return [name for name, version in versions.items() if built_for_cpu() and not version.endswith("+cpu")]


def find_shortages(
    gpus: int, cores: float, memory: float, most_cores: float = math.inf, most_memory: float = math.inf
) -> list[tuple[str, str]]:
    """Return pairs of a shortage, as text, and the sbatch option that fixes it, for ``gpus`` GPUs on a node.

    ``cores`` and ``memory`` (in bytes) are the available resources. A shortage is not reported if the whole node, with
    ``most_cores`` and ``most_memory``, has too little.
    """
    shortages = []
    if cores < _LEAST_CORES * gpus <= most_cores:
        enough = min(GOOD_CORES * gpus, most_cores)
        shortages.append((f"{cores:g} cores for {gpus} GPUs, at least {_LEAST_CORES * gpus} are needed",
                          f"--cpus-per-task={enough:g}"))  # fmt: skip
    if memory < _LEAST_MEMORY * gpus <= most_memory:
        enough = min(GOOD_GIB * gpus, most_memory // 2**30)
        least = format_bytes(_LEAST_MEMORY * gpus)
        shortages.append((f"{format_bytes(memory)} of memory for {gpus} GPUs, at least {least} are needed",
                          f"--mem={enough:g}G"))  # fmt: skip
    return shortages


def parse_slurm_bytes(text: str | None) -> float:
    """Return the bytes of a value of Slurm's ``--mem``, such as 64G; a number without a unit is in megabytes.

    The result is infinite for None, for text in another format, and for 0, which requests the whole node.
    """
    match = re.fullmatch(r"(\d+)([KMGT]?)B?", (text or "0").strip().upper())
    return int(match[1]) * _UNITS[match[2] or "M"] if match and int(match[1]) else math.inf


def find_driver_problem(version: str, environment: Mapping[str, str]) -> tuple[str, str] | None:
    """Return (problem, fix) if the NVIDIA driver ``version`` is too old for the CUDA of the installed torch, else None.

    NVIDIA's forward-compatibility libraries in LD_LIBRARY_PATH make an old driver acceptable.
    """
    cuda = read_torch_cuda()
    if cuda is None or not version.split(".")[0].isdigit():
        return None
    oldest = _OLDEST_DRIVER.get(cuda.split(".")[0], max(_OLDEST_DRIVER.values()))
    folders = environment.get("LD_LIBRARY_PATH", "").split(os.pathsep)
    if int(version.split(".")[0]) >= oldest or any(
        "compat" in folder and list(Path(folder).glob("libcuda.so*")) for folder in folders
    ):
        return None
    problem = f"driver {version} is too old for torch for CUDA {cuda}"
    return problem, f"request a node with driver branch {oldest} or newer, or load the site's cuda-compat module"


def read_torch_cuda() -> str | None:
    """Read the CUDA version of the installed torch from its files, without an import.

    Return None for a CPU build or without torch.
    """
    spec = importlib.util.find_spec("torch")
    text = (Path(spec.origin).parent / "version.py").read_text() if spec and spec.origin else ""
    match = re.search(r"^cuda\b[^=\n]*= *'([\d.]+)'", text, re.MULTILINE)
    return match and match[1]


def compiler_problems(environment: Mapping[str, str]) -> Iterator[Problem]:
    """Yield a Problem if the C compiler or Python.h is missing; Triton compiles C code for each kernel."""
    compiler = environment.get("CC")
    if not any(shutil.which(name) for name in ([compiler] if compiler else ["gcc", "clang"])):
        names = f"CC={compiler}" if compiler else "gcc or clang"
        problem = f"no C compiler found ({names}), which Triton needs to build kernels"
        yield Problem("C compiler", problem, "load the site's module: MODULES=gcc sbatch ..., or apt-get install gcc")
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if not header.is_file():
        fix = "apt-get install python3-dev, or set up with a Python that has it: PYTHON=FILE make setup"
        yield Problem("Python.h", f"{header} not found, which Triton needs to build kernels", fix)


def sampler_problems(environment: Mapping[str, str]) -> Iterator[Problem]:
    """Yield a Problem if VLLM_USE_FLASHINFER_SAMPLER is 1, but nvcc, which compiles the sampler, is missing."""
    toolkits = [Path(environment.get(name) or "/usr/local/cuda") for name in ("CUDA_HOME", "CUDA_PATH")]
    path = environment.get("PATH")
    if environment.get(FLASHINFER_SAMPLER) != "1" or any((toolkit / "bin/nvcc").is_file() for toolkit in toolkits):
        return
    if shutil.which("nvcc", path=path) is None:
        problem = "FlashInfer's sampler needs nvcc to compile it, but nvcc was not found"
        yield Problem(FLASHINFER_SAMPLER, problem, f"unset {FLASHINFER_SAMPLER}, or load the site's CUDA module (nvcc)")


def _find_scratch_problems(environment: Mapping[str, str]) -> Iterator[Problem]:
    """Yield a Problem for each cause of a crash at vLLM's start that this node has.

    These are long socket names, few inodes, a low limit of open files, and little free shared memory.
    """
    temporary = node_folder(environment)
    if (length := socket_length(temporary)) > SOCKET_BYTES:
        problem = f"{temporary} is too long for a unix socket ({length} of {SOCKET_BYTES} bytes)"
        yield Problem("TMPDIR", problem, "export TMPDIR=/tmp, or another short folder on the node")
    for name, folder in (("TMPDIR", temporary), (str(SHARED_MEMORY), SHARED_MEMORY)):
        if folder.is_dir() and (shortage := describe_inode_shortage(folder)):
            fix = "remove leftover files there (grpo doctor), or mount it with more inodes"
            yield Problem(name, f"{shortage} in {folder}", "set TMPDIR to another disk" if name == "TMPDIR" else fix)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < FEWEST_FILES:
        problem = f"a process may open {hard} files (ulimit -Hn), but a run needs {FEWEST_FILES}"
        yield Problem("open files", problem, "ask the admins to raise the limit of slurmd or of the container")
    if SHARED_MEMORY.is_dir() and (free := shutil.disk_usage(SHARED_MEMORY).free) < SHARED_BYTES:
        fix = "docker run --shm-size=16g, apptainer --bind /dev/shm, or remove leftover files there (grpo doctor)"
        problem = f"{format_bytes(free)} free, but vLLM's queues need {format_bytes(SHARED_BYTES)}"
        yield Problem(str(SHARED_MEMORY), problem, fix)


def describe_inode_shortage(folder: Path) -> str:
    """Return a text with the free inodes of a folder's file system if a run needs more, otherwise "".

    The folder need not exist yet.
    """
    existing = next(path for path in (folder, *folder.absolute().parents) if os.path.isdir(path))
    with contextlib.suppress(OSError):
        disk = os.statvfs(existing)
        if disk.f_files and disk.f_favail < FEWEST_INODES:  # some file systems report 0 inodes
            return f"space for {disk.f_favail} more files, but a run needs {FEWEST_INODES} (df -i)"
    return ""


def raise_file_limit() -> None:
    """Raise the soft limit of open files (RLIMIT_NOFILE) for this process and its children to at most 65,536.

    Many shells set it to 1,024.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY:
        most = _MANY_FILES if hard == resource.RLIM_INFINITY else min(hard, _MANY_FILES)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))


def socket_length(temporary: Path) -> int:
    """Return the length in bytes of the longest socket path of a run below a temporary folder."""
    return len(os.fsencode(f"{temporary}{_SOCKET_NAME}"))


def measure_free_memory() -> float:
    """Return the bytes that this process may still allocate on this machine and in its cgroup."""
    limit, used = cgroup_memory()
    return min(psutil.virtual_memory().available, limit - used)


def cgroup_memory(cgroups: str | None = None, root: Path = _CGROUPS) -> tuple[float, float]:
    """Return the memory limit and the used bytes of this process's cgroup with the lowest limit.

    Without a limit, the result is infinity and 0. For ``cgroups`` and ``root``, see ``_read_cgroup_numbers``.
    """
    files = ("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")
    pairs = _read_cgroup_numbers(files, cgroups, root)
    limits = [(limit, used) for limit, used in pairs if limit < 2**60]  # version 1 writes 2^63 without a limit
    return min(limits, default=(math.inf, 0))


def cgroup_cores(cgroups: str | None = None, root: Path = _CGROUPS) -> float:
    """Return the lowest CPU quota of this process's cgroups in cores, infinite without a quota.

    For ``cgroups`` and ``root``, see ``_read_cgroup_numbers``.
    """
    files = ("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")
    return min((quota / period for quota, period in _read_cgroup_numbers(files, cgroups, root)), default=math.inf)


def _read_cgroup_numbers(
    files: tuple[tuple[str, ...], ...], cgroups: str | None, root: Path
) -> Iterator[tuple[int, int]]:
    """Yield the two numbers in each group of ``files``, for every cgroup of this process and each of its ancestors.

    A group is one file with two numbers or two files with one: the first group is for cgroup version 2, the second for
    version 1. A group without exactly two numbers is skipped, for example if a file is missing or contains "max".
    ``cgroups`` is the content of /proc/self/cgroup (None reads that file), and ``root`` the mount point of cgroups. In
    a container the path belongs to the host and does not exist here, but its ancestor, the mount point, does.
    """
    text = Path("/proc/self/cgroup").read_text() if cgroups is None else cgroups
    for controllers, path in re.findall(r"^\d+:(.*?):(.*)$", text, re.MULTILINE):
        cgroup = root / controllers / path.lstrip("/")
        for folder in (cgroup, *cgroup.parents):
            for names in files:
                words = " ".join((folder / name).read_text() for name in names if (folder / name).is_file()).split()
                if len(words) == 2 and all(word.isdigit() for word in words):
                    yield int(words[0]), int(words[1])
