"""Check where a run publishes before it starts, and push the trained model there as one commit.

    python -m grpo_recipes.console.publish.push JOB.json

The launcher starts this process at the end of the run, so that it can kill a push that hangs.
"""

import json
import os
import re
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_recipes.errors import config_error, translate_errors
from grpo_recipes.fetch.hub import endpoint, explain_unreachable_hub, format_error_line, hub_answers, limit_every_wait
from grpo_recipes.process.tree import die_with_parent
from grpo_recipes.recipe import Recipe
from grpo_recipes.runs.rundir import write_json

WAITS = (5.0, 20.0)  # seconds between attempts
_CHECK_TIMEOUT, _PUSH_TIMEOUT = 30.0, 300.0  # seconds for one answer of the hub: before a run, and in a push
_MODEL_SUFFIXES = (".safetensors", ".json", ".txt", ".model", ".jinja", ".tiktoken", ".py", ".md")
_TEMPLATES = "additional_chat_templates/"
# Training state, not part of the model.
_STATE = ("trainer_state.json", "order_of_data.json", "controllers.json", "zero_to_fp32.py")
_WEIGHTS = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", "adapter_config.json")
_LOGIN = "export HF_TOKEN with a token that may write, or run hf auth login, or try again"


@dataclass(frozen=True)
class Target:
    """The repository and branch for the model of a run."""

    repo: str  # user/name
    private: bool  # whether a new repository is private
    branch: str  # branch of the commit
    note: str = ""  # a note for the user

    def __str__(self) -> str:
        """Return the repository, branch, visibility and note in one line."""
        kind = f"a {'private' if self.private else 'public'} repository if it is new"
        return f"{self.repo} ({self.branch}; {kind})" + (f"; {self.note}" if self.note else "")


def choose_repository_name(recipe: Recipe, run_name: str) -> str:
    """Return the name of the model repository: ``hub_model_id`` (with or without a user), or else the run's name.

    Characters that the hub does not accept are replaced in the run's name.
    """
    return recipe.run.hub_model_id or re.sub(r"[^\w.-]+|--+|\.\.+", "-", run_name).strip("-.")


def check_push_target(recipe: Recipe, environment: Mapping[str, str], run_name: str) -> Target | None:
    """Check before a run that its model can be pushed; return the repository, or None without ``push_to_hub``.

    ``run_name`` is the default of ``hub_model_id``. The target has a note if its visibility or the permission is
    uncertain. Raise ConfigError if the hub does not answer, there is no login, or the account may not write there.
    """
    if not recipe.run.push_to_hub:
        return None
    where, name = recipe.source("push_to_hub"), choose_repository_name(recipe, run_name)
    if not hub_answers(environment):
        fix = f"remove it, and publish later on a machine that reaches the hub: hf upload {name} <run>/model"
        raise config_error(where, f"push_to_hub can't work here: {explain_unreachable_hub(environment)}", fix)
    from huggingface_hub import errors

    account, api = _get_account(where, "push_to_hub", environment)
    hub_errors, private = _list_hub_errors(), recipe.run.hub_private_repo is not False
    location = recipe.location("hub_model_id" if recipe.is_set("hub_model_id") else "push_to_hub")
    repo, note = _find_writable_repo(location, name, account, "set hub_model_id: {}")
    try:
        if private and not note and not api.repo_info(repo).private:
            note = f"{repo} exists and is public: hub_private_repo changes only new repositories"
    except errors.RepositoryNotFoundError:  # the push creates it
        pass
    except hub_errors as error:  # some tokens may write but not read
        note = f"can't find out whether {repo} exists and is public ({format_error_line(error)})"
    return Target(repo, private, recipe.run.hub_revision or "main", note)


def check_dataset_repository(name: str, where: str, environment: Mapping[str, str]) -> str:
    """Check as far as the token shows that the account may write to a dataset repository; return it as ``user/name``.

    A name without a user gets the account's. The repository need not exist. ``where`` is the flag that requests the
    push. Raise ConfigError if the hub does not answer, there is no login, or the account surely may not write there.
    """
    if not hub_answers(environment):
        fix = "leave it out, and push the file on a machine that reaches the hub: hf upload --repo-type dataset"
        raise config_error(where, f"can't work here: {explain_unreachable_hub(environment)}", fix)
    account, _ = _get_account(where, where, environment)
    return _find_writable_repo(where, name, account, f"use {where} {{}}")[0]


def push_dataset(repo: str, file: Path, private: bool, message: str) -> str:
    """Create the dataset repository if needed, upload one file to it as a commit, and return the repository's URL.

    ``private`` has no effect on an existing repository. Errors of the hub's client are raised.
    """
    from huggingface_hub import HfApi

    limit_every_wait(_PUSH_TIMEOUT)
    api = HfApi()
    api.create_repo(repo, repo_type="dataset", private=private, exist_ok=True)
    api.upload_file(
        path_or_fileobj=file, path_in_repo=file.name, repo_id=repo, repo_type="dataset", commit_message=message
    )
    return f"{api.endpoint}/datasets/{repo}"


