"""Episodes of several turns in a real trainer: trained tokens, advantages, and endings."""

from __future__ import annotations

import math
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_processes import run_ranks

from grpo_recipes import smoke
from grpo_recipes.errors import ConfigError
from grpo_recipes.extensions.environments.episode import make_environment_pool
from grpo_recipes.extensions.environments.episodes import compute_turn_advantages
from grpo_recipes.recipe.configs import ScriptArguments
from grpo_recipes.rollouts.renderer import Renderer
from grpo_recipes.rollouts.turns import Turn
from grpo_recipes.trainers.checks import TooManyWithoutVerdict, compute_trainer_logps

from .fixed_completions import rows_of, weights_of
from .played_episodes import GROUP, completion, generation, make_trainer

TEXT = smoke.build_tokenizer()


def test_tokens_stay_as_sampled_and_the_environments_are_masked(tmp_path: Path, model: str) -> None:
    trainer = make_trainer(tmp_path, model)
    output = generation(trainer)
    for row, episode in enumerate(trainer.source.played):
        ids, mask = output["completion_ids"][row].tolist(), output["tool_mask"][row].tolist()
        place, expected = 0, []
        for turn in range(len(episode.actions)):
            sampled = [*completion(f"0/0/turn{turn}", row, 7), TEXT.eos_token_id]
            assert ids[place : place + len(sampled)] == sampled
            expected += [1] * len(sampled)
            place += len(sampled)
            if turn + 1 < len(episode.actions):
                between = TEXT(f"<|user|>{episode.turns[turn + 1].messages[0]['content']}<|im_end|><|assistant|>")
                assert ids[place : place + len(between.input_ids)] == between.input_ids
                expected += [0] * len(between.input_ids)
                place += len(between.input_ids)
        assert mask[:place] == expected
        assert output["completion_mask"][row].sum() == place
    assert any(0 in row_mask for row_mask in output["tool_mask"].tolist())


LOSSES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo")


