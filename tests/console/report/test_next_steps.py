"""Cards with what to try next: every health rule has one, and its command is valid."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from grpo_command import run_grpo

from grpo_recipes.console.report import next_steps
from grpo_recipes.console.report.next_steps import Card, make_cards
from grpo_recipes.console.report.pages import make_headline
from grpo_recipes.console.report.read import read_run
from grpo_recipes.recipe import read_recipe
from grpo_recipes.runs import health
from grpo_recipes.runs.health import Notice

from .synthetic_runs import make_run
from .test_pages_run import page_of

RECIPES = Path(__file__).parents[3] / "recipes/smoke"
RULES = [rule.name for rule in health._RULES]


def cards_of(folder: Path, *names: str) -> list[Card]:
    fixes = {rule.name: rule.fix.replace("{remedy}", health._MORE_SPREAD) for rule in health._RULES}
    notices = [Notice(name, "the text", fixes[name], 7, 60, True) for name in names]
    return make_cards(read_run(folder), folder, notices)


def test_every_rule_has_a_card_with_a_chart_of_the_page() -> None:
    ours = {next_steps._COLLAPSE}  # found on the whole run
    assert next_steps._ADVICE.keys() - ours == set(RULES) - {"not finite"}  # the page lists these by metric


def test_a_card_says_what_was_seen_and_links_to_its_chart(tmp_path: Path) -> None:
    folder = make_run(tmp_path, steps=30)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    lines = [json.dumps(row | {"kl": 2.0 + row["step"] / 10}) for row in rows]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    page = page_of(folder)
    assert page.text.index("Far from the reference") < page.text.index("Mean over the completions of a step")
    section = page.text[page.text.index("Far from the reference") : page.text.index("KL divergence from step")]
    assert "The KL divergence from the reference is 4.55 nats per token. To fix it, lower learning_rate (now" in section
    assert f"grpo launch {folder}/recipe.yaml --learning_rate 5e-07 --beta 0.08" in section
    links = {attributes["href"]: attributes for tag, attributes in page.elements if tag == "a"}
    assert links["#chart-kl-divergence"]["data-step"] == "1"
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert "chart-kl-divergence" in ids and len(ids) == len(set(ids))


def test_a_card_only_changes_keys_that_its_fix_names(tmp_path: Path) -> None:
    folder = make_run(tmp_path, steps=12)
    rows = [json.loads(line) | {"reward": 0.25, "frac_reward_zero_std": 1.0}
            for line in (folder / "metrics.jsonl").read_text().splitlines()]  # fmt: skip
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = page_of(folder).text
    card = text[text.index("Nothing is learned") : text.index("Mean over the completions of a step")]
    assert f"grpo check-rewards {folder}/recipe.yaml" in card and "--num_generations" not in card
    (card,) = cards_of(folder, "few signals")
    assert card.command.endswith("--num_generations 16")


def test_a_completed_run_without_a_sign_has_its_usual_next_steps(tmp_path: Path) -> None:
    folder = make_run(tmp_path, steps=60)
    text = page_of(folder).text
    assert text.index("Mean over the completions of a step") < text.index("Train longer")
    titles = [card.title for card in cards_of(folder)]
    assert titles == ["Train longer", "Repeat it with other seeds"]
    summary: dict[str, Any] = {"benchmarks": {}}
    flat = make_run(tmp_path / "flat", steps=60, lift=0.0, summary=summary)
    assert [card.title for card in cards_of(flat)] == ["Repeat it with other seeds"]  # it has evaluations
    (flat / "eval.jsonl").unlink()
    titles = [card.title for card in cards_of(flat)]
    assert titles == ["Evaluate the model", "Repeat it with other seeds"]
    solved = make_run(tmp_path / "solved", steps=12)
    rows = [json.loads(line) | {"reward": 1.5} for line in (solved / "metrics.jsonl").read_text().splitlines()]
    (solved / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert cards_of(solved)[0].title == "Use harder prompts"
    assert cards_of(make_run(tmp_path / "live", steps=60, summary={"status": "running"})) == []


def test_a_collapsed_reward_is_the_first_card(tmp_path: Path) -> None:
    def cards(name: str, change: Callable[[float], float]) -> list[Card]:
        """Return the cards, and check that the headline says the same about the reward as the first card."""
        folder = make_run(tmp_path / name, steps=60)
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        lines = [json.dumps(row | {"reward": row["reward"] - change(row["step"])}) for row in rows]
        (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
        cards, headline = cards_of(folder), make_headline(read_run(folder))
        if cards[0].title == "The reward collapsed":
            assert headline == cards[0].text.partition(" To fix it")[0].removeprefix("The r").replace("eward", "Reward")
        return cards

    card, *others = cards("collapsed", lambda step: 0.02 * max(0, step - 35))
    assert (card.title, card.chart, card.serious, others) == ("The reward collapsed", "Reward", True, [])
    assert card.step is not None and 30 <= card.step <= 40
    fall = (
        rf"The reward fell from 0\.6\d* at step {card.step} to 0\.\d+, the mean of the last 5 steps\. To fix it, lower"
    )
    assert re.match(fall, card.text)
    assert card.command.endswith("--learning_rate 2e-07 --beta 0.08")
    at_once, *_ = cards("at once", lambda step: 10.0 * (step > 1))
    assert at_once.title == "The reward collapsed" and at_once.step == 1
    assert re.match(
        r"The reward fell from 0\.\d+ at step 1 to \u22129\.\d+, the mean of the last 5 steps\.", at_once.text
    )
    for name, change in (("dip", 0.003), ("rise", 0.0)):
        titles = [card.title for card in cards(name, lambda step, change=change: change * max(0, step - 35))]
        assert "The reward collapsed" not in titles


def test_a_collapsed_run_gets_no_cards_for_what_follows_from_it(tmp_path: Path) -> None:
    folder = make_run(tmp_path, steps=60)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    lines = [json.dumps(row | {"reward": row["reward"] - 10.0 * (row["step"] > 1)}) for row in rows]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    titles = [card.title for card in cards_of(folder, *RULES)]
    assert titles[0] == "The reward collapsed" and "A reward is always 0" in titles
    assert not {"Many completions are clipped", "Most groups teach nothing", "Little exploration"} & {*titles}
    assert {*RULES} > next_steps._CONSEQUENCES
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert "Many completions are clipped" in [card.title for card in cards_of(folder, *RULES)]


@pytest.mark.parametrize(("recipe", "settings"), [("grpo.yaml", []), ("maxent.yaml", ["--maxent_tau", "0.5"])])
def test_the_command_of_every_card_is_valid(tmp_path: Path, recipe: str, settings: list[str]) -> None:
    folder = make_run(tmp_path, steps=60)
    (folder / "recipe.yaml").write_text(read_recipe(RECIPES / recipe, settings, {}).as_yaml())
    commands = [card.command for card in cards_of(folder, *RULES) + cards_of(folder) if " launch " in card.command]
    flags = dict.fromkeys(flag for command in commands for flag in re.findall(r"--\w+ \S+", command))
    assert {"--num_generations", "--max_completion_length"} <= {flag.split()[0] for flag in flags}
    assert ("--maxent_tau 0.25" in flags) == (recipe == "maxent.yaml")
    assert {shlex.split(command)[2] for command in commands} == {str(folder / "recipe.yaml")}
    checked = run_grpo("check", str(folder / "recipe.yaml"), *shlex.split(" ".join(flags)))
    assert checked.returncode == 0, checked.stdout + checked.stderr
