"""The built site in a browser: no page is wider than a phone or prints an error, and the search answers."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from unit.tools.report.browser import CHROMIUM, Browser, browser

ROOT = Path(__file__).resolve().parents[3]
PHONE = 390
_SEARCH = """
new Promise((resolve) => {
  const query = document.querySelector("[data-md-component=search-query]");
  query.focus();
  query.value = "pipeline";
  query.dispatchEvent(new KeyboardEvent("keyup", {bubbles: true}));
  const results = () => [...document.querySelectorAll(".md-search-result__article h1")].map((item) => item.innerText);
  const timer = setInterval(() => {
    if (results().length) {
      clearInterval(timer);
      resolve(results());
    }
  }, 100);
})
"""
pytestmark = [
    pytest.mark.thorough,
    pytest.mark.processes,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium"),
]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    for module in ("material", "mkdocstrings_handlers.python"):
        pytest.importorskip(module, reason="mkdocs-material and mkdocstrings are not installed (extra: docs)")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    subprocess.run(command, cwd=ROOT, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, check=True)
    return folder


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("profile")) as result:
        yield result


def test_no_page_scrolls_sideways_on_a_phone(site: Path, page: Browser) -> None:
    files = [file for file in sorted(site.rglob("*.html")) if file.name != "404.html"]  # its links begin at the root
    assert len(files) > 200
    wide, problems = [], {}
    for file in files:
        name = file.relative_to(site).as_posix()
        page.open(file, width=PHONE)
        if page.ask("document.documentElement.scrollWidth") > PHONE:
            wide.append(name)
        # versions.json is of `make site-version`.
        if messages := [text for text in page.problems() if "versions.json" not in text]:
            problems[name] = messages
    assert wide == [] and problems == {}


def test_the_page_has_the_colours_of_the_system(site: Path, page: Browser) -> None:
    for dark, scheme in ((False, "default"), (True, "slate"), (False, "default")):
        page.open(site / "index.html", width=1440, dark=dark)
        assert page.ask("document.body.dataset.mdColorScheme") == scheme


def test_the_search_answers_from_files(site: Path, page: Browser) -> None:
    page.open(site / "index.html", width=1440)
    assert page.ask(_SEARCH)[0] == "Parallelism"  # not a decision about it
