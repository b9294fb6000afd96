"""The report of a real run."""

from __future__ import annotations

import json
import re
from html import unescape
from pathlib import Path

import torch

from faults.fork_server import ForkServer


def test_a_report_verifies_the_export_of_a_run(isthmus: ForkServer, sft_args: list[str], tmp_path: Path) -> None:
    assert isthmus(*sft_args, "checkpoint.every=2").returncode == 0
    out = tmp_path / "out"
    written = isthmus("report", str(out), "--verify", "--json").result
    assert written["out"] == str(out / "report.html") and written["notes"] == []
    text = " ".join(unescape(re.sub("<[^>]*>", " ", (out / "report.html").read_text())).split())
    assert re.search(r"Equal to iter_0000004 bit by bit: \d+ tensors", text)
    assert "their content has the checksums of checksums.json" in text
    assert "checkpoint saved" in text and "export exported" in text
    environment = json.loads((out / "environment.json").read_text())
    assert (environment["torch"], environment["ranks"]) == (torch.__version__, 1)
    assert f"torch {torch.__version__}" in text
    marked = re.findall(r"<mark>(.*?)</mark>", (out / "report.html").read_text())
    assert len(marked) == 5  # with the one of the text above
    assert all(re.fullmatch(r"The number is \d+\.<\|im_end\|>", unescape(text)) for text in marked[1:])
