"""The page "My data, my reward, my cluster", followed: its files written, its commands run, in their order.

The page comes from the working tree, the clone from its last commit. The section on the cluster uses fakes: Slurm's
commands, an environment for GPUs, and the tiny model instead of a large one.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shlex
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from real_runs import REPOSITORY, clean_environment, marked_processes

PAGE = REPOSITORY / "docs/tutorial.md"
BLOCK = re.compile(r"^```(\w+)(?: title=\"([^\"]+)\")?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
ELSEWHERE = {
    "git clone REPOSITORY": f"git clone {shlex.quote(str(REPOSITORY))}",
    "model_name_or_path: Qwen/Qwen2.5-1.5B-Instruct": "model_name_or_path: smoke:sums",
    "DEVICE=cpu bash training.sh": "DEVICE=cpu bash training.sh --max_steps 4",  # other tests train to the end
}
FAKES = {
    "sbatch": 'cp "${@: -1}" "$PWD/sent-$(date +%N).sh"; echo "4711;fake"',
    "scontrol": "echo 'ClusterName = fake'",
    "squeue": "exit 0",
    "sacct": "exit 0",
}


def make_fakes(folder: Path) -> Path:
    """Put the fakes of Slurm's commands into a folder, and return it."""
    folder.mkdir()
    for name, body in FAKES.items():
        (folder / name).write_text(f"#!/bin/bash\n{body}\n")
        (folder / name).chmod(0o755)
    return folder


def make_environment(clone: Path, name: str, flavour: str) -> None:
    """Make an environment for the clone, complete for setup.sh, with the packages of the tests' environment."""
    prefix = clone / name
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(prefix)], check=True)
    (site,) = prefix.glob("lib/python3*/site-packages")
    packages = Path(sys.prefix, "lib", f"python3.{sys.version_info.minor}", "site-packages")
    (site / "0.pth").write_text(f"{clone / 'src'}\nimport site; site.addsitedir({str(packages)!r})\n")
    if flavour == "cuda":  # torch's version shows the device of an environment
        torch = f"Metadata-Version: 2.1\nName: torch\nVersion: {version('torch').removesuffix('+cpu')}\n"
        (site / "torch-0.dist-info").mkdir()
        (site / "torch-0.dist-info/METADATA").write_text(torch)
    script = Path(sys.executable).with_name("grpo").read_text().partition("\n")[2]
    (prefix / "bin/grpo").write_text(f"#!{prefix}/bin/python\n{script}")
    (prefix / "bin/grpo").chmod(0o755)
    locks = {"lock": "cpu" if flavour == "cpu" else "gpu", "extras": "environments", "search": "search"}
    files = {key: clone / "requirements" / f"{name}.txt" for key, name in locks.items()}
    hashes = {key: hashlib.sha256(file.read_bytes()).hexdigest() for key, file in files.items()}
    stamp = {"flavour": flavour, "python": platform.python_version(), **hashes}
    (prefix / "grpo-environment.json").write_text(json.dumps(stamp))


def script_of_the_page(local: bool = True) -> str:
    """Return the page as a bash script that prints each command before it runs it, and stops at the first failure.

    Args:
        local: replace the reader's addresses and paths with those of this machine.
    """
    text, lines = PAGE.read_text(), ["set -e"]
    for shown, place in ELSEWHERE.items() if local else ():
        assert shown in text
        text = text.replace(shown, place)
    for language, file, body in BLOCK.findall(text):
        if file:
            lines.append(f"cat > {file} <<'END_OF_FILE'\n{body}END_OF_FILE")
        elif language == "bash":
            for command in body.splitlines():
                echo = "" if command.startswith("#") else f"echo {shlex.quote('@@ ' + command)}"
                lines += [echo, command]
                lines += [f"{sys.executable} {__file__}"] if command == "cd grpo-recipes" else []
    return "\n".join(lines) + "\n"


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_the_page_followed_trains_on_own_data_and_compares_a_sweep(tmp_path: Path) -> None:
    mark = f"own-run-{tmp_path.name}-{os.getpid()}"
    environment = clean_environment(tmp_path, mark, PATH=f"{make_fakes(tmp_path / 'bin')}:{os.environ['PATH']}")
    del environment["RUN_ROOT"]  # the page has none: runs/ of the clone
    environment.setdefault("CACHE_ROOT", str(REPOSITORY / ".cache"))
    (tmp_path / "page.sh").write_text(script_of_the_page())
    with (tmp_path / "output.txt").open("w") as output_file:
        followed = subprocess.Popen(
            ["bash", "page.sh"],
            cwd=tmp_path,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output_file,
            stderr=output_file,
        )
        try:
            code = followed.wait(timeout=2300)
        finally:
            for process in marked_processes(mark):
                process.kill()
    output = (tmp_path / "output.txt").read_text()
    assert code == 0, output[-6000:]
    parts = {part.partition("\n")[0]: part.partition("\n")[2] for part in output.split("@@ ")[1:]}
    clone = tmp_path / "grpo-recipes"

    assert "grpo: status  completed; smoke test on CPU" in parts["DEVICE=cpu bash training.sh --max_steps 4"]
    assert "is valid" in parts["grpo check my.yaml"] and "tokens" in parts["grpo check my.yaml --deep"]
    assert "right_sum" in parts["grpo check-rewards my.yaml"]
    (run,) = clone.glob("runs/mine-*")
    summary = json.loads((run / "summary.json").read_text())
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert summary["status"] == "completed" and summary["steps"] == len(rows) == 40
    assert all("rewards/right_sum/mean" in row for row in rows)
    assert summary["final_reward"] > summary["initial_reward"] + 0.05
    assert "right_sum" in (run / "report.html").read_text()
    assert (run / "rewards/my_reward.py").read_text() == (clone / "my_reward.py").read_text()
    assert run.name in parts["grpo status"] and "completed" in parts["grpo status last"]

    (sweep,) = [path.parent for path in clone.glob("runs/sweeps/mine-*/sweep.html")]
    cells = [json.loads(path.read_text()) for path in sweep.glob("cells/*/summary.json")]
    assert len(cells) == 4 and all(cell["status"] == "completed" and cell["steps"] == 10 for cell in cells)
    page = (sweep / "sweep.html").read_text()
    assert "learning_rate" in page and "2 seeds" in page

    plan = parts["grpo plan cluster.yaml --gpus 3 --gpu-memory 80 --time 4:00:00"]
    assert "2 trainers" in plan and "nccl" in plan
    dry = parts["grpo submit cluster.yaml --profile mysite.yaml --dry-run"]
    assert "#SBATCH --gres=gpu:3" in dry and "#SBATCH --mem=96G" in dry
    assert "submitted job 4711" in parts["grpo submit cluster.yaml --profile mysite.yaml"]
    job, array = sorted(clone.glob("sent-*.sh"), key=lambda path: path.stat().st_mtime)
    assert "--resume" in job.read_text() and "#SBATCH --array=0-9%2" in array.read_text()


if __name__ == "__main__":  # in the clone, as a part of the page's script
    make_environment(Path.cwd(), ".venv", "cpu")
    make_environment(Path.cwd(), ".venv.cuda", "cuda")