@pytest.mark.parametrize("credit", ["all_turns", "last_turn", "per_turn"])
def test_what_the_environment_says_has_no_gradient(tmp_path: Path, model: str, credit: str) -> None:
    """Replacing environment tokens changes no bit of the gradient. Replacing policy tokens does.

    Only the target tokens of the loss are replaced. The model's inputs stay, because later tokens depend on them.
    """
    trainer = make_trainer(tmp_path, model, beta=0.1, environment_credit=credit, environment_args={"exactly": 2})
    trainer.args.trim_padding = False  # the model is given the rows that the loss has
    output = generation(trainer)
    read = torch.cat([output["prompt_ids"], output["completion_ids"]], dim=1)
    trained = output["tool_mask"].bool()

    def as_it_was(_: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        return args, {**kwargs, "input_ids": read}

    def gradient(changed_BT: torch.Tensor) -> torch.Tensor:
        ids = torch.where(changed_BT, (output["completion_ids"] + 1) % 64, output["completion_ids"])
        trainer.model.zero_grad()
        trainer.compute_loss(trainer.model, {**output, "completion_ids": ids}).backward()
        return torch.cat(
            [parameter.grad.flatten() for parameter in trainer.model.parameters() if parameter.grad is not None]
        )

    assert (~trained & output["completion_mask"].bool()).sum() > 8
    trainer.model.register_forward_pre_hook(as_it_was, with_kwargs=True)
    for loss in LOSSES:
        trainer.loss_type = loss
        plain = gradient(trained & False)
        assert plain.abs().max() > 0, loss
        assert torch.equal(gradient(~trained), plain), loss
        assert not torch.allclose(gradient(trained), plain), loss
    trainer.source.close()


def test_what_the_environment_says_is_not_compared_with_the_servers_log_probs(tmp_path: Path, model: str) -> None:
    trainer = make_trainer(tmp_path, model)
    output = generation(trainer)
    logps, policy = compute_trainer_logps(trainer, output), output["tool_mask"].bool()
    output["sampling_per_token_logps"] = torch.where(policy, logps, 0.0)
    assert trainer.checks.measure_logprob_difference(output) == 0.0
    output["sampling_per_token_logps"] = torch.where(policy, logps + 1.0, 0.0)
    assert trainer.checks.measure_logprob_difference(output) == pytest.approx(1.0)


def test_a_reward_is_the_episodes_sum_and_shown_with_its_turns(tmp_path: Path, model: str) -> None:
    trainer = make_trainer(tmp_path, model, report_samples=8)
    generation(trainer)
    for row, episode in enumerate(trainer.source.played):
        lengths = [len(action) % 4 / 4 for action in episode.actions]
        assert trainer.rewards_BR[row, 0] == pytest.approx(sum(lengths))
    (row,) = rows_of(tmp_path, "samples.jsonl")
    longest = max(row["samples"], key=lambda sample: len(sample["completion"]))
    assert "[assistant]" in longest["completion"] and "[user]" in longest["completion"]
    assert row["samples"][0]["prompt"].startswith("[user]\n") and row["samples"][0]["prompt"].endswith("=")
    by_text = {episode.record()["turns"][0]["action"]: episode for episode in trainer.source.played}
    for sample in row["samples"]:
        told, episode = sample["episode"], by_text[sample["episode"]["turns"][0]["action"]]
        assert (told["seed"], told["messages"]) == (episode.seed, episode.turns[0].messages)
        assert [turn["action"] for turn in told["turns"]] == episode.actions
        assert [turn["reward"] for turn in told["turns"]] == [turn.reward for turn in episode.turns[1:]]
        assert [turn["info"]["said"] for turn in told["turns"]] == episode.actions
        assert sample["reward"] == pytest.approx(sum(turn["reward"] for turn in told["turns"]))
        assert "unfinished" not in told and "failed" not in told
    turns = [len(episode.actions) for episode in trainer.source.played]
    assert trainer._metrics["train"]["episodes/turns"] == [pytest.approx(sum(turns) / len(turns))]
    assert trainer._metrics["train"]["episodes/letters"][0] > 0


def test_the_last_turn_alone_is_trained(tmp_path: Path, model: str) -> None:
    trainer = make_trainer(tmp_path, model, environment_credit="last_turn", environment_args={"exactly": 3})
    output = generation(trainer)
    for row, episode in enumerate(trainer.source.played):
        last = len(completion("0/0/turn2", row, 7)) + 1
        mask = output["tool_mask"][row][: len(episode.ids)].tolist()
        assert mask == [0] * (len(episode.ids) - last) + [1] * last


def test_each_turn_has_the_advantage_of_what_comes_after_it(tmp_path: Path, model: str) -> None:
    trainer = make_trainer(tmp_path, model, environment_credit="per_turn", environment_args={"exactly": 2})
    output = generation(trainer)
    played = trainer.source.played[:GROUP]
    for turn in (0, 1):
        to_come = torch.tensor([sum(later.reward for later in episode.turns[turn + 1 :]) for episode in played])
        expected = (to_come - to_come.mean()) / (to_come.std() + 1e-4)
        for row, episode in enumerate(played):
            tokens = [place for place, of in enumerate(episode.turn_ids) if of == turn]
            assert output["advantages"][row, tokens].tolist() == pytest.approx([expected[row].item()] * len(tokens))
    between = [place for place, of in enumerate(played[0].turn_ids) if of is None]
    assert between and output["advantages"][0, between].abs().max() == 0
    trainer.compute_loss(trainer.model, output).backward()


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_an_episode_of_one_turn_has_trls_own_advantage(tmp_path: Path, model: str, scale: str) -> None:
    keys: dict[str, Any] = {"environment_args": {"exactly": 1}, "reward_weights": [2.0], "scale_rewards": scale}
    stock = generation(make_trainer(tmp_path / "all", model, **keys))
    turns = make_trainer(tmp_path / "turns", model, environment_credit="per_turn", **keys)
    advantages = generation(turns)["advantages"]
    assert stock["advantages"].abs().max() > 0.1
    for row, episode in enumerate(turns.source.played):
        assert advantages[row, : len(episode.ids)].tolist() == pytest.approx(
            [stock["advantages"][row].item()] * len(episode.ids)
        )


def test_samples_show_the_advantages_of_turns_that_are_trained(tmp_path: Path, model: str) -> None:
    keys = {"environment_credit": "per_turn", "environment_args": {"exactly": 2}, "report_samples": 8}
    trainer = make_trainer(tmp_path, model, **keys)
    output = generation(trainer)
    (row,) = rows_of(tmp_path, "samples.jsonl")
    trained = {}
    for place, episode in enumerate(trainer.source.played):
        positions = [token for token, turn in enumerate(episode.turn_ids) if turn is not None]
        trained[tuple(episode.actions)] = output["advantages"][place, positions]
    assert len(row["samples"]) == 8
    for sample in row["samples"]:
        turns = sample["episode"]["turns"]
        of_tokens = trained[tuple(turn["action"] for turn in turns)]
        assert sample["advantage"] == pytest.approx(of_tokens.mean().item(), abs=1e-3)
        assert {turn["advantage"] for turn in turns} == {round(value, 4) for value in of_tokens.tolist()}
        view, start = sample["token_view"], 0
        stretches = [part.split(":") for part in view["advantages"].split()]
        assert [text for _, text in stretches if text != "-"] == [f"{turn['advantage']:.4g}" for turn in turns]
        lengths, trained_text = [*map(int, view["lengths"].split())], ""
        for count, text in stretches:
            characters = sum(lengths[: int(count)])
            trained_text += view["text"][start : start + characters] * (text != "-")
            lengths, start = lengths[int(count) :], start + characters
        assert all(turn["action"] in trained_text or "\ufffd" in view["text"] for turn in turns)
    assert trainer._logs["advantages"][0] == pytest.approx(trained[tuple(trainer.source.played[0].actions)].mean())


def test_turns_are_compared_among_the_episodes_that_have_them() -> None:
    advantages = compute_turn_advantages(
        [(0, 1.0, [0.0, 1.0]), (1, 0.0, [0.0]), (2, None, [5.0]), (3, 3.0, [1.0, 2.0])], 4
    )
    assert set(advantages) == {(0, 0), (0, 1), (1, 0), (3, 0), (3, 1)}
    assert advantages[0, 1] == pytest.approx(-advantages[3, 1]) and advantages[0, 1] == pytest.approx(
        -math.sqrt(0.5), abs=1e-3
    )
    assert advantages[1, 0] < advantages[0, 0] < advantages[3, 0]


@pytest.mark.parametrize(("rule", "scored"), [("score", True), ("zero", True), ("unscored", False)])
def test_an_episode_without_turns_left_ends_unfinished(tmp_path: Path, model: str, rule: str, scored: bool) -> None:
    keys = {"environment_args": {"exactly": 3}, "environment_max_turns": 2, "environment_unfinished": rule}
    trainer = make_trainer(tmp_path, model, **keys)
    generation(trainer)
    assert all(episode.unfinished and len(episode.actions) == 2 for episode in trainer.source.played)
    assert {record["unfinished"] for record in trainer.source.records} == {"environment_max_turns"}
    rewards = trainer.rewards_BR[:, 0]
    assert rewards.isnan().all() if not scored else (rewards == 0).all() == (rule == "zero")
    assert trainer._metrics["train"]["episodes/unfinished"] == [1.0]


def test_an_unfinished_episode_that_is_worth_nothing_trains_no_turn(tmp_path: Path, model: str) -> None:
    keys: dict[str, Any] = {"environment_args": {"exactly": 3}, "environment_max_turns": 2}
    advantages = {}
    for rule in ("score", "zero"):
        trainer = make_trainer(
            tmp_path / rule, model, environment_credit="per_turn", environment_unfinished=rule, **keys
        )
        advantages[rule] = generation(trainer)["advantages"]
        trainer.source.close()
    assert advantages["score"].abs().max() > 0.1 and advantages["zero"].abs().max() == 0


def test_an_episode_without_room_for_a_turn_ends_unfinished(tmp_path: Path, model: str) -> None:
    trainer = make_trainer(tmp_path, model, environment_args={"exactly": 3}, max_completion_length=24)
    output = generation(trainer)
    assert all(episode.unfinished for episode in trainer.source.played if len(episode.actions) < 3)
    assert {episode.unfinished for episode in trainer.source.played} >= {"max_completion_length"}
    assert output["completion_ids"].shape[1] <= 24


@pytest.mark.parametrize(
    ("length", "turns", "longest"),
    [(8, 3, 8), (None, 3, 10), (None, 1, 60)],
    ids=["given", "half of 60 tokens by 3 turns", "all of a single turn"],
)
def test_a_turn_is_sampled_no_longer_than_the_recipe_says(
    tmp_path: Path, model: str, length: int | None, turns: int, longest: int
) -> None:
    trainer = make_trainer(tmp_path, model, environment_turn_length=length, environment_max_turns=turns)
    stock, limits = trainer._generate_single_turn, set()

    def sampled(*args: Any) -> Any:
        limits.add(trainer.generation_config.max_new_tokens)
        return stock(*args)

    trainer._generate_single_turn = sampled
    generation(trainer)
    assert limits == {longest}


def test_a_recipe_says_how_many_processes_its_environments_have() -> None:
    pools = [
        make_environment_pool(partial(getattr, ScriptArguments(environment_workers=most)), None) for most in (3, 5)
    ]
    assert [pool.workers for pool in pools] == [3, 5]


def test_a_turn_that_is_cut_is_ended_for_the_model_and_not_trained_on(tmp_path: Path, model: str) -> None:
    trainer = make_trainer(tmp_path, model, ends=False, environment_args={"exactly": 2})
    output = generation(trainer)
    assert output["completion_ids"][0, 8] == TEXT.eos_token_id
    assert output["tool_mask"][0, :9].tolist() == [1] * 8 + [0]


def test_a_turn_without_a_token_is_ended_too(tmp_path: Path, model: str) -> None:
    trainer = make_trainer(tmp_path, model)
    trainer._generate_single_turn = lambda prompts, *_: ([[] for _ in prompts], None)
    output = generation(trainer)
    assert all(episode.actions and set(episode.actions) == {""} for episode in trainer.source.played)
    assert output["tool_mask"].sum() == 0
    trainer.source.close()


def test_failed_episodes_are_counted_and_too_many_end_the_run(tmp_path: Path, model: str) -> None:
    trainer = make_trainer(tmp_path, model, max_prompt_length=2)
    with pytest.raises(TooManyWithoutVerdict, match=r"its first observation has \d+ tokens, more than"):
        generation(trainer)
    assert trainer._metrics["train"]["episodes/unscored"] == [1.0]


@pytest.mark.slow
def test_environments_that_all_hang_are_given_up(tmp_path: Path, model: str) -> None:
    trainer = make_trainer(tmp_path, model, kind="Wild", environment_timeout=0.5, environment_args={"exactly": 1})
    trainer._generate_single_turn = lambda prompts, *_: ([TEXT("h").input_ids] * len(prompts), None)
    began = time.monotonic()
    with pytest.raises(TooManyWithoutVerdict, match="time limit"):
        generation(trainer)
    hung = [episode for episode in trainer.source.played if episode.failed == "time limit"]
    assert hung[0].record()["failed"] == "time limit" and hung[0].record()["turns"] == [{"action": "h"}]
    assert len(hung) == 5 and time.monotonic() - began < 60  # more than half of 8; the others were not called


def test_a_template_that_changes_earlier_turns_is_refused() -> None:
    tokenizer = smoke.build_tokenizer()
    tokenizer.chat_template = "{{ messages | length }}" + smoke.CHAT_TEMPLATE
    with pytest.raises(ConfigError, match="changes earlier turns"):
        Renderer(tokenizer, None).between([{"role": "user", "content": "2+2="}], [])


GEMMA = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}</answer>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def test_a_turn_ends_with_the_templates_own_token_where_sampling_stops_at_it() -> None:
    """As in Gemma, a turn ends with a line break and a different token than the tokenizer's."""
    tokenizer = smoke.build_tokenizer()
    tokenizer.chat_template = GEMMA
    end, messages = tokenizer.convert_tokens_to_ids("</answer>"), [{"role": "user", "content": "2+2="}]
    renderer = Renderer(tokenizer, None, [tokenizer.eos_token_id, end])
    follows = TEXT("\n<|user|>2+2=</answer>\n<|assistant|>").input_ids
    assert renderer.end() == end
    assert renderer.between(messages, [65, end]) == follows
    assert renderer.between(messages, [65, 66]) == renderer.between(messages, []) == [end, *follows]
    assert renderer.between(messages, [65, tokenizer.eos_token_id]) == [
        end,
        *follows,
    ]  # the template ends a turn this way
    assert renderer.text([*TEXT("4").input_ids, end]) == "4"
    with pytest.raises(ConfigError, match=r"ends a turn with '</answer>\\n', but sampling does not stop there"):
        Renderer(tokenizer, None).between(messages, [65])


