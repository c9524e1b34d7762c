"""The site builds offline without a warning, loads nothing from elsewhere, and its links lead somewhere.

In Chromium it is opened from disk: it scrolls sideways nowhere, sets its formulas, and finds words and keys.
"""

from __future__ import annotations

import ast
import html as markup
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from doc_pages import REPOSITORY, prose

sys.path.insert(0, str(REPOSITORY / "scripts"))
from documentation import pages

from grpo_recipes.recipe.converters import ALIASES, names
from grpo_recipes.recipe.keys import OWNED_KEYS, catalogue, keys_by_topic, nested_catalogue

NETWORK_OFF = {name: "http://127.0.0.1:9" for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY")}
NAV = (REPOSITORY / "mkdocs.yml").read_text().split("nav:")[1].split("\n\n")[0]
IN_NAV = tuple(re.findall(r"([a-z0-9-]+)\.md", NAV))
SOURCES = {page.removesuffix(".md"): f"../{file.removesuffix('.md')}" for page, file in pages.OUTSIDE.items()}
OUT_OF_NAV = {"guide-coverage", "atropos-coverage"}
PAGES = (*IN_NAV, *sorted(OUT_OF_NAV))
CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
PHONE, DESK = 400, 1400
# What people type into the search box -> the pages of which one must come first.
QUESTIONS = {
    "out of memory": {"performance", "troubleshooting"},
    "custom reward": {"rewards", "tutorial"},
    "stop a run": {"slurm", "quickstart"},
    "Ctrl-C": {"quickstart", "slurm"},
    "install": {"installation"},
    "LoRA": {"recipes", "weights"},
    "resume": {"slurm", "quickstart"},
    "stale weights": {"weights", "troubleshooting"},
    "multi node": {"slurm"},
    "no internet": {"installation", "slurm"},
    "port in use": {"troubleshooting"},
    "wandb": {"reports", "recipes"},
    "evaluate a checkpoint": {"evaluation"},
    "chat template": {"datasets", "recipes"},
    "think": {"datasets", "recipes", "rewards"},
    "KL": {"maxent", "troubleshooting"},
    "reward is zero": {"troubleshooting", "rewards"},
    "slow reward": {"rewards", "troubleshooting"},
    "sweep": {"reports"},
    "docker": {"installation"},
    "migrate": {"migrate"},
    "OOM": {"performance", "troubleshooting"},
    "enable_thinking": {"datasets", "recipes"},
}
Seen = tuple[dict[tuple[str, int], dict[str, Any]], list[str]]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    pages.PAGES.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=REPOSITORY,
        env={"PATH": "/usr/bin:/bin", "HOME": str(folder), "NO_MKDOCS_2_WARNING": "1", **NETWORK_OFF},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "WARNING" not in done.stderr
    return folder


def html(site: Path, page: str) -> str:
    return (site / f"{page}.html").read_text()


@pytest.mark.slow
def test_the_site_builds_without_a_warning(site: Path) -> None:
    for page in PAGES:
        assert html(site, page)


def test_every_page_is_in_a_group_but_the_coverage_of_the_guide(site: Path) -> None:
    groups = re.findall(r"^  - ([^:]+):(?: (.*))?$", NAV, re.MULTILINE)
    assert groups[0] == ("Home", "index.md") and all(page == "" for _, page in groups[1:])
    assert [name for name, _ in groups[1:]] == ["Guide", "Clusters", "Reference", "Project"]
    written = {path.stem for path in (REPOSITORY / "docs").glob("*.md")} | SOURCES.keys()
    assert sorted(IN_NAV) == sorted(written - OUT_OF_NAV)
    index = (REPOSITORY / "docs/index.md").read_text()
    assert [page for page in IN_NAV if page != "index" and f"({SOURCES.get(page, page)}.md)" not in index] == []
    entries = json.loads((site / "search/search_index.json").read_text())["docs"]
    assert {entry["location"].split(".html")[0] for entry in entries} >= {"rewards", "tutorial"}
    assert [entry for entry in entries if entry["location"].split(".html")[0] in OUT_OF_NAV] == []
    assert not list(site.rglob("*.py")) + list(site.rglob("*.pyc"))


@pytest.mark.parametrize("page", PAGES)
def test_pages_load_nothing_from_elsewhere(site: Path, page: str) -> None:
    text = html(site, page)
    loaded = re.findall(r'<(?:script|img|iframe)[^>]*\ssrc="([^"]+)"', text)
    loaded += re.findall(r'<link[^>]*\shref="([^"]+)"', text)
    assert loaded
    assert [address for address in loaded if re.match(r"(https?:)?//", address)] == []


def test_tables_of_keys_are_made_from_the_code(site: Path) -> None:
    text = html(site, "configuration")
    nested = [name for path in ("dataset_mixture", "dataset_mixture.datasets") for name in nested_catalogue()[path]]
    for name in (*catalogue(), *nested, *names(), *OWNED_KEYS, *ALIASES):
        assert f"<td><code>{name}</code></td>" in text or f"<dt><code>{name}</code>" in text, name
    assert "config_math.yaml</code></td>" in html(site, "recipes")


def test_every_key_stands_once_under_a_topic_with_type_default_and_meaning(site: Path) -> None:
    text = html(site, "configuration")
    topics = keys_by_topic()
    assert sorted(name for names in topics.values() for name in names) == sorted(catalogue())
    assert all(topics.values()) and len(topics["Everything else"]) < 0.15 * len(catalogue())
    for title, keys in topics.items():
        section = re.split(r"<h2", text.split(f">{title}<a ", 1)[1])[0]
        assert re.findall(r'<div id="(\w+)"><dt>', section) == keys, title
    entry = re.search(r'<div id="learning_rate">(.*?)</div>', text, re.DOTALL)
    assert entry is not None and "float &ge; 0" in entry[1].replace("≥", "&ge;") and "default <code>1e-06" in entry[1]
    assert "<dd>" in entry[1]


def test_keys_of_maxent_stand_with_the_objectives_that_read_them(site: Path) -> None:
    rows = re.findall(r"<td><a[^>]*><code>(maxent_\w+)</code></a></td>\s*<td>(.*?)</td>", html(site, "maxent-formulas"))
    assert {name for name, _ in rows} == {name for name in catalogue() if name.startswith("maxent_")}
    readers = {name: re.sub("</?code>", "", cell) for name, cell in rows}
    assert readers["maxent_objective"] == "all" and readers["maxent_utility"] == "tempered"
    assert readers["maxent_tau"] == "listwise, weighted_mle, tempered"
    assert readers["maxent_beta"] == "listwise, weighted_mle"


@pytest.mark.parametrize("page", PAGES)
def test_no_marker_of_a_table_is_left(site: Path, page: str) -> None:
    assert "&lt;!-- " not in html(site, page) and not re.search(r"<!-- [a-zA-Z]+[^>]* -->", html(site, page))


def test_the_reference_has_every_module_it_names(site: Path) -> None:
    text = html(site, "reference")
    for name in re.findall(r"^::: (\S+)", (REPOSITORY / "docs/reference.md").read_text(), re.MULTILINE):
        first_line = docstring(name).splitlines()[0]
        plain_words = max(re.split(r"[`<>&\"']+", first_line), key=len).strip()
        assert len(plain_words) > 10 and plain_words in text, name
    for name in (
        "weights.guard.find_differences",
        "plan.plan.make_plan",
        "trainers.grpo.GRPOTrainer",
        "recipe.read_recipe",
    ):
        assert f'id="grpo_recipes.{name}"' in text


def docstring(name: str) -> str:
    """Return the docstring of a module, or of a top-level function or class, by its full name."""
    path = REPOSITORY / "src" / name.replace(".", "/")
    docstrings: dict[Path, str] = {
        path / "__init__.py": "",
        path.with_suffix(".py"): "",
        path.parent.with_suffix(".py"): path.name,
        path.parent / "__init__.py": path.name,
    }
    source, inner = next((file, inner) for file, inner in docstrings.items() if file.is_file())
    tree: Any = ast.parse(source.read_text())
    node = next(child for child in tree.body if getattr(child, "name", "") == inner) if inner else tree
    return ast.get_docstring(node) or ""


def test_links_of_the_readme_lead_somewhere() -> None:
    links = re.findall(r"\]\(([^)#]+)\)", prose(REPOSITORY / "README.md"))
    assert links
    files = [link for link in links if not link.startswith("https://")]
    assert [link for link in files if not (REPOSITORY / link).exists()] == []
    assert len((REPOSITORY / "README.md").read_text().splitlines()) < 120


def test_links_inside_the_site_lead_to_files(site: Path) -> None:
    anchors = {f"{page}.html": {"", *re.findall(r'\sid="([^"]+)"', html(site, page))} for page in PAGES}
    for page in PAGES:
        for link, anchor in set(re.findall(r'<a[^>]*\shref="([^"#:]*)(?:#([^"]*))?"', html(site, page))):
            target = link or f"{page}.html"
            assert (site / target).is_file(), f"{page}: {link}"  # from disk a folder opens as a list of files
            assert anchor in anchors[target], f"{page}: {link}#{anchor}"


# --- in a browser, from disk -----------------------------------------------------------------------------------------

LOOK = """<!doctype html><body>FRAMES<pre id="found"></pre><script>
const views = [];
function look(frame) {
  const doc = frame.contentDocument;
  const shown = (one) => one.getClientRects().length > 0;
  return {
    scroll: doc.documentElement.scrollWidth,
    dark: frame.contentWindow.matchMedia("(prefers-color-scheme: dark)").matches,
    ground: frame.contentWindow.getComputedStyle(doc.body).backgroundColor,
    formulas: [...doc.querySelectorAll(".arithmatex")].map((one) => one.querySelectorAll(".katex math").length),
    errors: doc.querySelectorAll(".katex-error").length,
    keys: [...doc.querySelectorAll(".keys dt > code:first-child")].filter(shown).map((one) => one.textContent),
    found: [...doc.querySelectorAll(".md-search-result__item > a")].map((one) => one.getAttribute("href")),
    cut: [...doc.querySelectorAll(".md-content td, .keys dd, .keys dt")].filter(
      (one) => shown(one) && one.scrollWidth > one.clientWidth + 6).map((one) => one.textContent.slice(0, 60)),
    images: [...doc.images].map((one) => [one.getAttribute("src"), one.naturalWidth]),
  };
}
addEventListener("load", () => setTimeout(() => {
  document.getElementById("found").textContent = JSON.stringify([...document.querySelectorAll("iframe")].map(look));
}, 3000));
</script></body>
"""


@pytest.fixture(scope="module")
def seen(site: Path, tmp_path_factory: pytest.TempPathFactory) -> Seen:
    """Measurements of each page at a phone's width, of some at a desk's width, and the console's errors."""
    if CHROMIUM is None:
        pytest.skip("no Chromium here")
    searches = ("configuration.html?key=learning+rate", "index.html?q=requeue")
    views = [(f"{page}.html", PHONE) for page in PAGES] + [(page, DESK) for page in searches]
    views += [("configuration.html", DESK), ("recipes.html", DESK)]
    return look_at(site, tmp_path_factory.mktemp("browser"), views)


def look_at(site: Path, folder: Path, views: list[tuple[str, int]]) -> Seen:
    """Open pages at a width in pixels each; return their measurements and the console's errors."""
    frames = [f'<iframe src="{site.as_uri()}/{page}" width="{width}" height="800"></iframe>' for page, width in views]
    (folder / "outer.html").write_text(LOOK.replace("FRAMES", "".join(frames)))
    done = subprocess.run(
        [
            str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--allow-file-access-from-files",
            f"--user-data-dir={folder}/profile", "--enable-logging=stderr", "--window-size=1500,4000",
            "--blink-settings=preferredColorScheme=0", "--virtual-time-budget=15000", "--dump-dom",
            (folder / "outer.html").as_uri(),
        ],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (result,) = re.findall(r'<pre id="found">(.*?)</pre>', done.stdout, re.DOTALL)
    # Chromium's own pages say on a busy machine that the network is slow.
    messages = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    console = [line for line in messages if "Slow network is detected" not in line]
    return dict(zip(views, json.loads(markup.unescape(result)), strict=True)), console


@pytest.mark.slow
def test_no_page_scrolls_sideways_and_no_cell_is_cut_on_a_phone(seen: Seen) -> None:
    views, console = seen
    assert console == []
    for (page, width), view in views.items():
        assert view["scroll"] <= width, f"{page}: {view['scroll']} px wide"
        assert view["cut"] == [], page
        assert view["dark"] and sum(map(int, re.findall(r"\d+", view["ground"])[:3])) < 200, page


@pytest.mark.slow
def test_pictures_are_there_and_formulas_are_set(seen: Seen) -> None:
    views, _ = seen
    formulas = {page: view["formulas"] for (page, width), view in views.items() if width == PHONE and view["formulas"]}
    assert {"maxent.html", "rewards.html"} <= formulas.keys()
    assert all(count == 1 for counts in formulas.values() for count in counts)
    assert sum(view["errors"] for view in views.values()) == 0
    pictures = [(page, source, width) for (page, _), view in views.items() for source, width in view["images"]]
    assert [picture for picture in pictures if picture[2] == 0] == []
    assert [source for page, source, _ in pictures if page.startswith("index.html") and "report-dark" in source]


@pytest.mark.slow
def test_the_search_finds_a_word_from_disk(seen: Seen) -> None:
    results = seen[0]["index.html?q=requeue", DESK]["found"]
    assert any("slurm.html" in link for link in results), results


@pytest.fixture(scope="module")
def results(site: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """The pages that the search box lists for each question, best first."""
    if CHROMIUM is None:
        pytest.skip("no Chromium here")
    folder = tmp_path_factory.mktemp("searches")
    views = [f"index.html?q={question.replace(' ', '+')}" for question in QUESTIONS]
    found = look_at(site, folder, [(view, DESK) for view in views])[0]
    return {
        question: [link.rpartition("/")[2].partition(".html")[0] for link in found[view, DESK]["found"]]
        for question, view in zip(QUESTIONS, views, strict=True)
    }


@pytest.mark.slow
@pytest.mark.parametrize("question", QUESTIONS)
def test_the_search_lists_the_right_page_first(results: dict[str, list[str]], question: str) -> None:
    assert results[question][:1] and results[question][0] in QUESTIONS[question], results[question][:5]


@pytest.mark.slow
def test_the_box_of_the_configuration_leaves_the_keys_asked_for(seen: Seen) -> None:
    views, _ = seen
    every = views["configuration.html", DESK]["keys"]
    keys = views["configuration.html?key=learning+rate", DESK]["keys"]
    assert set(every) >= set(catalogue()) and len(every) < len(catalogue()) + 20
    assert "learning_rate" in keys and 0 < len(keys) < 10


def test_the_site_has_each_page_as_markdown_with_its_tables(site: Path) -> None:
    """Language models read llms.txt and the Markdown files instead of HTML."""
    listed = re.findall(r"^- \[.+\]\((.+)\.md\)$", (site / "llms.txt").read_text(), re.MULTILINE)
    assert listed == ["index", *IN_NAV[1:]]
    assert all((site / f"{page}.md").read_text().startswith("# ") for page in PAGES)
    built = {path.stem: path.read_text() for path in pages.PAGES.glob("*.md")}
    assert sorted(built) == sorted(PAGES) and all((site / f"{page}.md").read_text() in built[page] for page in PAGES)
    assert '<div id="learning_rate">' in (site / "configuration.md").read_text()
    assert "usage: grpo launch" in (site / "cli.md").read_text()


def test_formulas_come_with_their_licence_and_fonts() -> None:
    katex = REPOSITORY / "docs/assets/katex"
    named = set(re.findall(r"fonts/([\w-]+\.woff2)", (katex / "katex.min.css").read_text()))
    assert named and named == {path.name for path in (katex / "fonts").iterdir()}
    for folder in (katex, REPOSITORY / "docs/assets/iframe-worker"):
        assert "Permission is hereby granted" in (folder / "LICENSE").read_text()
