"""Downloads models and tokenizers from the Hugging Face Hub into its cache, and uploads model folders."""

from __future__ import annotations

import errno
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from huggingface_hub import HfApi, constants, snapshot_download
from huggingface_hub import errors as hub_errors
from huggingface_hub.utils import WeakFileLock, get_session, get_token, validate_repo_id

from isthmus.errors import IOFailure, IsthmusError, MissingInput, NoSpace, UsageError
from isthmus.hf.model_folder import ADAPTER_FILE, ADAPTER_WEIGHTS, SMALL_FILES
from isthmus.hf.tensors.safetensors_format import INDEX_FILE, SINGLE_FILE

_WEIGHTS = ("model*.safetensors", "model.safetensors.index.json")
ENDPOINT: str = constants.ENDPOINT
_OWNED = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_UNOWNED = ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")
"""Repositories without an owner in their name."""


def looks_like_id(text: str) -> bool:
    """Whether the text has the form of a Hub id: ``org/name``."""
    return text in _UNOWNED or (_OWNED.fullmatch(text) is not None and ".." not in text and "--" not in text)


def fetch(repo_id: str, *, weights: bool, code: bool = False, report: Callable[[str], None]) -> Path:
    """The folder of a repository in the Hub's cache; downloads it if it is not complete there.

    One process of a machine downloads while the others wait. Files in the cache are not requested again, so that all
    processes, and a run that is resumed, have the same files. ``code`` includes Python files, which may define a
    tokenizer; ``report`` gets a line for the user when a download begins.
    """
    patterns = [
        "config.json",
        ADAPTER_FILE,
        "README.md",
        *SMALL_FILES,
        *(_WEIGHTS if weights else ()),
        *(["*.py"] if code else []),
    ]
    cache = Path(constants.HF_HUB_CACHE)
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with WeakFileLock(cache / f".isthmus-{repo_id.replace('/', '--')}.lock"):
            folder = _cached(repo_id, patterns, weights=weights)
            if folder is None:
                report(f"downloading {repo_id} from the Hub into {cache}")
                folder = Path(snapshot_download(repo_id, allow_patterns=patterns))
            return folder
    except Exception as error:  # the HTTP library raises its own exceptions
        raise _hub_error(repo_id, error) from error


def _cached(repo_id: str, patterns: Sequence[str], *, weights: bool) -> Path | None:
    try:
        folder = Path(snapshot_download(repo_id, allow_patterns=[*patterns], local_files_only=True))
    except hub_errors.LocalEntryNotFoundError:
        return None
    # An earlier run may have downloaded it without weights; older versions of the library do not check.
    complete = not weights or any((folder / name).is_file() for name in (SINGLE_FILE, INDEX_FILE, ADAPTER_WEIGHTS))
    return folder if complete else None


def _hub_error(repo_id: str, error: Exception) -> IsthmusError:
    here = f"there is no local folder {repo_id}, and"
    token = "the token that is set" if get_token() else "HF_TOKEN, which is not set,"
    status = error.response.status_code if isinstance(error, hub_errors.HfHubHTTPError) else None
    if isinstance(error, hub_errors.GatedRepoError):
        return MissingInput(
            f"{here} {repo_id} on the Hub is gated: {token} gives no access. Ask for it on the model's page, then set "
            "HF_TOKEN to a token of that account."
        )
    if isinstance(error, hub_errors.RepositoryNotFoundError) or status in (401, 403, 404):
        return MissingInput(
            f"{here} no repository {repo_id} on the Hub that is visible with {token.removesuffix(',')}. Check the "
            "name; for a private or gated one set HF_TOKEN to a token that has access."
        )
    if constants.HF_HUB_OFFLINE and isinstance(
        error, hub_errors.LocalEntryNotFoundError | hub_errors.OfflineModeIsEnabled
    ):
        return MissingInput(
            f"{here} {repo_id} is not in the Hub cache, and HF_HUB_OFFLINE disables downloads. Check the "
            f"path, or download it on a machine with network access: hf download {repo_id}"
        )
    if isinstance(error, hub_errors.LocalEntryNotFoundError):  # neither in the cache nor on a Hub that answers
        return MissingInput(
            f"{here} the Hub, where it may be a repository, does not answer. Check the path, or the network: "
            f"{_joined_lines(error.__cause__ or error)[:300]}"
        )
    if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT):
        return NoSpace(f"{constants.HF_HUB_CACHE}: no space left to download {repo_id}. Make room, or set HF_HOME.")
    return IOFailure(f"{here} {repo_id} cannot be downloaded from the Hub: {_joined_lines(error)[:300]}")


