"""scripts/setup.sh, training.sh and the locks, as real processes."""

import fcntl
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from documented import documented
from setup_checkout import REPOSITORY, Checkout

USR1_BIT = 1 << 9  # signal 10 in the SigIgn mask of /proc/PID/status


def one_line(text: str) -> str:
    lines = text.strip().splitlines()
    assert len(lines) == 1, text
    return lines[0]


# --- a complete environment ------------------------------------------------------------------------------------------


def test_second_run_changes_nothing(checkout: Checkout, snapshot: Callable[[Path], dict[str, int]]) -> None:
    checkout.make_environment()
    before = snapshot(checkout.root)
    start = time.monotonic()
    result = checkout.setup()
    assert result.returncode == 0, result.stderr
    assert time.monotonic() - start < 5
    assert "is complete" in one_line(result.stdout)
    assert snapshot(checkout.root) == before


@pytest.mark.parametrize("name", [".venv", ".venv.cpu"])
def test_make_setup_finds_the_environment_that_it_is_told(checkout: Checkout, name: str) -> None:
    checkout.make_environment(name=name)
    shutil.copy(REPOSITORY / "Makefile", checkout.root)
    words = documented("make setup")
    if name != ".venv":
        words = documented("DEVICE=cpu ENV_DIR=.venv.cpu make setup")
    done = subprocess.run(words, cwd=checkout.root, env=checkout.env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert f"cpu environment in {checkout.root / name} " in done.stdout and "is complete" in done.stdout


def test_environment_of_these_tests_is_complete() -> None:
    stamp = Path(sys.prefix, "grpo-environment.json")
    if not stamp.exists():
        pytest.skip("these tests run in an environment that scripts/setup.sh did not make")
    flavour = json.loads(stamp.read_text())["flavour"]
    modules = Path(sys.prefix, "lib", f"python3.{sys.version_info.minor}", "site-packages")
    before = modules.stat().st_mtime_ns
    # like a job, so that a stale environment fails here instead of being changed under the running tests
    result = subprocess.run(
        ["bash", "scripts/setup.sh"],
        cwd=REPOSITORY,
        env=os.environ | {"ENV_DIR": sys.prefix, "DEVICE": flavour, "SLURM_JOB_ID": "1"},
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert result.returncode == 0, result.stderr
    assert modules.stat().st_mtime_ns == before


def test_complete_environment_serves_a_job(checkout: Checkout) -> None:
    checkout.make_environment()
    assert checkout.setup(SLURM_JOB_ID="1").returncode == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda root: (root / "requirements/cpu.txt").write_text("six==1\n"), "requirements/cpu.txt has changed"),
        (lambda root: (root / ".venv/bin/python").unlink(), "does not run"),
        (lambda root: (root / ".venv/bin/grpo").write_text("#!/elsewhere/bin/python\n"), "missing or was moved"),
        (lambda root: (root / ".venv/grpo-environment.json").unlink(), "no complete cpu environment"),
    ],
    ids=["lock", "interpreter", "moved", "interrupted"],
)
def test_incomplete_environment_is_noticed(checkout: Checkout, change: Callable[[Path], None], message: str) -> None:
    checkout.make_environment()
    change(checkout.root)
    result = checkout.setup(SLURM_JOB_ID="1")
    assert result.returncode == 2
    assert message in one_line(result.stderr)


# --- the extra -------------------------------------------------------------------------------------------------------


EXTRA_KEYS = {"environments": "extras", "search": "search"}  # an extra and its key in the stamp


@pytest.mark.parametrize("name", EXTRA_KEYS)
def test_each_extra_is_part_of_the_default_environment(checkout: Checkout, name: str) -> None:
    """R0: an environment without an extra is incomplete, whoever made it."""
    checkout.make_environment()
    assert checkout.setup(SLURM_JOB_ID="1").returncode == 0
    checkout.stamp(**{EXTRA_KEYS[name]: ""})
    missing = checkout.setup(SLURM_JOB_ID="1")
    assert missing.returncode == 2
    assert f"requirements/{name}.txt is not installed" in one_line(missing.stderr)
    assert "EXTRAS" not in missing.stderr


