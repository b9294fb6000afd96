"""Uploads, with a stand-in for the Hub: what is sent, what is said first, and how each way to fail ends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from huggingface_hub.errors import LocalTokenNotFoundError, OfflineModeIsEnabled

from isthmus.cli.main import main
from isthmus.hf import hub
from ranks.tiny import build_model_folder


class Api:
    """Keeps what it was asked for; ``error`` is what the upload ends in."""

    calls: list[tuple[str, dict[str, Any]]]
    error: Exception | None

    def create_repo(self, repo_id: str, **how: Any) -> str:
        self.calls.append(("create_repo", {"repo_id": repo_id, **how}))
        return f"https://huggingface.co/{repo_id}"

    def upload_folder(self, **how: Any) -> None:
        self.calls.append(("upload_folder", how))
        if self.error is not None:
            raise self.error


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> type[Api]:
    Api.calls, Api.error = [], None
    monkeypatch.setattr(hub, "HfApi", Api)
    return Api


@pytest.fixture
def model(tmp_path: Path) -> str:
    return str(build_model_folder(tmp_path / "model", "llama", num_hidden_layers=1))


def test_no_push_without_the_option(api: type[Api], model: str, tmp_path: Path) -> None:
    assert main(["convert", model, str(tmp_path / "out"), "--to", "hf"]) == 0
    assert api.calls == []


@pytest.mark.parametrize("public", [False, True], ids=["private", "public"])
def test_push_uploads_the_whole_folder(
    public: bool, api: type[Api], model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main(["convert", model, str(out), "--push", "me/model", "--json", *(["--public"] if public else [])]) == 0
    created, uploaded = api.calls
    assert created == ("create_repo", {"repo_id": "me/model", "private": not public, "exist_ok": True})
    assert uploaded[1]["repo_id"] == "me/model" and uploaded[1]["folder_path"] == out.absolute()
    printed = capsys.readouterr()
    first, last = printed.err.splitlines()
    assert first.startswith("pushing 4 files, ") and f"from {out} to me/model" in first
    assert ("private" in first) is not public
    assert last == "pushed to https://huggingface.co/me/model"
    assert printed.out.startswith("{") and printed.out.count("\n") == 1


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (LocalTokenNotFoundError("Token is required,\nbut no token found."), "not logged in (use hf auth login"),
        (OfflineModeIsEnabled("Cannot reach https://huggingface.co"), "HF_HUB_OFFLINE is set"),
        (ConnectionError("no route\n to host"), "no route to host"),
        (OSError("403 Forbidden: You don't have the rights"), "403 Forbidden: You don't have the rights"),
    ],
    ids=["no-token", "offline", "no-network", "no-rights"],
)
def test_push_error_is_one_line_and_keeps_the_folder(
    error: Exception, message: str, api: type[Api], model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    api.error, out = error, tmp_path / "out"
    assert main(["convert", model, str(out), "--to", "hf", "--push", "me/model"]) == 74
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith(f"isthmus: {out} is complete, but was not pushed to me/model: {message}")
    assert line.endswith(f"hf upload me/model {out}")
    assert (out / "model.safetensors").is_file()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--push", "not a name"], "--push not a name: "),
        (
            ["--push", "me/model", "--to", "torch_dist"],
            "--push uploads a Hugging Face folder, and this writes torch_dist",
        ),
    ],
)
def test_invalid_push_is_refused_before_writing(
    words: list[str], message: str, api: type[Api], model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["convert", model, str(tmp_path / "out"), *words]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists() and api.calls == []


@pytest.mark.slow
def test_push_without_a_network(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", model, str(tmp_path / "out"), "--push", "me/model"]) == 74
    assert "HF_HUB_OFFLINE is set" in capsys.readouterr().err
    assert (tmp_path / "out" / "model.safetensors").is_file()
