"""A real trainer that takes groups from a test instead of Atropos environments."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from grpo_recipes import smoke
from grpo_recipes.extensions.atropos.client import AtroposError
from grpo_recipes.extensions.atropos.group import Group
from grpo_recipes.extensions.atropos.rollouts import AtroposRollouts
from grpo_recipes.recipe.configs import GRPOConfig, ScriptArguments
from grpo_recipes.rewards.load import EpisodeReward
from grpo_recipes.runs.rundir import stop_file
from grpo_recipes.runs.stop_request import StoppedOnRequest
from grpo_recipes.trainers.grpo import GRPOTrainer

from .fake_atropos import ScriptedClient
from .tiny_training import DESCENT, GROUP

PROMPT, LONGEST = 3, 6  # tokens: of a prompt, and of a turn at most


def row(seed: str, turns: int = 1) -> dict[str, list[Any]]:
    """Generate a prompt and turns: each turn has 1 to ``LONGEST`` tokens, after two tokens of the environment.

    The log-probs are close to an untrained model's: one in 257 tokens.
    """
    draw = random.Random(seed)
    tokens, masks, logprobs = [], [], []
    for turn in range(turns):
        context = [draw.randrange(64, 90) for _ in range(2 if turn else PROMPT)]
        reply = [draw.randrange(64, 90) for _ in range(draw.randrange(LONGEST) + 1)]
        tokens += context + reply
        masks += [-100] * len(context) + reply
        logprobs += [1.0] * len(context) + [draw.uniform(-5.7, -5.4) for _ in reply]
    return {"tokens": tokens, "masks": masks, "inference_logprobs": logprobs}


def group(seed: str, scores: tuple[float, ...] = (1.0, 0.0, 0.5, 0.0), turns: int = 1, **fields: Any) -> Group:
    """Make a group of rows. ``fields`` are further fields of the transfer format."""
    rows = [row(f"{seed}/{index}", turns) for index in range(len(scores))]
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    return Group.from_json({**columns, "scores": list(scores), "generation_params": {"policy_version": 0}, **fields})


def like_the_trainer(trainer: GRPOTrainer, original: Group, ratio: float = 1.0, temperature: float = 1.0) -> Group:
    """Copy the group with the trainer's log-probs minus log(ratio), so that the trainer's ratio is ``ratio``."""
    plain, logprobs = original.to_json(), []
    for tokens, mask in zip(original.tokens, original.masks, strict=True):
        with torch.no_grad():
            logits = trainer.accelerator.unwrap_model(trainer.model)(torch.tensor([tokens])).logits[0, :-1]
        logps = (logits.float() / temperature).log_softmax(-1)
        of_tokens = [1.0, *logps.gather(1, torch.tensor(tokens[1:]).unsqueeze(1)).squeeze(1).tolist()]
        shift = torch.tensor(ratio).log().item()
        pairs = zip(of_tokens, mask, strict=True)
        logprobs.append([1.0 if label == -100 else logprob - shift for logprob, label in pairs])
    return Group.from_json({**plain, "inference_logprobs": logprobs})


def make_trainer(
    folder: Path,
    model: str,
    make: Callable[[int], list[Group] | None] | None = None,
    kind: type[GRPOTrainer] = GRPOTrainer,
    peft_config: Any = None,
    **keys: Any,
) -> GRPOTrainer:
    """Make a gradient-descent trainer on the groups of ``make(step)``, by default two groups of known tokens."""
    folder.mkdir(exist_ok=True, parents=True)
    script_keys = {key: keys.pop(key) for key in list(keys) if key.startswith(("atropos_", "max_prompt"))}
    config_keys = DESCENT | {"max_completion_length": 24, "temperature": 1.0} | keys
    args = GRPOConfig(output_dir=str(folder / "checkpoints"), **config_keys)
    script_args = ScriptArguments(atropos_environment="arithmetic", **{"max_prompt_length": 8, **script_keys})
    source = AtroposRollouts(script_args, args, folder)
    tokenizer = smoke.build_tokenizer()
    trainer = kind(
        model=model,
        reward_funcs=[EpisodeReward()],
        args=args,
        train_dataset=source.training_prompts(script_args, args.seed, args.generation_batch_size // GROUP).dataset,
        processing_class=tokenizer,
        run_dir=folder,
        peft_config=peft_config,
        source=source,
    )
    groups = args.generation_batch_size // args.num_generations
    default = partial(_known, groups)
    source._client = ScriptedClient(make or default, partial(source._reconnect_and_check_stop, trainer))
    return trainer


def _known(groups: int, step: int) -> list[Group]:
    return [group(f"{step}/{index}") for index in range(groups)]


def generation(trainer: GRPOTrainer, groups: int = 2) -> dict[str, Any]:
    """Return the inputs of a training step: this many groups, taken and weighted."""
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    rows = [trainer.train_dataset[row] for row in range(groups * trainer.num_generations)]
    return trainer._generate_and_score_completions(rows)


def gradient(trainer: GRPOTrainer, output: dict[str, Any]) -> torch.Tensor:
    trainer.model.zero_grad()
    trainer.compute_loss(trainer.model, output).backward()
    return torch.cat(
        [parameter.grad.flatten() for parameter in trainer.model.parameters() if parameter.grad is not None]
    )


def of_all_kinds(step: int) -> list[Group]:
    """Make three groups: scores, token advantages, and several turns with temperatures and a zeroed row."""
    second = group(f"{step}/b")
    advantages = [
        [random.Random(f"{step}/{at}").gauss(0, 1) for at in range(len(row_tokens))] for row_tokens in second.tokens
    ]
    third = group(f"{step}/c", turns=2, generation_params={"policy_version": 0, "temperature": 0.7})
    zeroed = {"overrides": [{"set_advantage_to_zero": True}, {}, {}, {"temperature": 1.3}]}
    return [
        group(f"{step}/a"),
        Group.from_json({**second.to_json(), "advantages": advantages}),
        Group.from_json({**third.to_json(), **zeroed}),
    ]


def main(folder: Path, model: str, ends: str, keys: dict[str, Any]) -> None:
    """Train as one of several ranks and save the weights, or the ending if the second step ``ends`` the run."""

    def make(step: int) -> list[Group] | None:
        assert trainer.accelerator.is_main_process
        if step == 0 or not ends:
            return of_all_kinds(step)
        if ends == "error":
            raise AtroposError("the groups are gone")
        stop_file(folder).touch()
        return None

    trainer = make_trainer(folder, model, make, **keys)
    try:
        trainer.train()
    except (AtroposError, StoppedOnRequest) as error:
        name = f"rank_{trainer.accelerator.process_index}.txt"
        (folder / name).write_text(f"{type(error).__name__}: {error}")
    if trainer.accelerator.is_main_process:
        torch.save(trainer.accelerator.unwrap_model(trainer.model).state_dict(), folder / "weights.pt")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":  # torchrun
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3], json.loads(sys.argv[4]))
