"""Anchors of links exist, and addresses of other hosts are well formed; `make site` checks the built links."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from urllib.parse import urlsplit

ROOT = Path(__file__).resolve().parents[3]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
_FENCED = re.compile(r"^ *```.*?^ *```$", re.MULTILINE | re.DOTALL)


def prose(page: Path) -> str:
    return re.sub(r"`[^`\n]*`", "", _FENCED.sub("", page.read_text()))


@functools.cache
def anchors(page: Path) -> set[str]:
    """The ids of the headings, as MkDocs makes them."""
    text = _FENCED.sub("", page.read_text())
    results: set[str] = set()
    for heading in re.findall(r"^#+ (.+?)\s*$", text, re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "")
        results.add(re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", plain).strip().lower()))
    return results


def test_anchors_exist() -> None:
    missing = []
    links = [(page, *link) for page in PAGES for link in re.findall(r"\]\(([^)#\s]*)#([^)\s]+)\)", prose(page))]
    assert len(links) > 50
    for page, path, anchor in links:
        target = (page.parent / path).resolve() if path else page
        if "://" not in path and anchor not in anchors(target):
            missing.append(f"{page.relative_to(ROOT)}: {path}#{anchor}")
    assert not missing


def test_addresses_are_well_formed() -> None:
    addresses = [address for page in PAGES for address in re.findall(r"\]\((https?://[^)\s]+)\)", prose(page))]
    assert len(addresses) > 10
    for address in addresses:
        parts = urlsplit(address)
        assert parts.scheme == "https" and re.fullmatch(r"[a-z0-9-]+(\.[a-z0-9-]+)+", parts.netloc), address
        assert not re.search(r"[<>\"{}|\\^`]|[.,;]$", address), address


GLOSSARY = (ROOT / "docs/reference/glossary.md").read_text()
TERMS = dict(re.findall(r"^\| ([^|]+?) \| [^|]+ \| \[[^\]]+\]\(([^)]+)\) \|$", GLOSSARY, re.MULTILINE))


def test_each_term_of_the_glossary_has_a_page() -> None:
    rows = re.findall(r"^\| (?!term |---)([^|]+?) \|", GLOSSARY, re.MULTILINE)
    assert sorted(rows) == sorted(TERMS) and len(rows) == len(set(rows))


_TERMS_OF_THE_FIELD = (
    "TP", "SP", "PP", "VPP", "CP", "EP", "ETP", "DP", "FSDP", "HSDP", "GQA", "MoE", "MTP", "LoRA", "QLoRA", "SFT",
    "DPO", "KTO", "GRPO", "MFU", "dropless", "grouped GEMM", "rank", "micro batch", "global batch", "packed sequence",
    "loss tokens", "rollout", "on-policy, off-policy",
)  # fmt: skip


def test_the_glossary_has_the_terms_of_the_field() -> None:
    assert set(_TERMS_OF_THE_FIELD) <= TERMS.keys()
