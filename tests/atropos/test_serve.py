"""One environment of a run in a separate process, between a real run-api and a fake of the run's server."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import requests
import yaml

pytest.importorskip("atroposlib")

from atroposlib.envs.base import BaseEnv

from atropos.run_api import RunApi
from grpo_recipes import smoke
from grpo_recipes.errors import ConfigError
from grpo_recipes.extensions.atropos import serve
from grpo_recipes.extensions.atropos.environments import ArithmeticEnv
from grpo_recipes.extensions.atropos.fields import OWNED_FIELDS
from grpo_recipes.extensions.atropos.group import Group, find_group_problem
from grpo_recipes.extensions.atropos.run_environment import adapt_class, disconnect_predecessor, record_id
from grpo_recipes.extensions.atropos.server import PromptTooLong, RunServer
from grpo_recipes.process.tree import is_alive
from grpo_recipes.recipe.user_code import copy_source

from .fake_vllm import FakeVllm, Sampled, save_tokenizer

FILE = Path(__file__).parent / "envs/third_party.py"
TOKENIZER = smoke.build_tokenizer()
END = TOKENIZER.eos_token_id
SECONDS = 240.0  # time for a process to start or a batch to arrive on a busy machine


def sums(prompt: list[int], number: int) -> Sampled:
    """Sample the correct answer of a sum for even indices, and the next number for odd indices."""
    first, second = TOKENIZER.decode(prompt, skip_special_tokens=True)[-4:-1].split("+")
    tokens = [*TOKENIZER.encode(f"<answer>{int(first) + int(second) + number % 2}</answer>"), END]
    return tokens, [-0.5] * len(tokens), "stop"


@pytest.fixture(scope="module")
def tokenizer_name(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def make_run(tmp_path: Path, tokenizer_name: str, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Return ``make_run(bridge=..., KEY=VALUE, ...)``, which builds a run directory."""

    def make_it(bridge: str = "file", **keys: Any) -> Path:
        run = tmp_path / "run"
        (run / "processes").mkdir(parents=True, exist_ok=True)
        sizes = {"num_generations": 2, "max_prompt_length": 16, "max_completion_length": 8, "seed": 7}
        (run / "recipe.yaml").write_text(yaml.safe_dump({**sizes, "model_name_or_path": "smoke:sums", **keys}))
        plan = {"model": tokenizer_name, "bridge": bridge, "server_timeout": 20.0, "processes": []}
        (run / "plan.json").write_text(json.dumps(plan))
        (tmp_path / "token").write_text("the-token")
        variables = {"GRPO_RUN_DIR": run, "GRPO_RUN": "run-abcd", "GRPO_TOKEN_FILE": tmp_path / "token"}
        for name, value in variables.items():
            monkeypatch.setenv(name, str(value))
        return run

    return make_it


@pytest.fixture
def vllm() -> Iterator[FakeVllm]:
    fake = FakeVllm(sums)
    fake.token = "the-token"
    yield fake
    fake.close()


def made(run: Path, index: int = 0, server: str = "http://127.0.0.1:9") -> Any:
    return serve.create_environment(run, index, "http://127.0.0.1:8", server)


# --- settings of an environment ------------------------------------------------------------------------------------


def test_the_configuration_is_the_recipes(make_run, tokenizer_name) -> None:
    run = make_run(
        atropos_environment="arithmetic", atropos_environment_args={"max_num_workers": 4}, temperature=0.5, top_p=0.9
    )
    environment = made(run)
    config = environment.config
    assert isinstance(environment, ArithmeticEnv) and environment.server_cls is RunServer
    assert (config.group_size, config.max_token_length, config.max_tokens, config.temperature) == (2, 24, 8, 0.5)
    assert (config.tokenizer_name, config.rollout_server_url) == (tokenizer_name, "http://127.0.0.1:8")
    assert (config.max_num_workers, config.seed, config.wandb_name) == (4, 7, "arithmetic")
    assert (config.inference_weight, config.min_batch_allocation, config.use_wandb) == (1.0, None, False)
    (server,) = environment.server.servers
    assert (server.config.base_url, server.config.model_name) == ("http://127.0.0.1:9/v1", "run-abcd")
    assert server.config.longest == 24 and server.config.sampling["top_p"] == 0.9


