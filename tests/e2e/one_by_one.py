"""Start the processes of a plan separately, so that a test can put a proxy between them."""

from __future__ import annotations

import atexit
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from real_runs import clean_environment, smoke_model

from grpo_recipes.launch.readiness import wait_until_ready
from grpo_recipes.paths import find_code_root
from grpo_recipes.plan.commands import base_environment, run_environment, with_processes
from grpo_recipes.plan.devices import find_resources
from grpo_recipes.plan.plan import make_plan
from grpo_recipes.plan.ports import choose_free_ports, plan_ports
from grpo_recipes.plan.types import Names, Plan
from grpo_recipes.process.scratch import make_scratch
from grpo_recipes.process.tree import descendants
from grpo_recipes.recipe import read_recipe
from grpo_recipes.runs.rundir import read_json, write_json
from grpo_recipes.runs.stop_request import StopRequest
from grpo_recipes.weights.file import FileClient

SHORT = ("--max_steps", "4", "--prompts_per_step", "4", "--num_generations", "8", "--save_strategy", "no")


class Bench:
    """Server and trainers of a short smoke run, each started by the test.

    Attributes:
        run_dir: the run directory.
        environment: of its processes.
        served: the model's name at the server.
        plan: the plan.
    """

    served = "bench-served"

    def __init__(self, folder: Path, *flags: str):
        smoke_model()
        self.run_dir = folder / "run"
        (self.run_dir / "processes").mkdir(parents=True)
        self._shell = clean_environment(folder, str(folder))
        self._recipe = read_recipe(find_code_root() / "recipes/smoke/grpo.yaml", (*SHORT, *flags))
        (self.run_dir / "recipe.yaml").write_text(self._recipe.as_yaml())
        self._names = Names(self.run_dir, "bench", self.served, "now")
        self._resources = find_resources({})
        self._scratch = make_scratch({})
        atexit.register(self._scratch.remove)  # a second server has the token of the first
        self._ports, _ = choose_free_ports(self._recipe, plan_ports(self._recipe, None), "127.0.0.1")
        self.plan = self._plan()
        self.environment = {
            **base_environment(self._shell),
            **run_environment(self._shell, self._scratch, self.run_dir, self.served),
        }
        self._log = folder / "log.txt"

    def _plan(self, server_port: int | None = None) -> Plan:
        plan = make_plan(self._recipe, self._resources, {})
        plan = replace(plan, ports=replace(self._ports, server=server_port or self._ports.server))
        return with_processes(plan, self._recipe, self._resources, {}, self._names)

    @contextmanager
    def server(self, model: str | None = None, extension: str | None = None, **variables: str) -> Iterator[str]:
        """Start the plan's server, perhaps with another model or another class as its workers' extension."""
        process = self.plan.process("server")
        assert process is not None
        replaced = {self.plan.model: model, "grpo_recipes.server.plugin.WeightReport": extension}
        argv = [replaced.get(part) or part for part in process.argv]
        with self._log.open("ab") as log:
            environment = {**self.environment, **process.environment, **variables}
            server = subprocess.Popen(argv, env=environment, stdout=log, stderr=log)
        port, token = self._ports.server, self._scratch.token_file.read_text()
        try:
            wait_until_ready(
                lambda: server.poll() is None, os.getpid(), "127.0.0.1", port, self.served, token, timeout=120
            )
            yield f"http://127.0.0.1:{port}"
        finally:
            engine = descendants(server.pid)
            server.terminate()
            with suppress(subprocess.TimeoutExpired):
                server.wait(30)
            for leftover in engine:  # a server that does not end is killed, as the launcher does
                with suppress(psutil.NoSuchProcess):
                    leftover.kill()
            server.kill()
            server.wait()

    def joined(self, patch: pytest.MonkeyPatch) -> Bench:
        """Set the variables that a client of the run's server reads."""
        for name in ("GRPO_TOKEN_FILE", "GRPO_RUN", "GRPO_SYNC_DIR"):
            patch.setenv(name, self.environment[name])
        return self

    def client(self, url: str, seed: int | None = 7) -> FileClient:
        """Return the client of the ``file`` bridge; ``joined`` comes first."""
        args = SimpleNamespace(
            use_cpu=True, server_request_timeout=60.0, weight_guard=True, vllm_server_timeout=60.0,
            max_concurrent_requests=256, vllm_data_parallel_size=self.plan.replicas,
        )  # fmt: skip
        return FileClient(args=args, run_dir=self.run_dir, seed=seed, stop=StopRequest(self.run_dir), base_url=url)

    def train(self, server_port: int | None = None) -> tuple[int, str]:
        plan = self._plan(server_port)
        write_json(self.run_dir / "plan.json", plan.as_json())
        process = plan.process("trainer")
        assert process is not None
        environment = {**self.environment, **process.environment}
        done = subprocess.run(process.argv, env=environment, capture_output=True, text=True, timeout=240, check=False)
        return done.returncode, done.stdout + done.stderr

    def causes(self) -> list[str]:
        records = sorted((self.run_dir / "processes").glob("rank_*.json"))
        return [read_json(path).get("cause", "") for path in records]
