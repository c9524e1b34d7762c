"""Each way for weights to reach the real server, on CPU: after every step its log-probs are the trainer's."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import bridge_cells
import psutil
import pytest
import requests
import torch
from documented import documented
from fake_forgetful_proxy import FakeCopyingProxy, FakeForgetfulProxy
from one_by_one import Bench
from real_runs import LEARNS, REPOSITORY, Launch, same_rows, weights_hash
from run_segments import RunSegments
from test_server_restarts import Places, engine_of

from grpo_recipes.runs.rundir import SERVER_STATE, read_json, read_metrics, write_json

# Weight sync methods, each with enough steps to lose the server and to be stopped before the last step.
# A new server for each step takes half a minute.
INTERRUPTED = [
    ("shared", ("--max_steps", "20")),
    ("lora", ("--max_steps", "20", *bridge_cells.LORA)),
    ("restart", ("--max_steps", "4")),
]
SHORT = ("--prompts_per_step", "8", "--num_generations", "8", "--save_steps", "100")


@pytest.mark.slow
def test_the_smoke_recipe_learns_in_one_copy_of_the_weights(launch: Callable[..., Launch]) -> None:
    recipe = {"recipes/smoke/grpo.yaml": str(REPOSITORY / "recipes/smoke/grpo.yaml")}
    learned(launch(*documented("grpo launch recipes/smoke/grpo.yaml --weight_sync shared", recipe)[2:], *LEARNS))


@pytest.mark.slow
def test_an_adapter_learns_alone(launch: Callable[..., Launch]) -> None:
    places = {"recipes/smoke/grpo.yaml": str(REPOSITORY / "recipes/smoke/grpo.yaml"), "120": "80"}
    shown = "grpo launch recipes/smoke/grpo.yaml --use_peft --weight_sync lora --learning_rate 2e-3 --max_steps 120"
    run = launch(*documented(shown, places)[2:])
    learned(run)
    assert len(list((run.run_dir / "adapter").iterdir())) > 1


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_new_server_for_each_model_learns(launch: Callable[..., Launch]) -> None:
    recipe = {"recipes/smoke/grpo.yaml": str(REPOSITORY / "recipes/smoke/grpo.yaml")}
    shown = "grpo launch recipes/smoke/grpo.yaml --weight_sync restart --num_iterations 6"
    run = launch(*documented(shown, recipe)[2:])
    learned(run)
    state = json.loads((run.run_dir / "processes/server_state.json").read_text())
    assert state["epoch"] == 10  # a server for each six steps; the first server starts with the first weights
    assert run.summary().get("server_restarts", 0) == 0


def learned(run: Launch) -> None:
    """Assert that the smoke task was learned, with the trainer's weights in the server after every step."""
    run.wait_for_step(1)
    memory = run.sync_folders()
    assert run.wait(600) == 0, run.output
    assert memory and not any(folder.exists() for folder in memory)
    assert run.summary()["final_reward"] >= 0.85
    name = "sampling/sampling_logp_difference/mean"
    differences = [row[name] for row in run.rows() if name in row]
    assert len(differences) >= 10 and max(differences) < 1e-4
    assert run.processes() == []


@pytest.mark.slow
@pytest.mark.parametrize("cell", bridge_cells.RUNS, ids="-".join)
def test_the_server_has_the_weights_of_every_step(launch: Callable[..., Launch], cell: tuple[str, str]) -> None:
    run = launch("--weight_sync", cell[0], "--max_steps", "3", *SHORT, *bridge_cells.RUNS[cell])
    run.wait_for(run.processes, "a process")
    segments = RunSegments(run)

    assert run.wait(500) == 0, run.output

    rows = run.rows()
    assert len(rows) == 3 and all(row["grad_norm"] > 0 for row in rows)
    assert all(row["sampling/sampling_logp_difference/mean"] < 1e-4 for row in rows)
    assert run.summary()["status"] == "completed"
    assert segments.find_left() == set()


@pytest.mark.slow
def test_tied_embeddings_are_in_one_copy_too(launch: Callable[..., Launch]) -> None:
    """Both sides have them once, and the server uses them as its output embeddings as well."""
    run = launch("--weight_sync", "shared", "--model_name_or_path", "smoke:sums-tied", "--max_steps", "3", *SHORT)

    assert run.wait(500) == 0, run.output

    rows = run.rows()
    assert len(rows) == 3 and all(row["grad_norm"] > 0 for row in rows)
    assert all(row["sampling/sampling_logp_difference/mean"] < 1e-4 for row in rows)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("bridge", "flags"), INTERRUPTED)
