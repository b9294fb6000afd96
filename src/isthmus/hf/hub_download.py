"""Brings models and tokenizers from the Hugging Face Hub into its cache on this machine."""

from __future__ import annotations

import errno
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)
from huggingface_hub.utils import WeakFileLock, get_token

from isthmus.errors import IOFailure, IsthmusError, MissingInput, NoSpace
from isthmus.hf.model_folder import INDEX_FILE, SINGLE_FILE, SMALL_FILES

_WEIGHTS = ("model*.safetensors", "model.safetensors.index.json")
_OWNED = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_UNOWNED = ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")
"""The names that tokenizers are still asked for by, from the time before repositories had owners."""


def looks_like_id(text: str) -> bool:
    """Whether this could be a repository on the Hub: ``org/name``."""
    return text in _UNOWNED or (_OWNED.fullmatch(text) is not None and ".." not in text and "--" not in text)


def fetch(repo_id: str, *, weights: bool, code: bool = False, say: Callable[[str], None]) -> Path:
    """The folder of a repository in this machine's cache, downloaded if it is not there in whole.

    Of the processes of a machine one downloads; the others wait and find everything in the cache. What is there is not
    asked for again, so that all of them, and a run that goes on, have the same files.

    Args:
        repo_id: ``org/name``; the caller has seen that there is no such folder here.
        weights: whether the safetensors files are wanted too; config, tokenizer and other small files always are.
        code: whether its Python files are, which can build a tokenizer.
        say: told what is downloaded.

    Raises:
        MissingInput: there is no such repository, it wants a token that has access, or this machine is offline and
            does not have it.
        IOFailure: the Hub cannot be reached, or the download broke off.
        NoSpace: the cache's disk is full.
    """
    patterns = ["config.json", *SMALL_FILES, *(_WEIGHTS if weights else ()), *(["*.py"] if code else [])]
    cache = Path(constants.HF_HUB_CACHE)
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with WeakFileLock(cache / f".isthmus-{repo_id.replace('/', '--')}.lock"):
            found = _cached(repo_id, patterns, weights=weights)
            if found is None:
                say(f"downloading {repo_id} from the Hub into {cache}")
                found = Path(snapshot_download(repo_id, allow_patterns=patterns))
            return found
    except Exception as error:  # besides the Hub's own there are those of its HTTP library
        raise _told(repo_id, error) from error


def _cached(repo_id: str, patterns: Sequence[str], *, weights: bool) -> Path | None:
    try:
        found = Path(snapshot_download(repo_id, allow_patterns=[*patterns], local_files_only=True))
    except LocalEntryNotFoundError:
        return None
    # It may be there from a run that wanted no weights; older versions of the library do not look.
    whole = not weights or (found / SINGLE_FILE).is_file() or (found / INDEX_FILE).is_file()
    return found if whole else None


def _told(repo_id: str, error: Exception) -> IsthmusError:
    here = f"there is no folder {repo_id} here, and"
    token = "the token that is set" if get_token() else "HF_TOKEN, which is not set,"
    status = error.response.status_code if isinstance(error, HfHubHTTPError) else None
    if isinstance(error, GatedRepoError):
        return MissingInput(
            f"{here} {repo_id} on the Hub is gated: {token} gives no access. Ask for it on the model's page, then set "
            "HF_TOKEN to a token of that account."
        )
    if isinstance(error, RepositoryNotFoundError) or status in (401, 403, 404):
        return MissingInput(
            f"{here} no repository {repo_id} on the Hub that can be seen with {token.removesuffix(',')}. Check the "
            "name; for a private or gated one set HF_TOKEN to a token that has access."
        )
    if constants.HF_HUB_OFFLINE and isinstance(error, LocalEntryNotFoundError | OfflineModeIsEnabled):
        return MissingInput(
            f"{here} {repo_id} is not in this machine's cache, and HF_HUB_OFFLINE keeps it from the Hub. Check the "
            f"path, or fetch it where there is a network: hf download {repo_id}"
        )
    if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT):
        return NoSpace(f"{constants.HF_HUB_CACHE}: no space left to download {repo_id}. Make room, or set HF_HOME.")
    reason = " ".join(str(error).split()) or type(error).__name__
    return IOFailure(f"{here} {repo_id} cannot be had from the Hub: {reason[:300]}")
