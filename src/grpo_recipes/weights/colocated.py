"""Run vLLM inside the training processes: TRL's generation with a weight check, a seed per prompt, and stop requests.

The weights are loaded layer by layer, which also works on CPU.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import set_seed
from torch.distributed import HashStore
from trl.generation import vllm_generation
from trl.trainer import grpo_trainer

from grpo_recipes.attributes import replace_attributes
from grpo_recipes.recipe.configs import GRPOConfig
from grpo_recipes.recipe.learning import served_dtype
from grpo_recipes.runs.stop_request import StopRequest
from grpo_recipes.weights.generation import Generation, Tensors
from grpo_recipes.weights.guard import compute_sent_fingerprint, describe_checksum_error, find_differences
from grpo_recipes.weights.sampling import SamplingSeeds

if TYPE_CHECKING:
    from grpo_recipes.weights.engine import Engine

BRIDGE = "colocate"  # the name in messages of the guard


class ColocatedGeneration(SamplingSeeds, Generation):
    """TRL's generation with a vLLM engine in each training process.

    Sampling seeds of prompts derive from ``run_seed``. With ``None``, vLLM uses its own seed. Ranks that share a model
    must draw the same tokens, but an evaluation gives each rank its own random state. With tensor parallelism, ``None``
    therefore means the seed of ``args``. If ``stop`` is requested, a running generation ends early with missing
    completions.
    """

    llm: "Engine"

    def __init__(self, *, args: GRPOConfig, run_seed: int | None, stop: StopRequest, **kwargs: Any) -> None:
        """Start vLLM, then seed the process again: vLLM has given every rank the same fixed seed."""
        self._args, self._guards, self._run_seed, self._stop = args, args.weight_guard, run_seed, stop
        if run_seed is None and args.vllm_tensor_parallel_size > 1:
            self._run_seed = args.seed
        self.transfers = 0  # number of weight loads so far
        self.checksum_error: str | None = None  # why the last load failed the checksum in this process
        self._held: dict[str, Any] = {}  # vLLM's first report of its parameters
        self._sent: dict[str, torch.Tensor] = {}  # fingerprint of each parameter sent last
        if args.vllm_max_num_seqs is not None:
            kwargs["max_num_seqs"] = args.vllm_max_num_seqs
        _init_process_group(args.device)
        super().__init__(**kwargs)
        # vLLM has seeded the whole process with a fixed seed. Ranks that share one model need equal random states.
        set_seed(args.seed + self.accelerator.process_index // self.tensor_parallel_size)

    def _init_vllm(self) -> None:
        """Build the engine as TRL does, with our class instead of ``LLM`` in TRL's module."""
        # Processes that sample together would not stop at the same token.
        stops = self._stop.cuts if self.tensor_parallel_size == 1 else None
        with replace_attributes(vllm_generation, LLM=partial(_make_engine, self._args, stops)):
            super()._init_vllm()

    # --- weights ---------------------------------------------------------------------------------------------------

    def _send_weights(self) -> None:
        """Load the weights as TRL does, but layer by layer.

        With the weight guard, compare vLLM's parameters afterwards and set ``checksum_error``.
        """
        super()._send_weights()
        self.transfers += 1
        if self._guards:
            sent = {name: int(value) for name, value in self._sent.items()}
            self.checksum_error = describe_checksum_error(BRIDGE, [find_differences(sent, self._request_reports())])

    def _iter_named_params(self) -> Tensors:
        """Yield the parameters inside vLLM's own layerwise reload, and store their fingerprints for the guard.

        The reload is needed because on CPU vLLM's parameters have no weight loaders.
        """
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

        worker = self.llm.llm_engine.model_executor.driver_worker
        model = worker.model_runner.model
        if self._guards and not self._held:
            self._held = self._request_reports()[0]
        with set_current_vllm_config(worker.vllm_config):
            initialize_layerwise_reload(model)
            for name, tensor in super()._iter_named_params():
                if self._guards:
                    self._sent[name] = compute_sent_fingerprint(name, tensor, self._held)
                yield name, tensor
            finalize_layerwise_reload(model, worker.model_runner.model_config)

    def _request_reports(self) -> list[dict[str, Any]]:
        """Return the report ``grpo_weights`` of each rank that has a part of this rank's vLLM model."""
        (report,) = self.llm.collective_rpc("grpo_weights")
        if self.tensor_parallel_size == 1:
            return [report]
        reports: list[Any] = [None] * self.tensor_parallel_size
        torch.distributed.all_gather_object(reports, report, group=self.tp_group)
        return reports

    # --- completions -----------------------------------------------------------------------------------------------

    def generate(self, prompts: list[Any], images: Any, num_generations: int, profiler: Any = None) -> tuple[Any, ...]:
        """Generate as TRL does. In a run with a seed, each row of all ranks gets the seed that a server would use."""
        if self._run_seed is None:
            return tuple(super().generate(prompts, images, num_generations, profiler))
        group = self.accelerator.process_index // self.tensor_parallel_size

        def seeds(count: int) -> list[int]:
            """Return the seeds of the ``count`` rows of this rank's engine."""
            rows = range(group * count, (group + 1) * count)
            if self.seed_numbers is not None:
                return [self.derive_prompt_seed(self.seed_numbers[row]) for row in rows]
            return [self.derive_prompt_seed(row // num_generations) + row % num_generations for row in rows]

        with self.llm.seeding_rows(seeds):
            return tuple(super().generate(prompts, images, num_generations, profiler))


def trl_building_colocated(**settings: Any) -> AbstractContextManager[None]:
    """Return a context manager in which TRL's trainer builds a ``ColocatedGeneration`` with these settings."""
    return replace_attributes(grpo_trainer, VLLMGeneration=partial(ColocatedGeneration, **settings))


def _make_engine(args: GRPOConfig, stops: Callable[[], bool] | None, **kwargs: Any) -> "Engine":
    """Build the engine with TRL's arguments ``kwargs``, some of them replaced by the options of our vLLM server.

    ``stops`` is called before each engine step. If it returns True, the running batch is aborted, and its unfinished
    rows are missing from the result. The engine's exit handler is turned off. On CPU, prompts are not prefilled in
    chunks.
    """
    from grpo_recipes.weights.engine import Engine  # imported here: runs with a server need no vLLM in the trainer

    mixed = "bf16" if args.bf16 else "fp16" if args.fp16 else "no"
    kwargs["dtype"] = served_dtype((args.model_init_kwargs or {}).get("dtype"), mixed)
    kwargs["worker_extension_cls"] = "grpo_recipes.server.plugin.WeightReport"
    kwargs["enforce_eager"] = args.vllm_enforce_eager
    if args.use_cpu:
        # As for the server: vLLM's CPU worker dies if a prompt is prefilled in chunks and its request has a seed.
        # Without chunks, a scheduler batch must hold the longest prompt: vLLM's default size, not TRL's 4096.
        kwargs |= {"enforce_eager": True, "enable_chunked_prefill": False, "max_num_batched_tokens": None}
    engine = Engine(**kwargs)
    engine.abort_when(stops)
    # The process shuts down torch.distributed itself; afterwards vLLM could not leave its groups.
    core: Any = engine.llm_engine.engine_core
    core._finalizer.atexit = False
    return engine


def _init_process_group(device: torch.device) -> None:
    """Create a process group for a single process: vLLM would open a port on every interface to create one."""
    if not torch.distributed.is_initialized():
        backend = "gloo" if device.type == "cpu" else "nccl"
        torch.distributed.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