def test_entries_of_a_mixture_have_their_weights_least_shares_and_names(make_run) -> None:
    entry = {"id": "arithmetic", "weight": 3.0}
    run = make_run(atropos_mixture={"environments": [entry, {**entry, "min_allocation": 0.25, "args": {"seed": 1}}]})
    configs = [made(run, index).config for index in (0, 1)]
    assert [(config.inference_weight, config.min_batch_allocation, config.seed) for config in configs] == [
        (3.0, None, 7),
        (3.0, 0.25, 1),
    ]
    assert len({config.wandb_name for config in configs}) == 2


def test_with_the_lora_bridge_completions_come_from_the_adapter(make_run) -> None:
    environment = made(make_run(bridge="lora", atropos_environment="arithmetic"))
    assert environment.server.servers[0].config.model_name == "grpo-adapter"


def test_an_environment_of_others_gets_the_runs_server_and_keeps_its_values(make_run, tokenizer_name, capsys) -> None:
    """S7: each value that the run changes is printed with its reason."""
    template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    environment = made(make_run(
        atropos_environment=f"{FILE}:Count", atropos_environment_args={"begin": 5, "max_batches_offpolicy": 1},
        temperature=0.7, chat_template=template,
    ))  # fmt: skip
    config = environment.config
    assert type(environment.server.servers[0]) is RunServer and environment.tokenizer.chat_template == template
    assert (config.begin, config.temperature, config.group_size, config.wandb_name) == (5, 0.7, 2, "count")
    assert (config.steps_per_eval, config.ensure_scores_are_not_same, config.include_messages) == (100, True, False)
    assert config.max_batches_offpolicy == 1 and config.total_steps > 10**9 and not config.use_wandb
    printed = capsys.readouterr().out.splitlines()
    lines = [line.partition("environment count: ")[2] for line in printed if "environment count: " in line]
    assert {line.split()[0] for line in lines} == {
        "group_size", "max_token_length", "tokenizer_name", "rollout_server_url", "temperature", "total_steps",
        "use_wandb", "wandb_name",
    }  # fmt: skip
    assert "group_size 4 -> 2: num_generations of the recipe" in lines
    assert "total_steps 1000 -> 1000000000000: an environment runs until the training ends" in lines


