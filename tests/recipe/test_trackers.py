"""Trackers need a network only if their variables say so."""

from __future__ import annotations

import pytest

from grpo_recipes.recipe.trackers import TRACKERS, remote_trackers


@pytest.mark.parametrize(
    ("name", "environment", "address"),
    [
        ("tensorboard", {}, None),
        ("wandb", {}, "https://api.wandb.ai"),
        ("wandb", {"WANDB_BASE_URL": "https://wandb.site"}, "https://wandb.site"),
        ("wandb", {"WANDB_MODE": "offline"}, None),
        ("wandb", {"WANDB_DISABLED": "True"}, None),
        ("trackio", {}, None),
        ("trackio", {"TRACKIO_SERVER_URL": "http://trackio.site"}, "http://trackio.site"),
        ("trackio", {"TRACKIO_SPACE_ID": "me/runs", "HF_ENDPOINT": "https://mirror.site"}, "https://mirror.site"),
        ("mlflow", {}, None),
        ("mlflow", {"MLFLOW_TRACKING_URI": "file:///mlruns"}, None),
        ("mlflow", {"MLFLOW_TRACKING_URI": "https://mlflow.site"}, "https://mlflow.site"),
        ("swanlab", {}, "https://api.swanlab.cn"),
        ("swanlab", {"SWANLAB_MODE": "offline"}, None),
        ("comet_ml", {}, "https://www.comet.com"),
        ("comet_ml", {"COMET_START_ONLINE": "0"}, None),
    ],
)
def test_the_address_of_a_tracker(name, environment, address):
    assert TRACKERS[name].address(environment) == address
    remote = [(tracker.title, its_address) for tracker, its_address in remote_trackers(["none", name], environment)]
    assert remote == ([(TRACKERS[name].title, address)] if address else [])


def test_every_tracker_with_an_address_has_a_fix_without_a_network():
    assert all(tracker.without_network for name, tracker in TRACKERS.items() if name != "tensorboard")
