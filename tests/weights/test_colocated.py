"""vLLM inside the trainers: the order of the engine's calls, its arguments, and a seed for each row of all ranks."""

from __future__ import annotations

import inspect
import os
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.utils import set_seed
from trl.generation.vllm_generation import VLLMGeneration
from trl.trainer import grpo_trainer
from vllm import LLM, SamplingParams

from grpo_recipes.recipe.configs import GRPOConfig
from grpo_recipes.rollouts import backends
from grpo_recipes.runs.rundir import stop_file
from grpo_recipes.runs.stop_request import StopRequest
from grpo_recipes.server.plugin import fingerprint
from grpo_recipes.weights import colocated
from grpo_recipes.weights.colocated import ColocatedGeneration, trl_building_colocated
from grpo_recipes.weights.engine import Engine
from grpo_recipes.weights.sampling import sampling_seed

RELOAD = "vllm.model_executor.model_loader.reload"

MODEL = torch.nn.Linear(2, 2, bias=False)


class FakeModel:
    """Model of the fake engine: records the weights that it receives as loaded, or drops them."""

    drops = False

    def __init__(self, calls: list[Any]):
        self.calls, self.held = calls, torch.zeros(2, 2, dtype=torch.bfloat16)

    def load_weights(self, weights: list[tuple[str, torch.Tensor]]) -> None:
        ((name, tensor),) = weights
        self.calls.append(f"load {name}")
        if not self.drops:
            self.held = tensor.detach().to(self.held.dtype)


class FakeEngine:
    """Replaces vLLM's engine and records its calls."""

    def __init__(self, calls: list[Any], **arguments: Any):
        self.calls, self.arguments = calls, arguments
        self.model = FakeModel(calls)
        runner = SimpleNamespace(model=self.model, model_config=None)
        worker = SimpleNamespace(model_runner=runner, vllm_config=None)
        core = SimpleNamespace(_finalizer=SimpleNamespace(atexit=True))
        executor = SimpleNamespace(driver_worker=worker)
        self.llm_engine = SimpleNamespace(model_executor=executor, engine_core=core)
        torch.manual_seed(arguments["seed"])  # vLLM seeds the whole process too

    def abort_when(self, stops: Any) -> None:
        self.stops = stops

    def seeding_rows(self, seeds: Any) -> Any:
        self.seeds = seeds
        return nullcontext()

    def sleep(self, level: int) -> None:
        self.calls.append(f"sleep {level}")

    def wake_up(self, tags: list[str]) -> None:
        self.calls.append(f"wake_up {tags[0]}")

    def reset_prefix_cache(self) -> None:
        self.calls.append("reset_prefix_cache")

    def collective_rpc(self, method: str) -> list[dict[str, Any]]:
        assert method == "grpo_weights"
        self.calls.append("report")
        return [{"parameters": {"weight": [int(fingerprint(self.model.held)), "bfloat16"]}, "packed": {}}]

    def generate(self, prompts: list[Any], sampling_params: Any, use_tqdm: bool) -> list[Any]:
        self.calls.append("generate")
        return []


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Record the calls to the engine, and the start and end of vLLM's reloads."""
    recorded: list[Any] = []
    monkeypatch.setattr("grpo_recipes.weights.engine.Engine", lambda **arguments: FakeEngine(recorded, **arguments))
    monkeypatch.setattr(f"{RELOAD}.initialize_layerwise_reload", lambda _: recorded.append("initialize"))
    monkeypatch.setattr(f"{RELOAD}.finalize_layerwise_reload", lambda *_: recorded.append("finalize"))
    monkeypatch.setattr(colocated, "_init_process_group", lambda _: None)
    monkeypatch.setattr("trl.generation.vllm_generation.empty_cache", lambda: None)
    return recorded


@pytest.fixture
def make(tmp_path: Path, calls: list[Any]) -> Any:
    """``make(rank=0, run_seed=7, sleeps=False, KEY=VALUE, ...)``: the generation of a rank, with a run's keys."""

    def made(rank: int = 0, run_seed: int | None = 7, sleeps: bool = False, **keys: Any) -> ColocatedGeneration:
        args = GRPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, report_to="none", **keys)
        accelerator = SimpleNamespace(
            process_index=rank, local_process_index=rank, num_processes=2, wait_for_everyone=lambda: None,
            device=torch.device("cpu"),
        )  # fmt: skip
        generation = ColocatedGeneration.__new__(ColocatedGeneration)
        generation.stream_parameters_from(lambda: iter(MODEL.named_parameters()))
        MODEL.name_or_path = "the/model"
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr("trl.generation.vllm_generation.DistributedBackend", lambda _: None)
            generation.__init__(
                args=args, run_seed=run_seed, stop=StopRequest(tmp_path), model=MODEL, accelerator=accelerator,
                processing_class=None, mode="colocate", enable_sleep_mode=sleeps, max_model_length=64,
            )  # fmt: skip
            for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):  # TRL sets them
                os.environ.pop(name, None)
        return generation

    return made


