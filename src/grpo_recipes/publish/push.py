"""Ask the hub where a run publishes, before it starts; and make one commit there, in a process of its own.

    python -m grpo_recipes.publish.push JOB.json

The launcher starts that process: trainers and server run offline, and a push that fails or hangs must not touch them.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_recipes.errors import config_error
from grpo_recipes.fetch.hub import bound_every_wait, endpoint, hub_answers, why_silent
from grpo_recipes.process.tree import die_with_parent
from grpo_recipes.recipe import Recipe
from grpo_recipes.runs.rundir import write_json
from grpo_recipes.secrets import masked

if TYPE_CHECKING:
    from huggingface_hub import HfApi

WAITS = (5.0, 20.0)  # seconds between attempts
_LONGEST_QUESTION, _LONGEST_WAIT = 30.0, 300.0  # seconds for one answer of the hub: before a run, and in a push
_WEIGHTS = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json")
_LOGIN = "export HF_TOKEN, or run hf auth login, with a token that may write"


@dataclass(frozen=True)
class Target:
    """Where a run publishes."""

    repo: str  # user/name
    private: bool  # whether the repository is private when it is made
    branch: str  # gets the commits
    strategy: str  # end, every_save, checkpoint or all_checkpoints
    always: bool  # push every checkpoint, though the push before is not finished
    note: str = ""  # what the user should know

    def __str__(self) -> str:
        kind = f"a {'private' if self.private else 'public'} repository if it is new"
        return f"{self.repo} ({self.branch}, {self.strategy}; {kind})" + (f"; {self.note}" if self.note else "")


def repository_name(recipe: Recipe, run_name: str) -> str:
    """Return the repository's name, with or without a user before it: ``hub_model_id``, or the run's name."""
    return str(recipe["hub_model_id"] or re.sub(r"[^\w.-]+|--+|\.\.+", "-", run_name).strip("-."))


def need_target(recipe: Recipe, environment: Mapping[str, str], run_name: str) -> Target | None:
    """Return where the run publishes, None without ``push_to_hub``; ``run_name`` stands in for ``hub_model_id``.

    Raise ConfigError where the hub does not answer, nobody is logged in, or the account may not write there.
    """
    if not recipe["push_to_hub"]:
        return None
    where, name = recipe.source("push_to_hub"), repository_name(recipe, run_name)
    if not hub_answers(environment):
        fix = f"remove it and publish afterwards where the hub answers: hf upload {name} <run>/model"
        raise config_error(where, f"push_to_hub cannot work here: {why_silent(environment)}", fix)
    from huggingface_hub import HfApi, get_token  # 0.3 s, for those who publish

    bound_every_wait(_LONGEST_QUESTION)
    api = HfApi(endpoint=endpoint(environment))
    if get_token() is None:
        raise config_error(where, "push_to_hub needs a login at the hub, there is none", _LOGIN)
    account, why_not = _ask(api.whoami)
    if account is None:
        if why_not in ("HTTP 401", "HTTP 403"):
            raise config_error(where, f"the hub refuses the login ({why_not})", _LOGIN)
        raise config_error(where, f"the hub did not confirm the login ({why_not})", "try again")
    repo, note = _writable(recipe, name, account)
    private = recipe["hub_private_repo"] is not False
    if not note and private:
        note = _public_note(api, repo)
    branch, strategy, always = recipe["hub_revision"] or "main", recipe["hub_strategy"], recipe["hub_always_push"]
    return Target(repo, private, branch, strategy, always, note)


def _ask(question: Callable[[], Any]) -> tuple[Any, str]:
    """Return the hub's answer, or None and why there is none; nothing where the repository does not exist."""
    import httpx
    from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError

    try:
        return question(), ""
    except RepositoryNotFoundError:
        return None, ""
    except HfHubHTTPError as error:
        return None, f"HTTP {error.response.status_code}"
    except httpx.TransportError as error:
        return None, type(error).__name__


