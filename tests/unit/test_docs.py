"""Links, make targets, verbs, options, settings, configs and code in the documentation exist."""

from __future__ import annotations

import ast
import functools
import re
import runpy
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from ruamel.yaml import YAML

from isthmus import errors
from isthmus.cli.main import app
from isthmus.config.load import load_config
from isthmus.config.setting_errors import trainers
from isthmus.data.tokenize.stats import TokenizeStats
from isthmus.families.architecture import SETTINGS
from isthmus.recipes.data.prepare import PrepareResult
from isthmus.tools.bench.bench_grid import split_values

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
IDS = [str(page.relative_to(ROOT)) for page in PAGES]


def blocks(page: Path, language: str) -> list[str]:
    """Fenced blocks of one language, also indented ones."""
    results = re.findall(rf"^( *)```{language}\n(.*?)^ *```", page.read_text(), re.MULTILINE | re.DOTALL)
    return [re.sub(rf"^{indent}", "", text, flags=re.MULTILINE) for indent, text in results]


def commands() -> Iterator[tuple[str, list[str]]]:
    """(page, words) of every command line in a shell block."""
    for page, name in zip(PAGES, IDS, strict=True):
        for block in [*blocks(page, "bash"), *blocks(page, "sh")]:
            for line in block.splitlines():
                words = shlex.split(line.strip().removeprefix("until ").partition("; do")[0], comments=True)
                if "-m" in words and words[words.index("-m") + 1] == "isthmus":
                    words = words[words.index("-m") + 1 :]
                if words:
                    yield name, words


@functools.cache
def verb_options() -> dict[tuple[str, ...], set[str]]:
    """Long options of each verb, ``("config", "show")`` for a verb with two words."""
    values: dict[tuple[str, ...], set[str]] = {}

    def walk(name: tuple[str, ...], command: Any) -> None:
        values[name] = {option for item in command.params for option in item.opts if option.startswith("--")}
        for inner, leaf in getattr(command, "commands", {}).items():
            walk((*name, inner), leaf)

    walk((), typer.main.get_command(app))
    return values


def options(text: str) -> set[str]:
    return set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", text))


def test_every_command_is_one_that_exists() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    seen: dict[str, int] = {}
    for page, words in commands():
        program, *arguments = words
        seen[program] = seen.get(program, 0) + 1
        if program == "make":
            assert set(arguments) <= targets, f"{page}: {words}"
        if program == "isthmus":
            verb = tuple(word for word in arguments[: 1 + (arguments[0] == "config")] if not word.startswith("-"))
            assert verb in verb_options(), f"{page}: {words}"
            isthmus_arguments = arguments[: arguments.index("--")] if "--" in arguments else arguments
            flags = {word.partition("=")[0] for word in isthmus_arguments if word.startswith("--")}
            assert flags <= verb_options()[verb] | {"--help"}, f"{page}: {words}"
    assert seen["make"] > 3
    assert seen["isthmus"] > 8


@pytest.mark.slow
def test_settings_in_commands_are_settings(tmp_path: Path) -> None:
    flags = {"out": str(tmp_path), "model.path": "model", "data.files": ["data.json"]}
    overrides = [
        (page, words[1], f"{name}={value}") for page, words in commands() if words[0] == "isthmus" for word in words
        if re.fullmatch(r"[a-z]+(\.[a-z_]+)?=.+", word) for name, _, text in [word.partition("=")]
        for value in (split_values(name, text) if words[1] == "bench" else [text])
    ]  # fmt: skip
    assert len(overrides) > 5
    for page, verb, override in overrides:
        more: dict[str, Any] = {"data.files": None, "train.steps": 5} if override == "data.mock=true" else {}
        if verb == "distill":
            more["distill.teacher"] = "teacher"
        elif verb == "grpo":
            more["rollout.reward"] = ["exact_match"]
        recipe = verb if verb in ("dpo", "kto", "reward", "distill", "grpo") else "sft"
        try:
            load_config(recipe, None, [override], flags | more)
        except errors.UsageError as error:
            pytest.fail(f"{page}: {override}: {error}")


def test_settings_in_text_are_settings() -> None:
    known = set(re.findall(r"^\| `([a-z_.0-9]+)` \|", (ROOT / "docs/reference/config.md").read_text(), re.MULTILINE))
    groups = {name.partition(".")[0] for name in known if "." in name}
    known |= SETTINGS.keys()  # of architectures, such as moe.top_k
    known |= trainers()["verl"].keys()  # on its page
    mentions = {
        (name, word.partition("=")[0])
        for page, name in zip(PAGES, IDS, strict=True)
        for word in re.findall(r"`([a-z_0-9]+\.[a-z_0-9]+(?:=[^`]*)?)`", page.read_text())
        if word.partition(".")[0] in groups and not word.endswith((".py", ".md", ".json", ".yaml", ".jsonl", ".model"))
    }
    assert len(mentions) > 10
    assert {entry for entry in mentions if entry[1] not in known} == set()