def test_a_sleeping_engine_is_woken_in_order(make: Any, calls: list[Any]) -> None:
    generation = make(sleeps=True, run_seed=None)
    assert calls == ["sleep 2"]
    calls.clear()

    generation.generate([[5]], None, 1)

    assert calls == [
        "wake_up weights", "report", "initialize", "load weight", "finalize", "reset_prefix_cache", "report",
        "wake_up kv_cache", "generate", "sleep 2",
    ]  # fmt: skip
    assert generation.transfers == 1 and generation.checksum_error is None
    generation.sync_weights()
    assert generation.transfers == 2


def test_a_load_that_is_dropped_fails_the_checksum(make: Any) -> None:
    generation = make()
    generation.sync_weights()
    assert generation.checksum_error is None  # compared in bfloat16, which vLLM holds
    with torch.no_grad():
        MODEL.weight.add_(1)
    generation.llm.model.drops = True
    generation.sync_weights()
    assert "through the 'colocate' bridge: after the sync it holds other values" in generation.checksum_error
    generation.llm.model.drops = False
    generation.sync_weights()
    assert generation.checksum_error is None


def test_without_the_guard_nothing_is_reported(make: Any, calls: list[Any]) -> None:
    generation = make(weight_guard=False)
    generation.sync_weights()
    assert "report" not in calls and calls[-1] == "reset_prefix_cache" and generation.checksum_error is None


@pytest.mark.parametrize("guard", [True, False])
def test_the_error_of_any_process_is_that_of_all(monkeypatch: pytest.MonkeyPatch, guard: bool) -> None:
    monkeypatch.setattr(backends, "gather_object", lambda errors: [*errors, "of rank 1", None])
    names: list[str] = []
    generation = SimpleNamespace(
        mode="colocate", checksum_error=None, transfers=3, tensor_parallel_size=1, name_generation=names.append
    )
    args = SimpleNamespace(weight_guard=guard, world_size=3)
    trainer = SimpleNamespace(use_vllm=True, vllm_generation=generation, args=args)
    rollouts = backends.make_rollouts(trainer)
    assert rollouts.checksum_error() == "of rank 1"
    assert (rollouts.guarded, rollouts.bridge, rollouts.transfers) == (guard, "colocate", 3)
    rollouts.seeds.name_generation("4/0")
    assert names == ["4/0"]


