"""The site builds offline without a warning, loads nothing from elsewhere, and its links lead somewhere."""

from __future__ import annotations

import ast
import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from doc_pages import REPOSITORY, prose

from grpo_recipes.recipe.dialects import ALIASES, OBSOLETE_KEYS
from grpo_recipes.recipe.keys import OWNED_KEYS, catalogue, nested_catalogue

NETWORK_OFF = {name: "http://127.0.0.1:9" for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY")}
NAV = (REPOSITORY / "mkdocs.yml").read_text().split("nav:")[1].split("\n\n")[0]
PAGES = tuple(re.findall(r"([a-z-]+)\.md", NAV))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
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
    return (site / ("index.html" if page == "index" else f"{page}/index.html")).read_text()


def test_the_site_builds_without_a_warning(site: Path) -> None:
    for page in PAGES:
        assert html(site, page)
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
    own = load_hooks().own_keys()
    assert "prompts_per_step" in own["GRPOConfig"] and "run_root" in own["ScriptArguments"]
    nested = [name for path in ("dataset_mixture", "dataset_mixture.datasets") for name in nested_catalogue()[path]]
    for name in (*catalogue(), *nested, *OBSOLETE_KEYS, *OWNED_KEYS, *ALIASES):
        assert f"<td><code>{name}</code></td>" in text, name
    assert "config_math.yaml</code></td>" in html(site, "recipes")


def test_keys_of_maxent_stand_with_the_objectives_that_read_them(site: Path) -> None:
    rows = re.findall(r"<td><a[^>]*><code>(maxent_\w+)</code></a></td>\s*<td>(.*?)</td>", html(site, "maxent"))
    assert {name for name, _ in rows} == {name for name in catalogue() if name.startswith("maxent_")}
    readers = {name: re.sub("</?code>", "", cell) for name, cell in rows}
    assert readers["maxent_tau"] == "all" and readers["maxent_utility"] == "tempered"
    assert readers["maxent_beta"] == "listwise, weighted_mle"


@pytest.mark.parametrize("page", PAGES)
def test_no_marker_of_a_table_is_left(site: Path, page: str) -> None:
    assert "&lt;!-- " not in html(site, page) and not re.search(r"<!-- [a-zA-Z]+[^>]* -->", html(site, page))


def load_hooks() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_hooks", REPOSITORY / "docs/hooks.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_reference_has_every_module_it_names(site: Path) -> None:
    text = html(site, "reference")
    for module in re.findall(r"^::: (\S+)", (REPOSITORY / "docs/reference.md").read_text(), re.MULTILINE):
        path = REPOSITORY / "src" / module.replace(".", "/")
        source = (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text()
        first_line = (ast.get_docstring(ast.parse(source)) or "").splitlines()[0]
        plain_words = max(re.split(r"[`<>&\"']+", first_line), key=len).strip()
        assert len(plain_words) > 10 and plain_words in text, module
    for name in ("weights.guard.differing", "plan.plan.make_plan", "trainers.grpo.GRPOTrainer", "recipe.read_recipe"):
        assert f'id="grpo_recipes.{name}"' in text


def test_links_of_the_readme_lead_somewhere() -> None:
    links = re.findall(r"\]\(([^)#]+)\)", prose(REPOSITORY / "README.md"))
    assert links
    assert [link for link in links if not (REPOSITORY / link).exists()] == []
    assert len((REPOSITORY / "README.md").read_text().splitlines()) < 90


def test_links_inside_the_site_lead_somewhere(site: Path) -> None:
    for page in PAGES:
        folder = site if page == "index" else site / page
        for link, anchor in re.findall(r'<a[^>]*\shref="([^"#:]*)(#[^"]*)?"', html(site, page)):
            target = (folder / link).resolve() if link else folder
            target = target / "index.html" if target.is_dir() else target
            assert target.is_file(), f"{page}: {link}"
            if len(anchor) > 1:
                assert re.search(rf'\sid="{re.escape(anchor[1:])}"', target.read_text()), f"{page}: {link}{anchor}"
