"""Hand-written tables agree with the code: variables, exit codes, ports, tolerances, metrics, messages."""

from __future__ import annotations

import importlib.metadata
import json
import re
from pathlib import Path

import pytest
from doc_pages import PAGES, REPOSITORY, blocks, code_words, prose, table_rows

from grpo_recipes import cli, errors
from grpo_recipes.console.doctor import MACHINE, RECIPE, RUN
from grpo_recipes.console.doctor.examine import get_check_name
from grpo_recipes.console.report import run_charts
from grpo_recipes.extensions.atropos.packing import predict_deadlock
from grpo_recipes.extensions.problems.modebench import baselines
from grpo_recipes.plan import ports
from grpo_recipes.plan.commands import base_environment
from grpo_recipes.plan.devices import environment_device
from grpo_recipes.plan.plan import ACCELERATE_FILES
from grpo_recipes.recipe.check import _DEFAULT_RECIPES
from grpo_recipes.recipe.converters import UNREAD_VARIABLES
from grpo_recipes.recipe.generated import recorded_columns
from grpo_recipes.recipe.keys import READ_VARIABLES, catalogue, environment_keys
from grpo_recipes.recipe.registry import OBJECTIVES, SYNC_METHODS, benchmarks, rewards
from grpo_recipes.recipe.trackers import TRACKERS
from grpo_recipes.runs.rundir import finish_summary
from grpo_recipes.trainers.metrics import PHASES
from grpo_recipes.weights.guard import TOLERANCES, describe_checksum_error, describe_logprob_error

DOCS = REPOSITORY / "docs"
GUIDE = DOCS / "recipes.md"
SCORES = ("pass@1", "pass@8", "mean@8", "distinct@8", "coverage@8")
# Read by other libraries; the launcher passes them on unchanged.
PASSED_ON = {
    "HF_TOKEN", "NCCL_DEBUG", "NLTK_DATA", "TORCH_DISTRIBUTED_DEBUG", "TENSORBOARD_LOGGING_DIR", "WANDB_API_KEY",
    "WANDB_MODE", "PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL",
}  # fmt: skip
# Removed from the children's environment, or written by us.
REMOVED = {"PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"}
NO_VARIABLES = {
    "COMMIT",
    "JUDGE_KEY",
    "COMPLETE",
    "VLLM_SERVER_DEV_MODE",
    "PISTON_RUN_TIMEOUT",
    "OPENAI_API_KEY",
    "GRPO_TOKEN_FILE",
    "HTTPS_PROXY",
    "TMPDIR",
    "UV_DEFAULT_INDEX",
    "SSL_CERT_FILE",
    "LICENSE",
    "SIGTERM",
    "SIGINT",
    "SIGHUP",
    "USR1",
    "NO_PROXY",
    "SBATCH",
    "FULL_SHARD",
    "NO_SHARD",
    "DETAIL",
    "INFO",
    "COMET_START_ONLINE",
    "MLFLOW_TRACKING_URI",
    "SWANLAB_MODE",
    "TENSORBOARD_LOGGING_DIR",
    "TRACKIO_DIR",
}


def shell_variables() -> set[str]:
    """What training.sh, scripts/setup.sh and slurm/train.slurm say they read."""
    usage = (REPOSITORY / "training.sh").read_text().split("<<'TEXT'")[1].split("\nTEXT")[0]
    head = (REPOSITORY / "scripts/setup.sh").read_text().split("set -euo pipefail")[0]
    flags = (REPOSITORY / "slurm/train.slurm").read_text().split("<<'TEXT'")[1].split("\nTEXT")[0]
    stand_for_flags = set(re.findall(r"^  --.* ([A-Z][A-Z_]+) {2,}", flags, re.MULTILINE)) - environment_keys().keys()
    return set(re.findall(r"\b([A-Z][A-Z_]+)=", usage + head)) | stand_for_flags


def documented(page: Path) -> dict[str, str]:
    return {row[0].strip("`"): row[1] for row in table_rows(page, "variable")}


def test_variables_that_stand_for_a_key() -> None:
    table = documented(GUIDE)
    assert {name: table[name].strip("`") for name in environment_keys()} == environment_keys()


def test_every_variable_that_is_read_is_documented_and_no_other() -> None:
    told = set(documented(GUIDE)) | set(documented(DOCS / "installation.md"))
    assert told == {*environment_keys(), *READ_VARIABLES, *shell_variables()}


