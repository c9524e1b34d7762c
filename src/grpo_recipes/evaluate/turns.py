"""Sample completions of benchmarks turn by turn with the recipe's source, e.g. because the policy has tools.

Rank 0 plays, so that each call of a tool runs once. If the sampler needs all ranks, rank 0 sends them the prompts of
each turn.

    played = play_completions(source, trainer, prompts, sampling)  # on rank 0
    sample_shared_turns(source, trainer, sampling)  # on the other ranks, unless only rank 0 samples
"""

from collections.abc import Sequence
from dataclasses import replace

from accelerate.utils import broadcast_object_list

from grpo_recipes.rollouts.backends import Prompt, Sampling, Tokens
from grpo_recipes.rollouts.renderer import Renderer
from grpo_recipes.rollouts.source import PlayedCompletion, SamplingTrainer, Source
from grpo_recipes.rollouts.turns import Message, Turn, derive_seed


def render_chats(trainer: SamplingTrainer, chats: Sequence[list[Message]]) -> list[Tokens]:
    """Return the token ids of chats as the source renders them in training, e.g. with the tools of the template."""
    renderer = Renderer(trainer.processing_class, trainer.chat_template_kwargs)
    return [renderer.prompt(Turn(chat)) for chat in chats]


def play_completions(
    source: Source, trainer: SamplingTrainer, prompts: Sequence[Prompt], sampling: Sampling
) -> list[list[PlayedCompletion]]:
    """Let the source play the completions of the prompts; return them, (prompts, samples)."""
    rollouts, samples = trainer.rollouts, sampling.samples
    turn_sampling = replace(sampling, samples=1, max_tokens=source.turn_tokens)

    def share(turns: list[Prompt] | None) -> None:
        """Send the prompts of the next turns, or None at the end, to the other ranks if they sample too."""
        if not rollouts.only_main_rank_samples:
            broadcast_object_list([turns], from_process=0)

    def sample(seeds: list[int], contexts: list[Tokens]) -> list[Tokens | None]:
        """Return the tokens of the next turns."""
        turns = [Prompt(context, seed) for context, seed in zip(contexts, seeds, strict=True)]
        share(turns)
        return [ids for (ids,) in rollouts.sample(turns, turn_sampling)]

    ids = [prompt.ids for prompt in prompts for _ in range(samples)]
    seeds = [derive_seed(prompt.seed, number) for prompt in prompts for number in range(samples)]
    try:
        played = source.play(ids, seeds, trainer, sample)
    finally:
        share(None)
    completions = [completion for completion in played if completion is not None]  # ``sample`` returns all turns
    return [completions[start : start + samples] for start in range(0, len(completions), samples)]


def sample_shared_turns(source: Source, trainer: SamplingTrainer, sampling: Sampling) -> None:
    """Sample turns together with rank 0 until its completions have ended."""
    turn_sampling = replace(sampling, samples=1, max_tokens=source.turn_tokens)
    while turns := broadcast_object_list([None], from_process=0)[0]:
        trainer.rollouts.sample(turns, turn_sampling)
