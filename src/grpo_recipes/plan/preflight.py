"""What a run needs of the node it starts on, looked at in seconds, before anything heavy starts.

The facts and the least of each are here once: `grpo doctor` shows them, `grpo launch` refuses by them on every node,
and `grpo submit` judges by them what a job asks for.
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
from grpo_recipes.plan.devices import nvidia_smi
from grpo_recipes.process.reports import gigabytes
from grpo_recipes.process.scratch import SHARED_MEMORY, node_folder
from grpo_recipes.recipe.registry import COLOCATE, built_for_cpu

# Oldest driver branch for a CUDA major version (NVIDIA, CUDA minor version compatibility, table 1).
_OLDEST_DRIVER = {"11": 450, "12": 525, "13": 580}
# A GPU's process and its data, rewards or engine need two cores; with torch, CUDA and vLLM loaded it takes 4 to 6 GB of
# the machine's memory before the first weight.
_LEAST_CORES, _LEAST_MEMORY = 2, 8e9
GOOD_CORES, GOOD_GIB = 8, 32  # of a GPU: what the shipped profiles ask for
FEWEST_INODES = 500  # new files of a run: checkpoints, logs, records, compiled kernels
FEWEST_FILES = 1024  # open at once: vLLM and torch take one for each connection, engine and shared tensor
_MANY_FILES = 65536
FLASHINFER_SAMPLER = "VLLM_USE_FLASHINFER_SAMPLER"
SHARED_BYTES = 320 * 2**20  # the message queue of a vLLM engine: ten chunks of 24 MiB, and NCCL's or torch's own
SOCKET_BYTES = 107  # sizeof(sockaddr_un.sun_path) - 1
# A run's folder below TMPDIR, and the name vLLM gives a socket there (a uuid).
_SOCKET_NAME = "/grpo-xxxxxxxx/" + 36 * "x"
_BESIDE_TORCH = ("torchvision", "torchaudio", "torchcodec")
_CGROUPS = Path("/sys/fs/cgroup")
_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def node_problems(gpus: int, environment: Mapping[str, str]) -> list[Problem]:
    """Return what would end a run on this node, which offers it so many GPUs, each with the line that fixes it."""
    problems = list(_scratch_problems(environment))
    if gpus:
        version = (nvidia_smi("--query-gpu=driver_version", "--format=csv,noheader") or "").split("\n")[0].strip()
        if old := old_driver(version, environment):
            problems.append(Problem("NVIDIA driver", *old))
        problems += [*compiler_problems(environment), *sampler_problems(environment)]
        cores, (memory, _) = min(len(os.sched_getaffinity(0)), cgroup_cores()), cgroup_memory()
        most_cores, most_memory = os.cpu_count() or 1, psutil.virtual_memory().total
        short = too_little(gpus, cores, memory, most_cores, most_memory)
        for what, option in short:
            fix = f"add the line #SBATCH {option}, or submit with sbatch {option}"
            problems.append(Problem("this node", what, fix if environment.get("SLURM_JOB_ID") else f"give it {option}"))
    return problems


def need_packages(mode: str) -> None:
    """Refuse an environment without vLLM where the run samples with it, or in which no model can be imported."""
    if beside := cuda_beside_cpu():
        what = f"{', '.join(beside)} for CUDA beside the torch for CPU: no model can be imported"
        raise config_error("environment", what, f"pip uninstall {' '.join(beside)}")
    if mode in ("server", COLOCATE) and importlib.util.find_spec("vllm") is None:
        device = "cpu" if built_for_cpu() else "cuda"
        fix = f"run make setup, or pip install -e '.[{device}]', or uv sync --extra {device}"
        raise config_error("environment", "vLLM is not installed, with which this run samples", fix)


def cuda_beside_cpu() -> list[str]:
    """Return the packages beside torch that are built for CUDA where torch is built for CPUs: PyPI has no others."""
    found = {name: one.version for name in _BESIDE_TORCH for one in importlib.metadata.distributions(name=name)}
    return [name for name, version in found.items() if built_for_cpu() and not version.endswith("+cpu")]


def too_little(
    gpus: int, cores: float, memory: float, most_cores: float = math.inf, most_memory: float = math.inf
) -> list[tuple[str, str]]:
    """Return what is too little for so many GPUs of a node, with the option of sbatch that asks for enough.

    ``memory`` is in bytes. More than the node has (``most_*``) is never asked for.
    """
    found = []
    if cores < _LEAST_CORES * gpus <= most_cores:
        enough = min(GOOD_CORES * gpus, most_cores)
        found.append((f"{cores:g} cores for {gpus} GPUs, at least {_LEAST_CORES * gpus} are needed",
                      f"--cpus-per-task={enough:g}"))  # fmt: skip
    if memory < _LEAST_MEMORY * gpus <= most_memory:
        enough = min(GOOD_GIB * gpus, most_memory // 2**30)
        least = gigabytes(_LEAST_MEMORY * gpus)
        found.append((f"{gigabytes(memory)} of memory for {gpus} GPUs, at least {least} are needed",
                      f"--mem={enough:g}G"))  # fmt: skip
    return found


def slurm_bytes(text: str | None) -> float:
    """Return the bytes of a ``--mem`` of Slurm; infinite for 0, which is the whole node, and for what is not given."""
    found = re.fullmatch(r"(\d+)([KMGT]?)B?", (text or "0").strip().upper())
    return int(found[1]) * _UNITS[found[2] or "M"] if found and int(found[1]) else math.inf


def old_driver(version: str, environment: Mapping[str, str]) -> tuple[str, str] | None:
    """Return what is wrong with a driver and its fix, where it is too old for the installed torch.

    NVIDIA's forward-compatibility libraries, before the driver's own in LD_LIBRARY_PATH, stand for a newer one.
    """
    cuda = torch_cuda()
    if cuda is None or not version.split(".")[0].isdigit():
        return None
    oldest = _OLDEST_DRIVER.get(cuda.split(".")[0], max(_OLDEST_DRIVER.values()))
    folders = environment.get("LD_LIBRARY_PATH", "").split(os.pathsep)
    if int(version.split(".")[0]) >= oldest or any(
        "compat" in one and list(Path(one).glob("libcuda.so*")) for one in folders
    ):
        return None
    what = f"driver {version} is too old for torch for CUDA {cuda}"
    return what, f"ask for a driver of branch {oldest} or newer, or load the site's cuda-compat module"


def torch_cuda() -> str | None:
    """Return the CUDA version torch was built for, read from its files; None for a CPU build or without torch."""
    spec = importlib.util.find_spec("torch")
    text = (Path(spec.origin).parent / "version.py").read_text() if spec and spec.origin else ""
    found = re.search(r"^cuda\b[^=\n]*= *'([\d.]+)'", text, re.MULTILINE)
    return found and found[1]


def compiler_problems(environment: Mapping[str, str]) -> Iterator[Problem]:
    """Yield what Triton lacks, which compiles a C module for each kernel where it is first used."""
    named = environment.get("CC")
    if not any(shutil.which(name) for name in ([named] if named else ["gcc", "clang"])):
        what = (
            f"there is no C compiler ({f'CC={named}' if named else 'gcc or clang'}), with which Triton builds kernels"
        )
        yield Problem("C compiler", what, "load the site's module: MODULES=gcc sbatch ..., or apt-get install gcc")
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if not header.is_file():
        fix = "apt-get install python3-dev, or make the environment of a Python that has it: PYTHON=FILE make setup"
        yield Problem("Python.h", f"{header} is missing, with which Triton builds kernels", fix)


def sampler_problems(environment: Mapping[str, str]) -> Iterator[Problem]:
    """Yield the lack of nvcc if the user turned on FlashInfer's sampler, which nvcc compiles at the first use."""
    toolkits = [Path(environment.get(name) or "/usr/local/cuda") for name in ("CUDA_HOME", "CUDA_PATH")]
    path = environment.get("PATH")
    if environment.get(FLASHINFER_SAMPLER) != "1" or any((toolkit / "bin/nvcc").is_file() for toolkit in toolkits):
        return
    if shutil.which("nvcc", path=path) is None:
        what = "is 1, and nvcc, which compiles FlashInfer's sampler at its first use, was not found"
        yield Problem(FLASHINFER_SAMPLER, what, f"unset {FLASHINFER_SAMPLER}, or load the site's CUDA module (nvcc)")