def test_extras_that_were_left_out_stay_out_until_they_are_named(checkout: Checkout) -> None:
    checkout.make_environment()
    checkout.stamp(extras="none", search="none")
    for variables in ({}, {"EXTRAS": "none"}):
        assert checkout.setup(SLURM_JOB_ID="1", **variables).returncode == 0
    for name in EXTRA_KEYS:
        named = checkout.setup(SLURM_JOB_ID="1", EXTRAS=name)
        assert named.returncode == 2
        assert f"requirements/{name}.txt is not installed" in one_line(named.stderr)
        assert named.stderr.endswith(f"EXTRAS={name} bash scripts/setup.sh\n")


@pytest.mark.parametrize("variables", [{}, {"EXTRAS": "none"}, {"EXTRAS": "environments search"}])
@pytest.mark.parametrize("name", EXTRA_KEYS)
def test_an_installed_extra_is_kept_as_its_lock_says(checkout: Checkout, name: str, variables: dict[str, str]) -> None:
    checkout.make_environment()
    assert checkout.setup(SLURM_JOB_ID="1", **variables).returncode == 0
    (checkout.root / f"requirements/{name}.txt").write_text("six==1\n")
    changed = checkout.setup(SLURM_JOB_ID="1", **variables)
    assert changed.returncode == 2 and f"{name}.txt is not installed, or has changed" in changed.stderr


def test_an_unknown_extra_is_rejected(checkout: Checkout) -> None:
    line = one_line(checkout.setup(EXTRAS="games,search").stderr)
    assert line == "setup: EXTRAS=games,search: 'games' is unknown. Fix: set EXTRAS=environments,search or EXTRAS=none"


# --- the checkout whose code runs ------------------------------------------------------------------------------------


def second_checkout(checkout: Checkout, tmp_path: Path) -> Checkout:
    root = tmp_path / "second"
    shutil.copytree(checkout.root, root, ignore=shutil.ignore_patterns(".venv*"))
    return Checkout(root, checkout.env)


@pytest.mark.parametrize("command", [("scripts/setup.sh",), ("training.sh",)], ids=lambda words: words[0])
@pytest.mark.parametrize("linked", [False, True])
def test_the_environment_of_another_checkout_is_rejected(
    checkout: Checkout, tmp_path: Path, linked: bool, command: tuple[str]
) -> None:
    """M15: an environment runs the code of a single checkout."""
    prefix, other = checkout.make_environment(), second_checkout(checkout, tmp_path)
    if linked:
        (other.root / ".venv").symlink_to(prefix)
    result = other.run(*command, **({} if linked else {"ENV_DIR": str(prefix)}))
    assert result.returncode == 2 and "grpo launch" not in result.stdout
    line = one_line(result.stderr)
    assert f"runs the code of {checkout.root}, not of {other.root}. Fix: ENV_DIR={other.root}/.venv" in line
    # The fix makes an environment for this checkout.
    fix = line.partition("Fix: ")[2]
    assert (".venv.own " in fix) == linked
    missing = other.run("-c", fix, SLURM_JOB_ID="1")
    assert f"no complete cpu environment in {other.root}/.venv" in one_line(missing.stderr)
    assert checkout.setup().returncode == 0  # and the first checkout keeps its own


def test_an_environment_whose_checkout_is_gone_is_installed_for_this_one(checkout: Checkout, tmp_path: Path) -> None:
    """M15: after the checkout was moved, its external environment does not run any code."""
    prefix, other = checkout.make_environment(), second_checkout(checkout, tmp_path)
    environment = shutil.move(prefix, str(tmp_path / "environment"))
    script = Path(environment, "bin/grpo")
    script.write_text(script.read_text().replace(str(prefix), environment))
    shutil.rmtree(checkout.root)
    result = other.setup(ENV_DIR=str(environment), SLURM_JOB_ID="1")
    assert result.returncode == 2
    assert f"{environment} does not run the code of {other.root}" in one_line(result.stderr)