def test_variables_named_in_sentences_exist() -> None:
    known = {*environment_keys(), *READ_VARIABLES, *shell_variables(), *PASSED_ON, *REMOVED, *NO_VARIABLES}
    known |= UNREAD_VARIABLES.keys()
    known |= {name for tracker in TRACKERS.values() for name in (*tracker.secrets, *tracker.project)}
    for page in PAGES:
        for span in code_words(prose(page)):
            for name in re.findall(r"^([A-Z][A-Z0-9_]{3,})(?:=\S*)?$", span):
                assert name in known or name.endswith("_"), f"{page.name}: {name}"


def test_what_the_environment_keeps_and_loses() -> None:
    for name in PASSED_ON:
        assert base_environment({name: "x"})[name] == "x"
    for name in (*REMOVED, "CONDA_PREFIX", "PMI_SIZE", "PMIX_RANK", "OMPI_COMM_WORLD_SIZE", *environment_keys()):
        assert name.startswith(("RUN_ROOT", "WANDB_")) or name not in base_environment({name: "x"})


def test_exit_codes() -> None:
    known = {0} | {value for name, value in vars(errors).items() if name.startswith("EXIT_")}
    assert {int(row[0]) for row in table_rows(DOCS / "troubleshooting.md", "code")} == known


def test_default_ports() -> None:
    rows = {row[1].strip("`"): int(row[2]) for row in table_rows(GUIDE, "port")}
    assert rows == ports.DEFAULT_PORTS
    block = re.findall(r"\d+", table_rows(GUIDE, "port")[0][3])
    assert [int(number) for number in block] == [ports._BLOCK_BASE, ports._BLOCKS, ports._BLOCK_SIZE]


def test_default_recipes_accelerators_and_rewards() -> None:
    for task, column in (("grpo", 1), ("maxent", 2)):
        defaults = {row[0]: row[column].strip("`") for row in table_rows(GUIDE, "device")}
        assert defaults == {device: name.format(task=task) for device, name in _DEFAULT_RECIPES.items()}
    assert {row[0].strip("`") for row in table_rows(GUIDE, "`accelerator`")} == {"auto", *ACCELERATE_FILES}
    assert {row[0].strip("`") for row in table_rows(DOCS / "rewards.md", "reward")} == set(rewards())
    bridges = {row[0].split()[0].strip("`") for row in table_rows(DOCS / "weights.md", "`weight_sync`")}
    assert bridges == set(catalogue()["weight_sync"]["choices"])
    needs = {row[0].strip("`"): row[2] for row in table_rows(DOCS / "weights.md", "`weight_sync`")}
    for name, bridge in SYNC_METHODS.items():
        assert ("GPUs" in needs[name]) == (not bridge.runs_on("cpu"))


def test_batches_of_the_math_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    recipe = str(REPOSITORY / "recipes/Qwen2.5-1.5B-Instruct/grpo/config_math.yaml")
    for gpus, *numbers in table_rows(DOCS / "gsm8k.md", "GPUs"):
        assert cli.main(["plan", recipe, "--gpus", gpus, "--json"]) == 0
        batch = json.loads(capsys.readouterr().out)["batch"]
        assert [int(number) for number in numbers] == [
            batch["world_size"], batch["per_device"], batch["accumulation"], batch["completions"]
        ]  # fmt: skip


def test_slurm_header() -> None:
    header = set(re.findall(r"^#SBATCH (--\S+)", (REPOSITORY / "training.sh").read_text(), re.MULTILINE))
    assert {word for row in table_rows(DOCS / "slurm.md", "line") for word in code_words(row[0])} == header


def test_benchmarks_keys_and_results_of_evaluation() -> None:
    page = DOCS / "evaluation.md"
    told = {row[0].strip("`"): row for row in table_rows(page, "benchmark") if row[0].startswith("`")}
    assert told.keys() == benchmarks().keys()
    assert all(f"`{benchmarks()[name].id}`" == row[2] for name, row in told.items() if name != "smoke:sums")
    keys = {word for row in table_rows(page, "key") for word in code_words(row[0])}
    assert keys <= catalogue().keys() and "benchmark_samples" in keys
    source = (REPOSITORY / "src/grpo_recipes/evaluate/benchmarks.py").read_text()
    results = {word for row in table_rows(page, "in `benchmarks.json`") for word in code_words(row[0])}
    of_modebench = (REPOSITORY / "src/grpo_recipes/extensions/problems/modebench/dataset.py").read_text()
    for word in results - {"pass@k", "pass@k_ci"}:
        assert f'"{word}":' in source or f'f"{word.removesuffix("k")}{{samples}}":' in of_modebench, word


