"""``--to gguf`` names the page with the converter of llama.cpp."""

from __future__ import annotations

from pathlib import Path

import pytest

from isthmus.cli.convert import SERVING_PAGE
from isthmus.cli.main import parse_and_run
from isthmus.errors import UsageError

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("name", ["gguf", "GGUF"])
def test_gguf_is_refused_with_the_page_on_serving(name: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=f"--to {name} is not a supported format.*{SERVING_PAGE}"):
        parse_and_run(["convert", str(tmp_path), str(tmp_path / "out"), "--to", name])
    assert not (tmp_path / "out").exists()
    assert "convert_hf_to_gguf.py" in (ROOT / SERVING_PAGE).read_text(encoding="utf-8")
