"""Write ``samples.jsonl``: the rewards of each generation, and some of its completions for a person to read.

``write_samples`` chooses groups that are worth reading: a prompt that the first row has too, if the generation contains
one, otherwise the first group, and the group with the largest difference in rewards.
"""

import json
import math
from itertools import groupby
from pathlib import Path
from typing import Any

from grpo_recipes.evaluate.scores import sum_weighted_rewards
from grpo_recipes.runs.rundir import load_json_mapping
from grpo_recipes.secrets import contains_secret, mask_secrets
from grpo_recipes.trainers.loss_inputs import sampled_logps, trained_mask
from grpo_recipes.trainers.metrics import append_json, to_json_number
from grpo_recipes.trainers.protocol import InnerTrainer

LONGEST_TEXT = 4000  # characters
_MOST_TOKENS = 512  # recorded tokens of a completion
_LONGEST_EPISODE = 16_000  # characters of all texts of an episode
_SHORTEST_CUT = 200  # least characters of a cut text of an episode


def write_samples(
    file: Path, trainer: InnerTrainer, answers: list[Any], completion_ids: list[list[int]], output: dict[str, Any],
    episodes: list[dict[str, Any]] | None = None,
) -> None:  # fmt: skip
    """Append a row to ``file``: all rewards of the generation that TRL just logged, and some completions to read.

    ``answers``, ``completion_ids`` and ``output`` are the reference answers, the tokens and the loss inputs of rank 0's
    rows. ``episodes`` are the records of completions, (B,), that come from environments.
    """
    logs, group_size, names = trainer._logs, trainer.num_generations, trainer.reward_func_names
    prompts, completions, advantages = (list(logs[name]) for name in ("prompt", "completion", "advantages"))
    rewards_BR = trainer.rewards_BR[-len(prompts) :]
    totals = [_round_or_none(total) for total in sum_weighted_rewards(rewards_BR, trainer.reward_weights).tolist()]
    starts, first_prompts = range(0, min(len(answers), len(prompts)), group_size), _read_first_prompts(file)
    recurring = next((start for start in starts if _format_text(prompts[start], roles=True) in first_prompts), 0)
    samples = []
    for row in choose_rows(totals, group_size, len(answers), trainer.args.report_samples, recurring):
        start = row - row % group_size
        answer = answers[start]
        extent: dict[str, Any] = {}
        if episodes:
            extent = {"episode": _shorten_episode(episodes[row])}
        elif row < len(completion_ids) and (ids := completion_ids[row]):  # not empty, and not of another rank
            ends = [*trainer.eos_token_ids, trainer._tokenizer.pad_token_id]  # as in TRL's metrics
            extent = {"tokens": len(ids), "truncated": ids[-1] not in ends}
        samples.append(
            {
                "prompt": _format_text(prompts[row], roles=True),
                "completion": _format_text(completions[row], roles=len(completions[row]) > 1),
                "answer": None if answer is None else _format_text(str(answer)),
                "reward": totals[row],
                "rewards": dict(zip(names, map(_round_or_none, rewards_BR[row].tolist()), strict=True)),
                "advantage": _round_or_none(advantages[row]),
                "group_rewards": totals[start : start + group_size],
                **extent,
                **_record_tokens(trainer, completion_ids, output, row),
            }
        )
    append_json(file, {"step": trainer.state.global_step + 1, "rewards": totals, "samples": samples})


def _record_tokens(
    trainer: InnerTrainer, completion_ids: list[list[int]], output: dict[str, Any], row: int
) -> dict[str, Any]:
    """Return ``{"token_view": {...}}``, the entry of a sample that describes its first 512 tokens.

    The values are strings: ``text`` of all these tokens, ``lengths`` ("4 1", the characters of each token),
    ``advantages`` ("40:0.5 12:-", 40 tokens with 0.5, then 12 untrained tokens) and the sampler's ``logprobs``, if it
    returned any. Return {} for an empty completion, a row of another rank, and a text with a secret, because its
    tokens can't be masked.
    """
    tokenizer, ids = trainer._tokenizer, completion_ids[row] if row < len(completion_ids) else []
    if not ids or contains_secret(tokenizer.decode(ids)):
        return {}
    shown_ids = ids[:_MOST_TOKENS]
    distinct_ids, length = list(dict.fromkeys(shown_ids)), len(shown_ids)
    decoded = tokenizer.batch_decode([[token] for token in distinct_ids], clean_up_tokenization_spaces=False)
    text_of_id: dict[int, str] = {}
    for token, name, text in zip(distinct_ids, tokenizer.convert_ids_to_tokens(distinct_ids), decoded, strict=True):
        # SentencePiece drops the space at the start of a text. A token without a text, such as padding, shows its name.
        space = " " if name.startswith("\u2581") and not text.startswith(" ") else ""
        text_of_id[token] = space + text or name
    texts = [text_of_id[token] for token in shown_ids]
    masks: dict[str, Any] = {
        name: output[name][row, :length] for name in ("completion_mask", "tool_mask") if name in output
    }
    advantages = output["advantages"][row]  # of the row, or (T,) of its tokens
    advantage_T = advantages[:length] if advantages.ndim else advantages.expand(length)
    trained_T = zip(trained_mask(masks).tolist(), advantage_T.tolist(), strict=True)
    stretches = groupby(f"{value + 0.0:.4g}" if is_trained else "-" for is_trained, value in trained_T)
    view = {
        "text": "".join(texts),
        "lengths": " ".join(str(len(text)) for text in texts),
        "advantages": " ".join(f"{len(list(tokens))}:{advantage}" for advantage, tokens in stretches),
    }
    logprobs = sampled_logps(output)
    if logprobs is not None:
        view["logprobs"] = " ".join(f"{logprob + 0.0:.3g}" for logprob in logprobs[row, :length].tolist())
    return {"token_view": view}