def test_a_run_keeps_turns_that_end_with_another_token(tmp_path: Path, model: str) -> None:
    trainer = make_trainer(tmp_path, model, environment_args={"exactly": 2})
    tokenizer = trainer.processing_class
    tokenizer.chat_template, end = GEMMA, tokenizer.convert_tokens_to_ids("</answer>")
    trainer.eos_token_ids = [tokenizer.eos_token_id, end]
    trainer._generate_single_turn = lambda prompts, *_: ([[65, end] for _ in prompts], None)
    output = generation(trainer)
    first = [65, end, *TEXT("\n<|user|>").input_ids]
    assert output["completion_ids"][0, : len(first)].tolist() == first
    assert output["tool_mask"][0, :4].tolist() == [1, 1, 0, 0]
    assert all(episode.actions == [TEXT.decode([65])] * 2 for episode in trainer.source.played)
    trainer.source.close()


def test_a_role_that_the_template_does_not_know_is_refused() -> None:
    tokenizer = smoke.build_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('no tools') }}"
    with pytest.raises(ConfigError, match="cannot render messages of the roles tool: no tools"):
        Renderer(tokenizer, None).prompt(Turn([{"role": "tool", "content": "4"}]))


@pytest.mark.slow
@pytest.mark.parametrize("credit", ["all_turns", "per_turn"])
def test_two_processes_equal_one(tmp_path: Path, model: str, credit: str) -> None:
    """Three groups of four on two ranks, each with half of the second group, give the update of one process."""
    run_ranks("trainers.played_episodes", str(tmp_path / "two"), model, credit, "6")
    alone = make_trainer(tmp_path / "one", model, environment_credit=credit, per_device_train_batch_size=12)
    before = weights_of(alone)
    alone.train()
    after, two = weights_of(alone), torch.load(tmp_path / "two/weights.pt")
    assert max((after[name] - before[name]).abs().max() for name in after) > 1e-3
    for name, weight in after.items():
        assert torch.allclose(two[name], weight, rtol=0, atol=1e-6), name