def reaches_hub(seconds: float = 5.0) -> bool:
    """Whether the Hub answers within ``seconds``; False without a request in offline mode."""
    if constants.HF_HUB_OFFLINE:
        return False
    try:
        get_session().head(ENDPOINT, timeout=seconds)
    except Exception:  # the HTTP library raises its own exceptions
        return False
    return True


def use_cache_only() -> None:
    """Let this process read only the caches of models and data sets; libraries repeat failed requests for a minute."""
    constants.HF_HUB_OFFLINE = True
    os.environ["HF_HUB_OFFLINE"] = os.environ["HF_EVALUATE_OFFLINE"] = "1"  # of libraries that are not imported yet
    if datasets := sys.modules.get("datasets"):
        datasets.config.HF_HUB_OFFLINE = True


def account_of_token(seconds: float = 5.0) -> str | None:
    """Name of the account; None without a token, if the Hub answers.

    Raises:
        PermissionError: the Hub refuses the token.
        OSError: it does not answer within ``seconds``.
    """
    token = get_token()
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    try:
        answer = get_session().get(f"{ENDPOINT}/api/whoami-v2", headers=headers, timeout=seconds)
    except Exception as error:  # the HTTP library raises its own exceptions
        raise OSError(_joined_lines(error)[:200] or type(error).__name__) from error
    if answer.status_code in (401, 403):  # also without a token
        if token:
            raise PermissionError(answer.status_code)
        return None
    if answer.status_code != 200:
        raise OSError(f"status {answer.status_code}")
    return str(answer.json()["name"])


def check_name(repo_id: str) -> None:
    try:
        validate_repo_id(repo_id)
    except hub_errors.HFValidationError as error:
        raise UsageError(f"--push {repo_id}: {_joined_lines(error)} Give NAMESPACE/NAME.") from None


def check_access(repo_id: str) -> None:
    """Ask the Hub whether the account can write to the namespace of ``repo_id``.

    Raises:
        UsageError: there is no token, or it has no such access.
        IOFailure: the Hub does not answer.
    """
    hint = "Correct it, or leave checkpoint.push out and upload later: hf upload"
    try:
        account = HfApi().whoami()
    except Exception as error:
        refused = isinstance(error, hub_errors.LocalTokenNotFoundError | hub_errors.OfflineModeIsEnabled)
        status = error.response.status_code if isinstance(error, hub_errors.HfHubHTTPError) else None
        kind = UsageError if refused or status in (401, 403) else IOFailure
        raise kind(f"--push {repo_id}: {_reason(error)}. {hint}") from error
    owner = repo_id.partition("/")[0] if "/" in repo_id else account["name"]
    owners = [account["name"], *(organization["name"] for organization in account.get("orgs", ()))]
    if account.get("auth", {}).get("accessToken", {}).get("role") == "read":
        raise UsageError(f"--push {repo_id}: the token of {account['name']} can only read. Use one that can write.")
    if owner not in owners:
        raise UsageError(f"--push {repo_id}: {account['name']} can write to {', '.join(owners)}. {hint}")


def push(folders: Mapping[str, Path], repo_id: str, *, private: bool, report: Callable[[str], None]) -> str:
    """Upload folders, by their place in the repository, and return the URL.

    A new repository is ``private``, an existing one is unchanged.
    """
    files = [path for folder in folders.values() for path in folder.rglob("*") if path.is_file()]
    size = sum(path.stat().st_size for path in files)
    kind = "a private repository" if private else "a public repository"
    names = " and ".join(map(str, folders.values()))
    report(f"pushing {len(files)} files, {size / 2**30:,.2f} GiB, from {names} to {repo_id} ({kind}, if it is new)")
    api = HfApi()
    try:
        address = str(api.create_repo(repo_id, private=private, exist_ok=True))
        for place, folder in folders.items():
            api.upload_folder(
                repo_id=repo_id,
                folder_path=folder,
                path_in_repo=None if place == "." else place,
                commit_message="Upload the model",
            )
    except Exception as error:  # the HTTP library, which differs between versions, raises its own exceptions
        again = (f"hf upload {repo_id} {folder} {place}".removesuffix(" .") for place, folder in folders.items())
        raise IOFailure(
            f"{names} is complete, but was not pushed to {repo_id}: {_reason(error)}. "
            f"Fix that, then run: {' && '.join(again)}"
        ) from error
    return address


def _reason(error: Exception) -> str:
    if isinstance(error, hub_errors.LocalTokenNotFoundError):
        return "not logged in (use hf auth login, or set HF_TOKEN)"
    if isinstance(error, hub_errors.OfflineModeIsEnabled):
        return "HF_HUB_OFFLINE is set"
    return _joined_lines(error).rstrip(".")


def _joined_lines(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
