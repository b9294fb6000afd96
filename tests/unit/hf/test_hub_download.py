"""Models from the Hub, played by a server on this machine: fetched once, found again, and refused in words."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from isthmus.errors import MissingInput
from isthmus.hf.hub import fetch, looks_like_id
from unit.hub_server import serve_hub

FILES = {
    "config.json": b'{"model_type": "llama"}',
    "tokenizer.json": b"{}",
    "model.safetensors": b"weights",
    "pytorch_model.bin": b"a pickle",
    "modeling.py": b"raise SystemExit",
}


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What the server was asked for so far; only ``org/open`` can be downloaded."""
    with serve_hub({"org/open": FILES}, frozenset({"org/gated"})) as hub:
        template = hub.address + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "ENDPOINT", hub.address)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr("isthmus.hf.hub.get_token", lambda: None)
        yield hub.asked


@pytest.mark.slow
def test_requested_files_are_downloaded_once(asked: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    folder = fetch("org/open", weights=False, report=said.append)
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "tokenizer.json"]
    complete = fetch("org/open", weights=True, report=said.append)
    assert complete == folder and (folder / "model.safetensors").read_bytes() == b"weights"
    assert not (folder / "pytorch_model.bin").exists() and not (folder / "modeling.py").exists()
    before = len(asked)
    assert fetch("org/open", weights=True, report=said.append) == fetch("org/open", weights=False, report=said.append)
    assert len(asked) == before and len(said) == 2
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert fetch("org/open", weights=True, report=said.append) == folder


@pytest.mark.slow
def test_one_process_per_machine_downloads(asked: list[str]) -> None:
    said: list[str] = []
    folders: list[Path] = []
    ranks = [
        threading.Thread(target=lambda: folders.append(fetch("org/open", weights=True, report=said.append)))
        for _ in range(4)
    ]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    assert len(set(folders)) == 1 and len(folders) == 4
    assert len(said) == 1 and sum("/revision/" in path for path in asked) == 1


@pytest.mark.slow
def test_download_errors_have_hints(asked: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(MissingInput, match=r"no local folder org/gated, and .* is gated: HF_TOKEN, which is not set,"):
        fetch("org/gated", weights=True, report=print)
    with pytest.raises(MissingInput, match=r"no local folder org/none, and no repository org/none .* Check the name;"):
        fetch("org/none", weights=True, report=print)
    monkeypatch.setattr("isthmus.hf.hub.get_token", lambda: "hf_x")
    with pytest.raises(MissingInput, match=r"the token that is set gives no access\. Ask for it"):
        fetch("org/gated", weights=True, report=print)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(MissingInput, match=r"HF_HUB_OFFLINE disables downloads.* hf download org/open"):
        fetch("org/open", weights=True, report=print)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(MissingInput, match=r"no local folder org/open, and the Hub, .* does not answer"):
        fetch("org/open", weights=True, report=print)


@pytest.mark.parametrize(
    ("text", "so"),
    [
        ("meta-llama/Llama-3.1-8B", True),
        ("gpt2", True),
        ("model", False),
        ("./models/llama", False),
        ("/models/llama", False),
        ("a/b/c", False),
        ("../llama", False),
        ("~/llama", False),
        ("models/llama/", False),
    ],
)
def test_form_of_hub_ids(text: str, so: bool) -> None:
    assert looks_like_id(text) is so