def test_keys_and_baselines_of_modebench(capsys: pytest.CaptureFixture[str]) -> None:
    page = DOCS / "environments.md"
    keys = [(word, row[1]) for row in table_rows(page, "key") for word in code_words(row[0])]
    assert {key for key, _ in keys} == {key for key in catalogue() if key.startswith("modebench_")}
    for key, told in keys:
        assert catalogue()[key]["default"] is None or str(catalogue()[key]["default"]) in told
    baselines.main()
    printed = []
    for line in capsys.readouterr().out.splitlines():
        task, kind, scores = line.split(maxsplit=2)
        known = dict(score.split() for score in scores.split(", "))
        printed.append([f"`{task}`", f"`{kind}`", *(known[key] for key in SCORES)])
    assert table_rows(page, "test split") == printed


def test_tolerances_of_the_guard() -> None:
    rows = table_rows(DOCS / "weights.md", "dtype")
    assert {row[0].strip("`"): float(row[1]) for row in rows} == TOLERANCES


def test_keys_of_the_summary(tmp_path: Path) -> None:
    written = finish_summary(tmp_path, status="failed", exit_code=1, failed_rank=None, cause="x")
    told = {row[0].strip("`") for row in table_rows(DOCS / "files.md", "key")}
    assert {*written, "smoke", "restarts"} <= told


def test_keys_of_a_row_are_those_that_trl_and_we_write() -> None:
    trl = importlib.metadata.distribution("trl")
    source = Path(str(trl.locate_file("trl/trainer/grpo_trainer.py"))).read_text()
    our_source = (REPOSITORY / "src/grpo_recipes/trainers/metrics.py").read_text()
    producers = ("ahead", "checks", "dynamic_sampling", "grpo", "maxent", "teacher")
    for name in (*(f"trainers/{name}" for name in producers), "weights/shared"):
        our_source += (REPOSITORY / f"src/grpo_recipes/{name}.py").read_text()
    environments = REPOSITORY / "src/grpo_recipes/extensions/environments"
    of_episodes = "".join((environments / f"{name}.py").read_text() for name in ("episodes", "tool_episodes"))
    of_the_loop = {"loss", "grad_norm", "learning_rate", "epoch"}  # transformers' own
    summary = prose(DOCS / "metrics.md").split("## samples.jsonl")[0]
    firsts = [line.split(" | ")[0] for line in summary.splitlines() if line.startswith("| `")]
    keys = {name for first in firsts for name in code_words(first)} - set(recorded_columns().values())
    assert {f"seconds/{phase}" for phase in (*PHASES, "update", "step")} < keys
    for name in keys - of_the_loop:
        if name.startswith("seconds/"):
            assert name.removeprefix("seconds/") in our_source
        elif name.startswith("rewards/"):
            kind = name.rpartition("/")[2]
            of_each = f"rewards/{{reward_func_name}}/{kind}" in source or f"rewards/{{name}}/{kind}" in our_source
            assert of_each or f'"{name}"' in our_source
        elif name.startswith("episodes/"):
            kind, _, suffix = name.removeprefix("episodes/").partition("_<")
            key_source = {"role>": f'f"{kind}_{{', "environment>": 'f"{name}_{label}"', "": f'"{kind}": '}[suffix]
            assert (key_source in of_episodes and f'"{kind}' in of_episodes) or name == "episodes/<name>", name
        else:
            assert f'"{name}"' in source + our_source or name.startswith("atropos/"), name  # these: below


def test_metrics_of_atropos_are_those_that_are_written() -> None:
    source = (REPOSITORY / "src/grpo_recipes/extensions/atropos/rollouts.py").read_text()
    counted = re.search(r"^_COUNT_METRICS = \((.*?)\)", source, re.MULTILINE | re.DOTALL)[1]
    written = {f"atropos/{name}" for name in re.findall(r'"(\w+)"', counted)}
    written |= {name.replace("{label}", "<environment>") for name in re.findall(r'"(atropos/[\w{}]+)"', source)}
    told = {word for row in table_rows(DOCS / "metrics.md", "key") for word in code_words(row[0])}
    assert {name for name in told if name.startswith("atropos/")} == written - {"atropos/{name}"}
    drawn = {name for name in run_charts.METRICS if name.startswith("atropos/")}
    of_each = {"atropos/reward_<environment>", "atropos/share_<environment>"}
    assert drawn == {name for name in told if name.startswith("atropos/")} - of_each


