"""docs/how-to/add-a-block.md lists what a kind of block touches, and blocks are named nowhere else."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import pytest

from isthmus.engine.decoder.spec import MIXERS
from isthmus.families.blocks.block import Recurrence
from isthmus.families.blocks.kinds import MIXER_KINDS, RECURRENCES

ROOT = Path(__file__).resolve().parents[4]
SOURCE = ROOT / "src/isthmus"
PAGE = (ROOT / "docs/how-to/add-a-block.md").read_text(encoding="utf-8")
PLACES = ("families/blocks/", "families/rules/", "families/models/", "engine/mixers/", "engine/decoder/spec.py")
UPSTREAM = {
    **{"mamba2": {"engine/tensor_names.py"}, "delta_net": {"engine/tensor_names.py"}},
    "mamba": {"config/dialects/megatron/translate_megatron.py"},
}
"""Names of tensors in Megatron-Core's checkpoints, which it splits or fuses for these mixers, and of a script."""


@cache
def source_texts() -> dict[str, str]:
    return {path.relative_to(SOURCE).as_posix(): path.read_text(encoding="utf-8") for path in SOURCE.rglob("*.py")}


def files_with(pattern: str, words: Iterable[str]) -> set[str]:
    """Files with the pattern, which contains one of the words."""
    texts = source_texts().items()
    return {path for path, text in texts if any(word in text for word in words) and re.search(pattern, text)}


@pytest.mark.slow
def test_the_listed_files_are_those_that_name_the_block() -> None:
    listed = set(re.findall(r"^- `([\w/]+\.py)`", PAGE[PAGE.index("## What it touches") :], re.MULTILINE))
    files = files_with(r"(?i)short_?convolution\b|\bshort convolution|ShortConvolutionMixer", ("hort",))
    assert {path for path in files if not path.startswith("families/models/")} == listed
    assert f"in {len(listed)} files of" in PAGE


def test_the_page_shows_the_block_as_it_is() -> None:
    block = (SOURCE / "families/blocks/short_convolution.py").read_text(encoding="utf-8")
    shown = PAGE[PAGE.index("@dataclass(frozen") : PAGE.index("```\n\n| what to answer")]
    assert shown.strip() in block
    mixer = PAGE[PAGE.index("class ShortConvolutionMixer") : PAGE.index("```\n\n## 4.")]
    assert mixer.strip() in (SOURCE / "engine/mixers/short_convolution.py").read_text(encoding="utf-8")


def test_the_page_explains_every_answer_of_a_recurrence() -> None:
    answers = [name for base in Recurrence.__mro__[:-1] for name in vars(base) if _is_answer(name, vars(base)[name])]
    derived = {"matmul_weights", "selection_flops"}
    assert sorted(name for name in {*answers} - derived if f"`{name}`" not in PAGE) == []


def _is_answer(name: str, value: object) -> bool:
    return not name.startswith("__") and (callable(value) or isinstance(value, property))


def test_every_kind_has_a_mixer() -> None:
    assert sorted(MIXERS) == sorted({*MIXER_KINDS} - {"attention"})


@pytest.mark.parametrize("block", RECURRENCES)
def test_a_block_is_named_only_where_the_page_says(block: type[Recurrence]) -> None:
    names = "|".join(re.escape(name) for name in {block.prefix, *block.kinds})
    name = block.__name__
    pattern = rf"import [^\n]*\b{name}\b|\b{name}\(|\"(?:{names})(?:\.\w+)?\""
    files = files_with(pattern, (name, block.prefix, *block.kinds))
    elsewhere = {path for path in files if not path.startswith(PLACES)}
    assert elsewhere == UPSTREAM.get(block.prefix, set())