def _scratch_problems(environment: Mapping[str, str]) -> Iterator[Problem]:
    """Yield what vLLM dies of at its start: long socket names, few descriptors, little shared memory."""
    temporary = node_folder(environment)
    if (length := socket_length(temporary)) > SOCKET_BYTES:
        what = f"{temporary} is too long for a unix socket ({length} of {SOCKET_BYTES} bytes)"
        yield Problem("TMPDIR", what, "export TMPDIR=/tmp, or another short folder on the node")
    for name, folder in (("TMPDIR", temporary), (str(SHARED_MEMORY), SHARED_MEMORY)):
        if folder.is_dir() and (few := few_inodes(folder)):
            fix = "remove what is left there (grpo doctor), or mount it with more inodes"
            yield Problem(name, f"{few} in {folder}", "set TMPDIR to another disk" if name == "TMPDIR" else fix)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < FEWEST_FILES:
        what = f"a process may open {hard} files (ulimit -Hn), a run needs {FEWEST_FILES}"
        yield Problem("open files", what, "ask the admins for more (the limits of slurmd or of the container)")
    if SHARED_MEMORY.is_dir() and (free := shutil.disk_usage(SHARED_MEMORY).free) < SHARED_BYTES:
        fix = "docker run --shm-size=16g, apptainer --bind /dev/shm; or remove what is left there (grpo doctor)"
        what = f"{gigabytes(free)} free, vLLM's queues need {gigabytes(SHARED_BYTES)}"
        yield Problem(str(SHARED_MEMORY), what, fix)


