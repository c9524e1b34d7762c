"""Completions on the page of a run: prompts at their first and last step, and the number of steps."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from grpo_recipes.console.report.samples import pair_prompts, render_steps
from grpo_recipes.console.report.tokens import read_tokens

from .synthetic_runs import game_samples, make_run, token_view, two_samples
from .test_pages_run import page_of


def write_samples(file: Path, *steps: list[dict[str, Any]]) -> Path:
    """Write a row of samples per step, beginning with step 1."""
    rows = [{"step": step, "rewards": [0.5], "samples": samples} for step, samples in enumerate(steps, start=1)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def ask(prompt: str, completion: str) -> dict[str, Any]:
    return {**two_samples()[0], "prompt": prompt, "completion": completion}


def test_prompts_with_the_most_steps_in_between_are_shown_first(tmp_path: Path) -> None:
    file = write_samples(
        tmp_path / "samples.jsonl",
        [ask("once", "a"), ask("far", "b"), ask("far", "c")],
        [ask("near", "d")],
        [],
        [ask("near", "e"), ask("far", "f")],
        [ask("far", "g")],
    )
    far, near = pair_prompts(file)
    shown = [
        [(step, [sample["completion"] for sample, _ in group.samples]) for step, group in (pair.first, pair.last)]
        for pair in (far, near)
    ]
    assert shown == [[(1, ["b", "c"]), (5, ["g"])], [(2, ["d"]), (4, ["e"])]]
    assert far.is_same_prompt and near.is_same_prompt


def test_without_a_recurring_prompt_two_prompts_are_shown(tmp_path: Path) -> None:
    (pair,) = pair_prompts(write_samples(tmp_path / "samples.jsonl", [ask("a", "b")], [ask("c", "d")], [ask("e", "f")]))
    assert (pair.first[0], pair.last[0], pair.is_same_prompt) == (1, 3, False)
    assert pair_prompts(write_samples(tmp_path / "one.jsonl", [ask("a", "b"), ask("c", "d")])) == []
    assert pair_prompts(tmp_path / "missing.jsonl") == []


def test_the_page_shows_a_prompt_at_its_first_and_last_step(tmp_path: Path) -> None:
    folder = make_run(tmp_path, steps=3)
    write_samples(folder / "samples.jsonl", [ask("1 + 1", "it is 3")], [ask("2 + 2", "x")], [ask("1 + 1", "it is 2")])
    text = page_of(folder).text
    section = text[text.index("First and last step") : text.index("3 of 3 steps")]
    assert "The same prompt at the first and the last step" in section
    assert section.count("1 + 1") == 1 and "2 + 2" not in section
    assert section.index("Step 1") < section.index("it is 3") < section.index("Step 3") < section.index("it is 2")
    assert "over 8 completions" not in text
    before, after = (ask("1 + 1", "x") | {"group_rewards": rewards} for rewards in ([1.0] * 7 + [None], [0.0, 0.5] * 4))
    write_samples(folder / "samples.jsonl", [before], [ask("2 + 2", "x")], [after])
    text = page_of(folder).text
    section = text[text.index("First and last step") :]
    shown = re.findall(r"Group: mean reward (\S+) over (\d+) completions", section)
    assert shown == [("1", "7"), ("0.25", "8")] * 2  # the pair, and the steps
    write_samples(folder / "samples.jsonl", [ask("1 + 1", "it is 3")], [ask("2 + 2", "x")])
    text = page_of(folder).text
    assert "No sampled prompt recurs" in text


def test_tokens_truncation_masks_and_advantages_of_turns_are_shown(tmp_path: Path) -> None:
    cut = {**two_samples()[0], "tokens": 512, "truncated": True}
    assert "tokens512" in (text := page_of(make_run(tmp_path, steps=1, samples=[cut])).text)
    assert "clipped at max_completion_length" in text and "truncated" not in text
    page = (tmp_path / "math-20261120-101500" / "report.html").read_text()
    assert 'class="completion up-side clipped"' in page and ".completion.clipped {" in page  # no plain success
    (game,) = game_samples(2)
    game["episode"]["turns"][0]["advantage"], game["episode"]["turns"][1]["advantage"] = 0.5, -0.5
    folder = make_run(tmp_path, "game-20261120-101503", steps=1, samples=[game])
    assert "usermasked" in page_of(folder).text.replace("\n", "")
    html = (folder / "report.html").read_text()
    assert 'class="policy up-side"' in html and 'class="policy down-side"' in html


def test_shown_tokens_are_limited_named_and_without_secrets(tmp_path: Path) -> None:
    sample = token_view(["\u202e", " a", "\n"], "1:0.5 2:-", "-1 nan -3")
    shown = read_tokens(sample, most=2)
    assert shown is not None
    assert (shown.text, shown.lengths, shown.count) == ("U+202E a", "6 2", 2)
    assert (shown.advantages, shown.logprobs) == ("1:0.5 2:-", "100 -")
    damaged = sample["token_view"] | {"lengths": "1 x"}
    for view in (None, [], {}, {"text": 3}, damaged, token_view(["hf_", "abcdefghij" * 2], "2:1")["token_view"]):
        assert read_tokens({"token_view": view}) is None
    assert read_tokens({}) is None


def test_the_most_tokens_that_fit_are_shown(tmp_path: Path) -> None:
    counts = []
    for number in (1, 24):
        samples = [sample | token_view([" word"] * 512, "512:1", "-0.12 " * 512) for sample in two_samples()]
        folder = make_run(tmp_path / str(number), steps=number, samples=samples)
        html = "".join(render_steps(folder / "samples.jsonl", number - 1))
        counts.append((html.count('class="tokens"'), *set(re.findall(r"(\d+) tokens", html))))
        assert len(html) <= 155_000
    assert counts == [(2, "512"), (48, "128")]


def test_an_ordinary_run_has_a_page_below_500_kb(tmp_path: Path) -> None:
    """A long run with every MaxEnt metric and with completions of 900 characters and 250 tokens."""
    words = " ".join(f"step {number} of the solution" for number in range(40))
    tokens = token_view([" toke"] * 250, "250:0.5", "-0.12 " * 250)
    samples = [{**sample, "prompt": f"{prompt}: {words[:300]}", "completion": words[:900], **tokens}
               for prompt in ("first", "second") for sample in two_samples()]  # fmt: skip
    folder = make_run(tmp_path, steps=1000, objective="listwise", samples=samples)
    page_of(folder)
    assert (folder / "report.html").stat().st_size < 500_000