@pytest.mark.parametrize("variable", ["ENV_ACTIVATE", "CONDA_ENV"])
def test_an_activated_environment_of_another_checkout_is_rejected(
    checkout: Checkout, tmp_path: Path, variable: str
) -> None:
    """M15: your own environment must run the code of the checkout that you launch from."""
    prefix, other = checkout.make_environment(name="own"), second_checkout(checkout, tmp_path)
    script = tmp_path / "activate.sh"
    script.write_text(f"conda() {{ PATH={prefix}/bin:$PATH; }}\nconda\n")
    variables = {"ENV_ACTIVATE": str(script)} if variable == "ENV_ACTIVATE" else {"CONDA_SH": str(script)}
    variables |= {"CONDA_ENV": "mine"} if variable == "CONDA_ENV" else {}
    assert checkout.run("training.sh", **variables).returncode == 0
    result = other.run("training.sh", **variables)
    assert result.returncode == 2 and "grpo launch" not in result.stdout
    line = one_line(result.stderr)
    assert f"runs the code of {checkout.root}, not of {other.root}." in line
    assert f"Fix: {prefix}/bin/python -m pip install --no-deps -e {other.root}" in line


@pytest.mark.parametrize(("name", "count"), [("environments", 5), ("search", 1)])
def test_the_lock_of_an_extra_replaces_nothing(name: str, count: int) -> None:
    extra = pins(name)
    assert not set(extra) & set(pins("cpu"))
    gpu = pins("gpu")
    assert {name for name in extra if gpu.get(name, extra[name]) != extra[name]} == set()
    assert not {"torch", "torchvision", "torchaudio", "torchcodec", "griffe"} & set(extra)
    requested = re.findall(r"^([a-z-]+)==(.+)$", (REPOSITORY / f"requirements/{name}.in").read_text(), re.MULTILINE)
    assert len(requested) == count and all(extra[name] == version for name, version in requested)


# --- flavours --------------------------------------------------------------------------------------------------------


def test_other_flavour_is_refused_with_the_command(checkout: Checkout) -> None:
    checkout.make_environment("cpu")
    result = checkout.setup(DEVICE="cuda")
    assert result.returncode == 2
    line = one_line(result.stderr)
    assert "holds the cpu flavour" in line
    assert line.endswith("bash scripts/setup.sh --rebuild")
    assert "DEVICE=cuda" in line


def test_gpu_in_this_machine_contradicts_a_cpu_environment(checkout: Checkout) -> None:
    checkout.make_environment("cpu")
    checkout.add_command("nvidia-smi", 'for i in 0 1 2 3; do echo "GPU $i: NVIDIA H200 (UUID: GPU-$i)"; done')
    result = checkout.setup(DEVICE="auto")
    assert result.returncode == 2
    assert "DEVICE=cpu keeps it" in one_line(result.stderr)
    assert checkout.setup(DEVICE="cpu").returncode == 0


def test_cuda_environment_stays_on_a_login_node(checkout: Checkout) -> None:
    checkout.make_environment("cuda")
    checkout.add_command("nvidia-smi", "exit 9")
    checkout.add_command("sinfo", "exit 1")
    result = checkout.setup(DEVICE="auto")
    assert result.returncode == 0, result.stderr
    assert "cuda environment" in result.stdout


@pytest.mark.parametrize(
    ("nvidia_smi", "sinfo", "flavour"),
    [
        ("exit 9", "echo '(null)'; echo gpu:a100:4", "cuda"),
        ("echo 'GPU 0: NVIDIA A100'", "exit 1", "cuda"),
        ("echo 'NVIDIA-SMI has failed'", "echo '(null)'", "cpu"),
        pytest.param("exit 9", "sleep 100", "cpu", marks=pytest.mark.slow),
    ],
    ids=["cluster", "machine", "neither", "silent controller"],
)
def test_automatic_flavour(checkout: Checkout, nvidia_smi: str, sinfo: str, flavour: str) -> None:
    checkout.add_command("nvidia-smi", nvidia_smi)
    checkout.add_command("sinfo", sinfo)
    start = time.monotonic()
    result = checkout.setup(DEVICE="auto", SLURM_JOB_ID="1")
    assert time.monotonic() - start < 20
    assert f"no complete {flavour} environment" in one_line(result.stderr)


