"""The files for GitHub and for citations: workflow, templates, SECURITY.md, CITATION.cff."""

from __future__ import annotations

import os
import re
import tomllib
from datetime import date
from typing import Any

import yaml

from grpo_recipes.paths import find_code_root

GITHUB = find_code_root() / ".github"


def load(name: str) -> dict[str, Any]:
    """Return a YAML file below .github."""
    return dict(yaml.safe_load((GITHUB / name).read_text()))


def project() -> dict[str, Any]:
    return dict(tomllib.loads((find_code_root() / "pyproject.toml").read_text())["project"])


def test_the_workflow_runs_the_script_of_contributing_within_a_time_limit() -> None:
    workflow = load("workflows/ci.yml")
    triggers = workflow[True]  # YAML 1.1 reads the key `on` as a boolean
    assert set(triggers) == {"push", "pull_request"}
    assert workflow["permissions"] == {"contents": "read"}
    (job,) = workflow["jobs"].values()
    assert job["runs-on"].startswith("ubuntu-") and job["timeout-minutes"] <= 240
    checkout, check = job["steps"]
    assert checkout["uses"].startswith("actions/checkout@") and checkout["with"]["fetch-depth"] == 0
    assert check["run"].split() == ["sudo", ".ci/run"]
    assert os.access(find_code_root() / ".ci/run", os.X_OK)


def test_the_bug_form_requires_doctor_recipe_and_log() -> None:
    fields = {field["id"]: field for field in load("ISSUE_TEMPLATE/bug.yml")["body"] if "id" in field}
    required = {name for name, field in fields.items() if field.get("validations", {}).get("required")}
    assert {"doctor", "recipe", "log"} <= required
    assert "grpo doctor" in fields["doctor"]["attributes"]["description"]


def test_every_issue_form_has_the_parts_that_github_requires() -> None:
    for path in sorted((GITHUB / "ISSUE_TEMPLATE").glob("*.yml")):
        form = load(f"ISSUE_TEMPLATE/{path.name}")
        if path.name == "config.yml":
            assert form == {"blank_issues_enabled": True}
            continue
        assert {"name", "description", "body"} <= set(form)
        fields = [field for field in form["body"] if field["type"] != "markdown"]
        assert len({field["id"] for field in fields}) == len(fields) > 0
        assert all(field["attributes"]["label"] for field in fields)


def test_files_and_targets_in_the_templates_exist() -> None:
    targets = re.findall(r"^([a-z0-9-]+):.*##", (find_code_root() / "Makefile").read_text(), re.MULTILINE)
    for path in [*GITHUB.rglob("*.yml"), *GITHUB.glob("*.md")]:
        text = path.read_text()
        assert set(re.findall(r"`make ([a-z0-9-]+)`", text)) <= set(targets), path
        for name in re.findall(r"`([\w/.]+\.md)`", text):
            assert (find_code_root() / name).is_file(), f"{path}: {name}"


def test_the_citation_has_the_version_and_the_license_of_the_package() -> None:
    citation = yaml.safe_load((find_code_root() / "CITATION.cff").read_text())
    assert citation["cff-version"] == "1.2.0" and citation["authors"] and citation["message"]
    assert citation["version"] == project()["version"]
    assert citation["license"] == project()["license"]
    released = f"## [{citation['version']}] - {date.fromisoformat(citation['date-released'])}"
    assert released in (find_code_root() / "CHANGELOG.md").read_text()


def test_what_the_tests_import_is_in_the_dev_extra() -> None:
    """`pip install -e '.[cpu,dev]'` has the packages that make test needs; the locks have the same ones."""
    extra = project()["optional-dependencies"]["dev"]
    names = {re.split(r"[\[<>=]", requirement)[0] for requirement in extra}
    assert {"hypothesis", "pytest", "jsonschema"} <= names
    pinned = (find_code_root() / "requirements/base.in").read_text()
    assert all(re.search(rf"^{re.escape(name)}\b", pinned, re.MULTILINE) for name in names)