def few_inodes(folder: Path) -> str:
    """Return what is wrong if the file system of a folder, which need not exist, has few inodes left; else nothing."""
    there = next(path for path in (folder, *folder.absolute().parents) if path.is_dir())
    with contextlib.suppress(OSError):
        disk = os.statvfs(there)
        if disk.f_files and disk.f_favail < FEWEST_INODES:  # some file systems count none
            return f"{disk.f_favail} more files fit, a run needs {FEWEST_INODES} (df -i)"
    return ""


def raise_file_limit() -> None:
    """Let what this process starts open many files: many shells have a soft limit of 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY:
        most = _MANY_FILES if hard == resource.RLIM_INFINITY else min(hard, _MANY_FILES)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))


def socket_length(temporary: Path) -> int:
    """Return the bytes of the longest socket name of a run below a temporary folder."""
    return len(os.fsencode(f"{temporary}{_SOCKET_NAME}"))


def free_memory() -> float:
    """Return the bytes that this process may still allocate, by the machine and by its cgroup."""
    limit, used = cgroup_memory()
    return min(psutil.virtual_memory().available, limit - used)


def cgroup_memory(own: str | None = None, root: Path = _CGROUPS) -> tuple[float, float]:
    """Return the tightest memory limit over this process, infinite without one, and how much is used, in bytes."""
    files = ("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")
    limits = [(limit, used) for limit, used in _cgroup_numbers(files, own, root) if limit < 2**60]  # v1: 2^63 for none
    return min(limits, default=(math.inf, 0))


def cgroup_cores(own: str | None = None, root: Path = _CGROUPS) -> float:
    """Return the tightest CPU quota over this process in cores, infinite without one."""
    files = ("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")
    return min((quota / period for quota, period in _cgroup_numbers(files, own, root)), default=math.inf)


def _cgroup_numbers(files: tuple[tuple[str, ...], ...], own: str | None, root: Path) -> Iterator[tuple[int, int]]:
    """Yield the two numbers that files of v2, or of v1, hold in each cgroup over this process that has a limit.

    ``own`` is the content of /proc/self/cgroup, ``root`` is where cgroups are mounted. Inside a container the path is
    that of the host: only the mount itself is there.
    """
    text = Path("/proc/self/cgroup").read_text() if own is None else own
    for controllers, path in re.findall(r"^\d+:(.*?):(.*)$", text, re.MULTILINE):
        folder = root / controllers / path.lstrip("/")
        for each, names in ((each, names) for each in (folder, *folder.parents) for names in files):
            words = " ".join((each / name).read_text() for name in names if (each / name).is_file()).split()
            if len(words) == 2 and all(word.isdigit() for word in words):
                yield int(words[0]), int(words[1])