def test_the_page_of_atropos_explains_every_metric_and_key_of_it() -> None:
    page = DOCS / "atropos.md"
    told = {word for row in table_rows(page, "metric") for word in code_words(row[0])}
    of_metrics = {word for row in table_rows(DOCS / "metrics.md", "key") for word in code_words(row[0])}
    assert told == {name for name in of_metrics if name.startswith("atropos/")}
    keys = {word for word in code_words(prose(page)) if re.fullmatch(r"atropos_\w+", word)}
    assert keys == {key for key in catalogue() if key.startswith("atropos_")}


def test_the_page_of_atropos_shows_its_example() -> None:
    page = (DOCS / "atropos.md").read_text()
    examples = REPOSITORY / "recipes/examples"
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    recipes = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    assert (examples / "atropos_two_sums.py").read_text().endswith(f'"""\n\n{code}')
    assert any((examples / "atropos_two_sums.yaml").read_text().endswith(recipe) for recipe in recipes)


def test_queues_that_the_page_of_atropos_says_stop_are_foreseen() -> None:
    rows = [row for row in table_rows(DOCS / "atropos.md", "registered") if row[0].isdigit()]
    assert len(rows) == 4
    for registered, queue, _ in rows:
        assert predict_deadlock(int(registered), [int(size) for size in re.findall(r"of (\d+)", queue)]), queue


def test_metrics_of_maxent_are_those_that_are_written() -> None:
    source = (REPOSITORY / "src/grpo_recipes/trainers/maxent.py").read_text()
    written = set(re.findall(r'"(maxent/\w+)"', source))
    assert len(written) == 8
    for page, first in ((DOCS / "maxent.md", "metric"), (DOCS / "metrics.md", "key")):
        told = {word for row in table_rows(page, first) for word in code_words(row[0])}
        assert {name for name in told if name.startswith("maxent/")} == written, page.name


def test_the_losses_of_the_objectives() -> None:
    told = {row[0]: row[1].strip("`") for row in table_rows(DOCS / "maxent-formulas.md", "objective") if len(row) == 3}
    losses = {kind: loss for kind, loss in told.items() if loss.endswith("grpo")}
    temperature = "with `maxent_policy_temperature`"
    ways = {
        temperature: {"maxent_policy_temperature": 2.0, "maxent_length_normalize_policy": True},
        "per token": {"maxent_policy_temperature": 0.0, "maxent_length_normalize_policy": True},
        "summed": {"maxent_policy_temperature": 0.0, "maxent_length_normalize_policy": False},
    }
    for name, objective in OBJECTIVES.items():
        of = {way: objective.loss_type({"maxent_objective": name, **keys}.__getitem__) for way, keys in ways.items()}
        if "maxent_policy_temperature" in objective.unread:
            assert of.pop(temperature) == of["per token"]
        if len(set(of.values())) == 1:
            assert losses.pop(f"`{name}`") == of["summed"]
            continue
        for way, loss in of.items():
            assert losses.pop(f"`{name}`, {way}") == loss
    assert losses == {}


def test_commands_and_keys_of_the_refused_list_are_not_accepted() -> None:
    from grpo_recipes.recipe.converters import names
    from grpo_recipes.recipe.keys import OWNED_KEYS

    assert not ({*names(), *OWNED_KEYS} & catalogue().keys())


def test_what_the_page_says_is_refused_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    rows = table_rows(DOCS / "limitations.md", "key")
    assert len(rows) >= 10
    for key, _, value in (row[0].strip("`").partition(": ") for row in rows):
        recipe = str(REPOSITORY / "recipes/smoke/grpo.yaml")
        assert cli.main(["check", recipe, f"--{key}", value]) == errors.EXIT_CONFIG_ERROR, key
        assert f"grpo: --{key}: " in capsys.readouterr().err


