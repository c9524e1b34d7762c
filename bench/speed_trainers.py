"""The trainers that ``speed.py`` compares, ours and bare TRL. Completions come from a table or from a real server."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import trl
from datasets import Dataset
from safetensors.torch import save_file
from transformers import Qwen2Config, Qwen2ForCausalLM, TrainerCallback
from trl.generation import vllm_generation
from trl.generation.vllm_client import VLLMClient

from grpo_recipes import smoke
from grpo_recipes.launch.readiness import wait_until_ready
from grpo_recipes.paths import find_code_root
from grpo_recipes.plan.commands import base_environment, run_environment, server_command, server_environment
from grpo_recipes.plan.ports import is_port_free
from grpo_recipes.process.scratch import make_scratch
from grpo_recipes.recipe import read_recipe
from grpo_recipes.recipe.configs import GRPOConfig
from grpo_recipes.trainers.grpo import GRPOTrainer
from grpo_recipes.trainers.maxent import MaxEntGRPOTrainer

GSM8K = find_code_root().parent / "shared/data/gsm8k/train.jsonl"
SERVED = "speed"
Keys = dict[str, Any] | None  # recipe keys of an arm of ours; None is bare TRL


class Shape(NamedTuple):
    """The sizes of an optimizer step."""

    lengths: str = "lognormal"  # or gsm8k, equal
    longest: int = 128  # tokens of a completion
    prompts: int = 4  # prompts of a step, over all ranks
    ranks: int = 1
    group: int = 8
    micro_batch: int = 16

    def completions(self, rows: int, seed: int) -> list[list[int]]:
        """Return random tokens of these lengths. Except for equal lengths, the mean is about 0.3 of ``longest``."""
        draw = random.Random(seed)
        sizes = [1.0] * rows
        if self.lengths == "lognormal":
            sizes = [draw.lognormvariate(0.0, 0.7) for _ in range(rows)]
        elif self.lengths == "gsm8k":
            sizes = draw.choices(solutions(), k=rows)
        return [draw.choices(range(60, 120), k=max(1, round(self.longest * size / max(sizes)))) for size in sizes]


def solutions() -> list[float]:
    """Return the lengths of GSM8K's solutions, in words, numbers and signs."""
    lines = GSM8K.read_text().splitlines()[:2000]
    return [float(len(re.findall(r"\w+|[^\w\s]", json.loads(line)["answer"]))) for line in lines]