def test_unknown_flavour(checkout: Checkout) -> None:
    result = checkout.setup(DEVICE="tpu")
    assert result.returncode == 2
    assert "DEVICE=tpu" in one_line(result.stderr)


# --- interpreters ----------------------------------------------------------------------------------------------------


def test_python_named_but_too_old(checkout: Checkout) -> None:
    old = checkout.add_command("python3.9", "exit 1")
    result = checkout.setup(PYTHON=str(old))
    assert result.returncode == 2
    assert "3.11 to 3.13" in one_line(result.stderr)


def test_no_python_at_all(checkout: Checkout, tmp_path: Path) -> None:
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ["bash", "cut", "dirname", "flock", "grep", "ls", "mkdir", "realpath", "sed", "sha256sum", "timeout"]:
        (tools / name).symlink_to(shutil.which(name) or f"/bin/{name}")
    (tools / "python3").symlink_to(checkout.add_command("python3.9", "exit 1"))
    result = checkout.setup(PATH=str(tools), PYTHON="")
    assert result.returncode == 2
    assert "no Python 3.11 to 3.13" in one_line(result.stderr)


def test_conda_prefix(checkout: Checkout) -> None:
    checkout.add_command("conda", f'echo "$*" >"$HOME/conda-call"; [[ $5 == /* ]] && {sys.executable} -m venv "$5"')
    result = checkout.setup(ENV_MODE="conda", PIP_INDEX_URL=f"http://127.0.0.1:{closed_port()}/simple")
    assert result.returncode == 2, result.stderr
    call = Path(checkout.env["HOME"], "conda-call").read_text().strip()
    assert call == f"create --yes --quiet --prefix {checkout.root}/.venv python=3.11 pip"
    assert "no answer from a package index" in result.stderr


# --- indexes ---------------------------------------------------------------------------------------------------------


