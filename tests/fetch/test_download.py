"""`grpo fetch` with the real hub clients against a fake hub: downloads, messages and errors."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from documented import documented
from fake_hub import READER, FakeHub
from no_network import without_network

from grpo_recipes.fetch.download import choose_files
from grpo_recipes.process.reports import format_bytes
from grpo_recipes.smoke import smoke_folder

from .conftest import GRPO, ROWS, Shell, jsonl

SMALL, LARGE = 1000, 5 * 10**9  # bytes of a file in a hub listing
LOAD = """
import sys
from pathlib import Path
from transformers import AutoModelForCausalLM, AutoTokenizer
from grpo_recipes.data import read_rows
from grpo_recipes.fetch.assets import find_fetched_datasets, find_assets, record_assets
from grpo_recipes.runs.rundir import Run
from grpo_recipes.recipe import read_recipe
import os
sources = find_assets(read_recipe(Path("recipe.yaml")), os.environ)
run = Path("run"); run.mkdir(); record_assets(Run(run), sources)
model = AutoModelForCausalLM.from_pretrained(sources.model.path)
tokenizer = AutoTokenizer.from_pretrained(sources.model.path)
rows = read_rows("ada/rows", None, "train", fetched=find_fetched_datasets(run))
print(model.num_parameters(), len(tokenizer("1+1=").input_ids), rows[29], len(rows))
"""
FETCH = """
import os
from pathlib import Path
from grpo_recipes.fetch.assets import DATASET, MODEL, list_assets
from grpo_recipes.fetch.download import fetch
from grpo_recipes.recipe import read_recipe
(asset,) = [one for one in list_assets(read_recipe(Path("recipe.yaml"))) if one.kind == DATASET]
fetch(asset, os.environ)
"""
WITHOUT_LOCKS = """
import errno, fcntl
ours = fcntl.flock
def flock(file, how):
    if "fetched" in str(getattr(file, "name", "")):
        raise OSError(errno.ENOLCK, "No locks available")
    return ours(file, how)
