"""`grpo compare`: what is refused, what runs at the same time and where, and the table. Launches are fakes."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from grpo_recipes import cli
from grpo_recipes.console.sweep import compare as module
from grpo_recipes.console.sweep.run import SignalForwarder
from grpo_recipes.plan.devices import Node, Resources
from grpo_recipes.plan.ports import port_keys
from grpo_recipes.recipe import read_frozen
from grpo_recipes.runs.benchmark import mode_of
from grpo_recipes.runs.rundir import read_json, write_json
from sweep.conftest import SMOKE

NUMBERS = {
    "total_steps": 3, "avg_step_time_seconds": 0.25, "avg_sync_time_seconds": 0.0312, "syncs": 3,
    "peak_process_memory_gb": 0.945,
}  # fmt: skip


ASKED = SignalForwarder.asked


class FakeLaunches:
    """In place of `grpo launch --resume DIR --benchmark`, each of which ends when it has been looked at twice.

    Attributes:
        began: the modes with their GPUs, in order.
        most: how many were under way at the same time.
        codes: exit code by mode; 0 by default.
        signal_after: modes that begin before a signal comes.
    """

    def __init__(self) -> None:
        self.began: list[tuple[str, str | None]] = []
        self.most = self.alive = 0
        self.codes: dict[str, int] = {}
        self.signal_after = 99

    def begin(self, forwarder: SignalForwarder, argv: list[str], environment: dict[str, str], log: Path) -> Any:
        assert argv[-3] == "--resume" and argv[-1] == "--benchmark" and log.parent == Path(argv[-2])
        folder, left = Path(argv[-2]), [None, None]
        self.began.append((folder.name, environment.get("CUDA_VISIBLE_DEVICES")))
        self.alive += 1
        self.most = max(self.most, self.alive)
        if len(self.began) == self.signal_after:
            forwarder.seen = signal.SIGINT

        def poll() -> int | None:
            if left:
                return left.pop()
            self.alive -= 1
            code = self.codes.get(folder.name, 0)
            if code == 2:
                log.write_text("grpo: here it is refused. Fix: mend it\n")
                return code
            self.leave(folder, code)
            return code

        return SimpleNamespace(poll=poll)

    def leave(self, folder: Path, code: int) -> None:
        status = {0: "completed", 75: "stopped"}.get(code, "failed")
        ended = {"status": status, "exit_code": code, "cause": None if code == 0 else "a fake cause"}
        summary = {**read_json(folder / "summary.json"), **ended, "initial_reward": 0.1, "final_reward": 0.375}
        write_json(folder / "summary.json", summary)
        if code == 0:
            write_json(folder / "benchmark.json", NUMBERS)
            checkpoint = folder / "checkpoints/checkpoint-3"
            checkpoint.mkdir(parents=True)
            (checkpoint / "model.safetensors").write_bytes(bytes(1_230_000))


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> FakeLaunches:
    fake = FakeLaunches()
    monkeypatch.setattr(SignalForwarder, "__init__", lambda self, *_: setattr(self, "seen", None))
    monkeypatch.setattr(SignalForwarder, "asked", lambda self: self.seen is not None)
    monkeypatch.setattr(SignalForwarder, "begin", lambda forwarder, *arguments: fake.begin(forwarder, *arguments))
    monkeypatch.setattr(module, "newest_complete", lambda folder: next(folder.glob("checkpoint-*"), None))
    monkeypatch.setattr(module, "_LOOK_SECONDS", 0)
    return fake


@pytest.fixture
def compare(folder: Path, fakes: FakeLaunches) -> Callable[..., int]:
    """``compare("file,shared", ...)``: `grpo compare` of the smoke recipe; its exit code."""
    return lambda modes, *more: cli.main(["compare", SMOKE, *(["--modes", modes] if modes else []), *more])


def record(folder: Path) -> tuple[Path, dict[str, Any]]:
    (path,) = folder.glob("runs/comparisons/*/compare.json")
    return path.parent, json.loads(path.read_text())


def test_every_mode_is_one_run_and_a_row_of_the_table(compare, fakes, folder, capsys):
    assert compare("shared_vllm,lora_only,colocate", "--steps", "3", "--learning_rate", "3e-4") == 0
    place, kept = record(folder)
    recipes = {mode: read_frozen(place / mode / "recipe.yaml") for mode in ("shared_vllm", "lora_only", "colocate")}
    made = {mode: (one["vllm_mode"], one["weight_sync"], one["use_peft"]) for mode, one in recipes.items()}
    assert made == {
        "shared_vllm": ("server", "shared", False),
        "lora_only": ("server", "lora", True),
        "colocate": ("colocate", "auto", False),
    }
    assert all(one["max_steps"] == 3 and one["learning_rate"] == 3e-4 for one in recipes.values())
    (shared, lora, _) = kept["modes"]
    assert shared["benchmark"] == NUMBERS and shared["checkpoint_bytes"] == 1_230_000
    assert (lora["bridge"], lora["use_peft"], lora["final_reward"]) == ("lora", True, 0.375)
    assert kept["at_once"] == 3 and kept["code"]["commit"]
    said = capsys.readouterr().out
    heads, *rows = (line.split() for line in said[said.index("mode  ") :].splitlines()[:4])
    assert heads[:3] == ["mode", "status", "steps"]
    assert rows[0] == ["shared_vllm", "completed", "3", "0.25", "0.0312", "3", "0.945", "1.23", "0.375"]
    assert [row[0] for row in rows] == ["shared_vllm", "lora_only", "colocate"]
    assert "LoRA and full training learn at different speeds" in said


def test_without_steps_the_recipe_says_how_many(compare, folder):
    assert compare("file,shared") == 0
    place, _ = record(folder)
    assert read_frozen(place / "file/recipe.yaml")["max_steps"] == 60


def test_jobs_says_how_many_run_at_the_same_time(compare, fakes, capsys):
    assert compare("file,shared,colocate") == 0 and fakes.most == 3
    assert "3 modes shared" in capsys.readouterr().out
    fakes.most = 0
    assert compare("file,shared,colocate", "--jobs", "1", "--run_root", "others") == 0 and fakes.most == 1
    assert "modes shared" not in capsys.readouterr().out


def test_a_mode_that_fails_is_a_row_with_its_cause_and_the_others_complete(compare, fakes, folder, capsys):
    fakes.codes = {"file": 3, "shared": 2}
    assert compare("file,shared,colocate", "--jobs", "1") == 1
    _, kept = record(folder)
    assert [(row["status"], row["exit_code"]) for row in kept["modes"]] == [
        ("failed", 3), ("failed", 2), ("completed", 0),
    ]  # fmt: skip
    said = capsys.readouterr().out
    assert "\nfile: a fake cause\n" in said and "\nshared: here it is refused. Fix: mend it\n" in said
    assert "grpo: a mode that has not completed goes on with: grpo launch --resume runs/comparisons/" in said
    assert kept["modes"][0]["benchmark"] is None and kept["modes"][0]["checkpoint_bytes"] is None


def test_the_table_fits_a_terminal_of_80_columns():
    numbers = {**NUMBERS, "total_steps": 12345, "avg_step_time_seconds": 12.34, "peak_process_memory_gb": 0.0123}
    one = {"mode": "lora_restart", "status": "not started", "benchmark": numbers, "checkpoint_bytes": 12345e6,
           "final_reward": 0.0375, "use_peft": True, "cause": None}  # fmt: skip
    lines = module.table([one], 1, Resources("cpu", (), 2))
    assert max(map(len, lines[:3])) <= 80


def test_grpo_stop_ends_the_mode_that_runs_and_no_other_begins(compare, fakes, folder, monkeypatch, capsys):
    made = lambda self, request: vars(self).update(seen=None, _request=request, _children=[])  # noqa: E731
    monkeypatch.setattr(SignalForwarder, "__init__", made)
    monkeypatch.setattr(SignalForwarder, "asked", ASKED)
    told: list[str] = []

    def leave(place: Path, code: int) -> None:
        """While the first mode runs, its user asks for the state in another terminal, and for its end."""
        name = place.parent.name
        for words in (["status"], ["status", name], ["stop", name]):
            capsys.readouterr()
            assert cli.main(words) == 0
            told.append(capsys.readouterr().out)
        write_json(place / "summary.json", {"status": "stopped", "exit_code": 75})

    fakes.codes = {"file": 75}
    monkeypatch.setattr(fakes, "leave", leave)
    assert compare("file,shared", "--jobs", "1") == 75
    table, state, stopped = told
    assert re.search(r"comparisons/smoke-\S+ +running, 0 of 2 modes completed", table)
    heads = [line.split("  ")[0] for line in state.splitlines()]
    assert heads == ["compare", "state", "", "mode", "file", "shared"] and "shared  waiting for its turn" in state
    assert "the running mode saves and ends, no other starts" in stopped
    assert [mode for mode, _ in fakes.began] == ["file"]
    assert "grpo stop: the comparison ends here" in capsys.readouterr().out
    place, _ = record(folder)
    assert "state    stopped, 0 of 2 modes completed" in said(capsys, "status", place.name)
    again = f"goes on with: grpo launch --resume runs/comparisons/{place.name}/MODE --benchmark"
    assert again in said(capsys, "stop", place.name, code=2)


def said(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> str:
    assert cli.main([*words]) == code
    captured = capsys.readouterr()
    return captured.out + captured.err


def test_a_damaged_record_hides_no_other(folder, capsys):
    for name, text in (("bad", '{"modes": 3}'), ("good", '{"modes": [{"mode": "file"}]}')):
        (folder / "runs/comparisons" / name).mkdir(parents=True)
        (folder / "runs/comparisons" / name / "compare.json").write_text(text)
    assert [line.split()[0] for line in said(capsys, "status").splitlines()] == ["run", "comparisons/good"]
    assert "is damaged ('modes' is not what a comparison writes)" in said(capsys, "status", "bad", code=2)
    assert "file  gone" in said(capsys, "status", "good")


def test_a_mode_that_took_no_step_has_no_numbers(compare, fakes, folder, monkeypatch, capsys):
    monkeypatch.setitem(NUMBERS, "total_steps", 0)
    assert compare("file,shared") == 0
    assert [row["benchmark"] for row in record(folder)[1]["modes"]] == [None, None]


def test_after_a_signal_no_other_begins(compare, fakes, folder, capsys):
    fakes.signal_after, fakes.codes = 1, {"file": 75}
    assert compare("file,shared", "--jobs", "1") == 75
    assert [mode for mode, _ in fakes.began] == ["file"]
    assert [row["status"] for row in record(folder)[1]["modes"]] == ["stopped", "not started"]
    assert "SIGINT: the comparison ends here" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("modes", "flags", "problem"),
    [
        ("file", (), "one mode compares nothing"),
        (None, (), "--modes: is missing. Fix: write --modes M1,M2: two or more of colocate, file,"),
        ("file,shard", (), "'shard' is not a mode. Fix: write shared"),
        ("file,nccl", (), "nccl: --modes: nccl needs GPUs, this is a CPU environment. Fix: leave nccl out"),
        ("lora,lora_only", (), "lora and lora_only are the same with this recipe"),
        ("file,file", (), "file is named twice"),
        ("file,shared", ("--jobs", "0"), "--jobs: is 0"),
        ("file,shared", ("--steps", "0"), "--steps: is 0"),
        ("file,shared", ("--steps", "3", "--max_steps", "4"), "--max_steps is given too"),
        ("file,shared", ("--vllm_server_port", "8123"), "2 modes at the same time cannot have one vllm_server_port"),
        ("file,shared", ("--weight_sync", "file"), "--weight_sync: is set by the modes"),
        ("file,shared", ("--weight_bridge_mode", "none"), "--weight_bridge_mode: is set by the modes. Fix: remove it"),
        ("file,,shared", (), "--modes: 'file,,shared' has an empty name"),
        ("file,shared", ("--use_peft", "true"), "shared: --modes: shared does not work with LoRA"),
    ],
)
def test_what_cannot_be_compared_is_refused_before_anything_is_written(
    compare, fakes, folder, capsys, modes, flags, problem
):
    assert compare(modes, *flags) == 2
    assert problem in capsys.readouterr().err
    assert fakes.began == [] and not (folder / "runs").exists()


def test_a_named_port_that_is_taken_is_refused_before_anything_is_written(compare, fakes, folder, capsys):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        assert compare("file,shared", "--jobs", "1", "--vllm_server_port", str(port)) == 2
    said = f"--vllm_server_port: port {port} is in use by another process (pid {os.getpid()}). Fix: free it"
    assert said in capsys.readouterr().err
    assert fakes.began == [] and not (folder / "runs").exists()


def with_gpus(monkeypatch: pytest.MonkeyPatch, count: int, nodes: tuple[Node, ...] = ()) -> None:
    resources = Resources("cuda", tuple(map(str, range(count))), 16, nodes=nodes)
    monkeypatch.setattr(module, "find_resources", lambda environment: resources)


def test_gpus_are_dealt_out_disjointly(compare, fakes, monkeypatch, capsys):
    with_gpus(monkeypatch, 5)
    assert compare("nccl,file") == 0
    assert fakes.began == [("nccl", "0,1"), ("file", "2,3")]
    assert "the peak of the first training process on its GPU" in capsys.readouterr().out
    fakes.began = []
    assert compare("nccl,file", "--jobs", "1", "--run_root", "others") == 0
    assert fakes.began == [("nccl", "0,1,2,3,4"), ("file", "0,1,2,3,4")]


@pytest.mark.parametrize(
    ("modes", "gpus", "problem"),
    [
        ("nccl,file", 1, "2 at the same time need 4 GPUs, 1 are visible. Fix: ask for more GPUs"),
        ("nccl,file", 3, "2 at the same time need 4 GPUs, 3 are visible. Fix: add --jobs 1"),
        ("nccl,file,colocate", 5, "3 at the same time need 6 GPUs, 5 are visible. Fix: add --jobs 2"),
    ],
)
def test_too_few_gpus_are_refused(compare, fakes, folder, monkeypatch, capsys, modes, gpus, problem):
    with_gpus(monkeypatch, gpus)
    assert compare(modes) == 2
    assert problem in capsys.readouterr().err
    assert fakes.began == [] and not (folder / "runs").exists()


def test_several_nodes_are_refused(compare, monkeypatch, capsys):
    with_gpus(monkeypatch, 4, (Node(("0",), 4, "a"), Node(("0",), 4, "b")))
    assert compare("nccl,file") == 2
    assert "2 nodes are allocated, and modes are compared on one" in capsys.readouterr().err


def test_atropos_names_are_those_of_the_benchmark(tmp_path):
    for name in ("none", "shared_vllm", "lora_only", "lora_restart"):
        bridge, lora = module.MODES[name]
        run = SimpleNamespace(plan={"bridge": bridge}, value={"use_peft": lora}.get)
        assert mode_of(run) == name


GROUPS = """
model_name_or_path: smoke:sums
dtype: float32
bf16: false
atropos_environment: arithmetic
reward_funcs: [environment]
prompts_per_step: 8
num_generations: 8
max_prompt_length: 32
max_completion_length: 8
max_steps: 9
use_vllm: true
"""


def test_the_modes_of_atropos_trainer_run_side_by_side_each_with_a_run_api_of_its_own(fakes, folder, capsys):
    pytest.importorskip("atroposlib")
    (folder / "groups.yaml").write_text(GROUPS)
    assert cli.main(["compare", "groups.yaml", "--modes", "none,shared_vllm,lora_only", "--steps", "3"]) == 0
    place, kept = record(folder)
    assert [row["bridge"] for row in kept["modes"]] == ["restart", "shared", "lora"]
    assert [row["status"] for row in kept["modes"]] == ["completed"] * 3 and fakes.most == 3
    for row in kept["modes"]:
        run = place / row["mode"]
        recipe, plan = read_frozen(run / "recipe.yaml"), read_json(run / "plan.json")
        assert recipe["max_steps"] == 3 and recipe["atropos_environment"] == "arithmetic"
        assert not any(recipe.given(key) for key in port_keys())  # so that each launch takes free ones
        assert {"run-api", "environment-arithmetic"} <= {process["role"] for process in plan["processes"]}
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines if line.startswith(("none ", "shared_vllm ", "lora_only "))][-3:] == [
        "none", "shared_vllm", "lora_only"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("flag", "said"),
    [
        ("--atropos_api_url=http://127.0.0.1:8000", "modes cannot share a run-api"),
        ("--atropos_port=8123", "2 modes at the same time cannot have one atropos_port"),
    ],
)
def test_modes_cannot_share_a_run_api(fakes, folder, capsys, flag, said):
    pytest.importorskip("atroposlib")
    (folder / "groups.yaml").write_text(GROUPS)
    assert cli.main(["compare", "groups.yaml", "--modes", "file,shared", flag]) == 2
    assert said in capsys.readouterr().err
    assert fakes.began == [] and not (folder / "runs").exists()
