"""Uploads a model folder to the Hugging Face Hub."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from huggingface_hub import HfApi
from huggingface_hub.errors import HFValidationError, LocalTokenNotFoundError, OfflineModeIsEnabled
from huggingface_hub.utils import validate_repo_id

from isthmus.errors import IOFailure, UsageError


def check_name(repo_id: str) -> None:
    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        raise UsageError(f"--push {repo_id}: {_one_line(error)} Give NAMESPACE/NAME.") from None


def push(folder: Path, repo_id: str, *, private: bool, report: Callable[[str], None]) -> str:
    """Upload a whole folder and return the URL; creates the repository if it does not exist.

    Args:
        folder: it is not changed.
        repo_id: ``namespace/name``.
        private: create a private repository; an existing one keeps its visibility.
        report: called with a line for the user before the upload.

    Raises:
        IOFailure: no token, no network, no write access, or the upload failed.
    """
    files = [path for path in folder.rglob("*") if path.is_file()]
    size = sum(path.stat().st_size for path in files)
    kind = "a private repository" if private else "a public repository"
    report(f"pushing {len(files)} files, {size / 2**30:,.2f} GiB, from {folder} to {repo_id} ({kind}, if it is new)")
    api = HfApi()
    try:
        address = str(api.create_repo(repo_id, private=private, exist_ok=True))
        api.upload_folder(repo_id=repo_id, folder_path=folder, commit_message="Upload the model")
    except Exception as error:  # the HTTP library, which differs between versions, raises its own exceptions
        raise IOFailure(
            f"{folder} is complete, but was not pushed to {repo_id}: {_reason(error)}. "
            f"Fix that, then run: hf upload {repo_id} {folder}"
        ) from error
    return address


def _reason(error: Exception) -> str:
    if isinstance(error, LocalTokenNotFoundError):
        return "not logged in (use hf auth login, or set HF_TOKEN)"
    if isinstance(error, OfflineModeIsEnabled):
        return "HF_HUB_OFFLINE is set"
    return _one_line(error).rstrip(".")


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