def build_model(folder: Path, **sizes: Any) -> Path:
    """Write a random model: by default four layers, 256 hidden units, about 3.6M parameters, untied embeddings."""
    tokenizer = smoke.build_tokenizer()
    config_keys = {
        "vocab_size": len(tokenizer), "hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 1024,
        "tie_word_embeddings": False, **sizes,
    }  # fmt: skip
    config = Qwen2Config(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, **config_keys)
    torch.manual_seed(0)
    Qwen2ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def trainer_of(
    folder: Path, model: Path, shape: Shape, steps: int, keys: Keys, callback: TrainerCallback, port: int | None = None,
    common: dict[str, Any] | None = None,
) -> Any:  # fmt: skip
    """Return a trainer of that shape. It samples from the server at ``port``, or from a table without a port.

    ``common`` are keys for bare TRL and ours. They replace the options here.
    """
    folder.mkdir(parents=True, exist_ok=True)
    rows = shape.prompts * shape.group
    micro_batch = min(shape.micro_batch, rows // shape.ranks)
    options = {
        "output_dir": str(folder),
        "max_steps": steps,
        "per_device_train_batch_size": micro_batch,
        "gradient_accumulation_steps": rows // shape.ranks // micro_batch,
        "num_generations": shape.group,
        "max_completion_length": shape.longest,
        "learning_rate": 0.0,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "disable_tqdm": True,
        "model_init_kwargs": {"dtype": "float32"},
        **({"use_vllm": True, "vllm_mode": "server", "vllm_server_port": port} if port else {"use_vllm": False}),
        **({"weight_sync": "file"} if port and keys is not None else {}),
        **(common or {}),
        **(keys or {}),
    }
    draw = random.Random(7)
    problems = ["".join(draw.choices("0123456789+", k=draw.randrange(10, 50))) for _ in range(64)]
    trainer_class = MaxEntGRPOTrainer if "maxent_objective" in options else GRPOTrainer
    with patch.object(vllm_generation, "VLLMClient", PlainClient):
        trainer = (trl.GRPOTrainer if keys is None else trainer_class)(
            model=str(model),
            reward_funcs=[last_token_is_even],
            args=(trl.GRPOConfig if keys is None else GRPOConfig)(**options),
            train_dataset=Dataset.from_list([{"prompt": [{"role": "user", "content": text}]} for text in problems]),
            processing_class=smoke.build_tokenizer(),
            callbacks=[callback],
            **({} if keys is None else {"run_dir": folder}),
        )
    if port:
        client = trainer.vllm_generation.vllm_client
        client.generate = partial(sample, client, shape, lambda: trainer.state.global_step, client.generate)
    else:
        trainer._generate_single_turn = lambda prompt_ids, *_, **__: (
            shape.completions(len(prompt_ids), trainer.state.global_step),
            None,
        )
    return trainer


def last_token_is_even(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Return rewards that differ within a group."""
    return [float(ids[-1] % 2 == 0) for ids in completion_ids]


def sample(
    client: VLLMClient, shape: Shape, step: Callable[[], int], plain: Callable[..., Any],
    prompts: list[list[int]], n: int = 1, max_tokens: int = 1, **options: Any,
) -> dict[str, Any]:  # fmt: skip
    """Sample completions of the shape's lengths, all at once, which no token ends; equal ones as the client does.

    A server takes one length for all completions of a request, so that others are a request each.
    """
    options["generation_kwargs"] = {**(options.get("generation_kwargs") or {}), "ignore_eos": True}
    if shape.lengths == "equal":
        return dict(plain(prompts=prompts, n=n, max_tokens=max_tokens, **options))
    lengths = [len(row) for row in shape.completions(len(prompts) * n, step())]

    def request(row: int) -> dict[str, Any]:
        return dict(VLLMClient.generate(client, [prompts[row // n]], n=1, max_tokens=lengths[row], **options))

    with ThreadPoolExecutor(len(lengths)) as pool:
        answers = list(pool.map(request, range(len(lengths))))
    joined = {key: [row for answer in answers for row in answer[key]] for key in ("completion_ids", "logprobs")}
    return {
        "prompt_ids": prompts, **joined,
        "logprob_token_ids": [row for answer in answers for row in answer.get("logprob_token_ids") or [None]],
    }  # fmt: skip


class PlainClient(VLLMClient):
    """TRL's client with the plainest sync there is on CPU: a file, and vLLM's own reload. TRL's NCCL raises there."""

    def check_server(self, *args: Any, **kwargs: Any) -> None:
        """Send the server's token. ``served`` has waited for the server; TRL would retry without a token forever."""
        token = Path(os.environ["GRPO_TOKEN_FILE"]).read_text().strip()
        self.session.headers["Authorization"] = f"Bearer {token}"
        self.session.trust_env = False

    def init_communicator(self, device: Any = 0) -> None:
        """Open nothing."""

    def close_communicator(self) -> None:
        """Close nothing."""

    def update_named_params(self, metadata: Any, params: Any) -> None:
        """Write all tensors, and let the server read them."""
        folder = Path(os.environ["GRPO_SYNC_DIR"]) / "plain"
        folder.mkdir(parents=True, exist_ok=True)
        save_file({name: tensor.detach().clone() for name, tensor in params}, folder / "model.safetensors")
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
        self.session.post(f"{self.base_url}/collective_rpc", json=body, timeout=60).raise_for_status()


@contextmanager
def served(model: Path) -> Iterator[int]:
    """Serve the model with the real vLLM on the last of this process's cores, and leave that to it; yield the port."""
    cores = sorted(os.sched_getaffinity(0))
    port = next(
        candidate
        for candidate in iter(lambda: random.randrange(20000, 30000), None)
        if is_port_free("127.0.0.1", candidate)
    )
    scratch = make_scratch(os.environ)
    recipe = read_recipe(find_code_root() / "recipes/smoke/grpo.yaml")
    environment = {
        **base_environment(os.environ),
        **run_environment(os.environ, scratch, scratch.disk, SERVED),
        **server_environment("cpu", None, os.environ),
    }
    os.environ |= {name: environment[name] for name in ("GRPO_TOKEN_FILE", "GRPO_SYNC_DIR", "GRPO_RUN")}
    argv = server_command(recipe, str(model), SERVED, "127.0.0.1", port, "cpu")
    alone = ["taskset", "-c", str(cores[-1])] if len(cores) > 1 else []
    server = subprocess.Popen([*alone, *argv], env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        token = scratch.token_file.read_text()
        wait_until_ready(lambda: server.poll() is None, os.getpid(), "127.0.0.1", port, SERVED, token, timeout=300)
        os.sched_setaffinity(0, cores[:-1] or cores)
        yield port
    finally:
        os.sched_setaffinity(0, cores)
        server.terminate()
        server.wait(30)
        scratch.remove()


def first_step(command: list[str], folder: Path) -> dict[str, float]:
    """Launch a recipe; return the seconds until each of its lines that names a phase, and its first step."""
    began, seconds_by_phase = time.perf_counter(), dict[str, float]()
    environment = {**base_environment(os.environ), "GRPO_HOME": str(find_code_root())}
    with subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as run:
        assert run.stdout is not None
        for line in run.stdout:
            if match := re.match(r"grpo: now ([a-z ]+?)(?: \(|$)|(step 1)/", line.strip()):
                seconds_by_phase.setdefault(match[1] or match[2], round(time.perf_counter() - began, 2))
    if run.returncode or "step 1" not in seconds_by_phase:
        raise RuntimeError(f"{command} ended with {run.returncode}, after {seconds_by_phase}")
    return seconds_by_phase
