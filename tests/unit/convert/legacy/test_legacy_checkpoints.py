"""Legacy checkpoints in many layouts are written, read and converted to every other format."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest
import torch

from isthmus.convert.legacy.from_legacy import FILE
from isthmus.convert.legacy.legacy_layout import LegacyLayout
from isthmus.convert.transfer import convert
from isthmus.convert.verify.compare import compare_models
from isthmus.errors import DataError, UnsafeInput, UsageError
from isthmus.families.registry import all_families
from ranks.tiny import ARCHETYPES, build_model_folder, without_checksums

LAYOUTS = [
    LegacyLayout(),
    LegacyLayout(tp=2),
    LegacyLayout(pp=2),
    LegacyLayout(tp=4),
    LegacyLayout(tp=2, pp=4),
    LegacyLayout(pp=3),
    LegacyLayout(pp=2, vpp=2),
    LegacyLayout(tp=2, pp=2, vpp=2),
]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return build_model_folder(tmp_path / "model", "qwen3", tie_word_embeddings=False)


def rewrite(path: Path, change: Any) -> None:
    without_checksums(path.parent)
    state = torch.load(path, weights_only=False)
    change(state)
    torch.save(state, path)


@pytest.mark.slow
@pytest.mark.sweep_cases("layout3-False", "layout1-False", "layout5-False", "layout8-True", "layout7-False")
@pytest.mark.parametrize(
    ("layout", "tied"), [*((layout, False) for layout in LAYOUTS), (LAYOUTS[0], True), (LAYOUTS[-1], True)]
)
def test_legacy_round_trip(layout: LegacyLayout, tied: bool, tmp_path: Path) -> None:
    source = build_model_folder(tmp_path / "hf", "qwen3", dtype=torch.bfloat16, tie_word_embeddings=tied)
    done = convert(source, tmp_path / "legacy", "torch", layout=layout)
    assert done.destination_format == "torch"
    assert len(list((tmp_path / "legacy" / "release").iterdir())) == layout.tp * layout.pp
    assert compare_models(source, tmp_path / "legacy").formats == ("hf", "torch")
    convert(tmp_path / "legacy", tmp_path / "back")
    compare_models(source, tmp_path / "back")


@pytest.mark.slow
@pytest.mark.sweep_cases("gpt2")
@pytest.mark.parametrize("family", ARCHETYPES)
def test_archetypes(family: str, tmp_path: Path) -> None:
    source = build_model_folder(tmp_path / "hf", family, tie_word_embeddings=False)
    has_experts = any(rule.is_expert for rule in all_families()[family].rules)
    layout = LegacyLayout(tp=2, pp=2, ep=2, etp=1) if has_experts else LegacyLayout(tp=2, pp=2)
    for spelling in ("te", "local"):
        convert(source, tmp_path / spelling, "torch", layout=layout, spelling=spelling)  # type: ignore[arg-type]
        compare_models(source, tmp_path / spelling)


@pytest.mark.slow
def test_from_any_format_to_any_other(model: Path, tmp_path: Path) -> None:
    convert(model, tmp_path / "tp2pp2", "torch", layout=LegacyLayout(tp=2, pp=2))
    convert(tmp_path / "tp2pp2", tmp_path / "tp4", "torch", layout=LegacyLayout(tp=4))
    convert(tmp_path / "tp4", tmp_path / "dist", "torch_dist")
    convert(tmp_path / "dist", tmp_path / "pp4", "torch", layout=LegacyLayout(pp=4))
    convert(tmp_path / "dist", tmp_path / "dist-again", "torch_dist")
    convert(tmp_path / "pp4", tmp_path / "hf", "hf")
    for name in ("tp2pp2", "tp4", "dist", "dist-again", "pp4", "hf"):
        compare_models(model, tmp_path / name)


@pytest.mark.slow
def test_contents_of_each_rank(model: Path, tmp_path: Path) -> None:
    convert(model, tmp_path / "legacy", "torch", layout=LegacyLayout(tp=2, pp=2, vpp=2))
    states = {
        (tp, pp): torch.load(tmp_path / "legacy" / "release" / f"mp_rank_{tp:02d}_{pp:03d}" / FILE, weights_only=False)
        for tp in range(2)
        for pp in range(2)
    }
    first, last = states[1, 0], states[1, 1]
    assert {"args", "checkpoint_version", "iteration", "model0", "model1"} == set(first)
    assert first["args"].virtual_pipeline_model_parallel_size == 2 and first["args"].padded_vocab_size == 78
    assert first["model0"]["embedding.word_embeddings.weight"].shape == (39, 32)
    assert not first["model0"]["embedding.word_embeddings.weight"][-1].any()  # the padding, on the last rank
    assert "output_layer.weight" in last["model1"] and "output_layer.weight" not in last["model0"]
    assert {name.split(".")[2] for name in first["model1"] if "layers" in name} == {"0"}
    assert first["model0"]["decoder.layers.0.mlp.linear_fc1._extra_state"] is None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spelling", "norm"),
    [("te", "self_attention.linear_qkv.layer_norm_weight"), ("local", "input_layernorm.weight")],
)
def test_both_spellings(spelling: Any, norm: str, model: Path, tmp_path: Path) -> None:
    convert(model, tmp_path / "legacy", "torch", layout=LegacyLayout(tp=2), spelling=spelling)
    state = torch.load(tmp_path / "legacy" / "release" / "mp_rank_01" / FILE, weights_only=False)
    assert f"decoder.layers.3.{norm}" in state["model"]
    assert state["args"].transformer_impl == ("transformer_engine" if spelling == "te" else "local")
    for path in (tmp_path / "legacy" / "release").glob(f"*/{FILE}"):
        rewrite(path, lambda state: state.update(optimizer={"state": torch.zeros(3)}))
    compare_models(model, tmp_path / "legacy")


@pytest.mark.slow
def test_padding_of_any_width_is_removed(model: Path, tmp_path: Path) -> None:
    convert(model, tmp_path / "legacy", "torch")
    name = "embedding.word_embeddings.weight"

    def pad(state: dict[str, Any]) -> None:
        for name in ("embedding.word_embeddings.weight", "output_layer.weight"):
            state["model"][name] = torch.cat((state["model"][name], torch.ones(51, 32)))

    rewrite(tmp_path / "legacy" / "release" / "mp_rank_00" / FILE, pad)
    assert (
        torch.load(tmp_path / "legacy" / "release" / "mp_rank_00" / FILE, weights_only=False)["model"][name].size(0)
        == 128
    )
    compare_models(model, tmp_path / "legacy")


@pytest.mark.slow_cases("<lambda>-1 missing")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state["model"].pop("decoder.layers.1.mlp.linear_fc2.weight"), "1 missing"),
        (lambda state: state["model"].update({"decoder.layers.0.mlp.bias": torch.zeros(2)}), "1 not expected"),
        (
            lambda state: state["model"].update({"decoder.final_layernorm.weight": torch.zeros(31)}),
            "of another shape",
        ),
        (lambda state: state.pop("args"), "no args"),
        (lambda state: state.pop("model"), "no model"),
    ],
)
def test_mismatched_tensors_are_named(change: Any, message: str, model: Path, tmp_path: Path) -> None:
    convert(model, tmp_path / "legacy", "torch")
    rewrite(tmp_path / "legacy" / "release" / "mp_rank_00" / FILE, change)
    with pytest.raises(DataError, match=message):
        convert(tmp_path / "legacy", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_damage_is_named(model: Path, tmp_path: Path) -> None:
    convert(model, tmp_path / "legacy", "torch", layout=LegacyLayout(tp=2))
    path = tmp_path / "legacy" / "release" / "mp_rank_01" / FILE
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(DataError, match="mp_rank_01"):
        convert(tmp_path / "legacy", tmp_path / "out")
    path.unlink()
    with pytest.raises(DataError, match="mp_rank_01"):
        convert(tmp_path / "legacy", tmp_path / "out")


class Payload:
    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (Path("ran-anyway"),))


def test_payload_does_not_run(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    convert(model, tmp_path / "legacy", "torch")
    rewrite(tmp_path / "legacy" / "release" / "mp_rank_00" / FILE, lambda state: state.update(rng_state=Payload()))
    with pytest.raises(UnsafeInput):
        convert(tmp_path / "legacy", tmp_path / "out")
    assert not Path("ran-anyway").exists()


def test_args_with_enums_of_megatron_core(model: Path, tmp_path: Path) -> None:
    from megatron.core.transformer.enums import AttnBackend

    convert(model, tmp_path / "legacy", "torch")

    def trained(state: dict[str, Any]) -> None:
        state["args"] = argparse.Namespace(**vars(state["args"]), attention_backend=AttnBackend.auto, rank=0)

    rewrite(tmp_path / "legacy" / "release" / "mp_rank_00" / FILE, trained)
    compare_models(model, tmp_path / "legacy")


@pytest.mark.slow
def test_ranks_without_config_use_args_or_hf_like(model: Path, tmp_path: Path) -> None:
    convert(model, tmp_path / "legacy", "torch", layout=LegacyLayout(tp=2))
    (tmp_path / "legacy" / "release").rename(tmp_path / "ranks")
    assert compare_models(tmp_path / "ranks", model).formats == ("torch", "hf")
    assert compare_models(tmp_path / "ranks", model, hf_like=model).formats == ("torch", "hf")


def test_wrong_parallel_sizes_are_refused(model: Path, tmp_path: Path) -> None:
    convert(model, tmp_path / "legacy", "torch", layout=LegacyLayout(pp=2))
    for path in (tmp_path / "legacy" / "release").glob(f"*/{FILE}"):
        rewrite(path, lambda state: setattr(state["args"], "pipeline_model_parallel_size", 1))
    with pytest.raises(DataError, match="mp_rank_00 of 1 ranks missing"):
        convert(tmp_path / "legacy", tmp_path / "out")


@pytest.mark.slow
def test_parts_of_one_tensor_must_have_one_dtype(model: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(model / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"].bfloat16()
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    convert(model, tmp_path / "legacy", "torch")
    compare_models(model, tmp_path / "legacy")
    name = "model.layers.1.self_attn.k_proj.weight"
    save_file(tensors | {name: tensors[name].bfloat16()}, model / "model.safetensors", {"format": "pt"})
    with pytest.raises(UsageError, match=r"k_proj.weight is bfloat16.*--dtype"):
        convert(model, tmp_path / "out", "torch")
    convert(model, tmp_path / "out", "torch", dtype=torch.float32)


@pytest.mark.slow
def test_uneven_pipeline_stages_are_read(model: Path, tmp_path: Path) -> None:
    convert(model, tmp_path / "legacy", "torch", layout=LegacyLayout(pp=2))
    moved: dict[str, Any] = {}

    def take(state: dict[str, Any]) -> None:
        for name in [name for name in state["model"] if name.startswith("decoder.layers.1.")]:
            moved[name] = state["model"].pop(name)

    def give(state: dict[str, Any]) -> None:
        later = {name: state["model"].pop(name) for name in list(state["model"]) if "layers." in name}
        for name, value in later.items():
            number = int(name.split(".")[2])
            state["model"][name.replace(f"layers.{number}", f"layers.{number + 1}")] = value
        state["model"] |= {name.replace("layers.1", "layers.0"): value for name, value in moved.items()}

    rewrite(tmp_path / "legacy" / "release" / "mp_rank_00_000" / FILE, take)
    rewrite(tmp_path / "legacy" / "release" / "mp_rank_00_001" / FILE, give)
    compare_models(model, tmp_path / "legacy")