def _read_first_prompts(file: Path) -> set[str]:
    """Return the prompts of the first row of ``samples.jsonl``; an empty set without a row."""
    if not file.exists():
        return set()
    with file.open(encoding="utf-8", errors="replace") as lines:
        row = load_json_mapping(lines.readline()) or {}
    return {sample["prompt"] for sample in row.get("samples", [])}


def choose_rows(totals: list[float | None], group: int, answered: int, count: int, first_group: int = 0) -> list[int]:
    """Return the indices of ``count`` rows to show, half from the group that begins at row ``first_group``.

    The other half comes from the other group with the largest difference in ``totals``, the rewards, (B,). Without
    another group, all come from the first. ``group`` is the size of groups. Only groups that begin in the first
    ``answered`` rows count, because rank 0 knows their answers. The rows of a group come in the order best, worst,
    second best, and so on.
    """

    def spread(start: int) -> float:
        """Return the difference of a group's largest and smallest reward; -1 if no row has one."""
        scored = [total for total in totals[start : start + group] if total is not None]
        return max(scored) - min(scored) if scored else -1.0

    def reward_of(row: int) -> float:
        """Return the reward of a row, minus infinity for an unscored one."""
        total = totals[row]
        return -math.inf if total is None else total

    def extremes(start: int, most: int) -> list[int]:
        """Return at most ``most`` rows of the group at ``start``: the best, the worst, the second best, and so on."""
        rows = range(start, min(start + group, len(totals)))
        ranked = sorted(rows, key=reward_of, reverse=True)
        return [ranked.pop(-(index % 2)) for index in range(len(rows))][:most]

    others = [start for start in range(0, min(answered, len(totals)), group) if start != first_group]
    if not others:
        return extremes(first_group, count)
    return extremes(first_group, count - count // 2) + extremes(max(others, key=spread), count // 2)


def _shorten_episode(record: dict[str, Any]) -> Any:
    """Return an episode's record with secrets masked and long texts cut, shorter if it has many turns."""
    longest = max(_SHORTEST_CUT, _LONGEST_EPISODE // (1 + 2 * len(record["turns"])))

    def shorten(value: Any) -> Any:
        """Return a value with secrets masked and texts cut, also inside mappings and lists."""
        if isinstance(value, dict):
            return {mask_secrets(str(name)): shorten(item) for name, item in value.items()}
        if isinstance(value, list):
            return [shorten(item) for item in value]
        return _format_text(value, longest=longest) if isinstance(value, str) else to_json_number(value)

    return shorten(record)


def _format_text(content: Any, roles: bool = False, longest: int = LONGEST_TEXT) -> str:
    """Return a text or joined chat messages with secrets masked, cut to ``longest`` characters.

    ``roles`` writes the role above each message. A cut text tells how many characters are missing.
    """
    if not isinstance(content, str):
        contents = [message.get("content") for message in content]
        texts = [text if isinstance(text, str) else json.dumps(text) for text in contents]
        heads = [f"[{message['role']}]\n" if roles else "" for message in content]
        content = "\n\n".join(head + text for head, text in zip(heads, texts, strict=True))
    text = mask_secrets(content)
    excess = len(text) - longest
    return text if excess <= 0 else f"{text[:longest]} […{excess:,} more characters]"


def _round_or_none(value: float) -> float | None:
    """Return a number with 4 decimals, or None if it is not finite."""
    return round(value, 4) if math.isfinite(value) else None
