"""Any changed byte of a real checkpoint is detected, and training resumes from the previous checkpoint."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from grpo_recipes.runs import checkpoints
from grpo_recipes.runs.checkpoints import compute_digest, find_damage, find_newest_complete, find_verified_checkpoint
from grpo_recipes.runs.rundir import move_rows_after
from grpo_recipes.trainers.checkpoints import Checkpoints, choose_checkpoint, collecting_digests

from .tiny_training import train

SAVING = {"save_strategy": "steps", "save_steps": 2, "max_steps": 6}


def flip(path: Path, bit: int) -> None:
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


def test_a_flipped_bit_of_any_file_is_noticed_and_training_goes_on_from_the_checkpoint_before(tmp_path: Path) -> None:
    trained, _ = train(tmp_path, **SAVING)
    weights = {name: value.clone() for name, value in trained.model.state_dict().items()}
    folder = tmp_path / "checkpoints"
    newest = folder / "checkpoint-6"
    names = {str(path.relative_to(newest)): path.stat().st_size * 8 for path in newest.rglob("*") if path.is_file()}
    assert {"model.safetensors", "optimizer.pt", "rng_state.pth", "grpo_window_0.pt", "COMPLETE"} < names.keys()

    chance = random.Random(0)
    for name, bits in names.items():
        bit = chance.randrange(bits)
        flip(newest / name, bit)
        messages = []
        assert (
            find_verified_checkpoint(folder, messages.append) == folder / "checkpoint-4" == find_newest_complete(folder)
        )
        assert len(messages) == 1 and messages[0].startswith(f"checkpoint-6 is damaged: {name} "), messages
        (folder / "checkpoint-6.damaged").rename(newest)
        flip(newest / name, bit)
        assert find_damage(newest, messages.append) is None

    flip(newest / "optimizer.pt", names["optimizer.pt"] // 2)
    find_verified_checkpoint(folder, print)
    move_rows_after(tmp_path, 4)
    continued, _ = train(tmp_path, **SAVING)
    assert all(torch.equal(value, weights[name]) for name, value in continued.model.state_dict().items())
    assert find_damage(newest, print) is None  # made again


def test_what_torch_writes_is_not_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = []
    monkeypatch.setattr(checkpoints, "compute_digest", lambda path, *_: read.append(path.name) or compute_digest(path))
    train(tmp_path, **SAVING | {"max_steps": 2})
    assert "model.safetensors" in read and not [name for name in read if name.endswith((".pt", ".pth"))]
    assert find_damage(tmp_path / "checkpoints" / "checkpoint-2", print) is None


def test_digests_are_those_of_the_files_that_torch_wrote(tmp_path: Path) -> None:
    inside, outside = tmp_path / "inside", tmp_path / "outside.pt"
    (inside / "shards").mkdir(parents=True)
    tensors = {"large": torch.arange(700_000), "none": torch.zeros(0), "small": torch.ones(3)}
    plain = torch.save
    with collecting_digests(inside) as digests:
        torch.save(tensors, inside / "shards" / "rank_1.pt")
        torch.save(tensors, str(inside / "old.pt"), _use_new_zipfile_serialization=False)
        torch.save(tensors, outside)
        with (inside / "open.pt").open("wb") as file:
            torch.save(tensors, file)
        torch.save(tensors, inside / "changed.pt")
        torch.save(tensors, inside / "removed.pt")
        flip(inside / "changed.pt", 4000)
        (inside / "removed.pt").unlink()
    assert torch.save is plain and torch.serialization.get_crc32_options()
    assert digests == {name: compute_digest(inside / name) for name in ("shards/rank_1.pt", "old.pt")}
    for path in (inside / "shards" / "rank_1.pt", inside / "old.pt", inside / "open.pt", outside):
        for mapped in (False, path.name != "old.pt"):
            loaded = torch.load(path, mmap=mapped)
            assert all(torch.equal(loaded[name], value) for name, value in tensors.items())


@pytest.mark.parametrize("answer", [True, Path("checkpoint-6"), None])
def test_ranks_follow_rank_0_if_their_node_sees_other_checkpoints(tmp_path: Path, monkeypatch, answer) -> None:
    """On a network file system, another node may see a new checkpoint later. Ranks must do the same nevertheless."""
    seen = []
    monkeypatch.setattr(
        "grpo_recipes.trainers.checkpoints.broadcast_object_list", lambda own: seen.extend(own) or [answer]
    )
    if answer is not True:
        assert choose_checkpoint(tmp_path) == answer and seen == [None]
        return
    trainer = SimpleNamespace(
        args=SimpleNamespace(output_dir=str(tmp_path)), state=SimpleNamespace(global_step=6), accelerator=None
    )
    Checkpoints(trainer).save(lambda: pytest.fail("this rank saves, and rank 0 does not"))
    assert seen == [False]
