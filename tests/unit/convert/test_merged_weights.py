"""Merging adapters equals PEFT: the weights of ``merge_and_unload``, and the logits of base and adapter."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from isthmus.cli.main import parse_and_run
from isthmus.convert.legacy.legacy_layout import LegacyLayout
from isthmus.convert.merged_weights import MergedWeights, linears_with_adapter
from isthmus.convert.transfer import convert
from isthmus.errors import DataError, IsthmusError, MissingInput, UsageError
from isthmus.families.adapted_linears import adapted_linears, all_linears
from isthmus.families.registry import family_for
from isthmus.families.rules.shard import Layout, tensor_slices
from isthmus.hf.model_folder import ModelFolder
from isthmus.hf.peft_folder import AdapterConfig, LoraFactors, PeftFolder, write_adapter
from optional_packages import peft
from ranks.tiny import VOCAB, build_adapter, build_model_folder
from sweep import swept

TOKENS = torch.arange(3, 3 + 24)[None] % VOCAB


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    return model.eval()(TOKENS).logits


def content(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


pytestmark = peft.required
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"target_modules": "all-linear", "use_rslora": True}),
    "qwen3-dora": ("qwen3", {"target_modules": ["q_proj", "o_proj", "down_proj"], "use_dora": True}),
    "qwen3-patterns": (
        "qwen3",
        {
            "target_modules": r".*\.(q|k|up)_proj",
            "rank_pattern": {"k_proj": 2, "layers.1.mlp.up_proj": 5},
            "alpha_pattern": {"k_proj": 3},
            "modules_to_save": ["lm_head", "input_layernorm"],
        },
    ),
    "phi3": ("phi3", {"target_modules": ["qkv_proj", "gate_up_proj", "lm_head"]}),
    "gpt2": ("gpt2", {"target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True}),
    "gpt2-dora": ("gpt2", {"target_modules": ["c_attn", "c_fc"], "fan_in_fan_out": True, "use_dora": True}),
    "embedding": ("llama", {"target_modules": ["embed_tokens", "v_proj"]}),
    "embedding-dora": ("gpt2", {"target_modules": ["wte", "c_fc"], "use_dora": True}),
    "deepseek_v3": (
        "deepseek_v3",
        {
            "target_modules": ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"],
            "target_parameters": [*EXPERTS, "model.layers.0.mlp.down_proj.weight"],
        },
    ),
    "qwen3_moe": ("qwen3_moe", {"target_modules": ["q_proj", "gate_proj", "up_proj", "down_proj", "gate"]}),
    "mixtral": ("mixtral", {"target_modules": ["v_proj"], "target_parameters": EXPERTS[1:]}),
    "gpt_oss": ("gpt_oss", {"target_modules": ["q_proj"], "target_parameters": EXPERTS}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", swept(CASES, ("llama", "qwen3-patterns", "gpt2-dora", "gpt_oss")))
def test_merging_equals_peft(name: str, tmp_path: Path) -> None:
    family, settings = CASES[name]
    base = build_model_folder(tmp_path / "base", family, num_hidden_layers=2, tie_word_embeddings=False)
    adapter = build_adapter(base, tmp_path / "adapter", **settings)
    convert(base, tmp_path / "merged", "hf", adapter=adapter)
    theirs = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter)
    ours = logits(AutoModelForCausalLM.from_pretrained(tmp_path / "merged"))
    assert (logits(AutoModelForCausalLM.from_pretrained(base)) - ours).abs().max() > 1e-2
    torch.testing.assert_close(ours, logits(theirs), atol=1e-5, rtol=0)
    theirs.merge_and_unload().save_pretrained(tmp_path / "theirs")
    merged, expected = content(tmp_path / "merged"), content(tmp_path / "theirs")
    assert merged.keys() == expected.keys()
    for tensor, value in expected.items():
        torch.testing.assert_close(merged[tensor], value, atol=1e-6, rtol=0, msg=tensor)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", swept(["llama", "qwen3-dora", "gpt2", "deepseek_v3", "mixtral", "gpt_oss"], ("qwen3-dora", "deepseek_v3"))
)
def test_written_adapter_is_that_of_peft(name: str, tmp_path: Path) -> None:
    family_name, settings = CASES[name]
    base = build_model_folder(tmp_path / "base", family_name, num_hidden_layers=2, tie_word_embeddings=False)
    read = PeftFolder(build_adapter(base, tmp_path / "adapter", **settings))
    config = json.loads((base / "config.json").read_text())
    family = family_for(config)
    arch = family.to_architecture(config)
    adapted = linears_with_adapter(read, family, arch, base)
    linears = [linear for group in all_linears(family, arch).values() for linear in group]
    factors = {
        linear: read.factors(linear, linear.expert)
        for linears in reversed(adapted.values())  # the order of ranks and stages is any
        for linear in linears
    }
    (tmp_path / "written").mkdir()
    write_adapter(tmp_path / "written", replace(read.config, target_modules=(), target_parameters=()), factors, linears)
    ours, theirs = content(tmp_path / "written"), content(tmp_path / "adapter")
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)
    loaded = [
        peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path / folder)
        for folder in ("adapter", "written")
    ]
    assert torch.equal(*map(logits, loaded))


@pytest.mark.slow
def test_written_targets_select_these_layers_only(tmp_path: Path) -> None:
    base = build_model_folder(tmp_path / "base", "deepseek_v3", num_hidden_layers=3)
    config = json.loads((base / "config.json").read_text())
    family = family_for(config)
    arch = family.to_architecture(config)
    linears = [linear for group in all_linears(family, arch).values() for linear in group]
    targets = ["layers.1.self_attn.o_proj", "q_b_proj", "experts.down_proj", "shared_experts.up_proj"]
    chosen = [linear for linears in adapted_linears(family, arch, targets).values() for linear in linears]
    factors = {item: LoraFactors(torch.randn(2, item.inputs) / 5, torch.randn(item.out, 2) / 5, 1.0) for item in chosen}
    saved = {"lm_head.weight": torch.randn(VOCAB, 32) / 5}
    settings = AdapterConfig(r=2, lora_alpha=2, lora_dropout=0.1, modules_to_save=("lm_head",))
    write_adapter(tmp_path, settings, factors, linears, saved)
    written = json.loads((tmp_path / "adapter_config.json").read_text())
    assert {*written["target_modules"]} == {"model.layers.1.self_attn.o_proj", "q_b_proj"}
    shared = [f"model.layers.{n}.mlp.shared_experts.up_proj.weight" for n in (1, 2)]
    assert {*written["target_parameters"]} == {"down_proj", *shared} and written["lora_dropout"] == 0
    loaded = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path)
    theirs = {name.replace(".default", "") for name, _ in loaded.named_parameters() if ".lora_" in name}
    assert {f"{name}" for name in content(tmp_path) if ".lora_" in name} == theirs
    convert(base, tmp_path / "merged", "hf", adapter=tmp_path)
    merged = logits(AutoModelForCausalLM.from_pretrained(tmp_path / "merged"))
    torch.testing.assert_close(merged, logits(loaded), atol=1e-5, rtol=0)
    assert torch.equal(content(tmp_path / "merged")["lm_head.weight"], saved["lm_head.weight"])


@pytest.mark.sweep_cases("gpt2-dora", "deepseek_v3")
@pytest.mark.slow_cases("gpt_oss", "qwen3-dora")
@pytest.mark.parametrize("name", ["deepseek_v3", "gpt_oss", "gpt2-dora", "qwen3-dora"])
def test_slices_equal_the_whole(name: str, tmp_path: Path) -> None:
    """As the ranks of tp 2 and ep 2 read them; and memory: only the slice of the base is read."""
    family_name, settings = CASES[name]
    base = build_model_folder(tmp_path / "base", family_name, num_hidden_layers=2, tie_word_embeddings=False)
    adapter = PeftFolder(build_adapter(base, tmp_path / "adapter", **settings))
    folder = ModelFolder.open(base)
    family = family_for(folder.config)
    arch = family.to_architecture(folder.config)
    full = MergedWeights(folder, family, arch, adapter)
    expected = {name: full.read(name) for name in full.tensors}
    sliced = MergedWeights(folder, family, arch, adapter)  # with norms not yet computed
    for placed in family.placements(arch).values():
        size = 1 if placed.rule.shard == "whole" else 2
        layout = Layout(tp_rank=size - 1, tp_size=size, etp_rank=size - 1, etp_size=size, padded_vocab_size=80)
        for piece in tensor_slices(placed.rule, arch, layout, placed.expert):
            tensor = placed.hf[piece.part]
            target = torch.empty_like(expected[tensor][piece.hf], dtype=torch.float64)
            sliced.read(tensor, piece.hf, into=target)
            torch.testing.assert_close(target.float(), expected[tensor][piece.hf], atol=1e-6, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_moe", "phi3"])
def test_conversion_to_megatron_and_back(name: str, tmp_path: Path) -> None:
    family, settings = CASES[name]
    base = build_model_folder(
        tmp_path / "base", family, num_hidden_layers=2, tie_word_embeddings=False, dtype=torch.bfloat16
    )
    adapter = build_adapter(base, tmp_path / "adapter", **settings)
    convert(base, tmp_path / "merged", "hf", adapter=adapter)
    layout = LegacyLayout(tp=2, pp=2, ep=2 if name == "qwen3_moe" else 1)
    convert(base, tmp_path / "dist", adapter=adapter)
    convert(base, tmp_path / "legacy", "torch", layout=layout, adapter=adapter)
    merged = content(tmp_path / "merged")
    assert {tensor.dtype for tensor in merged.values()} == {torch.bfloat16}
    for source in ("dist", "legacy"):
        convert(tmp_path / source, tmp_path / f"{source}-hf")
        back = content(tmp_path / f"{source}-hf")
        assert back.keys() == merged.keys() and all(torch.equal(back[key], merged[key]) for key in merged)


def test_adapter_with_a_module_for_each_expert(tmp_path: Path) -> None:
    """As saved with transformers 4, whose experts were modules."""
    base = build_model_folder(tmp_path / "base", "mixtral", num_hidden_layers=1)
    before, generator = content(base), torch.Generator().manual_seed(0)
    tensors, expected = {}, {}
    for module in ("experts.2.w1", "experts.5.w2", "gate"):
        path = f"model.layers.0.block_sparse_moe.{module}"
        out, inputs = before[f"{path}.weight"].shape
        a, b = (torch.randn(shape, generator=generator) for shape in ((2, inputs), (out, 2)))
        tensors |= {f"base_model.model.{path}.lora_A.weight": a, f"base_model.model.{path}.lora_B.weight": b}
        expected[f"{path}.weight"] = before[f"{path}.weight"] + 2 * (b @ a)
    adapter = hand_made(tmp_path / "adapter", tensors, r=2, lora_alpha=4)
    convert(base, tmp_path / "merged", "hf", adapter=adapter)
    merged = content(tmp_path / "merged")
    for name, tensor in merged.items():
        torch.testing.assert_close(tensor, expected.get(name, before[name]), atol=1e-6, rtol=0)


def hand_made(folder: Path, tensors: dict[str, torch.Tensor], **settings: Any) -> Path:
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", **settings}))
    return folder


@pytest.mark.parametrize("both", [False, True])
def test_tied_embedding(both: bool, tmp_path: Path) -> None:
    base = build_model_folder(tmp_path / "base", "llama", tie_word_embeddings=True, num_hidden_layers=1)
    embedding = torch.randn(VOCAB, 32)
    saved = {"base_model.model.model.embed_tokens.weight": embedding}
    if both:
        saved["base_model.model.lm_head.weight"] = embedding.clone()
    done = convert(base, tmp_path / "merged", "hf", adapter=hand_made(tmp_path / "a", saved, r=1, lora_alpha=1))
    merged, config = content(tmp_path / "merged"), json.loads((tmp_path / "merged/config.json").read_text())
    assert torch.equal(merged["model.embed_tokens.weight"], embedding)
    assert (config["tie_word_embeddings"], "lm_head.weight" in merged) == (both, not both)
    assert both or torch.equal(merged["lm_head.weight"], content(base)["model.embed_tokens.weight"])
    assert ("no longer tied" in " ".join(done.notes)) != both


BAD: dict[str, tuple[dict[str, Any], type[IsthmusError], str]] = {
    "not-lora": ({"peft_type": "LOHA"}, UsageError, "peft_type is LOHA, and only LORA is supported"),
    "rank-0": ({"r": 0}, UsageError, "rank 0 is no adapter"),
    "no-alpha": ({"lora_alpha": None}, DataError, "lacks r and lora_alpha"),
    "nan": ({"lora_alpha": math.nan}, DataError, "lora_alpha is nan, expected a finite number"),
    "infinity": ({"lora_alpha": math.inf}, DataError, "lora_alpha is inf, expected a finite number"),
    "huge": ({"lora_alpha": 1e308}, DataError, "is not finite after"),
    "nan-of-module": ({"alpha_pattern": {"q_proj": math.nan}}, DataError, "alpha_pattern of q_proj is nan, expected a"),
    "string": ({"alpha_pattern": "q_proj"}, DataError, "settings of another type"),
    "string-of-module": ({"alpha_pattern": {"q_proj": "16"}}, DataError, "alpha_pattern of q_proj is '16', expected a"),
    "pissa": ({"init_lora_weights": "pissa"}, UsageError, "path_initial_model_for_weight_conversion"),
    "variant": ({"use_qalora": True}, UsageError, "use_qalora=True is not supported"),
    "dora": ({"use_dora": True}, DataError, "and no model.layers.0.self_attn.q_proj.lora_magnitude_vector"),
    "slow": ({"rank_pattern": {"(a+)+b": 2}}, DataError, "'(a+)+b' of rank_pattern or alpha_pattern may run"),
    "rank": ({"rank_pattern": {"q_proj": 2}}, DataError, "lora_A.weight is [3, 32], not [2, 32]"),
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a base and an adapter of it."""
    root = tmp_path_factory.mktemp("plain")
    base = build_model_folder(root / "base", "llama", num_hidden_layers=1)
    build_adapter(base, root / "adapter", target_modules=["q_proj"])
    return root


