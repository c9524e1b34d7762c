"""vLLM inside the training processes: TRL's, with weights that also load on CPU, the guard, and a seed per prompt."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from accelerate.utils import set_seed
from torch.distributed import HashStore
from trl.generation import vllm_generation
from trl.trainer import grpo_trainer

from grpo_recipes.attributes import replaced
from grpo_recipes.recipe.configs import GRPOConfig
from grpo_recipes.recipe.learning import served_dtype
from grpo_recipes.runs.stop_request import StopRequest
from grpo_recipes.weights.guard import checksum_error, differing, sent_fingerprint
from grpo_recipes.weights.sampling import sampling_seed

BRIDGE = "colocate"  # its name in messages of the guard
Tensors = Iterator[tuple[str, torch.Tensor]]


class ColocatedGeneration(vllm_generation.VLLMGeneration):
    """TRL's generation with vLLM in this process, which every rank has.

    ``run_seed`` is the run's, for a sampling seed per prompt, or None for vLLM's own. When the run is asked to stop, a
    generation is given up.
    """

    def __init__(self, *, args: GRPOConfig, run_seed: int | None, stop: StopRequest, **kwargs: Any):
        self._guards, self._run_seed = args.weight_guard, run_seed
        self.generation_name = ""  # what the next sampling seeds are derived from, set by the trainer
        self.seed_numbers: list[int] | None = (
            None  # of all ranks, by which each prompt's seed is derived; None: by its place
        )
        self.transfers = 0  # weights that were loaded so far
        self.checksum_error: str | None = None  # why the last load failed the checksum, here
        self._held: dict[str, Any] = {}  # the first report of what vLLM holds
        self._sent: dict[str, torch.Tensor] = {}
        if args.vllm_max_num_seqs is not None:
            kwargs["max_num_seqs"] = args.vllm_max_num_seqs
        _meet_alone(args.device)
        with replaced(vllm_generation, LLM=partial(_engine, args)):
            super().__init__(**kwargs)
        if self.tensor_parallel_size == 1:  # else processes that sample together would not stop at the same token
            self.llm.stops = stop.cuts
        # vLLM has seeded this whole process, whatever the seed of the run. Ranks that hold one model together need
        # the same random states.
        set_seed(args.seed + self.accelerator.process_index // self.tensor_parallel_size)

    def sync_weights(self) -> None:
        """Load the weights as TRL does, but layer by layer; with the guard, compare what vLLM then holds."""
        with replaced(self, _iter_named_params=partial(self._loading, self._iter_named_params)):
            super().sync_weights()
        self.transfers += 1
        if self._guards:
            sent = {name: int(value) for name, value in self._sent.items()}
            self.checksum_error = checksum_error(BRIDGE, differing(sent, self._reports()))

    def _loading(self, stream: Callable[[], Tensors]) -> Tensors:
        """Yield what is streamed, inside the bracket of vLLM's own reloads: on CPU its parameters have no loaders."""
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

        worker = self.llm.llm_engine.model_executor.driver_worker
        model = worker.model_runner.model
        if self._guards and not self._held:
            self._held = self._reports()[0]
        with set_current_vllm_config(worker.vllm_config):
            initialize_layerwise_reload(model)
            for name, tensor in stream():
                if self._guards:
                    self._sent[name] = sent_fingerprint(name, tensor, self._held)
                yield name, tensor
            finalize_layerwise_reload(model, worker.model_runner.model_config)

    def _reports(self) -> list[dict[str, Any]]:
        """Return what each rank holds of the model that this one has a part of, as ``grpo_weights`` reports it."""
        (own,) = self.llm.collective_rpc("grpo_weights")
        if self.tensor_parallel_size == 1:
            return [own]
        reports: list[Any] = [None] * self.tensor_parallel_size
        torch.distributed.all_gather_object(reports, own, group=self.tp_group)
        return reports

    def generate(self, prompts: list[Any], images: Any, num_generations: int, profiler: Any = None) -> tuple[Any, ...]:
        """Generate as TRL does; with a run seed, row ``r`` of all ranks draws what the server would draw for it."""
        if self._run_seed is None:
            return tuple(super().generate(prompts, images, num_generations, profiler))
        group = self.accelerator.process_index // self.tensor_parallel_size

        def seeds(rows: int) -> list[int]:
            every = range(group * rows, (group + 1) * rows)
            if self.seed_numbers is not None:
                return [self._seed(self.seed_numbers[row]) for row in every]
            return [self._seed(row // num_generations) + row % num_generations for row in every]

        with replaced(self.llm, seeds=seeds):
            return tuple(super().generate(prompts, images, num_generations, profiler))

    def using_seed(self, seed: int) -> AbstractContextManager[None]:
        """Derive sampling seeds inside from this one; a run without them still has none."""
        return replaced(self, _run_seed=self._run_seed if self._run_seed is None else seed)

    def _seed(self, prompt: int) -> int:
        assert self._run_seed is not None
        return sampling_seed(self._run_seed, self.generation_name, prompt)


def trl_building_colocated(**settings: Any) -> AbstractContextManager[None]:
    """Let TRL's trainer build our generation inside."""
    return replaced(grpo_trainer, VLLMGeneration=partial(ColocatedGeneration, **settings))


def _engine(args: GRPOConfig, **kwargs: Any) -> Any:
    """Build the engine with what TRL asks for, and what our server is started with."""
    from grpo_recipes.weights.engine import Engine  # only here: a run without it needs no vLLM

    mixed = "bf16" if args.bf16 else "fp16" if args.fp16 else "no"
    kwargs["dtype"] = served_dtype((args.model_init_kwargs or {}).get("dtype"), mixed)
    kwargs["worker_extension_cls"] = "grpo_recipes.server.plugin.WeightReport"
    kwargs["enforce_eager"] = args.vllm_enforce_eager
    if args.use_cpu:
        # As for the server: a prompt prefilled in parts ends vLLM's CPU worker where its request has a seed. Without
        # parts a batch of the scheduler must hold the longest prompt: vLLM's own size, not TRL's 4096.
        kwargs |= {"enforce_eager": True, "enable_chunked_prefill": False, "max_num_batched_tokens": None}
    engine = Engine(**kwargs)
    # The process ends torch.distributed itself; vLLM would then fail to leave groups that are gone.
    engine.llm_engine.engine_core._finalizer.atexit = False
    return engine


def _meet_alone(device: torch.device) -> None:
    """Give a process without others its own group: vLLM would open a port on every interface to make one."""
    if not torch.distributed.is_initialized():
        backend = "gloo" if device.type == "cpu" else "nccl"
        torch.distributed.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
