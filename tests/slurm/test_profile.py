"""Test site profiles: reading them, rejecting wrong keys, and the shipped profiles."""

from __future__ import annotations

from pathlib import Path

import pytest

from grpo_recipes.errors import ConfigError
from grpo_recipes.paths import find_code_root
from grpo_recipes.slurm.client import parse_walltime
from grpo_recipes.slurm.profile import KEYS, Profile, read_profile

SHIPPED = sorted((find_code_root() / "slurm/profiles").glob("*.yaml"))


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "site.yaml"
    path.write_text(text)
    return path


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_profiles_are_right(path: Path) -> None:
    assert read_profile(path).name == path.stem


def test_an_empty_profile_is_one(tmp_path: Path) -> None:
    assert read_profile(written(tmp_path, "")) == Profile("site")


def test_a_profile_builds_on_another(tmp_path: Path) -> None:
    path = written(tmp_path, "base: slurm/profiles/mltheory.yaml\ngpus: 2\n")
    profile = read_profile(path)
    assert (profile.account, profile.gpus) == ("mltheory", 2)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("acount: me\n", "site.yaml:1: unknown profile key 'acount'. Fix: use 'account'"),
        ("\ngpus: many\n", "site.yaml:2: gpus: expected an integer, got 'many'"),
        ("gpus: -1\n", "gpus: expected at least 0, got -1"),
        ("gpu_flag_style: gpu\n", "set gpu_flag_style to one of none, gpus, gres"),
        ("time: three days\n", "'three days' is not a time limit in Slurm's format"),
        ('time: "0"\n', "is not a time limit in Slurm's format"),
        ("gpus: 2\ngpus: 4\n", "'gpus'"),
        ("gpu_kind: a100\n", "gpu_kind is set, but gpus is not"),
        ("conda_env: a\nenv_dir: /b\n", "env_dir and conda_env can't be combined"),
        ("sbatch_options: [gres=gpu]\n", "'gres=gpu' is not an option"),
        ("environment: {HF_TOKEN: x}\n", "'HF_TOKEN' contains a secret"),
        ("environment:\n  A B: x\n", "site.yaml:2: 'A B' is not a valid variable name"),
        ("environment:\n  A: [x]\n", "A: expected a string, got ['x']"),
        ("account: hf_" + "plantedsecret" * 2 + "\n", "contains a possible secret"),
        ("signal_lead: 5\n", "at least 30"),
        ('account: "a\\nb"\n', "site.yaml:1: 'account' must be a single line"),
        ("sbatch_options: ['--export=ALL,WANDB_API_KEY=plantedsecret']\n", "'sbatch_options' contains a possible"),
        ("srun_options: [--export=MY_TOKEN=plantedsecret]\n", "'srun_options' contains a possible"),
        ("run_root: /scratch/$USER/runs\n", "site.yaml:1: variables in 'run_root' are not expanded"),
    ],
)
def test_what_is_wrong_is_told_with_its_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        read_profile(written(tmp_path, text))
    assert message in str(refused.value)
    assert "plantedsecret" not in str(refused.value)


def test_the_home_sign_is_read_in_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    text = "run_root: ~/runs\ncache_root: ~/cache\nenv_dir: ~/env\nconda_sh: ~/conda.sh\naccount: ~x\n"
    profile = read_profile(written(tmp_path, text))
    assert (profile.run_root, profile.cache_root, profile.account) == ("/home/me/runs", "/home/me/cache", "~x")
    assert (profile.env_dir, profile.conda_sh) == ("/home/me/env", "/home/me/conda.sh")


def test_everything_wrong_is_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        read_profile(written(tmp_path, "acount: me\ngpus: many\n"))
    assert len(refused.value.problems) == 2


def test_the_command_line_stands_over_the_profile() -> None:
    profile = Profile("site", account="a").with_values({"account": "b", "gpus": "2", "time": "1-0"})
    assert (profile.account, profile.gpus, profile.time) == ("b", 2, "1-0")
    with pytest.raises(ConfigError, match=r"--time: 'soon' is not a time limit"):
        profile.with_values({"time": "soon"})


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 5400), ("1:30", 90), ("72:00:00", 259200), ("2-12", 216000), ("1-00:30", 88200), ("1-0:0:5", 86405)],
)
def test_times_are_read_as_slurm_reads_them(text: str, seconds: int) -> None:
    assert parse_walltime(text) == seconds


@pytest.mark.parametrize("text", ["", "1:2:3:4", "1-", "1-2-3", "UNLIMITED", "-1", "1h"])
def test_other_times_are_none(text: str) -> None:
    assert parse_walltime(text) is None


def test_the_profile_to_copy_names_every_key() -> None:
    text = (find_code_root() / "slurm/profiles/generic.yaml").read_text()
    assert [key for key in KEYS if f"{key}:" not in text] == []


def test_a_path_may_hold_the_word_key(tmp_path: Path) -> None:
    assert read_profile(written(tmp_path, "cache_root: /data/key=3/x\n")).cache_root == "/data/key=3/x"


def test_no_shipped_profile_loads_a_cuda_of_its_own():
    """torch includes the CUDA version of the lock. A module's libraries would be loaded before it."""
    for path in (find_code_root() / "slurm/profiles").glob("*.yaml"):
        assert not [name for name in read_profile(path).modules if name.startswith("cuda")], path.name
        assert "cuda/" not in path.read_text(), path.name
