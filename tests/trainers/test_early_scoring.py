"""Rewards in child processes begin with a group while others are sampled, and nothing else follows from that."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rotation import ROTATES
from weights.fake_server import FakeServer

from grpo_recipes.rewards.load import IsolatedReward
from grpo_recipes.rewards.score import GIVEN_UP
from grpo_recipes.server.wire import completions_of, packed
from grpo_recipes.trainers.grpo import GRPOTrainer
from trainers.scored_trainer import REWARD, make_trainer, own_rewards

PROMPTS, GROUP = 4, 3
WRITES = """
def own(completions, completion_ids):
    with open("FOLDER/called.txt", "a") as file:
        file.write(f"{completion_ids[0][0]}\\n")
    return [float(sum(completion_ids[0]))]
"""
FAILS = f"{WRITES}    1 / 0\n".replace("    return [float(sum(completion_ids[0]))]\n", "")
HANGS = """
import time
def own(completions, completion_ids):
    if completion_ids[0][0] == 8:
        time.sleep(60)
    return [float(sum(completion_ids[0]))]
"""


class FakeSampler(FakeServer):
    """Draws for the prompt ``3+1=`` completions that begin with token 8, and so on; ``before`` is called first."""

    before: Callable[[int], None] = staticmethod(lambda _: None)

    def _completions(self, asked: dict[str, Any]) -> bytes:
        place = next(token for token in asked["prompt"] if token in self.digits)
        self.before(self.digits[place])
        super()._completions(asked)  # counted, and held while the engine is paused
        ids = [[5 + self.digits[place], *[5 + number] * (number + 1)] for number in range(asked["n"])]
        return packed(completions_of(ids, [[-0.5] * len(row) for row in ids]))


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeSampler]:
    fake = FakeSampler()
    (tmp_path / "token").write_text("the-token")
    monkeypatch.setenv("GRPO_TOKEN_FILE", str(tmp_path / "token"))
    monkeypatch.setenv("GRPO_RUN", "this-run")
    monkeypatch.setenv("GRPO_SYNC_DIR", str(tmp_path / "sync"))
    yield fake
    fake.close()


def trainer_of(server: FakeSampler, folder: Path, rewards: list[Any], **keys: Any) -> GRPOTrainer:
    (folder / "processes").mkdir(exist_ok=True)
    given = {"use_vllm": True, "vllm_mode": "server", "weight_sync": "file", "weight_guard": False, **keys}
    port = int(server.url.rpartition(":")[2])
    trainer = make_trainer(folder, rewards, num_generations=GROUP, vllm_server_port=port, **given)
    tokenizer = trainer.processing_class
    server.digits = {tokenizer.convert_tokens_to_ids(str(number)): number for number in range(2, 2 + PROMPTS)}
    return trainer


def scored(trainer: GRPOTrainer) -> dict[str, Any]:
    """Sample and score a generation: all that a step takes from it, and what is written of it."""
    rows = [trainer.train_dataset[2 + row] for row in range(PROMPTS) for _ in range(GROUP)]
    output = trainer._generate_and_score_completions([dict(row) for row in rows])
    (reward,) = trainer.reward_funcs
    slow = trainer.scoring._file
    told = [json.loads(line) for line in slow.read_text().splitlines()] if slow.exists() else []
    metrics = {name: values[-1] for name, values in trainer._metrics["train"].items() if "/seconds" not in name}
    return {
        "rewards": trainer.rewards_BR.nan_to_num(-1).tolist(), "advantages": output["advantages"].tolist(),
        "scores": [(score.value, score.reason, score.by_limit, score.replayed) for score in reward.scores],
        "told": [{**row, "seconds": None} for row in told],
        "metrics": {name: value for name, value in metrics.items() if "profiling" not in name},
    }  # fmt: skip


@pytest.mark.slow
@pytest.mark.rotating
@pytest.mark.parametrize("seed_server", [True, False])
def test_a_group_is_judged_before_the_last_one_has_arrived(server, tmp_path, seed_server) -> None:
    called, in_time = tmp_path / "called.txt", threading.Event()
    rewards = own_rewards(tmp_path, WRITES.replace("FOLDER", str(tmp_path)))
    called.unlink()  # of the first call

    def last_waits_for_a_reward(number: int) -> None:
        deadline = time.monotonic() + 30
        while number == 1 + PROMPTS and time.monotonic() < deadline and not in_time.is_set():
            time.sleep(0.01)
            if called.exists():
                in_time.set()

    server.before = last_waits_for_a_reward
    trainer = trainer_of(server, tmp_path, rewards, seed_server=seed_server)
    found = scored(trainer)
    assert in_time.is_set(), "no reward was called before the last group had arrived"
    assert found["metrics"]["rewards/judged_early"] >= 1 / PROMPTS
    assert len(called.read_text().split()) == PROMPTS * GROUP  # each once


@pytest.mark.parametrize("code", [REWARD, pytest.param(HANGS, marks=ROTATES)], ids=["unscored", "over the limit"])
def test_what_is_judged_early_is_what_would_be_judged_afterwards(server, tmp_path, code, monkeypatch) -> None:
    """Also in a run that is done again: what a limit decided is not called again."""
    found, one_by_one = {}, {"max_concurrent_requests": 1, "seed_server": False}
    for name in ("early", "afterwards"):
        (folder := tmp_path / name).mkdir()
        for again in (False, True):
            trainer = trainer_of(server, folder, own_rewards(folder, code, reward_timeout=3.0), **one_by_one)
            if name == "afterwards":
                monkeypatch.setattr(trainer.early_scoring, "rewards", list)
            found[name, again] = scored(trainer)
            trainer.reward_funcs[0].pool.close()
    for again in (False, True):
        early = found["early", again]["metrics"].pop("rewards/judged_early")
        assert early > 0
        text = json.dumps(found["afterwards", again]).replace(str(tmp_path / "afterwards"), str(tmp_path / "early"))
        assert json.dumps(found["early", again]) == text
    if code == HANGS:
        decided = [(by_limit, replayed) for _, _, by_limit, replayed in found["early", True]["scores"] if by_limit]
        assert decided and all(replayed for _, replayed in decided)


def test_those_that_were_unscored_early_count_among_too_many(tmp_path) -> None:
    (reward,) = own_rewards(tmp_path, FAILS.replace("FOLDER", str(tmp_path)), reward_timeout=30.0)
    early = reward.score_early({"completions": ["a"], "completion_ids": [[5]]}, 0, None, lambda: False)
    assert [score.reason for score in early.values()] == ["ZeroDivisionError: division by zero"]
    (tmp_path / "called.txt").unlink()
    reward.early, reward.give_up_after = early, 0
    assert reward(completions=["a", "b"], completion_ids=[[5], [6]]) == [None, None]
    assert [score.reason == GIVEN_UP for score in reward.scores] == [False, True]
    assert not (tmp_path / "called.txt").exists()


def test_a_completion_that_was_drawn_again_is_judged_again(server, tmp_path) -> None:
    """A restarted server without seeds gives others: a score is that of the arguments it was made for."""
    (reward,) = own_rewards(tmp_path, WRITES.replace("FOLDER", str(tmp_path)))
    assert isinstance(reward, IsolatedReward)
    columns = {"completions": ["a"], "completion_ids": [[5, 5]], "prompts": ["p"]}
    reward.early = reward.score_early(columns, 0, None, lambda: False)
    (tmp_path / "called.txt").unlink()
    assert reward(**{**columns, "completion_ids": [[5, 6]]}) == [11.0]
    assert (tmp_path / "called.txt").exists()
    reward.early = reward.score_early(columns, 0, None, lambda: False)
    (tmp_path / "called.txt").unlink()
    assert reward(**columns) == [10.0] and not (tmp_path / "called.txt").exists()
    assert reward.early == {}  # of that generation alone