def _writable(recipe: Recipe, name: str, account: dict[str, Any]) -> tuple[str, str]:
    """Return ``user/name`` if this account may write there, and a note where only the push will show it."""
    where = recipe.place("hub_model_id" if recipe.given("hub_model_id") else "push_to_hub")
    role = account.get("auth", {}).get("accessToken", {}).get("role")
    if role == "read":
        raise config_error(where, "the token at hand may only read", "export HF_TOKEN with a token that may write")
    orgs = [org["name"] for org in account.get("orgs", []) if org.get("roleInOrg") not in ("read", "no_access")]
    repo = name if "/" in name else f"{account['name']}/{name}"
    if repo.split("/")[0] in (account["name"], *orgs):
        return repo, ""
    if role == "fineGrained":  # lists the organisations it was made for alone
        return repo, f"whether this fine-grained token may write to {repo} shows with the first push"
    fix = f"write hub_model_id: {account['name']}/{repo.split('/')[1]}, or log in as its owner"
    raise config_error(where, f"'{account['name']}' may not write to '{repo}'", fix)


def _public_note(api: HfApi, repo: str) -> str:
    """Warn of a repository that exists and that everybody can read, where the recipe asks for a private one."""
    found, why_not = _ask(lambda: api.repo_info(repo))
    if why_not:  # some tokens may write and not read
        return f"whether {repo} exists and is public could not be asked ({why_not})"
    is_public = found is not None and not found.private
    return f"{repo} exists and is public: hub_private_repo is for repositories that are made" if is_public else ""


@dataclass(frozen=True)
class Job:
    """What to push."""

    repo: str  # user/name
    private: bool  # whether it is private when it is made
    branch: str  # gets the commit
    message: str  # of the commit
    folders: dict[str, str]  # local folder -> folder in the repository, "" for its root
    result: str  # file that gets how it ended
    waits: tuple[float, ...] = WAITS  # seconds between attempts; one attempt more than waits


def main(path: str) -> int:
    """Do the job, a bounded number of times."""
    job = Job(**json.loads(Path(path).read_text()))
    error = ""
    for wait in (0.0, *job.waits):
        time.sleep(wait)
        try:
            write_json(Path(job.result), push(job))
            return 0
        except Exception as failure:  # whatever it is, the run must hear of it and go on
            error = masked(f"{type(failure).__name__}: {' '.join(str(failure).split())[:300]}")
            print(f"grpo: push to {job.repo} failed: {error}", flush=True)
    write_json(Path(job.result), {"repo": job.repo, "error": f"{error} ({len(job.waits) + 1} attempts)"})
    return 1


def push(job: Job) -> dict[str, Any]:
    """Make the repository and the branch if they are not there, and add one commit with all files.

    ``HfApi.upload_folder`` takes one folder a commit; half a model must never be the newest one. Return repo, revision,
    commit and url.
    """
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi

    api = HfApi()
    api.create_repo(job.repo, private=job.private, exist_ok=True)
    if job.branch != "main":
        api.create_branch(job.repo, branch=job.branch, exist_ok=True)
    files = {inside: path for folder, root in job.folders.items() for inside, path in _files(Path(folder), root)}
    there = api.list_repo_files(job.repo, revision=job.branch)
    old = [CommitOperationDelete(name) for name in stale(there, files, job.folders.values())]
    new = [CommitOperationAdd(name, str(path)) for name, path in sorted(files.items())]
    done = api.create_commit(job.repo, [*old, *new], commit_message=job.message, revision=job.branch)
    url = f"{api.endpoint}/{job.repo}/tree/{job.branch}"
    return {"repo": job.repo, "revision": job.branch, "commit": done.oid, "url": url}


def stale(there: Iterable[str], new: Iterable[str], roots: Iterable[str]) -> list[str]:
    """Return the files of earlier pushes that would be read together with the new ones.

    These are weights in the root that are not new (an old model.safetensors is preferred to new shards), and everything
    that is not new in the other folders. ``roots`` are the folders of the repository that are pushed, "" for its root.
    """
    kept = set(new)
    folders = tuple(f"{root}/" for root in roots if root)
    old = [name for name in there if name not in kept]
    whole = [name for name in old if name.startswith(folders)]
    return whole + [name for name in old if "" in roots and "/" not in name and name.endswith(_WEIGHTS)]


def _files(folder: Path, root: str) -> Iterable[tuple[str, Path]]:
    """Yield names in the repository and files; a pickle of our arguments does not belong beside the model."""
    for path in sorted(folder.rglob("*")):
        if path.is_file() and (root or path.name != "training_args.bin"):
            yield str(Path(root) / path.relative_to(folder)), path


if __name__ == "__main__":
    die_with_parent(os.getppid(), signal.SIGKILL)  # SIGTERM is ignored by the launcher's last processes
    bound_every_wait(_LONGEST_WAIT)
    sys.exit(main(sys.argv[1]))