fcntl.flock = flock
"""


@pytest.mark.slow
def test_what_was_fetched_loads_with_the_network_cut_off(shell: Shell, hub: FakeHub) -> None:
    shell.recipe()
    fetched = shell.run(*documented("grpo fetch my.yaml", {"my.yaml": "recipe.yaml"}, fake="the hub"))
    assert fetched.returncode == 0, fetched.stderr
    model, dataset = hub.repos["model", "ada/sums"], hub.repos["dataset", "ada/rows"]
    for line, sha in zip(fetched.stdout.splitlines()[-3:-1], (model.at("main"), dataset.at("main")), strict=True):
        assert str(sha)[:12] in line and "downloaded" in line and "cache/" in line
    assert fetched.stdout.endswith(
        "grpo: everything that recipe.yaml needs is on this machine; its job needs no network\n"
    )

    loaded = shell.run(*without_network(GRPO.replace("bin/grpo", "bin/python"), "-c", LOAD), HF_HUB_OFFLINE="1")
    assert loaded.returncode == 0, loaded.stderr
    assert loaded.stdout.split()[1:] == ["4", "{'problem':", "'29+1=',", "'answer':", "'30'}", "30"]


@pytest.mark.slow
def test_again_it_downloads_nothing_and_tells_of_newer_commits(shell: Shell, hub: FakeHub) -> None:
    shell.recipe()
    shell.grpo("fetch", "recipe.yaml")
    model = hub.repos["model", "ada/sums"]
    old, downloads = model.at("main"), hub.asked("/resolve/")
    second = shell.grpo("fetch", "recipe.yaml")
    assert second.returncode == 0 and second.stdout.count("  here\n") == 2
    assert hub.asked("/resolve/") == downloads

    new = model.commit({**model.files(), "notes.txt": b"new"}, "new")
    told = shell.grpo("fetch", "recipe.yaml")
    assert f"here; the hub has {new[:12]} (grpo fetch --update)" in told.stdout
    assert shell.records()[1]["commit"] == old

    updated = shell.run(*documented("grpo fetch my.yaml --update", {"my.yaml": "recipe.yaml"}, fake="the hub"))
    assert updated.returncode == 0, updated.stderr
    assert shell.records()[1]["commit"] == new
    assert (Path(shell.records()[1]["path"]) / "notes.txt").read_text() == "new"


@pytest.mark.slow
def test_what_a_purge_of_old_files_damaged_is_brought_again(shell: Shell) -> None:
    from datasets import load_from_disk

    shell.recipe()
    shell.grpo("fetch", "recipe.yaml")
    (folder,) = (shell.cache / "datasets").iterdir()
    for damage in ("missing", "cut short"):
        (file,) = folder.glob("*.arrow")
        file.unlink() if damage == "missing" else file.write_bytes(file.read_bytes()[:300])
        second = shell.grpo("fetch", "recipe.yaml")
        assert second.returncode == 0 and "grpo: downloading dataset ada/rows" in second.stdout, second.stderr
        assert len(load_from_disk(str(folder))) == len(ROWS)
    assert list((shell.cache / "datasets").iterdir()) == [folder]


@pytest.mark.slow
def test_rows_whose_record_is_gone_are_not_brought_again(shell: Shell, hub: FakeHub) -> None:
    shell.recipe()
    shell.grpo("fetch", "recipe.yaml")
    shutil.rmtree(shell.cache / "fetched")
    downloads = hub.asked("/ada/rows/resolve/")
    second = shell.grpo("fetch", "recipe.yaml")
    assert second.returncode == 0 and len(shell.records()) == 2, second.stderr
    assert hub.asked("/ada/rows/resolve/") == downloads


@pytest.mark.slow
@pytest.mark.parametrize("has_locks", [True, False])
def test_what_killed_fetches_left_is_removed_though_the_file_system_has_no_locks(shell: Shell, has_locks: bool) -> None:
    shell.recipe()
    shell.grpo("fetch", "recipe.yaml")
    (folder,) = (shell.cache / "datasets").iterdir()
    shutil.rmtree(folder)
    old, young = (folder.with_name(f".{folder.name}.{age}") for age in ("old", "young"))
    for leftover in (old, young):
        (leftover / "rows").mkdir(parents=True)
    os.utime(old, (0, 0))
    fetched = shell.run(sys.executable, "-c", FETCH if has_locks else WITHOUT_LOCKS + FETCH)
    assert fetched.returncode == 0, fetched.stderr
    assert {*folder.parent.iterdir()} == ({folder} if has_locks else {folder, young})


def test_a_model_leaves_ctrl_c_as_it_was(shell: Shell) -> None:
    shell.recipe()
    code = f"import signal; before = signal.getsignal(signal.SIGINT)\n{FETCH.replace('DATASET', 'MODEL')}"
    fetched = shell.run(sys.executable, "-c", f"{code}assert signal.getsignal(signal.SIGINT) is before\n")
    assert fetched.returncode == 0, fetched.stderr


@pytest.mark.slow
def test_without_the_hub_it_says_what_is_here_and_what_is_not(shell: Shell) -> None:
    shell.recipe()
    nowhere = {"HF_ENDPOINT": "http://127.0.0.1:1"}
    missing = shell.grpo("fetch", "recipe.yaml", **nowhere)
    assert missing.returncode == 2
    first, second = missing.stderr.splitlines()
    assert first == (
        "grpo: recipe.yaml:6: model ada/sums is not on this machine: http://127.0.0.1:1 does not answer. "
        "Fix: run grpo fetch on a machine that reaches the hub, e.g. the login node"
    )
    assert second.startswith("grpo: recipe.yaml:2: dataset ada/rows (train) is not on this machine")

    assert (
        "is not on this machine: HF_HUB_OFFLINE is set. "
        in shell.grpo("fetch", "recipe.yaml", HF_HUB_OFFLINE="1").stderr
    )

    shell.grpo("fetch", "recipe.yaml")
    offline = shell.grpo("fetch", "recipe.yaml", **nowhere)
    assert (
        offline.returncode == 0
        and offline.stdout.count("here, not compared with the hub: http://127.0.0.1:1 does not answer") == 2
    )
    update = shell.grpo("fetch", "recipe.yaml", "--update", **nowhere)
    assert update.returncode == 2 and "model ada/sums can't be updated" in update.stderr


@pytest.mark.slow
def test_a_gated_model_is_told_in_one_line_without_the_token(shell: Shell, hub: FakeHub) -> None:
    hub.repos["model", "ada/sums"].gated = True
    shell.recipe()
    refused = shell.grpo("fetch", "recipe.yaml", HF_TOKEN=READER)
    assert refused.returncode == 2
    (line,) = refused.stderr.splitlines()
    assert line == (
        "grpo: recipe.yaml:6: model ada/sums is gated and this account may not read it. "
        "Fix: accept its license at https://huggingface.co/ada/sums, then export HF_TOKEN or run hf auth login"
    )
    hub.granted.add(READER)
    granted = shell.grpo("fetch", "recipe.yaml", HF_TOKEN=READER)
    assert granted.returncode == 0, granted.stderr
    written = [path for path in shell.folder.rglob("*") if path.is_file()]
    assert len(written) > 10 and all(READER.encode() not in path.read_bytes() for path in written)


def test_a_gated_dataset_is_told_too(shell: Shell, hub: FakeHub) -> None:
    hub.repos["dataset", "ada/rows"].gated = True
    shell.recipe()
    refused = shell.grpo("fetch", "recipe.yaml")
    assert refused.returncode == 2
    (line,) = refused.stderr.splitlines()
    assert "dataset ada/rows (train) is gated" in line
    assert "accept its license at https://huggingface.co/datasets/ada/rows, then export HF_TOKEN" in line


def test_every_wrong_name_is_told_at_once(shell: Shell) -> None:
    shell.recipe(model_revision="nope", dataset_name="ada/none")
    refused = shell.grpo("fetch", "recipe.yaml")
    assert refused.returncode == 2
    first, second = refused.stderr.splitlines()
    assert "model 'ada/sums' has no revision 'nope'" in first
    assert "recipe.yaml:2: the hub has no dataset 'ada/none', or it is private" in second


def test_what_cannot_be_a_name_is_told(shell: Shell) -> None:
    shell.recipe(dataset_name="ada/rows..old")
    refused = shell.grpo("fetch", "recipe.yaml")
    assert refused.returncode == 2
    assert "recipe.yaml:2: 'ada/rows..old' is neither a local path nor a valid hub id of a dataset" in refused.stderr


def test_a_split_that_does_not_exist_names_those_that_do(shell: Shell) -> None:
    shell.recipe(dataset_train_split="training")
    refused = shell.grpo("fetch", "recipe.yaml")
    assert refused.returncode == 2
    assert "Unknown split \"training\". Should be one of ['train', 'test']" in refused.stderr
    assert not list((shell.cache / "datasets").glob("*"))


def test_a_model_that_does_not_fit_on_the_disk_is_not_begun(shell: Shell, hub: FakeHub) -> None:
    hub.sizes["model.safetensors"] = 10**18
    shell.recipe()
    refused = shell.grpo("fetch", "recipe.yaml")
    assert refused.returncode == 2
    assert f"model ada/sums needs {format_bytes(10**18)} more" in refused.stderr and "free" in refused.stderr
    assert hub.asked("/ada/sums/resolve/.*safetensors") <= 1  # at most one request for the size


@pytest.mark.slow
def test_interrupted_it_says_so_and_goes_on_from_there(shell: Shell, hub: FakeHub) -> None:
    shell.recipe()
    hub.slow["model.safetensors"] = 60.0
    process = subprocess.Popen(
        [GRPO, "fetch", "recipe.yaml"], cwd=shell.folder, env=shell.environment, stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 30
    while not any(command == "GET" and path.endswith("model.safetensors") for command, path in hub.requests):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, told = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "grpo: interrupted; run it again to continue: finished files are kept" in told
    hub.slow.clear()
    assert shell.grpo("fetch", "recipe.yaml").returncode == 0


@pytest.mark.slow
def test_only_the_first_rows_of_a_stream_are_brought(shell: Shell, hub: FakeHub) -> None:
    hub.add("dataset", "ada/long", {"train.jsonl": jsonl(ROWS * 100)})
    shell.recipe(dataset_name="ada/long", dataset_streaming=True, max_train_prompts=7)
    fetched = shell.grpo("fetch", "recipe.yaml")
    assert fetched.returncode == 0, fetched.stderr
    record = next(entry for entry in shell.records() if entry["kind"] == "dataset")
    assert record["limit"] == 14 and record["path"].endswith(f"ada--long--train--first-14--{record['commit'][:12]}")
    from datasets import load_from_disk

    assert load_from_disk(record["path"])["problem"][:] == [row["problem"] for row in ROWS[:14]]


def test_local_files_need_no_hub(shell: Shell, hub: FakeHub, tiny_model: Path) -> None:
    (shell.folder / "rows.jsonl").write_bytes(jsonl(ROWS))
    shell.recipe(model_name_or_path=str(tiny_model), dataset_name="rows.jsonl")
    fetched = shell.grpo("fetch", "recipe.yaml")
    assert fetched.returncode == 0, fetched.stderr
    assert fetched.stdout.count("  local\n") == 2 and hub.requests == []


def test_the_smoke_task_is_made_so_that_a_job_finds_it(shell: Shell, hub: FakeHub) -> None:
    shell.recipe(model_name_or_path="smoke:sums", dataset_name="smoke:sums")
    shell.cache.mkdir()
    (shell.cache / "smoke").touch()  # a file blocks the folder
    refused = shell.grpo("fetch", "recipe.yaml")
    assert refused.returncode == 2 and "CACHE_ROOT: cannot write the smoke model" in refused.stderr
    (shell.cache / "smoke").unlink()
    folder = smoke_folder("smoke:sums", shell.environment)
    folder.mkdir(parents=True)
    (folder / "COMPLETE").touch()
    assert shell.grpo("fetch", "recipe.yaml").returncode == 0 and hub.requests == []


def test_safetensors_without_the_copies_in_other_formats() -> None:
    llama = {
        ".gitattributes": SMALL,
        "LICENSE": SMALL,
        "README.md": SMALL,
        "config.json": SMALL,
        "generation_config.json": SMALL,
        "model-00001-of-00002.safetensors": LARGE,
        "model-00002-of-00002.safetensors": LARGE,
        "model.safetensors.index.json": SMALL,
        "original/consolidated.00.pth": LARGE,
        "original/params.json": SMALL,
        "special_tokens_map.json": SMALL,
        "tokenizer.json": 9 * 10**6,
        "tokenizer_config.json": SMALL,
    }
    left_out = {".gitattributes", "README.md", "original/consolidated.00.pth", "original/params.json"}
    assert choose_files(llama) == sorted(llama.keys() - left_out)


def test_of_two_formats_of_one_library_the_one_that_is_trained() -> None:
    mistral = ["config.json", "consolidated.safetensors", "model.safetensors", "params.json", "tekken.json"]
    assert choose_files(dict.fromkeys(mistral, LARGE // 1000)) == [
        "config.json",
        "model.safetensors",
        "tekken.json",
    ]


def test_old_repositories_have_pickles_alone() -> None:
    files = ["config.json", "merges.txt", "pytorch_model.bin", "tf_model.h5", "training_args.bin", "vocab.json"]
    expected = ["config.json", "merges.txt", "pytorch_model.bin", "vocab.json"]
    assert choose_files(dict.fromkeys(files, SMALL)) == expected
    assert choose_files(dict.fromkeys([*files, "model.safetensors"], SMALL)) == sorted(
        {*expected, "model.safetensors"} - {"pytorch_model.bin"}
    )


def test_tokenizers_of_every_kind_are_small_files() -> None:
    kinds = ["chat_template.jinja", "qwen.tiktoken", "sentencepiece.bpe.model", "spiece.model", "tokenizer.model"]
    assert choose_files(dict.fromkeys(kinds, SMALL)) == kinds
    assert choose_files({"tokenizer.model": SMALL, "model.Q4_K_M.gguf": LARGE, "dump": LARGE}) == ["tokenizer.model"]
    assert choose_files({"additional_chat_templates/rag.jinja": SMALL, "onnx/config.json": SMALL}) == [
        "additional_chat_templates/rag.jinja"
    ]


def test_python_files_come_with_trust_remote_code_alone() -> None:
    files = {"config.json": SMALL, "modeling_own.py": SMALL, "model.safetensors": LARGE}
    assert "modeling_own.py" not in choose_files(files)
    assert "modeling_own.py" in choose_files(files, code=True)