def test_checks_of_the_doctor_that_are_named_exist() -> None:
    known = {get_check_name(check) for check in (*MACHINE, *RECIPE, *RUN)}
    rows = table_rows(DOCS / "troubleshooting.md", "symptom")
    assert len(rows) >= 5
    assert {name for row in rows for name in row[2].split(", ")} <= known


# --- messages of the troubleshooting page ----------------------------------------------------------------------------

SMOKE = "recipes/smoke/grpo.yaml"
MATH = "recipes/Qwen2.5-1.5B-Instruct/grpo/config_math.yaml"
# Beginning of a message -> (command, variables) that brings it, word for word.
SAID = {
    "grpo: sbatch --nodes:": (f"plan {SMOKE} --num_processes 1", {"SLURM_JOB_ID": "5", "SLURM_JOB_NUM_NODES": "2"}),
    "grpo: RECIPE: no recipe is named": ("check", {}),
    "grpo: --lerning_rate:": (f"check {SMOKE} --lerning_rate 1", {}),
    "grpo: --warmup_ratio:": (f"check {SMOKE} --warmup_ratio 0.1", {}),
    "grpo: --resume_from_checkpoint:": (f"check {SMOKE} --resume_from_checkpoint x", {}),
    "grpo: --num_generations: expected": (f"check {SMOKE} --num_generations 7.5", {}),
    "grpo: --max_steps: is given": (f"check {SMOKE} --max_steps", {}),
    "grpo: --gradient_accumulation_steps:": (f"check {SMOKE} --gradient_accumulation_steps 4", {}),
    "grpo: --num_generations: 256": (f"plan {SMOKE} --prompts_per_step null --num_generations 7", {}),
    "grpo: --vllm_max_model_length:": (f"check {SMOKE} --vllm_max_model_length 30", {}),
    "grpo: --top_p:": (f"check {SMOKE} --top_p 0.9", {}),
    "grpo: --accelerator: steps": (f"check {SMOKE} --dtype bfloat16 --learning_rate 3e-5 --accelerator ddp", {}),
    "grpo: --learning_rate: learning": (f"check {SMOKE} --learning_rate 1e6", {}),
    "grpo: --warmup_steps:": (f"check {SMOKE} --warmup_steps 9000", {}),
    "grpo: VLLM_MODEL:": (f"check {SMOKE}", {"VLLM_MODEL": "other/model"}),
    "grpo: --reward_funcs:": (f"check {SMOKE} --reward_funcs accuracy", {}),
    "grpo: MAXENT:": ("check recipes/smoke/maxent.yaml", {"MAXENT": "0"}),
    "grpo: TRAIN_ENTRYPOINT:": ("check", {"MAXENT": "1", "TRAIN_ENTRYPOINT": "src/grpo.py"}),
    "grpo: --maxent_tau:": (f"check {SMOKE} --maxent_tau 0.2", {}),
    "grpo: --maxent_q_epsilon:": (
        "check recipes/Qwen3-4B/maxent/config_math.yaml --maxent_q_epsilon 0.2",
        {},
    ),
    "grpo: --kl_target:": (f"check {SMOKE} --kl_target 0.1", {}),
    "grpo: CONFIG:": ("check", {"CONFIG": "missing.yaml"}),
    "grpo: CONFIG_FILE:": (f"plan {SMOKE}", {"CONFIG_FILE": "missing.yaml"}),
    "grpo: 'recipes/smoke/grpo.yaml':": (f"plan --seed=1 {SMOKE}", {}),
    "grpo: devices:": (f"plan {MATH} --gpus 0", {}),
    "grpo: recipes/base/math.yaml:": (f"plan {MATH} --gpus 1", {}),
    "grpo: --vllm_tensor_parallel_size:": (f"plan {MATH} --gpus 2 --vllm_tensor_parallel_size 2", {}),
    "grpo: --vllm_enable_sleep_mode:": (f"plan {SMOKE} --vllm_mode colocate --vllm_enable_sleep_mode", {}),
    "grpo: --weight_sync:": (f"plan {SMOKE} --weight_sync nccl", {}),
    "grpo: --resume: no runs found": ("launch --resume last", {}),
}
# Messages that need a run, a cluster or a broken machine: fixed parts of them -> the file that says them.
WRITTEN_IN = {
    "add the line #SBATCH ": "src/grpo_recipes/plan/preflight.py",
    "set NETWORK_INTERFACE to the interface that joins them": "src/grpo_recipes/launch/addresses.py",
    ", or open the firewall between them": "src/grpo_recipes/launch/addresses.py",
    "and a job installs nothing; on the login node run:": "scripts/setup.sh",
    "no answer from a package index:": "scripts/setup.sh",
    "replace it with:": "scripts/setup.sh",
    "no Python 3.11 to 3.13 with the venv module found": "scripts/setup.sh",
    "which is not the repository;": "training.sh",
    "is in use by another process": "src/grpo_recipes/plan/ports.py",
    " was taken by ": "src/grpo_recipes/launch/readiness.py",
    " died before it was ready": "src/grpo_recipes/launch/readiness.py",
    "s (vllm_server_timeout)": "src/grpo_recipes/launch/readiness.py",
    "the vLLM server did not answer": "src/grpo_recipes/weights/transport.py",
    "lost the connection to the vLLM server in": "src/grpo_recipes/weights/transport.py",
    "the engine of the vLLM server is dead:": "src/grpo_recipes/weights/transport.py",
    "; log: ": "src/grpo_recipes/weights/connection.py",
    "the vLLM server is gone and is not started again": "src/grpo_recipes/weights/client.py",
    "weights did not reach the server through the": "src/grpo_recipes/weights/guard.py",
    "the server computes with other weights than the trainer's": "src/grpo_recipes/weights/guard.py",
    ", which was not taken": "src/grpo_recipes/trainers/checks.py",
    "the weights are not finite after step": "src/grpo_recipes/trainers/checks.py",
    "was killed by signal": "src/grpo_recipes/launch/processes.py",
    "died or was killed": "src/grpo_recipes/launch/processes.py",
    "check CONFIG_FILE and the accelerator key": "src/grpo_recipes/trainers/rank.py",
    "has no column": "src/grpo_recipes/data/problems.py",
    "prompts are left, one step needs": "src/grpo_recipes/data/prompts.py",
    "are unscored, more than reward_max_no_verdict:": "src/grpo_recipes/trainers/checks.py",
    "No space left on device": "src/grpo_recipes/runs/endings.py",
    "the run was made at commit": "src/grpo_recipes/runs/rundir.py",
    "contains no checkpoint that can be resumed:": "src/grpo_recipes/runs/checkpoints.py",
    "was changed since the run wrote it": "src/grpo_recipes/runs/checkpoints.py",
    "is missing: the checkpoint was made with another number of processes": "src/grpo_recipes/trainers/checkpoints.py",
}