def test_the_runs_copy_of_a_users_file_is_what_runs(make_run, tmp_path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(FILE.read_text())
    run = make_run(atropos_environment=f"{file}:Count")
    copy_source(f"{file}:Count", run / "rewards")
    file.write_text("raise SystemExit('changed since the run began')")
    assert type(made(run)).__name__ == "Count"


def test_every_field_that_a_run_may_change_has_a_reason_and_ours_change_none(make_run, capsys) -> None:
    """S7: an environment of ours has no values of another author."""
    changed = set(OWNED_FIELDS) - {"batch_size"} | {"seed", "max_tokens", "system_prompt", "wandb_name"}
    changed |= {"group_size", "total_steps", "use_wandb", "max_batches_offpolicy", "worker_timeout"}
    assert changed == set(serve._REASONS)
    made(make_run(atropos_environment="arithmetic", temperature=0.5, system_prompt="hello"))
    assert " -> " not in capsys.readouterr().out


def test_a_field_that_the_configuration_derives_is_shown_as_derived(make_run, capsys) -> None:
    made(make_run(atropos_environment=f"{FILE}:Derived"))
    assert "half 2 -> 1: the configuration derives it from other values" in capsys.readouterr().out


@pytest.mark.parametrize(("own", "longest_wait", "used"), [(None, 900.0, 900), (None, 60.0, 600), (-1, 900.0, -1)])
def test_a_group_may_take_as_long_as_the_trainer_waits(make_run, own: int | None, longest_wait: float, used) -> None:
    args = {} if own is None else {"worker_timeout": own}
    keys = {"atropos_environment_args": args, "atropos_batch_max_wait_time": longest_wait}
    assert made(make_run(atropos_environment=f"{FILE}:Count", **keys)).config.worker_timeout == used


def test_an_environment_that_would_never_begin_begins_and_arguments_win(make_run, capsys) -> None:
    base = serve.load_environment(f"{FILE}:Count").config_init()[0]
    assert (
        serve._list_required_values(base.model_copy(update={"max_batches_offpolicy": 0}))["max_batches_offpolicy"] == 1
    )
    args = {"total_steps": 120, "steps_per_eval": 20}
    config = made(make_run(atropos_environment=f"{FILE}:Count", atropos_environment_args=args)).config
    assert (config.total_steps, config.steps_per_eval) == (120, 20)
    assert "total_steps" not in capsys.readouterr().out


def test_what_an_environment_logs_is_kept_in_the_run_directory(make_run) -> None:
    """S7: with W&B off in its process, the results of ``evaluate`` were lost."""
    run = make_run(atropos_environment=f"{FILE}:Logs")
    environment = made(run)
    environment.curr_step = 4
    asyncio.run(environment.wandb_log())
    (row,) = map(json.loads, (run / "environment-logs.jsonl").read_text().splitlines())
    assert (row["step"], row["eval/percent_correct"]) == (4, 0.5)


def test_a_request_gets_at_most_max_completion_length_and_the_first_is_printed(make_run, vllm, capsys) -> None:
    """S7: also of requests that are not trained on, which vLLM would refuse at the length of a whole sequence."""
    environment = made(make_run(atropos_environment="arithmetic"), server=vllm.url)
    (server,) = environment.server.servers

    async def ask() -> None:
        for most in (24, 4, 99):
            await server.chat_completion(messages=[{"role": "user", "content": "1+1="}], n=1, max_tokens=most)
        await server.chat_completion(messages=[{"role": "user", "content": "1+1="}], n=1)

    asyncio.run(ask())
    assert [request["max_tokens"] for request in vllm.asked] == [8, 4, 8, 8]
    assert (
        capsys.readouterr().out.count("a request for 24 tokens exceeds max_completion_length; all such requests get 8")
        == 1
    )


@pytest.mark.parametrize(
    ("spec", "args", "message"),
    [
        ("arithmetic", {"max_num_worker": 3}, "no field 'max_num_worker'. Fix: use 'max_num_workers'"),
        ("arithmetic", {"tokenizer_name": "x"}, "is set by the launch. Fix: remove it, and set model_name_or_path"),
        ("arithmetic", {"seed": "three"}, "atropos_environment_args.seed: Input should be a valid integer"),
        (f"{FILE}:Count", {"begin": -1}, "atropos_environment_args.begin: Input should be greater than or equal to 0"),
        (f"{FILE}:Unfinished", {}, "does not define evaluate and get_next_item"),
        (f"{FILE}:CountConfig", {}, "is not an Atropos environment"),
        ("json:dumps", {}, "is not an Atropos environment"),
        (f"{Path(__file__).parent}/envs/nowhere.py:Env", {}, "no file"),
        ("grpo_recipes.extensions.atropos.environments:RecipeEnv", {}, "does not define next_item and score"),
        ("dataset", {}, "needs a dataset"),
        (
            "dataset",
            {"dataset_name": "smoke:sums", "reward": "modebenc"},
            "unknown reward 'modebenc'. Fix: set modebench",
        ),
    ],
)
def test_a_check_finds_what_is_wrong_with_an_environment_without_starting_it(spec, args, message) -> None:
    (problem,) = serve.find_environment_problems(spec, args, "recipe.yaml:3")
    assert str(problem).startswith("recipe.yaml:3: ") and message in str(problem)


def test_a_check_finds_nothing_in_a_right_one_and_survives_code_that_raises(tmp_path) -> None:
    assert serve.find_environment_problems("arithmetic", {"max_num_workers": 2}) == []
    assert serve.find_environment_problems(f"{FILE}:Count", {"begin": 1}) == []
    assert serve.find_environment_problems("dataset", {"dataset_name": "smoke:sums"}) == []
    (tmp_path / "raises.py").write_text("1 / 0\n")
    (problem,) = serve.find_environment_problems(f"{tmp_path}/raises.py:Env", {})
    assert "can't be loaded: ZeroDivisionError: division by zero" in problem.what


def test_trajectories_that_are_collected_one_by_one_keep_their_log_probs(make_run, vllm) -> None:
    vllm.policy = 6
    environment = made(make_run(atropos_environment=f"{FILE}:Count", temperature=0.9), server=vllm.url)
    vllm.samples = lambda prompt, number: sums(prompt, len(vllm.asked))
    group, backlog = asyncio.run(environment.collect_trajectories({"number": 4}))
    assert sorted(group["scores"]) == [0.0, 1.0] and backlog == [{"number": 4}] * 2
    assert sorted(map(len, group["overrides"])) == [0, 1] and group["group_overrides"] == {"note": 1}
    plain = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
    assert group["generation_params"] == {**plain, "temperature": 0.9, "policy_version": 6, "environment": "count"}
    assert find_group_problem(Group.from_json(group), size=2, longest=24, vocabulary=len(TOKENIZER)) is None
    assert {body["max_tokens"] for body in vllm.asked} == {8}  # S7: the recipe's max_completion_length


def test_what_an_environment_says_of_its_groups_stays(make_run, vllm) -> None:
    environment = made(make_run(atropos_environment=f"{FILE}:Own"), server=vllm.url)
    (group, none), backlog = asyncio.run(environment.collect_trajectories({"number": 4}))
    assert none is None and backlog == [{"number": 9}]
    params = group["generation_params"]
    assert (params["temperature"], params["policy_version"], params["environment"]) == (0.1, 0, "own")
    assert find_group_problem(Group.from_json(group), size=2, longest=24, vocabulary=len(TOKENIZER)) is None


def test_an_environment_that_makes_no_group_any_more_ends_with_its_own_error(make_run, capsys) -> None:
    environment = made(make_run(atropos_environment=f"{FILE}:Broken"))

    async def try_often() -> None:
        for _ in range(99):
            with pytest.raises(ZeroDivisionError):
                await environment.collect_trajectories({"number": 1})

    with pytest.raises(SystemExit) as error:
        asyncio.run(try_often())
    output = capsys.readouterr()
    assert error.value.code == 1 and "24 groups in a row failed, the last with ZeroDivisionError" in output.out
    assert output.err.count("Traceback") == 1 and "third_party.py" in output.err  # once, with the line of the error


def test_prompts_that_are_all_too_long_end_it_and_one_alone_does_not(make_run, vllm, capsys) -> None:
    environment = made(make_run(atropos_environment="arithmetic"), server=vllm.url)
    long, short = {"prompt": "1" * 30, "answer": "1"}, {"prompt": "1+1=", "answer": "2"}

    async def collect_all(items: list[Any]) -> None:
        for item in items:
            with contextlib.suppress(PromptTooLong):
                await environment.collect_trajectories(item)

    asyncio.run(collect_all([long, short] * 30))
    with pytest.raises(SystemExit):
        asyncio.run(collect_all([long] * 30))
    output = capsys.readouterr()
    assert "Traceback" not in output.err and "the last with PromptTooLong: the prompt has 33 tokens" in output.out


def test_long_prompts_do_not_end_it_while_another_group_is_under_way(make_run, vllm) -> None:
    environment = made(make_run(atropos_environment="arithmetic"), server=vllm.url)
    long, short = {"prompt": "1" * 30, "answer": "1"}, {"prompt": "1+1=", "answer": "2"}
    sample = environment.sample

    async def collect_all() -> Any:
        all_failed = asyncio.Event()

        async def sample_late(*args: Any) -> Any:
            await all_failed.wait()
            return await sample(*args)

        environment.sample = sample_late
        slow = asyncio.create_task(environment.collect_trajectories(short))
        await asyncio.sleep(0)
        for _ in range(30):
            with pytest.raises(PromptTooLong):
                await environment.collect_trajectories(long)
        all_failed.set()
        return (await slow)[0]

    assert len(asyncio.run(collect_all())["tokens"]) == 2


def test_a_template_that_cannot_go_on_ends_it_as_a_wrong_recipe(make_run, capsys) -> None:
    environment = made(make_run(atropos_environment="arithmetic", chat_template="{{ raise_exception('no') }}"))
    with pytest.raises(SystemExit) as error:
        asyncio.run(environment.collect_trajectories(environment.next_item()))
    assert error.value.code == 2 and "chat_template: the template cannot render" in capsys.readouterr().out


def test_a_prompt_without_a_limit_is_refused(make_run) -> None:
    with pytest.raises(ConfigError, match="nothing limits the length of a prompt"):
        made(make_run(atropos_environment="arithmetic", max_prompt_length=None))
    assert made(
        make_run(atropos_environment="arithmetic", max_prompt_length=None, vllm_max_model_length=99)
    ).config.max_token_length == 99  # fmt: skip


# --- in a separate process -----------------------------------------------------------------------------------------


class Served:
    """A process that serves an environment; ``log`` is its output."""

    def __init__(self, folder: Path, index: int, api: str, server: str):
        self._file = folder / f"environment_{index}_{time.monotonic_ns()}.log"
        argv = [
            sys.executable,
            "-m",
            "grpo_recipes.extensions.atropos.serve",
            str(index),
            "--api-url",
            api,
            "--server-url",
            server,
        ]
        variables = {**os.environ, "HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled", "PYTHONUNBUFFERED": "1"}
        with self._file.open("wb") as out:
            self.process = subprocess.Popen(argv, stdout=out, stderr=subprocess.STDOUT, env=variables)

    @property
    def log(self) -> str:
        return self._file.read_text()

    def wait_for(self, text: str) -> None:
        until(lambda: text in self.log or self.process.poll() is not None, lambda: self.log)
        assert text in self.log, self.log

    def end(self) -> int:
        self.process.terminate()
        return self.process.wait(5)


def until(true: Callable[[], Any], told: Callable[[], str] = str) -> Any:
    deadline = time.monotonic() + SECONDS
    while not (result := true()):
        assert time.monotonic() < deadline, told()
        time.sleep(0.05)
    return result


def batch(api: RunApi, *served: Served) -> list[Group]:
    """Wait for the next batch and check that these processes are alive."""

    def ask() -> list[Any] | None:
        assert all(environment.process.poll() is None for environment in served), served[0].log
        return api.get("/batch").json()["batch"]

    return [
        Group.from_json(plain) for plain in until(ask, lambda: "\n".join(environment.log for environment in served))
    ]


@pytest.mark.parametrize(("weight", "most"), [(1.0, 8), (0.75, 6), (0.25, 2), (0.01, 1)])
def test_an_environment_has_its_share_of_groups_under_way(tmp_path: Path, weight: float, most: int) -> None:
    """Two batches of four groups may wait for the trainer."""

    class FakeEnvironment(BaseEnv):
        max_num_workers = 64
        under_way: ClassVar[list[int]] = [0]

        def __init__(self) -> None:
            self.config = SimpleNamespace(max_batches_offpolicy=2, batch_size=16, group_size=4)
            self.status_dict = {"env_weight": weight}

        async def get_next_item(self) -> None: ...

        async def evaluate(self) -> None: ...

        async def collect_trajectories(self, item: int) -> tuple[None, list[Any]]:
            self.under_way.append(self.under_way[-1] + 1)
            await asyncio.sleep(0.01)
            self.under_way.append(self.under_way[-1] - 1)
            return None, [item]

    async def ask_for(count: int) -> list[tuple[None, list[Any]]]:
        return await asyncio.gather(*(environment.collect_trajectories(item) for item in range(count)))

    environment = adapt_class(FakeEnvironment, tmp_path, 0, "sums", run_template=None)()
    assert asyncio.run(ask_for(20)) == [(None, [item]) for item in range(20)]
    assert max(environment.under_way) == most


@pytest.mark.slow
def test_two_environments_of_a_run_send_groups_through_every_trouble(make_run, tmp_path, vllm, api) -> None:
    equal = {"ensure_scores_are_not_same": False}  # the fake server answers every request of Count correctly
    third = {"id": f"{FILE}:Count", "weight": 1.0, "min_allocation": 0.5, "args": equal}
    run = make_run(atropos_mixture={"environments": [{"id": "arithmetic", "weight": 3.0}, third]})
    vllm.policy = 3
    first, second = served = [Served(tmp_path, index, api.url, vllm.url) for index in (0, 1)]
    try:
        # They wait for the trainer, which sets the batch size.
        for environment in served:
            environment.wait_for("wait for trainer to start")
        api.register(batch_size=8, max_token_len=25)
        for environment in served:
            environment.wait_for("registered at run-api as environment")
        records = [json.loads((run / f"processes/atropos_{index}.json").read_text()) for index in (0, 1)]
        arithmetic, count = (record["env_id"] for record in records)
        groups = [group for _ in range(6) for group in batch(api, *served)]
        # If one environment starts slowly, the other's groups may fill the first batches.
        until(lambda: any(group.env_id == arithmetic for group in groups) or groups.extend(batch(api, *served)))
        for group in groups:
            assert find_group_problem(group, size=2, longest=24, vocabulary=len(TOKENIZER)) is None
            assert group.scores == [1.0, 0.0] or group.env_id == count
            assert group.generation_params["environment"] == {arithmetic: "arithmetic", count: "count"}[group.env_id]
        assert {group.policy_version for group in groups} == {3}
        # run-api makes no batch of four groups without one of the environment that has a least share.
        assert all(
            any(group.env_id == count for group in groups[begin : begin + 4]) for begin in range(0, len(groups), 4)
        )
        weights = [
            api.get("/status-env", json={"env_id": env_id}).json()["env_weight"] for env_id in (arithmetic, count)
        ]
        assert weights == [0.75, 0.25]

        # The server answers with errors for a while: every process survives and reports it once.
        vllm.fails = [500] * 12
        until(lambda: not vllm.fails or not api.get("/batch").ok)
        vllm.policy = 4
        until(lambda: any(group.policy_version == 4 for group in batch(api, *served)))
        assert all(environment.log.count("does not answer (InternalServerError") <= 1 for environment in served)

        # End and restart one process: run-api must not wait for the groups of the ended process.
        assert second.end() == -signal.SIGTERM
        restarted = Served(tmp_path, 1, api.url, vllm.url)
        served.append(restarted)
        restarted.wait_for(f"disconnected environment {count} of an earlier process from run-api")
        restarted.wait_for("registered at run-api as environment")
        newest = json.loads((run / "processes/atropos_1.json").read_text())["env_id"]
        assert newest not in (arithmetic, count)
        until(lambda: any(group.env_id == newest for group in batch(api, first, restarted)))

        for environment in served:
            assert "the-token" not in environment.log and "Traceback" not in environment.log
    finally:
        for environment in served:
            environment.process.kill()
            environment.process.wait()


def test_only_an_environment_that_this_run_api_knows_is_disconnected(tmp_path, api, capsys) -> None:
    file = tmp_path / "processes/atropos_0.json"

    def live() -> None:
        """Start and register as an environment process does."""
        disconnect_predecessor(file, api.url)
        record_id(file, api.url, api.register_env(2, min_batch_allocation=0.5))

    def connected() -> int:
        """Count the environments that share the weight in run-api."""
        env_id = api.register_env(2)
        share = api.get("/status-env", json={"env_id": env_id}).json()["env_weight"]
        assert api.post("/disconnect-env", {"env_id": env_id}).json() == {"status": "success"}
        return round(1 / share) - 1

    api.register()
    live()
    assert connected() == 1
    live()
    assert connected() == 1  # otherwise 2, and one of them is dead
    assert "disconnected environment 0 of an earlier process from run-api" in capsys.readouterr().out

    api.restart()
    api.register()
    other = [api.register_env(2) for _ in range(4)]
    live()
    assert connected() == 5 and json.loads(file.read_text())["env_id"] not in other
    assert "disconnected" not in capsys.readouterr().out


@pytest.mark.slow
def test_it_ends_with_its_parent(make_run, tmp_path, vllm, api) -> None:
    make_run(atropos_environment="arithmetic")
    argv = ["-m", "grpo_recipes.extensions.atropos.serve", "0", "--api-url", api.url, "--server-url", vllm.url]
    parent = (
        "import subprocess, sys, time\n"
        f"child = subprocess.Popen([sys.executable, *{argv!r}], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)\n"
        "print(child.pid, flush=True)\n"
        "child.stdout.readline()\n"  # the line about waiting for the trainer
        "print('served', flush=True)\n"
        "time.sleep(600)\n"
    )
    launcher = subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True)
    child = int(launcher.stdout.readline())
    assert launcher.stdout.readline() == "served\n" and is_alive(child)
    launcher.kill()
    launcher.wait()
    launcher.stdout.close()
    until(lambda: not is_alive(child))


@pytest.mark.parametrize(
    ("keys", "code", "message"),
    [
        ({"atropos_environment_args": {"max_num_worker": 3}}, 2, "Fix: use 'max_num_workers'"),
        ({}, 1, "run-api at http://127.0.0.1:9 does not answer: "),
    ],
)
def test_what_keeps_it_from_serving_ends_it_with_a_line(make_run, capsys, keys, code, message) -> None:
    make_run(atropos_environment="arithmetic", **keys)
    assert serve.main(["0", "--api-url", "http://127.0.0.1:9/", "--server-url", "http://127.0.0.1:9"]) == code
    assert message in capsys.readouterr().out


def test_an_api_that_stops_answering_at_the_start_ends_it_with_a_line(make_run, capsys, monkeypatch) -> None:
    def time_out(file: Path, api_url: str) -> None:
        raise requests.ReadTimeout("Read timed out.")

    make_run(atropos_environment="arithmetic")
    monkeypatch.setattr(serve, "disconnect_predecessor", time_out)
    assert serve.main(["0", "--api-url", "http://127.0.0.1:9", "--server-url", "http://127.0.0.1:9"]) == 1
    assert "run-api at http://127.0.0.1:9 does not answer: Read timed out." in capsys.readouterr().out
