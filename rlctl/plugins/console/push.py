"""Push of an exported folder to a model repository of the Hugging Face hub."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from huggingface_hub import HfApi, constants, get_token
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    RepositoryNotFoundError,
)
from huggingface_hub.utils import get_session, validate_repo_id

from rlctl.errors import ConflictError, ResourceError, UsageError
from rlctl.hub import TIMEOUT_S, hub_answers
from rlctl.redaction import redact, register
from rlctl.runtime.card import CARD
from rlctl.runtime.export import MARKER, exported_files

_TOKEN_HINT = (
    "create a token with write access, set HF_TOKEN=… or log in with `hf auth login`: "
    "{}/settings/tokens"
)
SILENCE_S = 120.0  # without a byte from the hub; its client waits for ever


@dataclass(frozen=True)
class HubRepo:
    """Model repository `ORG/NAME` of the hub; `private` is None for the default of the account."""

    name: str
    exists: bool
    private: bool | None
    api: HfApi = field(repr=False)

    @property
    def url(self) -> str:
        """Page of the repository."""
        return f"{self.api.endpoint}/{self.name}"


def find_repo(name: str, private: bool) -> HubRepo:
    """Check name, token and network, and return the repository, which may not exist yet.

    Changes nothing on the hub. Raises UsageError for a name without ORG, ResourceError without a
    token or a network or if the hub refuses the token, and ConflictError if the repository is
    public although `private` is asked for.
    """
    try:
        validate_repo_id(name)
        if "/" not in name:
            raise HFValidationError
    except HFValidationError as error:
        raise UsageError(
            f"--push should be ORG/NAME of letters, digits, '-', '_' and '.', not {name!r}",
            hint="such as --push my-org/my-model; your user name is an ORG, too",
        ) from error
    hint = _TOKEN_HINT.format(constants.ENDPOINT)
    with _explained(name, hint):  # the token of a CI job, or its renewal, comes from the network
        token = get_token()
    if token is None:
        raise ResourceError("no token for the Hugging Face hub is set", hint=hint)
    register(token, "token")
    if not hub_answers():
        raise ResourceError(
            f"the hub does not respond within {TIMEOUT_S:g} s, or HF_HUB_OFFLINE is set",
            where=constants.ENDPOINT,
            hint="check the network; HF_ENDPOINT=URL selects another hub",
        )
    get_session().timeout = SILENCE_S
    api = HfApi(endpoint=constants.ENDPOINT, token=token, library_name="rlctl")
    with _explained(name):
        api.whoami()
        try:
            is_private = api.model_info(name).private
        except RepositoryNotFoundError:
            return HubRepo(name, False, private or None, api)
    if private and not is_private:
        raise ConflictError(
            f"{name} exists and is public",
            where=f"{constants.ENDPOINT}/{name}",
            hint="leave out --private, choose another name, or change it in the settings of the "
            "repository",
        )
    return HubRepo(name, True, is_private, api)


def push(repo: HubRepo, folder: Path, message: str, card_only: bool = False) -> str:
    """Commit the files of an export to the repository, created if necessary; return the commit.

    Files of the repository that the export does not have stay. Raises ResourceError if the hub
    refuses or the connection is lost; the folder is complete then, and can be pushed again.
    """
    again = f"the folder is complete; to push it later: hf upload {repo.name} {folder}"
    with _explained(repo.name, again):
        if not repo.exists:
            repo.api.create_repo(repo.name, private=repo.private, exist_ok=True)
        commit = repo.api.upload_folder(
            repo_id=repo.name,
            folder_path=folder,
            commit_message=redact(message),
            allow_patterns=[CARD] if card_only else exported_files(folder),
            ignore_patterns=[MARKER],
        )
    return commit.oid


@contextmanager
def _explained(name: str, hint: str = "check the network and try again") -> Iterator[None]:
    """Raise errors of the hub's client in the block as ResourceError."""
    owner = "ORG is your user name or an organization that you may write to"
    causes = {
        401: ("the hub refuses the token", _TOKEN_HINT.format(constants.ENDPOINT)),
        403: (
            f"the token may not write to {name}",
            f"a token with write access to this name; {owner}",
        ),
    }
    try:
        yield
    except Exception as error:  # the client's HTTP library changes; its errors share no class
        problem = (f"cannot push to {name}", hint)
        label = f": {type(error).__name__}"
        reason = next(iter(str(error).strip().splitlines()), "no reason given")
        if isinstance(error, HfHubHTTPError):
            status = error.response.status_code
            problem = causes.get(status, problem)
            label = f" ({status})"
            reason = " ".join((error.server_message or reason).split())
        raise ResourceError(f"{problem[0]}{label}: {reason}", hint=problem[1]) from error