def messages() -> list[str]:
    return [line for block in blocks("text") if block.page == "troubleshooting.md" for line in block.lines]


@pytest.mark.parametrize("message", messages())
def test_messages_are_what_the_code_says(
    message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    commands = [call for start, call in SAID.items() if message.startswith(start)]
    if not commands:
        files = [file for part, file in WRITTEN_IN.items() if part in message]
        assert files, "new message: add it to SAID, or to WRITTEN_IN"
        return
    if environment_device() != "cpu":
        pytest.skip("the page shows the output of a CPU environment")
    ((command, variables),) = commands
    monkeypatch.chdir(REPOSITORY)
    for name in {*READ_VARIABLES, *environment_keys()} - {"CACHE_ROOT"}:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    if "--resume" in command:
        monkeypatch.setenv("RUN_ROOT", "no-such-folder")
        message = message.replace("no runs found in runs", "no runs found in no-such-folder")

    assert cli.main(command.split()) == errors.EXIT_CONFIG_ERROR

    assert capsys.readouterr().err.strip() == message


def test_every_table_entry_is_used_and_its_file_says_it() -> None:
    text = "\n".join(messages())
    assert [start for start in SAID if start not in text] == []
    for part, file in WRITTEN_IN.items():
        assert part in text, part
        source = re.sub(r'"\s*\n\s*f?"', "", (REPOSITORY / file).read_text())
        assert part in source, f"{file} no longer says: {part}"


def test_messages_of_the_guard() -> None:
    text = (DOCS / "weights.md").read_text()
    names = ["model.embed_tokens.weight", *[f"p{number}" for number in range(28)]]
    checksum = describe_checksum_error("file", [names])
    assert checksum is not None and checksum.split(" in model")[0] in text
    logprobs = describe_logprob_error("file", 1.31, TOLERANCES["float32"])
    assert logprobs is not None and logprobs in text