def test_every_rank_draws_what_the_server_would_draw_for_its_rows(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    sampled: list[Any] = []
    monkeypatch.setattr(LLM, "generate", lambda self, prompts, sampling_params, **_: sampled.append(sampling_params))
    monkeypatch.setattr(Engine, "reset_prefix_cache", lambda self: None)
    monkeypatch.setattr(Engine, "llm_engine", SimpleNamespace(step=None), raising=False)

    def seeds_of(rank: int, sampling: SamplingParams, **keys: Any) -> list[int | None]:
        generation, engine = make(rank=rank, **keys), Engine.__new__(Engine)
        generation.generation_name = "4/0"
        generation.tensor_parallel_size = generation._args.vllm_tensor_parallel_size
        monkeypatch.setattr(FakeEngine, "generate", lambda _, prompts, **kw: Engine.generate(engine, prompts, **kw))
        monkeypatch.setattr(VLLMGeneration, "generate", lambda self, prompts, *_: trl_generates(self, prompts))

        def trl_generates(self: Any, prompts: list[Any]) -> tuple[()]:
            seeds = getattr(self.llm, "seeds", None)
            with engine.seeding_rows(seeds) if seeds else nullcontext():
                engine.generate(prompts, sampling_params=sampling)
            return ()

        generation.generate([[5]] * 6, None, 4)
        drawn = sampled.pop()
        return [parameters.seed for parameters in drawn] if isinstance(drawn, list) else [drawn.seed]

    # Three prompts of four completions over two ranks: the second prompt is half on each.
    every = [sampling_seed(7, "4/0", prompt) + completion for prompt in range(3) for completion in range(4)]
    plain = SamplingParams(temperature=1.0)
    assert seeds_of(0, plain) + seeds_of(1, plain) == every
    assert len(set(every)) == 12
    assert seeds_of(0, plain, run_seed=None) == [None]
    assert seeds_of(0, SamplingParams(seed=3)) == [3]  # from generation_kwargs
    # Both ranks of one model sample all of its rows, on GPUs from random states that differ in an evaluation.
    shared: dict[str, Any] = {"run_seed": None, "seed": 7, "vllm_tensor_parallel_size": 2}
    assert seeds_of(0, plain, **shared) == seeds_of(1, plain, **shared) == every[:6]


def test_a_generation_is_given_up_when_the_run_is_asked_to_stop(
    make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting, steps = {"a": None, "b": None}, iter(range(100))

    def take_step() -> list[str]:
        if next(steps) == 3:
            stop_file(tmp_path).touch()
        return ["nothing finished"]

    def generate(self: Any, *_: Any, **__: Any) -> list[str]:
        """Run steps until all requests are finished, like vLLM's loop."""
        finished = []
        while waiting:
            finished += self.llm_engine.step()
        return finished

    engine = Engine.__new__(Engine)
    processor = SimpleNamespace(request_states=waiting)
    abort = lambda ids, internal: [waiting.pop(request_id) for request_id in ids if internal]  # noqa: E731
    engine.llm_engine = SimpleNamespace(step=take_step, output_processor=processor, abort_request=abort)
    monkeypatch.setattr(LLM, "generate", generate)
    stop = StopRequest(tmp_path)
    engine.abort_when(stop.cuts)
    monkeypatch.setattr("grpo_recipes.runs.stop_request.POLL_SECONDS", 0.0)

    with stop.cutting_short():
        assert engine.generate([]) == ["nothing finished"] * 4

    assert waiting == {} and engine.llm_engine.step is take_step
    assert make().llm.stops() is False  # outside of what may be cut


def test_the_engine_is_what_the_server_would_be(make: Any) -> None:
    on_cpu = make(model_init_kwargs={"dtype": "float32"}).llm
    assert on_cpu.arguments["worker_extension_cls"] == "grpo_recipes.server.plugin.WeightReport"
    assert on_cpu.arguments["dtype"] == "float32" and on_cpu.arguments["max_model_len"] == 64
    assert on_cpu.arguments["enforce_eager"] is True and on_cpu.arguments["enable_chunked_prefill"] is False
    assert on_cpu.arguments["max_num_batched_tokens"] is None
    assert on_cpu.llm_engine.engine_core._finalizer.atexit is False
    shared = {"use_cpu": False, "model_init_kwargs": None, "bf16": True, "fp16": False}
    for eager in (False, True):  # R13
        args = SimpleNamespace(**shared, vllm_enforce_eager=eager)
        on_gpu = colocated._make_engine(args, None, seed=0).arguments
        assert on_gpu["dtype"] == "auto" and on_gpu["enforce_eager"] is eager
    keys = {"use_cpu": False, "model_init_kwargs": {"dtype": "float32"}, "fp16": False, "vllm_enforce_eager": False}
    arguments = [SimpleNamespace(bf16=low, **keys) for low in (True, False)]
    dtypes = [colocated._make_engine(config, None, seed=0).arguments["dtype"] for config in arguments]
    assert dtypes == ["bfloat16", "float32"]  # G4


def test_the_engine_generates_as_many_completions_at_the_same_time_as_the_recipe_says(make: Any) -> None:
    """P1: the key reaches vLLM inside a trainer too."""
    assert make(vllm_max_num_seqs=3).llm.arguments["max_num_seqs"] == 3


def test_vllm_does_not_decide_the_random_states_of_the_training(make: Any) -> None:
    drawn = []
    for rank, seed in ((0, 5), (0, 6), (1, 5)):
        make(rank=rank, seed=seed)
        drawn.append(torch.rand(1).item())
    set_seed(5)
    assert drawn[0] == torch.rand(1).item() and len({*drawn}) == 2 and drawn[1] == drawn[2]  # 5 + rank, as TRL's


def test_trl_still_has_what_is_replaced() -> None:
    assert list(inspect.signature(VLLMGeneration.sync_weights).parameters) == ["self"]
    signature = ["self", "prompts", "images", "num_generations", "profiler"]
    assert list(inspect.signature(VLLMGeneration.generate).parameters) == signature
    source = inspect.getsource(VLLMGeneration)
    assert source.count("self.llm = LLM(") == 1
    assert "for name, param in self._iter_named_params():\n                self.llm.llm_engine" in source
    before = grpo_trainer.VLLMGeneration
    with trl_building_colocated(run_seed=7):
        assert grpo_trainer.VLLMGeneration.func is ColocatedGeneration
    assert grpo_trainer.VLLMGeneration is before is VLLMGeneration