def closed_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@pytest.fixture
def silent_port() -> Iterator[int]:
    """Accepts connections and never says a word."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(64)
        yield listener.getsockname()[1]


@pytest.mark.slow
@pytest.mark.parametrize("setting", ["PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL"])
def test_silent_index_is_noticed(checkout: Checkout, silent_port: int, setting: str, tmp_path: Path) -> None:
    url = f"http://127.0.0.1:{silent_port}/simple"
    indexes = {"PIP_INDEX_URL": f"file://{tmp_path}", setting: url}
    start = time.monotonic()
    result = checkout.setup(PIP_DEFAULT_TIMEOUT="180", PIP_RETRIES="10", **indexes)
    assert time.monotonic() - start < 120  # pip alone would wait half an hour
    assert result.returncode == 2
    line = one_line(result.stderr)
    assert url in line
    assert "PIP_INDEX_URL" in line
    assert not (checkout.root / ".venv/grpo-environment.json").exists()


@pytest.mark.slow
def test_refused_index_is_noticed_without_showing_credentials(checkout: Checkout) -> None:
    port = closed_port()
    result = checkout.setup(PIP_INDEX_URL=f"http://someone:planted@127.0.0.1:{port}/simple")
    assert result.returncode == 2
    assert f"127.0.0.1:{port}" in one_line(result.stderr)
    assert "planted" not in result.stdout + result.stderr


# --- what is left alone ----------------------------------------------------------------------------------------------


def test_job_installs_nothing(checkout: Checkout, snapshot: Callable[[Path], dict[str, int]]) -> None:
    before = snapshot(checkout.root)
    result = checkout.setup(SLURM_JOB_ID="1")
    assert result.returncode == 2
    assert f"on the login node run: cd {checkout.root} && DEVICE=cpu" in one_line(result.stderr)
    assert snapshot(checkout.root) == before


@pytest.mark.parametrize("options", [(), ("--rebuild",)])
def test_directory_of_another_kind_is_left_alone(checkout: Checkout, tmp_path: Path, options: tuple[str, ...]) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "work.txt").write_text("mine")
    result = checkout.setup(*options, ENV_DIR=str(other))
    assert result.returncode == 2
    assert "not a Python environment" in result.stderr
    assert [path.name for path in other.iterdir()] == ["work.txt"]


def test_two_set_ups_at_once(checkout: Checkout) -> None:
    with open(checkout.root / ".venv.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        waiting = subprocess.Popen(
            ["bash", "scripts/setup.sh"], cwd=checkout.root, env=checkout.env, stdout=subprocess.PIPE, text=True
        )
        assert waiting.stdout is not None
        assert "no complete cpu environment" in waiting.stdout.readline()
        assert "waiting" in waiting.stdout.readline()
        checkout.make_environment()  # what the first set-up does meanwhile
    assert waiting.wait(timeout=30) == 0
    assert waiting.stdout.read() == ""
    waiting.stdout.close()


# --- locks -----------------------------------------------------------------------------------------------------------


def pins(name: str) -> dict[str, str]:
    lines = (REPOSITORY / "requirements" / f"{name}.txt").read_text().splitlines()
    return dict(line.split("==", 1) for line in lines)


@pytest.mark.parametrize("name", ["cpu", "gpu", "environments", "search"])
def test_lock_holds_pins_only(name: str) -> None:
    for package, version in pins(name).items():
        assert re.fullmatch(r"[a-z0-9-]+", package)
        assert re.fullmatch(r"[0-9][^ /;]*", version), f"{package}=={version}"


@pytest.mark.parametrize("name", ["cpu", "gpu"])
def test_lock_agrees_with_what_was_asked_for(name: str) -> None:
    locked = pins(name)
    for line in (REPOSITORY / "requirements" / "base.in").read_text().splitlines():
        requirement = re.match(r"([A-Za-z0-9.-]+)(?:\[.*\])?(?:==(.+))?", line)
        if requirement:
            package = requirement[1].lower().replace(".", "-")
            assert package in locked
            assert requirement[2] in (None, locked[package])


def test_cpu_lock_leaves_out_what_breaks_it() -> None:
    assert not {"torchvision", "torchaudio", "torchcodec", "vllm"} & set(pins("cpu"))


def test_gpu_lock_never_takes_a_cpu_build() -> None:
    assert pins("gpu")["torch"] == "2.13.0,!=2.13.0+cpu"


@pytest.mark.slow
def test_gpu_lock_resolves_on_this_machine(tmp_path: Path) -> None:
    # The settings for uv in pyproject.toml leave out torchvision, which this lock has. Nothing is downloaded.
    script = """source scripts/pip_settings.sh; export_uv_settings "$1"
        "$1" -m uv pip install --no-config --dry-run --python "$1" --target "$2" --requirements requirements/gpu.txt"""
    done = subprocess.run(
        ["bash", "-c", script, "-", sys.executable, str(tmp_path / "none")],
        cwd=REPOSITORY, env=os.environ | {"DS_BUILD_OPS": "0"}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    resolved = dict(line.removeprefix(" + ").split("==") for line in done.stderr.splitlines() if line[:3] == " + ")
    assert resolved == pins("gpu") | {"torch": "2.13.0"}


# --- training.sh -----------------------------------------------------------------------------------------------------


def test_header_has_only_what_every_cluster_accepts() -> None:
    header = re.findall(r"^#SBATCH --(.*)$", (REPOSITORY / "training.sh").read_text(), re.MULTILINE)
    assert header == [
        "job-name=grpo",
        "output=logs/slurm_%j.out",
        "error=logs/slurm_%j.err",
        "open-mode=append",
        "signal=B:USR1@300",
        "requeue",
        "time=72:00:00",
    ]


def test_first_command_ignores_usr1() -> None:
    lines = (REPOSITORY / "training.sh").read_text().splitlines()
    assert next(line for line in lines if line and not line.startswith("#")) == "trap '' USR1"


def test_help_without_an_environment(checkout: Checkout) -> None:
    result = checkout.run("training.sh", "--help")
    assert result.returncode == 0
    assert "sbatch --gres=gpu:8 --cpus-per-task=64 --mem=256G training.sh" in result.stdout
    assert not (checkout.root / ".venv").exists()
    assert not (checkout.root / "logs").exists()


def test_inside_salloc_the_repository_is_where_the_script_is(checkout: Checkout, tmp_path: Path) -> None:
    checkout.make_environment()
    result = checkout.run("training.sh", SLURM_JOB_ID="1", SLURM_SUBMIT_DIR=str(tmp_path))
    assert result.returncode == 0, result.stderr
    assert "grpo launch" in result.stdout and (checkout.root / "logs").is_dir()


def test_job_submitted_elsewhere(checkout: Checkout, tmp_path: Path) -> None:
    spooled = shutil.copy(checkout.root / "training.sh", tmp_path / "slurm_script")
    result = checkout.run(str(spooled), SLURM_JOB_ID="1", SLURM_SUBMIT_DIR=str(tmp_path))
    assert result.returncode == 2
    assert "GRPO_HOME" in one_line(result.stderr)


@pytest.mark.parametrize("variable", ["SLURM_SUBMIT_DIR", "GRPO_HOME"])
def test_job_finds_the_repository(checkout: Checkout, tmp_path: Path, variable: str) -> None:
    checkout.make_environment()
    spooled = shutil.copy(checkout.root / "training.sh", tmp_path / "slurm_script")
    result = checkout.run(str(spooled), "--recipe", "x y", SLURM_JOB_ID="1", **{variable: str(checkout.root)})
    assert result.returncode == 0, result.stderr
    assert "grpo launch --recipe x y" in result.stdout
    mask = re.search(r"SigIgn:\s*([0-9a-f]+)", result.stdout)
    assert mask is not None and int(mask[1], 16) & USR1_BIT
    assert (checkout.root / "logs").is_dir()


def test_job_without_an_environment(checkout: Checkout) -> None:
    result = checkout.run("training.sh", SLURM_JOB_ID="1", SLURM_SUBMIT_DIR=str(checkout.root))
    assert result.returncode == 2
    assert "bash scripts/setup.sh" in one_line(result.stderr)


def test_activated_environment_is_used_as_it_is(checkout: Checkout, tmp_path: Path) -> None:
    prefix = checkout.make_environment(name="own")
    (prefix / "grpo-environment.json").unlink()
    activate = tmp_path / "activate.sh"
    activate.write_text(f'PATH={prefix}/bin:$PATH; echo "unset: $NEVER_SET"; false; true\n')
    result = checkout.run("training.sh", ENV_ACTIVATE=str(activate))
    assert result.returncode == 0, result.stderr
    assert "grpo launch" in result.stdout


def test_conda_environment_is_used_as_it_is(checkout: Checkout, tmp_path: Path) -> None:
    prefix = checkout.make_environment(name="own")
    script = tmp_path / "conda.sh"
    script.write_text(f'conda() {{ [[ "$*" == "activate mine" ]] && PATH={prefix}/bin:$PATH; }}\n')
    result = checkout.run("training.sh", CONDA_SH=str(script), CONDA_ENV="mine")
    assert result.returncode == 0, result.stderr
    assert "grpo launch" in result.stdout
    assert checkout.run("training.sh", CONDA_SH=str(script), CONDA_ENV="other").returncode == 2


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"ENV_ACTIVATE": "/nonexistent/activate"}, "ENV_ACTIVATE=/nonexistent/activate"),
        ({"CONDA_SH": "/nonexistent/conda.sh"}, "CONDA_SH=/nonexistent/conda.sh"),
        ({"MODULES": "cuda/12.6", "BASH_FUNC_module%%": "() { return 1; }"}, "module load cuda/12.6 failed"),
    ],
    ids=["activate", "conda", "modules"],
)
def test_failed_preparation_ends_the_launch(checkout: Checkout, env: dict[str, str], message: str) -> None:
    checkout.make_environment()
    result = checkout.run("training.sh", **env)
    assert result.returncode == 2
    assert message in result.stderr
    assert "grpo launch" not in result.stdout
