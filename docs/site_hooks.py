"""MkDocs hooks: pages from outside ``docs/``, their links, and a check that the site needs no other host."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
PAGES = {
    "README.md": "index.md",
    "ARCHITECTURE.md": "project/architecture.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "CHANGELOG.md": "project/changelog.md",
    "SECURITY.md": "project/security.md",
    "benchmarks/README.md": "project/benchmarks/README.md",
}
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
_ROLE = re.compile(r":(?:func|class|meth):<code>(?:~[\w.]+\.)?([\w.]+)</code>")
_REMOTE = re.compile(r"<(?:script|link|img|iframe)\b[^>]*\b(?:src|href)=\"?(https?:)?//[^>]*>")


def site_pages() -> dict[str, str]:
    """Path in the repository -> path in the site, of all pages from outside ``docs/``."""
    tables = sorted((ROOT / "benchmarks/results").glob("*.md"))
    return PAGES | {f"benchmarks/results/{table.name}": f"project/benchmarks/{table.name}" for table in tables}


def on_files(files: Files, *, config: Any) -> Files:
    """Add the pages from outside ``docs/``."""
    for source, target in site_pages().items():
        files.append(File.generated(config, target, abs_src_path=str(ROOT / source)))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: Any, files: Files) -> str:
    """Replace links by path in the repository by links within the site; files without a page become plain text."""
    pages = site_pages()
    sources = {target: source for source, target in pages.items()}
    here = page.file.src_uri
    folder = posixpath.dirname(sources.get(here, f"docs/{here}"))
    if here.startswith(("decisions/", "project/")):
        page.meta["search"] = {"boost": 0.1}  # how to do something comes before why it is so

    def replace(match: re.Match[str]) -> str:
        image, text, link = match.groups()
        if "://" in link or link.startswith(("#", "mailto:")):
            return match[0]
        path, hash_sign, anchor = link.partition("#")
        wanted = posixpath.normpath(posixpath.join(folder, path))
        if wanted in pages:
            target = pages[wanted]
        elif wanted.startswith("docs/"):
            target = wanted.removeprefix("docs/")
        elif (ROOT / wanted).exists():
            return text
        else:
            raise PluginError(f"{here}: the link {link} leads nowhere")
        target = posixpath.relpath(target, posixpath.dirname(here) or ".")
        return f"{image}[{text}]({target}{hash_sign}{anchor})"

    parts = re.split(r"(^ *```.*?^ *```)", markdown, flags=re.MULTILINE | re.DOTALL)
    return "".join(part if number % 2 else _LINK.sub(replace, part) for number, part in enumerate(parts))


def on_page_content(html: str, *, page: Page, config: Any, files: Files) -> str:
    """Names in docstrings without the roles of Sphinx, as ``help()`` and editors read them."""
    return _ROLE.sub(r"<code>\1</code>", html)


def on_post_build(*, config: Any) -> None:
    """Refuse a site that loads scripts, styles or images from another host."""
    for page in sorted(Path(config["site_dir"]).rglob("*.html")):
        for tag in _REMOTE.finditer(page.read_text(encoding="utf-8")):
            if 'rel="canonical"' not in tag[0]:
                raise PluginError(f"{page}: {tag[0][:120]} needs another host")
