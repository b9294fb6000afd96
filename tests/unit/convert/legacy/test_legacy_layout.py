"""Files of a legacy layout and their contents, compared with Megatron's rank order."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest

from isthmus.convert.legacy.legacy_layout import LegacyLayout, RankFile, local_slices
from isthmus.errors import UsageError
from isthmus.families.architecture import Architecture
from isthmus.families.registry import family_for

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 4,
    "vocab_size": 78,
    "max_position_embeddings": 128,
}
EXPERTS = {"model_type": "qwen3_moe", "num_experts": 8, "moe_intermediate_size": 16, "num_experts_per_tok": 2}


def architecture(**config: Any) -> Architecture:
    config = SIZES | {"model_type": "llama"} | config
    return family_for(config).to_architecture(config)


def ranks(tp: int, pp: int, ep: int, etp: int) -> Iterator[tuple[int, int, int, int]]:
    """Ranks in tp, pp, ep and etp of each process, in Megatron's orders tp-cp-dp-pp and etp-ep-edp-pp."""
    world = next(n for n in itertools.count(1) if n % tp == 0 and n % (etp * ep) == 0)
    dense = [(t, d) for d in range(world // tp) for t in range(tp)]
    expert = [(t, e, d) for d in range(world // (etp * ep)) for e in range(ep) for t in range(etp)]
    for stage in range(pp):
        for (t, _), (within, e, _) in zip(dense, expert, strict=True):
            yield t, stage, e, within


def test_files_match_megatron_rank_order() -> None:
    for tp, ep, etp, pp in itertools.product((1, 2, 4), (1, 2, 4, 8), (1, 2, 4), (1, 2)):
        check_files_and_ranks(tp, ep, etp, pp)


def check_files_and_ranks(tp: int, ep: int, etp: int, pp: int) -> None:
    layout, expected = LegacyLayout(tp=tp, pp=pp, ep=ep, etp=etp), set(ranks(tp, pp, ep, etp))
    by_name: dict[tuple[int, int, int], set[int]] = {}
    for t, stage, e, within in expected:
        by_name.setdefault((t, stage, e), set()).add(within)
    if any(len(different) > 1 for different in by_name.values()):
        with pytest.raises(UsageError, match="two ranks with different parts of an expert would share one"):
            layout.files()
        return
    files = layout.files()
    assert {(file.tp, file.pp, file.ep, file.etp) for file in files} == expected and len(files) == len(expected)
    folders = {layout.folder(file) for file in files}
    assert len(folders) == len(files)
    for file in files:
        stage = f"_{file.pp:03d}" if pp > 1 else ""
        assert f"mp_rank_{file.tp:02d}{stage}" + (f"_{file.ep:03d}" if ep > 1 else "") in folders


@pytest.mark.slow_cases("{'ep': 8, 'etp': 1}")
@pytest.mark.parametrize(
    "sizes",
    [
        {"tp": 2, "ep": 4},
        {"tp": 4, "ep": 2, "etp": 2},
        {"tp": 2, "pp": 2, "ep": 2, "etp": 1},
        {"ep": 8, "etp": 1},
        {"tp": 4, "pp": 2, "vpp": 2},
    ],
    ids=str,
)
def test_shards_cover_every_element(sizes: dict[str, int]) -> None:
    config = SIZES | EXPERTS
    family, layout = family_for(config), LegacyLayout(**sizes)
    arch = family.to_architecture(config)
    layout.check(arch)
    layers = layout.layers_of(arch)
    for name, placed in family.placements(arch).items():
        shape = placed.rule.canonical_shape(arch)
        cells_of: dict[RankFile, set[tuple[int, int]]] = {}
        for stage, _, local in layout.place(name, arch, layers):
            for file in layout.files():
                if file.pp == stage and layout.on_rank(local, file, arch) is not None:
                    _, rectangles = local_slices(placed.rule, arch, layout, file, 80)
                    cells = itertools.chain.from_iterable(
                        itertools.product(
                            *(range(*cut.indices(size)) for cut, size in zip(mine, shape[: len(mine)], strict=True))
                        )
                        for mine, _ in rectangles
                    )
                    cells_of[file] = set(cells)
        axes = max(len(cell) for cells in cells_of.values() for cell in cells)
        assert set().union(*cells_of.values()) == set(itertools.product(*(range(size) for size in shape[:axes]))), name
        # Different shards have no common element, unless the tensor is replicated.
        for (item, cells), (other, others) in itertools.combinations(cells_of.items(), 2):
            key = ("ep", "etp") if placed.rule.is_expert else ("tp",)
            same = all(getattr(item, axis) == getattr(other, axis) for axis in key)
            assert (cells == others) if same or placed.rule.shard == "whole" else not cells & others, name


def test_chunks_of_layers_are_interleaved() -> None:
    arch = architecture()
    layout = LegacyLayout(pp=2, vpp=2)
    layers = layout.layers_of(arch)
    results = [layout.place(f"decoder.layers.{layer}.mlp.linear_fc2.weight", arch, layers)[0] for layer in range(8)]
    assert [(stage, chunk, int(name.split(".")[2])) for stage, chunk, name in results] == [
        (0, 0, 0), (0, 0, 1), (1, 0, 0), (1, 0, 1), (0, 1, 0), (0, 1, 1), (1, 1, 0), (1, 1, 1),
    ]  # fmt: skip
    assert layout.place("embedding.word_embeddings.weight", arch, layers) == [
        (0, 0, "embedding.word_embeddings.weight")
    ]
    assert layout.place("decoder.final_layernorm.weight", arch, layers)[0][:2] == (1, 1)


@pytest.mark.parametrize(
    ("num_layers", "pp", "expected"),
    [
        *((3, 2, [2, 1]), (5, 2, [3, 2]), (5, 3, [2, 2, 1]), (7, 3, [2, 3, 2]), (6, 4, [1, 2, 2, 1])),
        *((7, 4, [2, 2, 2, 1]), (9, 8, [2, 1, 1, 1, 1, 1, 1, 1]), (61, 16, [3, *[4] * 14, 2])),
    ],
)
def test_layers_of_stages_that_do_not_divide_them(num_layers: int, pp: int, expected: list[int]) -> None:
    arch, layout = architecture(num_hidden_layers=num_layers), LegacyLayout(pp=pp)
    layout.check(arch)
    assert layout.layers_of(arch) == [[layers] for layers in expected]
    assert sum(expected) == num_layers and len({*expected[1:-1]}) <= 1
    first, last = layout.flags(num_layers)[1:]
    assert (first.split()[1], last.split()[1]) == (str(expected[0]), str(expected[-1]))


@pytest.mark.parametrize("pp", [1, 2])
def test_tied_output_layer_needs_several_stages(pp: int) -> None:
    arch = architecture(tie_word_embeddings=True)
    layout = LegacyLayout(pp=pp)
    assert len(layout.place("output_layer.weight", arch, layout.layers_of(arch))) == pp - 1


@pytest.mark.parametrize(
    ("config", "sizes", "message"),
    [
        ({}, {"tp": 3}, "tp=3 does not divide num_attention_heads=8"),
        ({}, {"pp": 9}, "pp=9 is more than num_layers=8"),
        ({}, {"pp": 2, "vpp": 3}, "pp=2 times vpp=3 does not divide"),
        ({}, {"vpp": 2}, "more than one pipeline stage"),
        ({}, {"ep": 2}, "has none"),
        ({}, {"etp": 1}, "has none"),
        (EXPERTS, {"ep": 3}, r"ep=3 does not divide num_experts=8 \(.*\). Use 1, 2, 4 or 8."),
        (EXPERTS, {"ep": 2, "etp": 3}, "etp=3 does not divide"),
        (EXPERTS, {"tp": 1, "ep": 2, "etp": 2}, "Use an etp that divides tp"),
    ],
)
def test_invalid_layouts_are_refused(config: dict[str, Any], sizes: dict[str, int], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        LegacyLayout(**sizes).check(architecture(**config))
