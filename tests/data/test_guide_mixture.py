"""A mixture's dataset is read by its id, configuration and split."""

from __future__ import annotations

import datasets

from grpo_recipes.data import load_prompts
from grpo_recipes.recipe.configs import ScriptArguments


def test_every_dataset_is_read_by_its_id_configuration_and_split(tokenizer, tmp_path):
    requests = []

    def fetched(*source):
        requests.append(source)
        folder = tmp_path / source[0].replace("/", "-")
        datasets.Dataset.from_list([{"problem": source[0], "answer": "1"}]).save_to_disk(folder)
        return folder

    entries = [{"id": "a/one", "config": "main", "split": "train"}, {"id": "a/two", "config": "hard", "split": "extra"}]
    prompts = load_prompts(ScriptArguments(dataset_mixture={"datasets": entries}), tokenizer, fetched=fetched)

    assert requests == [("a/one", "main", "train"), ("a/two", "hard", "extra")]
    assert {row["source"] for row in prompts.dataset} == {"a/one", "a/two"}
