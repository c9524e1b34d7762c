"""Before a run that publishes starts: the hub answers, somebody is logged in, and may write where the recipe says."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from grpo_recipes.errors import config_error
from grpo_recipes.fetch.hub import endpoint, hub_answers, told_offline
from grpo_recipes.recipe import Recipe

if TYPE_CHECKING:
    from huggingface_hub import HfApi

_LONGEST_WAIT = 30.0


@dataclass(frozen=True)
class Target:
    """Where a run publishes.

    Attributes:
        repo: ``user/name``.
        private: whether the repository is private when it is made.
        branch: branch that gets the commits.
        strategy: ``end``, ``every_save``, ``checkpoint`` or ``all_checkpoints``.
        always: push every checkpoint, though the push before is not finished.
        note: what the user should know, or nothing.
    """

    repo: str
    private: bool
    branch: str
    strategy: str
    always: bool
    note: str = ""


def repository_name(recipe: Recipe, run_name: str) -> str:
    """Return the repository's name, with or without a user before it: ``hub_model_id``, or the run's name."""
    return str(recipe["hub_model_id"] or re.sub(r"[^\w.-]+|--+|\.\.+", "-", run_name).strip("-."))


def need_target(recipe: Recipe, environment: Mapping[str, str], run_name: str) -> Target | None:
    """Where the run publishes, asked of the hub while nothing is started yet.

    Args:
        recipe: the recipe.
        environment: variables of the user.
        run_name: names the repository when ``hub_model_id`` does not.

    Returns:
        None without ``push_to_hub``.

    Raises:
        ConfigError: the hub does not answer, nobody is logged in, or the account may not write there.
    """
    if not recipe["push_to_hub"]:
        return None
    where, name = recipe.origin("push_to_hub"), repository_name(recipe, run_name)
    if not hub_answers(environment):
        why = "HF_HUB_OFFLINE is set" if told_offline(environment) else f"{endpoint(environment)} does not answer"
        fix = f"remove it and publish afterwards where the hub answers: hf upload {name} <run>/model"
        raise config_error(where, f"push_to_hub cannot work here: {why}", fix)
    api = _hub(endpoint(environment))
    account = _account(api, where)
    repo, note = _writable(recipe, name, account)
    return Target(
        repo=repo,
        private=recipe["hub_private_repo"] is not False,
        branch=recipe["hub_revision"] or "main",
        strategy=recipe["hub_strategy"],
        always=recipe["hub_always_push"],
        note=note or _public_note(api, recipe, repo),
    )


def _hub(address: str) -> HfApi:
    from huggingface_hub import HfApi  # 0.3 s, for those who publish

    from grpo_recipes.fetch.client import bound_every_wait

    bound_every_wait(_LONGEST_WAIT)
    return HfApi(endpoint=address)


def _account(api: HfApi, where: str) -> dict[str, Any]:
    """Who is logged in, as the hub says."""
    import httpx
    from huggingface_hub import get_token
    from huggingface_hub.errors import HfHubHTTPError

    login = "export HF_TOKEN, or run hf auth login, with a token that may write"
    if get_token() is None:
        raise config_error(where, "push_to_hub needs a login at the hub, there is none", login)
    try:
        return api.whoami()
    except HfHubHTTPError as error:
        raise config_error(where, f"the hub refuses the login (HTTP {error.response.status_code})", login) from None
    except httpx.TransportError as error:
        raise config_error(where, f"the hub does not answer ({type(error).__name__})", "try again") from None


def _writable(recipe: Recipe, name: str, account: dict[str, Any]) -> tuple[str, str]:
    """``user/name`` if this account may write there, and what could not be told."""
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
    what = f"'{account['name']}' may not write to '{repo}'"
    raise config_error(
        where, what, f"write hub_model_id: {account['name']}/{repo.split('/')[1]}, or log in as its owner"
    )


def _public_note(api: HfApi, recipe: Recipe, repo: str) -> str:
    """Tell of a repository that exists and that everybody can read, where the recipe asks for a private one."""
    import httpx
    from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError

    unknown = f"whether {repo} exists and is public could not be asked"
    try:
        private = api.repo_info(repo).private
    except RepositoryNotFoundError:
        return ""
    except HfHubHTTPError as error:  # some tokens may write and not read
        return f"{unknown} (HTTP {error.response.status_code})"
    except httpx.TransportError as error:
        return f"{unknown} ({type(error).__name__})"
    if private or recipe["hub_private_repo"] is False:
        return ""
    return f"{repo} exists and is public: hub_private_repo is for repositories that are made"
