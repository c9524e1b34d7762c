"""The page of a separate evaluation: its content, omitted parts, and its filter in a real browser."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path
from typing import Any

import pytest

from grpo_recipes.console.report.pages import render_evaluation_page
from grpo_recipes.stats import scores_at_k

from .test_browser import CHROMIUM, chromium

WIDTHS = (390, 1300)
# Select each kind of completion and count the visible completions.
PROBE = """<!doctype html><body>FRAMES<pre id="found"></pre><script>
addEventListener("load", () => {
  const ticks = setInterval(() => {}, 1);
  const look = (frame) => {
    const doc = frame.contentDocument, [search, select] = doc.querySelectorAll(".search input, .search select");
    const seen = (selector) => [...doc.querySelectorAll(selector)].filter((one) => one.getClientRects().length).length;
    const counts = {};
    for (const [kind, text] of [["", ""], ["right", ""], ["wrong", ""], ["unscored", ""], ["wrong", "prompt 1?"]]) {
      select.value = kind;
      search.value = text;
      select.dispatchEvent(new Event("input"));
      counts[kind + text] = [seen(".completion"), seen(".group"), doc.querySelector(".search .note").textContent];
    }
    const ground = frame.contentWindow.getComputedStyle(doc.body).backgroundColor;
    return { width: frame.contentWindow.innerWidth, scroll: doc.documentElement.scrollWidth, counts, ground };
  };
  document.getElementById("found").textContent = JSON.stringify([...document.querySelectorAll("iframe")].map(look));
  clearInterval(ticks);
});
</script></body>"""


def completion(right: bool | None, text: str = "said") -> dict[str, Any]:
    reward = None if right is None else float(right)
    entry = {"text": text, "tokens": 3, "truncated": right is False, "reward": reward, "right": right}
    return entry | {"rewards": {"mine": reward, "other": reward}, **({"reason": "timed out"} if right is None else {})}


def row(index: int, *completions: dict[str, Any]) -> dict[str, Any]:
    prompt = [{"role": "system", "content": "Add."}, {"role": "user", "content": f"prompt {index}?"}]
    return {"index": index, "prompt": prompt, "answer": "7", "completions": list(completions)}


def page_of(rows: list[dict[str, Any]], data: dict[str, str] | None = None, **changes: Any) -> str:
    right = [[entry["right"] for entry in line["completions"]] for line in rows]
    rewards = [[entry["reward"] for entry in line["completions"]] for line in rows]
    scores = scores_at_k(rewards, right, [["a"] * len(each) for each in right])
    result: dict[str, Any] = {name: score for name, (score, _) in scores.items()}
    result |= {f"{name}_ci": list(limits) for name, (_, limits) in scores.items() if limits}
    result |= {"model": "a/model", "recipe": "my.yaml", "prompts": len(rows), "samples": len(right[0]), "seed": 0}
    result |= {"reward": 0.5, "reward_std": 0.1, "truncated": 0.25, "mean_length": 3.0, "no_verdict": 2, **changes}
    data = {"dataset_name": "d", "eval_dataset_name": "held_out.jsonl"} if data is None else data
    result["settings"] = {**data, "max_tokens": 64, "temperature": 0.7, "reward_funcs": ["mine", "other"]}
    return render_evaluation_page(result, rows)


def mixed(count: int) -> list[dict[str, Any]]:
    return [
        row(index, completion(True), completion(False), completion(None), completion(False)) for index in range(count)
    ]


@pytest.mark.parametrize(
    ("data", "name"),
    [({"eval_dataset_name": "held_out.jsonl", "dataset_name": "d"}, "held_out.jsonl"), ({"dataset_name": "d"}, "d"),
     ({"dataset_mixture": "a and b"}, "a mixture")],
)  # fmt: skip
def test_the_data_are_named_by_the_keys_that_the_recipe_sets(data: dict[str, str], name: str) -> None:
    assert f"<dt>Data</dt><dd>{name}</dd>" in re.sub(r">\s+<", "><", page_of(mixed(2), data))


def test_scores_settings_and_samples_are_on_the_page() -> None:
    page = page_of(mixed(3))
    assert "pass@1 33.3 % (" in page and "on 3 prompts</h1>" in page
    assert "<td>66.7 % (" in page  # pass@2 with 1 right completion and 3 scored
    for text in (
        "a/model",
        "my.yaml",
        "held_out.jsonl",
        "3 prompts \u00d7 4, temperature 0.7",
        "mine, other",
        "timed out",
    ):
        assert text in page
    assert page.count("clipped at the token limit") == 6
    assert [page.count(f'data-verdict="{name}"') for name in ("right", "wrong", "unscored")] == [3, 6, 3]
    assert "[system]" in page and "prompt 2?" in page and "Reference answer" in page


def test_texts_of_the_model_are_escaped_and_secrets_masked() -> None:
    page = page_of([row(0, completion(True, "<script>x</script> hf_" + "plantedsecret" * 2), completion(False))])
    assert "<script>x" not in page and "plantedsecret" not in page


def test_a_score_without_prompts_is_a_dash() -> None:
    page = page_of([row(0, completion(None), completion(None))], **{"pass@1": None, "mean@1": None})
    assert "<h1>No score for pass@1 on 1 prompt</h1>" in page and "<td>\u2013</td>" in page


def test_of_many_completions_right_and_wrong_ones_are_shown_in_their_order() -> None:
    many = [completion(False, f"text {place}") for place in range(40)] + [completion(True, "the right one")]
    page = page_of([row(0, *many)])
    assert page.count('data-verdict="') == 8 and "the right one" in page
    assert re.findall(r"text (\d+)", page.replace('<i class="sp"> </i>', " ")) == [str(place) for place in range(7)]


def test_prompts_are_spread_and_become_fewer_where_the_page_would_be_too_large() -> None:
    page = page_of(mixed(500))
    shown = [int(number) for number in re.findall(r"prompt (\d+)\?", page)]
    assert len(shown) == 60 and shown == sorted(shown) and (shown[0], shown[-1]) == (0, 499)
    long = [row(index, *[completion(False, "x" * 2400)] * 8) for index in range(500)]
    page = page_of(long)
    groups = page.count('class="group"')
    assert 10 < groups < 60 and len(page) < 900_000 and f"{groups} of 500 prompts" in page


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_the_filter_leaves_right_or_wrong_completions_and_nothing_overflows(tmp_path: Path, dark: bool) -> None:
    rows = [*mixed(3), row(3, completion(False, "x" * 3000))]
    (tmp_path / "eval.html").write_text(page_of(rows))
    frames = "".join(f'<iframe src="eval.html" width="{width}" height="900"></iframe>' for width in WIDTHS)
    (tmp_path / "outer.html").write_text(PROBE.replace("FRAMES", frames))
    done = chromium(tmp_path, tmp_path / "outer.html", 60_000, dark)
    assert "CONSOLE" not in done.stderr
    (text,) = re.findall(r'<pre id="found">(.*?)</pre>', done.stdout, re.DOTALL)
    for width, view in zip(WIDTHS, json.loads(html.unescape(text)), strict=True):
        assert view["width"] == width >= view["scroll"]
        assert view["counts"] == {
            "": [13, 4, ""],
            "right": [3, 3, "3 completions"],
            "wrong": [7, 4, "7 completions"],
            "unscored": [3, 3, "3 completions"],
            "wrongprompt 1?": [2, 1, "2 completions"],
        }
        assert (sum(map(int, re.findall(r"\d+", view["ground"]))) < 200) == dark
