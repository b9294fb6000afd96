"""The page of claims: quotes are those of the pages, and their tests and recorded results exist."""

from __future__ import annotations

import ast
import json
import runpy
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="module")
def trust(repository: Path) -> dict[str, Any]:
    return runpy.run_path(str(repository / "docs" / "trust.py"))


@pytest.fixture(scope="module")
def claims(trust: dict[str, Any]) -> list[Any]:
    return [claim for group in trust["CLAIMS"].values() for claim in group]


def test_claims_are_quotes_of_their_pages(claims: list[Any], repository: Path) -> None:
    missing = [
        (claim.page, claim.quote)
        for claim in claims
        if claim.quote not in " ".join((repository / claim.page).read_text().split())
    ]
    assert missing == [], "the page has other words now: change the claim in docs/trust.py, and check its evidence"


@pytest.mark.slow
def test_claims_have_evidence_that_exists(claims: list[Any], trust: dict[str, Any], repository: Path) -> None:
    for claim in claims:
        assert claim.tests or claim.results, claim.quote
        for result in claim.results:
            assert trust["newest_result"](result).is_file()
        for test in claim.tests:
            file, _, name = test.partition("::")
            body = ast.parse((repository / "tests" / file).read_text()).body
            names = {node.name for node in body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}
            assert name in names if name else names, test


@pytest.mark.slow
def test_the_page_has_each_recorded_result_as_its_file_says(trust: dict[str, Any], repository: Path) -> None:
    page, listed = (
        trust["page"](),
        {name for group in trust["CLAIMS"].values() for claim in group for name in claim.results},
    )
    for path in (repository / "benchmarks/results").glob("*.json"):
        certificate = json.loads(path.read_text())["certificate"]
        assert path.name.startswith(certificate["date"][:10]), path.name
        row = next(line for line in page.splitlines() if f"{path.name}) | " in line)
        assert f"| {certificate['date'][:10]} | `{certificate['commit'][:8]}` |" in row
        benchmark = path.name.split("_", 1)[1].rpartition("_")[0]
        assert benchmark in listed, f"{path.name} holds no claim: add one to docs/trust.py"


def test_limits_come_first(trust: dict[str, Any]) -> None:
    page = trust["page"]()
    limits, claims = page.index("## Known limits"), page.index("## How to read")
    assert limits < claims and page[limits:claims].count("\n- ") > 5