@pytest.mark.slow
@pytest.mark.parametrize("name", BAD)
def test_bad_adapters(name: str, plain: Path, tmp_path: Path) -> None:
    changes, kind, message = BAD[name]
    adapter = shutil.copytree(plain / "adapter", tmp_path / "adapter")
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps(config | changes))
    with pytest.raises(kind) as error:
        convert(plain / "base", tmp_path / "out", "hf", adapter=adapter)
    assert message in str(error.value) and "\n" not in str(error.value)
    assert not (tmp_path / "out").exists()


def test_adapter_of_another_base(plain: Path, tmp_path: Path) -> None:
    wide = build_model_folder(tmp_path / "wide", "llama", num_hidden_layers=1, hidden_size=48)
    with pytest.raises(DataError, match=r"lora_A.weight is \[3, 32\], not \[3, 48\].* It was trained on .*base\."):
        convert(wide, tmp_path / "out", "hf", adapter=plain / "adapter")
    fused = build_model_folder(tmp_path / "fused", "phi3", num_hidden_layers=1)
    with pytest.raises(DataError, match=r"fused: 1 not expected: model.layers.0.self_attn.q_proj\."):
        convert(fused, tmp_path / "out", "hf", adapter=plain / "adapter")


def test_adapters_of_other_modules_are_not_trained(tmp_path: Path) -> None:
    base = build_model_folder(tmp_path / "base", "llama", num_hidden_layers=1)
    config = json.loads((base / "config.json").read_text())
    family = family_for(config)
    adapter = PeftFolder(build_adapter(base, tmp_path / "adapter", target_modules=["q_proj", "embed_tokens"]))
    with pytest.raises(UsageError, match=r"adapts model.embed_tokens, which .* Merge it first: isthmus merge BASE"):
        linears_with_adapter(adapter, family, family.to_architecture(config), base)