def test_yaml_blocks_are_configs(tmp_path: Path) -> None:
    results = [(name, text) for page, name in zip(PAGES, IDS, strict=True) for text in blocks(page, "yaml")]
    assert results
    (tmp_path / "site.yaml").write_text("out: runs/mine\ndata: {files: [chats.json]}\n")
    for _, text in results:
        file = tmp_path / "page.yaml"
        file.write_text(text)
        match = re.search(r"^recipe: (\w+)$", text, re.MULTILINE)
        recipe = match[1] if match else "sft"
        assert load_config(recipe, file, [], {}).recipe == recipe


def test_the_tutorial_shows_the_error_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tutorial = ROOT / "docs/tutorial.md"
    monkeypatch.chdir(tmp_path)
    Path("sft.yaml").write_text(blocks(tutorial, "yaml")[0].replace("  tp: 2", "  tpp: 2"))
    with pytest.raises(errors.UsageError) as caught:
        load_config("sft", Path("sft.yaml"), [], {})
    assert str(caught.value).strip() == blocks(tutorial, "text")[0].strip()


PAGES_WITH_PYTHON = [page for page in PAGES if blocks(page, "python")]


@pytest.mark.parametrize("page", PAGES_WITH_PYTHON, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_python_blocks_import_what_exists(page: Path) -> None:
    for text in blocks(page, "python"):
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("isthmus"):
                code = f"from {node.module} import {', '.join(name.name for name in node.names)}"
                exec(compile(code, str(page), "exec"), {})


def test_links_lead_somewhere() -> None:
    links = [(page, link) for page in PAGES for link in re.findall(r"\]\(([^)#\s]+)[^)\s]*\)", page.read_text())]
    assert [(page, link) for page, link in links if "://" not in link and not (page.parent / link).exists()] == []


def test_the_family_page_shows_a_family_as_it_is() -> None:
    shown = blocks(ROOT / "docs/how-to/add-a-family.md", "python")[0].strip()
    assert shown in (ROOT / "src/isthmus/families/models/qwen2.py").read_text()


@pytest.mark.processes
def test_generated_pages_are_current() -> None:
    generate: dict[str, Any] = runpy.run_path(str(ROOT / "docs/generate.py"))
    for name, page in generate["PAGES"].items():
        written = (ROOT / f"docs/reference/{name}.md").read_text()
        assert written == page(), f"docs/reference/{name}.md is out of date: run `make docs`"


def test_navigation_lists_each_page() -> None:
    def leaves(entry: Any) -> Iterator[str]:
        if isinstance(entry, str):
            yield entry
        for child in entry.values() if isinstance(entry, dict) else entry if isinstance(entry, list) else ():
            yield from leaves(child)

    listed = list(leaves(YAML(typ="safe").load(ROOT / "mkdocs.yml")["nav"]))
    assert len(listed) == len(set(listed))
    reference_pages = {page for page in listed if page != "index.md" and not page.startswith("project/")}
    assert reference_pages == {str(page.relative_to(ROOT / "docs")) for page in ROOT.glob("docs/**/*.md")}


def test_exit_codes_are_those_of_the_errors() -> None:
    page = (ROOT / "docs/reference/exit-codes.md").read_text()
    shown = {int(code) for code in re.findall(r"^\| (\d+) \|", page, re.MULTILINE)}
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type)]
    codes = {kind.exit_code for kind in kinds if issubclass(kind, errors.IsthmusError)}
    assert shown == codes | {0, 130, 141}


def test_the_fields_of_prepare_are_those_of_its_result() -> None:
    page = (ROOT / "docs/reference/run-folder.md").read_text()
    (row,) = re.findall(r"^\| `prepare` \| (.*) \|$", page, re.MULTILINE)
    assert re.findall(r"`(\w+)`", row) == [*PrepareResult("out", "text", TokenizeStats(), 1.0).as_dict()]


def test_the_reference_lists_every_option() -> None:
    for verb, names in verb_options().items():
        if not verb:
            continue
        page = (ROOT / f"docs/reference/verbs/{verb[0]}.md").read_text()
        section = re.split(r"^#+ ", page.partition(f"# isthmus {' '.join(verb)}\n")[2], flags=re.MULTILINE)[0]
        assert names - {"--help"} - {"--version"} <= options(section), verb
