"""A server that draws its own noise gets another seed at each start, or it would repeat the noise of earlier steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import psutil
import pytest

from grpo_recipes.launch.processes import Ending
from grpo_recipes.launch.server_starts import with_server_seed
from grpo_recipes.plan.types import Plan, Process
from launch.fake_run import FakeRun


def seed_of(argv: list[str]) -> str:
    return argv[argv.index("--seed") + 1]


@pytest.mark.parametrize(
    ("keys", "seed"),
    [({"seed": 5}, "5"), ({"seed": 5, "seed_server": True}, None), ({"device": "cpu"}, None),
     ({"device": "cpu", "seed_server": False, "seed": 5}, "5")],
)  # fmt: skip
def test_a_server_has_the_runs_seed_unless_each_prompt_has_one(
    planned: Callable[..., Plan], keys: dict[str, object], seed: str | None
) -> None:
    argv = planned(**keys).process("server").argv
    assert seed_of(argv) == seed if seed else "--seed" not in argv


def test_each_start_of_a_server_has_its_own_seed(fake_run: Callable[..., FakeRun]) -> None:
    run = fake_run(steps=20)
    server, *others = run.attempt.plan.processes
    server = replace(server, argv=[*server.argv, "--seed", "7"])
    run.attempt.plan = replace(run.attempt.plan, processes=[server, *others])
    seeds = []

    def ready(epoch: int) -> None:
        run.wait_until(lambda: run.state() == {"epoch": epoch, "state": "ready"})
        seeds.append(seed_of(psutil.Process(run.records("server")[0]["pid"]).cmdline()))

    def train() -> None:
        run.wait_for_step(2)
        ready(1)
        run.kill("server")
        ready(2)

    assert run.then(train).end() == Ending(0)
    assert seeds[0] == "7"  # as shown in the plan
    assert len(set(seeds)) == 2 and all(0 <= int(seed) < 2**31 for seed in seeds)


def test_a_seed_depends_on_the_run_the_attempt_and_the_start() -> None:
    def start(seed: int, *numbers: int) -> str:
        server = Process("server", ["vllm", "--seed", str(seed), "--port", "1"], {}, (), "log", ready="serving")
        return seed_of(with_server_seed(server, *numbers).argv)

    assert start(1, 0, 1) == "1"
    assert start(1, 0, 2) == start(1, 0, 2)
    assert len({start(1, 0, 1), start(1, 0, 2), start(1, 6, 1), start(2, 0, 1), start(2, 0, 2)}) == 5
    trainer = Process("trainer", ["train", "--seed", "3"], {}, (), "log")
    assert with_server_seed(trainer, 0, 1) == trainer