def test_a_killed_server_and_a_stop_change_nothing(
    launch: Callable[..., Launch], bridge: str, flags: tuple[str, ...]
) -> None:
    keys, places = ("--weight_sync", bridge, *SHORT, *flags), Places()
    run = launch(*keys, *places.keys)
    run.wait_for_step(2)
    if bridge == "restart":  # wait for the third server: the launcher may still be ending the second
        third = {"epoch": 3, "state": "ready"}
        run.wait_for(lambda: third.items() <= read_json(run.run_dir / SERVER_STATE).items(), "third server")
    places.note(run)
    psutil.Process(engine_of(run)).kill()
    run.wait_for(lambda: "only the server is started again (1 of 2)" in run.output, "another server")
    run.wait_for_step(len(run.rows()) + 1)
    run.process.terminate()

    assert run.wait() == 75, run.output
    assert run.processes() == []
    places.assert_left()
    resumed = launch("--resume", str(run.run_dir), by_exec=True)
    assert resumed.wait(600) == 0, resumed.output
    summary = run.summary()
    assert (summary["status"], summary["restarts"]) == ("completed", 1)
    expected = launch(*keys, folder="uninterrupted")
    assert expected.wait(600) == 0, expected.output
    assert same_rows(run, expected) and weights_hash(run) == weights_hash(expected)


@pytest.mark.slow
def test_a_server_that_kept_its_own_copy_stops_the_run_at_the_first_sync(tmp_path: Path) -> None:
    bench = Bench(tmp_path, "--weight_sync", "shared")
    with bench.server() as url:
        proxy = FakeCopyingProxy(url)
        code, output = bench.train(proxy.port)
        proxy.close()

    assert code != 0 and proxy.copied == 1, output
    (cause,) = bench.causes()
    assert "WeightsDiffer: weights did not reach the server through the 'shared' bridge" in cause
    assert "step 0 was not taken" in cause and read_metrics(bench.run_dir) == []


@pytest.mark.slow
def test_a_server_that_was_started_with_the_old_model_stops_the_run(tmp_path: Path) -> None:
    """A fake launcher in a thread says that the server has the newest model, and starts none."""
    bench = Bench(tmp_path, "--weight_sync", "restart")
    folder, ended = Path(bench.environment["GRPO_SYNC_DIR"]), threading.Event()

    def lie() -> None:
        while not ended.wait(0.1):
            if (folder / "newest_model").exists():
                model = str((folder / "newest_model").resolve())
                write_json(bench.run_dir / SERVER_STATE, {"epoch": 2, "state": "ready", "model": model})

    with bench.server():
        threading.Thread(target=lie).start()
        code, output = bench.train()
        ended.set()

    assert code != 0, output
    (cause,) = bench.causes()
    assert "WeightsDiffer: weights did not reach the server through the 'restart' bridge" in cause
    assert "it has the weights of sync 0, and the trainer sent sync 1" in cause
    assert len(read_metrics(bench.run_dir)) == 1


@pytest.mark.slow
def test_an_adapter_one_step_old_stops_the_run(tmp_path: Path) -> None:
    bench = Bench(tmp_path, "--weight_sync", "lora", *bridge_cells.LORA)
    with bench.server() as url:
        proxy = FakeForgetfulProxy(url, honest=2)
        code, output = bench.train(proxy.port)
        # A request for the base model gets the base model, even if an adapter is loaded.
        answer = requests.post(
            f"{url}/v1/completions",
            json={"model": bench.served, "prompt": [4, 5, 6], "max_tokens": 1, "logprobs": 0, "temperature": 0},
            headers={"Authorization": f"Bearer {Path(bench.environment['GRPO_TOKEN_FILE']).read_text().strip()}"},
            timeout=60,
        ).json()
        proxy.close()

    assert code != 0 and proxy.forgotten == 1, output
    (cause,) = bench.causes()
    assert "WeightsDiffer: weights did not reach the server through the 'lora' bridge" in cause
    assert "it has the weights of sync 2, and the trainer sent sync 3; step 2 was not taken" in cause
    assert len(read_metrics(bench.run_dir)) == 2
    assert answer["choices"][0]["logprobs"]["token_logprobs"][0] == pytest.approx(greedy(bench.plan.model), abs=1e-4)


