"""Tiny models are loaded into simulated ranks and exported again with the same bytes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from isthmus.convert.online import export_plan, export_weights, import_weights
from isthmus.convert.towers import Towers
from isthmus.convert.weight_source import RandomWeights
from isthmus.errors import DataError, MissingInput, UsageError
from isthmus.families.architecture import Architecture
from isthmus.families.family import Family
from isthmus.families.registry import all_families, family_for
from isthmus.families.rules.shard import Layout, local_shape
from isthmus.hf.model_folder import ModelFolder, write_model_files
from isthmus.hf.tensors.parallel_writer import SafetensorsWriter
from ranks.tiny import ARCHETYPES, build_model_folder
from sweep import by_tier

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 77,
}


def build(folder: Path, family: str, *, dtype: torch.dtype, tied: bool = False, shards: str = "5GB") -> ModelFolder:
    return ModelFolder.open(build_model_folder(folder, family, dtype=dtype, shards=shards, tie_word_embeddings=tied))


def ranks(family: Family, arch: Architecture, tp: int, dtype: torch.dtype) -> Iterator[dict[str, Any]]:
    padded = -(-arch.vocab_size // (8 * tp)) * 8 * tp
    for rank in range(tp):
        layout = Layout(tp_rank=rank, tp_size=tp, etp_rank=rank, etp_size=tp, padded_vocab_size=padded)
        live = {
            name: torch.full(local_shape(placed.rule, arch, layout), float("nan"), dtype=dtype)
            for name, placed in family.placements(arch).items()
        }
        yield {"live": live, "layout": layout}


def round_trip(source: ModelFolder, target: Path, tp: int, dtype: torch.dtype, max_shard_bytes: float = 5e9) -> Family:
    family = family_for(source.config)
    arch = family.to_architecture(source.config)
    towers, dtypes = Towers(source, family), {name: info.dtype for name, info in source.tensors.items()}
    plan = export_plan(family, arch, dtypes, max_shard_bytes=max_shard_bytes, towers=towers.tensors)
    target.mkdir()
    plan.create(target)
    read = written = 0
    for rank in ranks(family, arch, tp, dtype):
        live = rank.pop("live")
        read += import_weights(live, family, arch, source, **rank)
        assert not any(tensor.isnan().any() for tensor in live.values())
        assert export_weights(live, family, arch, plan, target, **rank, writes=False) == 0
        written += export_weights(live, family, arch, plan, target, **rank)
    assert written == plan.total_bytes - towers.num_bytes <= read
    with SafetensorsWriter(plan, target) as writer:
        towers.copy(writer)
    write_model_files(target, source, family.to_hf_config(arch, source.config))
    return family


@pytest.mark.sweep_cases("4-False", "2-True", "1-False")
@pytest.mark.slow_cases("2-False", "4-True")
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_round_trip_of_bfloat16_in_float32_keeps_every_byte(tmp_path: Path, tp: int, tied: bool) -> None:
    check_round_trip(build(tmp_path / "source", "qwen3", dtype=torch.bfloat16, tied=tied), tmp_path, tp)


@pytest.mark.slow_cases("deepseek_v3", "qwen3_next", "qwen3_vl", "glm_moe_dsa", "gpt_oss", "kimi_linear")
@pytest.mark.parametrize("family", by_tier(sorted(all_families())))
def test_round_trip_keeps_every_byte(tmp_path: Path, family: str) -> None:
    check_round_trip(build(tmp_path / "source", family, dtype=torch.float32), tmp_path, tp=2)


def check_round_trip(source: ModelFolder, tmp_path: Path, tp: int) -> None:
    """The export is the file that transformers wrote."""
    round_trip(source, tmp_path / "export", tp, torch.float32)
    ours, theirs = (tmp_path / side / "model.safetensors" for side in ("export", "source"))
    assert ours.read_bytes() == theirs.read_bytes()
    exported, original = (AutoConfig.from_pretrained(tmp_path / side).to_dict() for side in ("export", "source"))
    assert exported | {"_name_or_path": ""} == original | {"_name_or_path": ""}
    assert (tmp_path / "export" / "generation_config.json").read_bytes() == (
        tmp_path / "source" / "generation_config.json"
    ).read_bytes()


@pytest.mark.slow
@pytest.mark.sweep_cases("gpt2", "deepseek_v3")
@pytest.mark.parametrize("family", ARCHETYPES)
def test_sharded_files_round_trip_and_load_without_warnings(tmp_path: Path, family: str) -> None:
    source = build(tmp_path / "source", family, dtype=torch.bfloat16, shards="15KB")
    assert len(list((tmp_path / "source").glob("*.safetensors"))) > 2
    round_trip(source, tmp_path / "export", 2, torch.bfloat16, max_shard_bytes=15e3)
    export = ModelFolder.open(tmp_path / "export")
    assert export.tensors.keys() == source.tensors.keys()
    for name, info in source.tensors.items():
        assert export.tensors[name].dtype == info.dtype
        assert torch.equal(export.read(name), source.read(name))
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path / "export", output_loading_info=True)
    assert not any(info.values())
    head = next(name for name in ("lm_head.weight", "embed_out.weight") if name in source.tensors)
    assert torch.equal(model.get_output_embeddings().weight, source.read(head))


def test_tied_last_stage_gets_a_copy_of_the_embedding(tmp_path: Path) -> None:
    source = build(tmp_path / "source", "qwen3", dtype=torch.float32, tied=True)
    assert "lm_head.weight" not in source.tensors
    family = family_for(source.config)
    arch = family.to_architecture(source.config)
    for rank in ranks(family, arch, 2, torch.float32):
        live = rank.pop("live")
        last_stage = {"output_layer.weight": live["output_layer.weight"]}
        import_weights(last_stage, family, arch, source, **rank)
        first = rank["layout"].tp_rank * 40
        rows = slice(first, min(77, first + 40))
        expected = source.read("model.embed_tokens.weight")[rows]
        assert torch.equal(last_stage["output_layer.weight"][: len(expected)], expected)
        assert not last_stage["output_layer.weight"][len(expected) :].any()


def rewrite(folder: Path, change: Any) -> ModelFolder:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)
    return ModelFolder.open(folder)


def drop_two(tensors: dict[str, torch.Tensor]) -> None:
    del tensors["model.norm.weight"], tensors["model.layers.1.mlp.up_proj.weight"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (drop_two, r"2 missing: model\.layers\.1\.mlp\.up_proj\.weight, model\.norm\.weight"),
        (lambda t: t.update({f"x.{n}": torch.ones(1) for n in range(6)}), r"6 not expected: x\.0, .* and 2 more"),
        (lambda t: t.update({"model.norm.weight": torch.ones(31)}), r"model\.norm\.weight is \[31\], not \[32\]"),
        (
            lambda t: t.update({"model.norm.weight": torch.ones(32, dtype=torch.int8)}),
            r"1 of a type that cannot be trained: model\.norm\.weight is torch\.int8",
        ),
    ],
)
def test_mismatched_source_is_refused_before_loading(tmp_path: Path, change: Any, message: str) -> None:
    build(tmp_path, "llama", dtype=torch.float32)
    source = rewrite(tmp_path, change)
    family = family_for(source.config)
    arch = family.to_architecture(source.config)
    (rank,) = ranks(family, arch, 1, torch.float32)
    with pytest.raises(DataError, match=message):
        import_weights(rank["live"], family, arch, source, layout=Layout(padded_vocab_size=80))
    assert all(tensor.isnan().all() for tensor in rank["live"].values())


def test_buffers_and_tied_output_layer_are_ignored(tmp_path: Path) -> None:
    build(tmp_path, "llama", dtype=torch.float32, tied=True)
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8), "lm_head.weight": torch.zeros(77, 32)}
    source = rewrite(tmp_path, lambda tensors: tensors.update(extra))
    family = family_for(source.config)
    arch = family.to_architecture(source.config)
    (rank,) = ranks(family, arch, 1, torch.float32)
    live = rank.pop("live")
    import_weights(live, family, arch, source, **rank)
    assert live["output_layer.weight"].any()


def test_folder_without_weights_is_refused(tmp_path: Path) -> None:
    source = build(tmp_path, "llama", dtype=torch.float32)
    source.close()
    (tmp_path / "model.safetensors").unlink()
    arch = family_for(source.config).to_architecture(source.config)
    with pytest.raises(MissingInput, match="has no safetensors weights"):
        import_weights(
            {}, family_for(source.config), arch, ModelFolder.open(tmp_path), layout=Layout(padded_vocab_size=80)
        )


def test_live_tensors_must_match_the_family(tmp_path: Path) -> None:
    config = SIZES | {"model_type": "llama"}
    family = family_for(config)
    arch = family.to_architecture(config)
    layout = Layout(padded_vocab_size=80)
    for live, message in [
        ({"decoder.layers.2.input_layernorm.weight": torch.zeros(32)}, "has no rule"),
        ({"decoder.final_layernorm.weight": torch.zeros(31)}, r"is \(31,\), family llama has \(32,\)"),
    ]:
        with pytest.raises(ValueError, match=message):
            import_weights(live, family, arch, RandomWeights(family, arch, seed=0), layout=layout)


@pytest.fixture
def llama() -> dict[str, Any]:
    """Family, architecture and layout of a random model."""
    config = SIZES | {"model_type": "llama"}
    family = family_for(config)
    return {"family": family, "arch": family.to_architecture(config), "layout": Layout(padded_vocab_size=80)}


def export(llama: dict[str, Any], folder: Path, value: float, dtype: torch.dtype, merge: Any = None) -> None:
    layout, arguments = llama["layout"], {key: llama[key] for key in ("family", "arch")}
    live = {
        name: torch.full(local_shape(placed.rule, llama["arch"], layout), value)
        for name, placed in llama["family"].placements(llama["arch"]).items()
    }
    plan = export_plan(**arguments, dtypes=dtype)
    plan.create(folder)
    export_weights(live, **arguments, plan=plan, folder=folder, layout=layout, merge=merge)


def test_export_beyond_a_dtype_is_refused(llama: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"^model\.embed_tokens\.weight has 70000, .* of float16 is 65504"):
        export(llama, tmp_path, 7e4, torch.float16)


def test_export_with_an_adapter_of_nan_is_refused(llama: dict[str, Any], tmp_path: Path) -> None:
    calls = []

    def merge(name: str, weight: torch.Tensor) -> torch.Tensor:
        calls.append(name)
        return weight * float("nan") if name.endswith("linear_qkv.weight") else weight

    with pytest.raises(DataError, match=r"^decoder\.layers\.0\.self_attention\.linear_qkv\.weight is not finite after"):
        export(llama, tmp_path, 1.0, torch.bfloat16, merge)
    assert len(calls) == len(llama["family"].placements(llama["arch"])), "other ranks wait for the next merge"


def test_weights_beyond_the_dtype_of_the_training_are_refused(llama: dict[str, Any], tmp_path: Path) -> None:
    export(llama, tmp_path, 7e4, torch.float32)
    live = {"decoder.final_layernorm.weight": torch.zeros(32, dtype=torch.float16)}
    source = ModelFolder(tmp_path, {})
    with pytest.raises(UsageError, match=r"^model\.norm\.weight has 70000"):
        import_weights(live, llama["family"], llama["arch"], source, layout=llama["layout"])


@pytest.mark.slow
@pytest.mark.sweep_cases("gpt2")
@pytest.mark.parametrize("family", ARCHETYPES)
def test_random_weights_do_not_depend_on_the_layout(tmp_path: Path, family: str) -> None:
    config = build(tmp_path / "model", family, dtype=torch.float32).config
    table = family_for(config)
    arch = table.to_architecture(config)
    exports = []
    for tp in (1, 2):
        plan = export_plan(table, arch, torch.float32)
        folder = tmp_path / str(tp)
        folder.mkdir()
        plan.create(folder)
        for rank in ranks(table, arch, tp, torch.float32):
            live = rank.pop("live")
            import_weights(live, table, arch, RandomWeights(table, arch, seed=3), **rank)
            export_weights(live, table, arch, plan, folder, **rank)
        exports.append(load_file(folder / "model.safetensors"))
    item, two = exports
    assert all(torch.equal(tensor, two[name]) for name, tensor in item.items())
    for placed in table.placements(arch).values():
        for name in placed.hf:
            match placed.rule.init:
                case "ones":
                    assert item[name].eq(0 if arch.norm.norm_zero_centered else 1).all()
                case "zeros":
                    assert not item[name].any()
                case "normal":
                    drawn = item[name].numel()
                    assert item[name].std() == pytest.approx(arch.init_std, rel=0.1 + 4 / drawn**0.5)
    largest = [tensor for tensor in item.values() if tensor.numel() > 1000]
    assert not any(torch.equal(a.flatten()[:99], b.flatten()[:99]) for a, b in itertools.combinations(largest, 2))