def test_adapter_files(plain: Path, tmp_path: Path) -> None:
    with pytest.raises(MissingInput, match=r"has no adapter_config.json"):
        convert(plain / "base", tmp_path / "out", "hf", adapter=plain)
    (shutil.copytree(plain / "adapter", tmp_path / "half") / "adapter_model.safetensors").unlink()
    with pytest.raises(MissingInput, match=r"has no adapter_model.safetensors"):
        convert(plain / "base", tmp_path / "out", "hf", adapter=tmp_path / "half")
    convert(plain / "base", tmp_path / "dist")
    with pytest.raises(UsageError, match=r"Convert the checkpoint first: isthmus convert .*dist DST --to hf"):
        convert(tmp_path / "dist", tmp_path / "out", "hf", adapter=plain / "adapter")
    with pytest.raises(MissingInput, match=r"isthmus merge .*/base .*/adapter .*/adapter-merged"):
        convert(plain / "adapter", tmp_path / "out")


def test_merge_command(plain: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert parse_and_run(["merge", str(plain / "base"), str(plain / "adapter"), str(tmp_path / "out"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["destination_format"] == "hf"
    before, after = content(plain / "base"), content(tmp_path / "out")
    assert [name for name in before if not torch.equal(before[name], after[name])] == [
        "model.layers.0.self_attn.q_proj.weight"
    ]