def greedy(model: str) -> float:
    """The largest log-prob of the first token after the prompt 4 5 6."""
    from transformers import AutoModelForCausalLM

    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)(torch.tensor([[4, 5, 6]])).logits
    return logits[0, -1].log_softmax(-1).max().item()


@pytest.mark.slow
def test_no_request_sees_a_step_that_is_half_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client and a model in this process, as rank 0 has them, at a real server that others ask as well."""
    bench = Bench(tmp_path, "--weight_sync", "shared")
    model = trained_model(bench)
    with bench.server() as url:
        client = client_here(bench, url, monkeypatch)
        client.sync_model(model)
        assert client.checksum_error is None and list(Path(bench.environment["GRPO_SYNC_DIR"]).glob("weights*")) == []

        def sampled(count: int) -> dict:
            keys = {"max_tokens": count, "temperature": 1.0, "generation_kwargs": {"ignore_eos": True, "seed": 5}}
            return client.generate([[4, 5, 6]], n=1, logprobs=0, **keys)

        difference = partial(log_prob_difference, model, [4, 5, 6])
        assert difference(sampled(20)) < 1e-4
        with ThreadPoolExecutor() as pool:
            under_way = pool.submit(sampled, 100)
            time.sleep(0.05)
            assert not under_way.done()
            client.drain()
            assert under_way.done()  # it saw one step's weights from its first token to its last
            before = difference(under_way.result())
            late = pool.submit(sampled, 20)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(1.05)
            time.sleep(0.3)
            assert not late.done()
            client.release()
            assert difference(late.result()) < 1e-4 and before < 1e-4
        assert difference(sampled(20)) < 1e-4


@pytest.mark.slow
def test_a_request_of_another_client_does_not_keep_the_cache_of_old_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both begin with the same prompt, which fills a block of vLLM's cache."""
    bench = Bench(tmp_path, "--weight_sync", "file")
    model, prompt = trained_model(bench), [4, 5, 6] * 44
    metadata = [(name, "float32", list(weight.shape)) for name, weight in model.named_parameters()]
    with bench.server() as url:
        client = client_here(bench, url, monkeypatch)

        def sampled(count: int) -> dict:
            keys = {"max_tokens": count, "temperature": 1.0, "generation_kwargs": {"ignore_eos": True, "seed": 5}}
            return client.generate([prompt], n=1, logprobs=0, **keys)

        def sync() -> None:
            client.update_named_params(metadata, ((name, weight.detach()) for name, weight in model.named_parameters()))
            client.reset_prefix_cache()
            assert client.checksum_error is None

        sync()
        assert log_prob_difference(model, prompt, sampled(4)) < 1e-4
        with ThreadPoolExecutor() as pool, torch.no_grad():
            other = pool.submit(sampled, 120)
            time.sleep(0.1)
            for parameter in model.parameters():
                parameter.mul_(1.05)
            sync()
            assert not other.done()
            assert log_prob_difference(model, prompt, sampled(4)) < 1e-4
            assert len(other.result()["completion_ids"][0]) == 120


def trained_model(bench: Bench) -> torch.nn.Module:
    """The model as rank 0 trains it."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(bench.plan.model, dtype=torch.float32).eval()


def client_here(bench: Bench, url: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The bridge's client in this process, without a seed."""
    from grpo_recipes.recipe.configs import GRPOConfig
    from grpo_recipes.runs.stop_request import StopRequest
    from grpo_recipes.weights.bridges import CLIENTS

    for name, value in bench.environment.items():
        if name.startswith("GRPO_"):
            monkeypatch.setenv(name, value)
    args = GRPOConfig(output_dir=str(bench.run_dir.parent / "out"), use_cpu=True, bf16=False, report_to="none")
    stop = StopRequest(bench.run_dir)
    return CLIENTS[bench.plan.bridge](
        args=args, run_dir=bench.run_dir, seed=None, stop=stop, base_url=url, connection_timeout=60
    )


def log_prob_difference(model: torch.nn.Module, prompt: list[int], answer: dict) -> float:
    """Return the largest difference between the server's log-probs and the model's current ones."""
    tokens = torch.tensor([[*prompt, *answer["completion_ids"][0]]])
    with torch.no_grad():
        logps = model(tokens).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    logps = logps.gather(1, tokens[0, len(prompt) :, None])[:, 0]
    return (logps - torch.tensor(answer["logprobs"][0])[:, 0]).abs().max().item()