def _list_hub_errors() -> tuple[type[Exception], ...]:
    """Return the exception types of the hub's client: HTTP errors, a missing login, and a failed connection."""
    import httpx  # takes 0.3 s, so only for a push
    from huggingface_hub import errors

    return errors.HfHubHTTPError, errors.LocalTokenNotFoundError, httpx.TransportError


def _get_account(where: str, option: str, environment: Mapping[str, str]) -> tuple[dict[str, Any], Any]:
    """Request the data of the account that is logged in; return it with a client of the hub.

    ``option`` is the key or flag that needs the login, and ``where`` its place, for the message. Raise ConfigError if
    the hub does not confirm a login.
    """
    from huggingface_hub import HfApi

    limit_every_wait(_CHECK_TIMEOUT)
    api, message = HfApi(endpoint=endpoint(environment)), f"{option} needs a login, which the hub did not confirm"
    with translate_errors(
        _list_hub_errors(), lambda error: config_error(where, f"{message} ({format_error_line(error)})", _LOGIN)
    ):
        return api.whoami(), api


def _find_writable_repo(where: str, name: str, account: dict[str, Any], fix: str) -> tuple[str, str]:
    """Return ``user/name`` of a repository, with the user added if ``name`` has none, and a note.

    The note is empty, or explains that only the push can confirm the permission. ``fix`` is a format string for the
    repository's name. Raise ConfigError if the account may not write there.
    """
    role = account.get("auth", {}).get("accessToken", {}).get("role")
    if role == "read":
        raise config_error(where, "the token is read-only", "export HF_TOKEN with a token that may write")
    orgs = [org["name"] for org in account.get("orgs", []) if org.get("roleInOrg") not in ("read", "no_access")]
    repo = name if "/" in name else f"{account['name']}/{name}"
    if repo.split("/")[0] in (account["name"], *orgs):
        return repo, ""
    if role == "fineGrained":  # such a token lists only the organisations it was made for
        return repo, f"only the push will show whether this fine-grained token may write to {repo}"
    fix = fix.format(f"{account['name']}/{repo.split('/')[1]}") + ", or log in as its owner"
    raise config_error(where, f"'{account['name']}' may not write to '{repo}'", fix)


def main(path: str) -> int:
    """Push the model that the JSON file ``path`` describes, and write the result file that it names.

    After a failure, wait for the next of the job's ``waits`` (in seconds) and try again. Return 0, or 1 if every
    attempt failed.
    """
    job = json.loads(Path(path).read_text())
    target, model, result = Target(**job["target"]), Path(job["model"]), Path(job["result"])
    error = ""
    for wait in (0.0, *job["waits"]):
        time.sleep(wait)
        try:
            write_json(result, push_model(target, model))
            return 0
        except Exception as failure:  # the launcher reports every failure
            error = f"{type(failure).__name__}: {format_error_line(failure)}"
            print(f"grpo: push to {target.repo} failed: {error}", flush=True)
    write_json(result, {"repo": target.repo, "error": f"{error} ({len(job['waits']) + 1} attempts)"})
    return 1


def list_model_files(folder: Path) -> list[Path]:
    """Return the files of a model folder to push (weights, configuration, tokenizer), or [] without safetensors."""
    paths = [*folder.iterdir(), *folder.glob(f"{_TEMPLATES}*")]
    files = [path for path in paths if path.name.endswith(_MODEL_SUFFIXES) and path.name not in _STATE]
    return sorted(files) if any(path.name.endswith(".safetensors") for path in files) else []


def push_model(target: Target, model: Path) -> dict[str, Any]:
    """Create the repository and the branch if needed, and add one commit with the files in the folder ``model``.

    The commit removes weights and chat templates of earlier models, since loaders prefer an old model.safetensors to
    new shards. A single commit keeps the newest revision complete; ``HfApi.upload_folder`` may make several commits.
    Return repo, revision, commit and url.
    """
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi

    api = HfApi()
    api.create_repo(target.repo, private=target.private, exist_ok=True)
    if target.branch != "main":
        api.create_branch(target.repo, branch=target.branch, exist_ok=True)
    files = {str(path.relative_to(model)): path for path in list_model_files(model)}
    old_files = [name for name in api.list_repo_files(target.repo, revision=target.branch) if name not in files]
    weights = [name for name in old_files if "/" not in name and name.endswith(_WEIGHTS)]
    templates = [name for name in old_files if name.startswith(_TEMPLATES)]
    deletions = [CommitOperationDelete(name) for name in (*weights, *templates)]
    additions = [CommitOperationAdd(name, str(path)) for name, path in files.items()]
    commit = api.create_commit(
        target.repo, [*deletions, *additions], commit_message="Final model", revision=target.branch
    )
    url = f"{api.endpoint}/{target.repo}/tree/{target.branch}"
    return {"repo": target.repo, "revision": target.branch, "commit": commit.oid, "url": url}


if __name__ == "__main__":
    die_with_parent(os.getppid(), signal.SIGKILL)  # the ending launcher ignores SIGTERM, and children inherit this
    limit_every_wait(_PUSH_TIMEOUT)
    sys.exit(main(sys.argv[1]))
