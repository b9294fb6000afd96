"""``isthmus verify --logits``: equal models agree in every family, and injected faults are detected."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from isthmus.convert.legacy.legacy_layout import LegacyLayout
from isthmus.convert.transfer import convert
from isthmus.families.registry import all_families
from ranks.rank_pool import RankPool
from ranks.tiny import ARCHETYPES, SIZES, build_model_folder

Tensors = dict[str, torch.Tensor]
Done = dict[str, dict[str, Any]]
LLAMA3 = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0}
LLAMA3 |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 32}
LAYER = "model.layers.{}."


@dataclass(frozen=True)
class Fault:
    """A change to the Hugging Face model of a pair with a Megatron checkpoint."""

    family: str
    layer: int
    """First layer after which hidden states differ."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Config of the model before the fault."""
    tensors: Callable[[Tensors], Tensors] = lambda tensors: tensors
    config: dict[str, Any] = field(default_factory=dict)
    megatron: bool = False
    """Whether ``config`` is for the Megatron model."""


def changed(name: str, new: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Tensors], Tensors]:
    return lambda tensors: tensors | {name: new(tensors[name]).contiguous()}


def swapped(name: str, other: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: tensors | {name: tensors[other], other: tensors[name]}


def without(text: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {name: tensor for name, tensor in tensors.items() if text not in name}


def rope(theta: float) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": theta}, "rope_theta": theta}


FAULTS = {
    "two heads swapped": Fault(
        "qwen3",
        1,
        tensors=changed(
            "model.layers.1.self_attn.q_proj.weight", lambda w: torch.cat((w[32:48], w[16:32], w[:16], w[48:]))
        ),
    ),
    "gate and up swapped": Fault(
        "qwen3",
        2,
        tensors=swapped("model.layers.2.mlp.gate_proj.weight", "model.layers.2.mlp.up_proj.weight"),
    ),
    "rows permuted": Fault("qwen3", 3, tensors=changed("model.layers.3.mlp.gate_proj.weight", lambda w: w.flip(0))),
    "zeroed": Fault("qwen3", 1, tensors=changed("model.layers.1.self_attn.v_proj.weight", torch.zeros_like)),
    "final norm zeroed": Fault("qwen3", 4, tensors=changed("model.norm.weight", torch.zeros_like)),
    "q and k norm of ones": Fault(
        "qwen3", 2, tensors=changed("model.layers.2.self_attn.k_norm.weight", torch.ones_like)
    ),
    "q and k norm dropped": Fault(
        "qwen3", 0, tensors=without("_norm"), config={"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    ),
    "wrong rope base": Fault("qwen3", 0, config=rope(500.0)),
    "wrong rope base in Megatron": Fault("qwen3", 0, config=rope(500.0), megatron=True),
    "wrong rope scaling": Fault(
        "llama", 0, {"rope_parameters": LLAMA3}, config={"rope_parameters": LLAMA3 | {"factor": 4.0}}
    ),
    "rope scaling removed in Megatron": Fault(
        "llama", 0, {"rope_parameters": LLAMA3}, config={**rope(10000.0), "rope_scaling": None}, megatron=True
    ),
    "wrong norm eps": Fault("qwen2", 0, {"rms_norm_eps": 1e-6}, config={"rms_norm_eps": 1e-5}),
    "wrong norm eps in Megatron": Fault(
        "qwen2", 0, {"rms_norm_eps": 1e-6}, config={"rms_norm_eps": 1e-5}, megatron=True
    ),
    "an expert's rows permuted": Fault(
        "qwen3_moe", 1, tensors=changed("model.layers.1.mlp.experts.3.gate_proj.weight", lambda w: w.flip(0))
    ),
    "two experts swapped": Fault(
        "mixtral",
        2,
        tensors=swapped(
            "model.layers.2.block_sparse_moe.experts.0.w2.weight", "model.layers.2.block_sparse_moe.experts.1.w2.weight"
        ),
    ),
    "router bias zeroed": Fault(
        "deepseek_v3", 2, tensors=changed("model.layers.2.mlp.gate.e_score_correction_bias", torch.zeros_like)
    ),
    "router linear bias zeroed": Fault(
        "gpt_oss", 1, tensors=changed("model.layers.1.mlp.router.bias", torch.zeros_like)
    ),
    "sinks zeroed": Fault("gpt_oss", 2, tensors=changed("model.layers.2.self_attn.sinks", torch.zeros_like)),
    "expert weights not normalized": Fault("qwen3_moe", 0, {"norm_topk_prob": True}, config={"norm_topk_prob": False}),
}
FAULT_CASES = [
    pytest.param(
        name,
        marks=[] if fault.family in all_families() else pytest.mark.skip(reason=f"no family {fault.family} yet"),
    )
    for name, fault in FAULTS.items()
]


def pair(folder: Path, family: str, **settings: Any) -> list[str]:
    """The paths of a model in both formats."""
    source = build_model_folder(folder / "hf", family, **settings)
    convert(source, folder / "megatron")
    return [str(source), str(folder / "megatron")]


def inject(fault: Fault, folder: Path) -> list[str]:
    paths = pair(folder, fault.family, **fault.settings)
    source = Path(paths[0])
    save_file(fault.tensors(load_file(source / "model.safetensors")), source / "model.safetensors", {"format": "pt"})
    config = json.dumps(json.loads((source / "config.json").read_text()) | fault.config)
    if not fault.megatron:
        (source / "config.json").write_text(config)
        return paths
    (folder / "wrong").mkdir()
    (folder / "wrong/config.json").write_text(config)
    return [*paths, "--hf-like", str(folder / "wrong")]


def run(world: RankPool, command_lines: dict[str, list[str]]) -> Done:
    """Verify all pairs in one task."""
    done = world.run(
        "parity.tasks.commands", command_lines=[["verify", *args, "--logits"] for args in command_lines.values()]
    )
    return dict(zip(command_lines, done, strict=True))


@pytest.fixture(scope="module")
def injected(one_rank: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Done:
    known = {name: fault for name, fault in FAULTS.items() if fault.family in all_families()}
    return run(one_rank, {name: inject(fault, tmp_path_factory.mktemp("fault")) for name, fault in known.items()})


@pytest.fixture(scope="module")
def clean(one_rank: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Done:
    pairs = {family: pair(tmp_path_factory.mktemp(family), family) for family in ARCHETYPES}
    return run(one_rank, {family: [*paths, "--layer-by-layer", "--json"] for family, paths in pairs.items()})


@pytest.mark.parametrize("name", FAULT_CASES)
def test_injected_fault_is_detected(name: str, injected: Done) -> None:
    fault, done = FAULTS[name], injected[name]
    assert done["code"] == 1 and done["err"].count("\n") == 1
    assert "their logits differ by" in done["err"]
    message = f"the first layer after which hidden states differ is {fault.layer} (of 0 to 3)"
    assert ("check the final norm" if fault.layer == 4 else message) in done["err"]
    config = not fault.config or "they are not the same model" in done["err"]
    assert config and (fault.config or "they differ in" in done["err"])


@pytest.mark.parametrize("family", ARCHETYPES)
def test_archetype_agrees_layer_by_layer(family: str, clean: Done) -> None:
    done = clean[family]
    assert done["code"] == 0, done["err"]
    result = json.loads(done["out"])
    assert result["formats"] == ["hf", "torch_dist"]
    assert 0 < result["logits_max_abs"] < 1e-5 and 0 <= result["logits_mean_kl_nats"] < 1e-9
    assert "transformers and Megatron-Core, 2 samples of 64 tokens, layer by layer" in result["logits_run"]


def test_lengths_of_which_transformers_computes_something_else(one_rank: RankPool, tmp_path: Path) -> None:
    """transformers keeps the short factors of Phi-3.5-MoE: nothing is compared beyond the original length."""
    factors = {"short_factor": [1.0, 1.1, 1.3, 2.0] * 2, "long_factor": [1.0, 2.0, 4.0, 9.0] * 2}
    scaling = {"rope_type": "longrope", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
    rotary = scaling | factors | {"short_mscale": 1.2, "long_mscale": 1.2}
    paths = pair(tmp_path, "phimoe", rope_parameters=rotary)
    done = run(one_rank, {"default": paths, "longer": [*paths, "--tokens", "33"]})
    assert done["default"]["code"] == 0, done["default"]["err"]
    assert "samples of 32 tokens" in done["default"]["err"] + done["default"]["out"]
    assert "beyond 32 tokens transformers keeps the short factors" in done["default"]["err"] + done["default"]["out"]
    assert done["longer"]["code"] == 2 and "Use 32 or fewer" in done["longer"]["err"]


def test_whole_model_and_layerwise_runs_agree(one_rank: RankPool, tmp_path: Path) -> None:
    hf, megatron = pair(tmp_path, "qwen3_moe", tie_word_embeddings=True)
    convert(Path(hf), tmp_path / "legacy", "torch", layout=LegacyLayout(tp=2, pp=2))
    other, legacy = str(shutil.copytree(hf, tmp_path / "other")), str(tmp_path / "legacy")
    results = {
        name: json.loads(done["out"])
        for name, done in run(
            one_rank,
            {
                "whole": [hf, megatron, "--json"],
                "by layer": [hf, megatron, "--json", "--layer-by-layer"],
                "legacy": [legacy, hf, "--json"],
                "both in transformers": [hf, other, "--json"],
                "both in Megatron-Core": [megatron, legacy, "--json"],
            },
        ).items()
    }
    assert results["whole"]["logits_max_abs"] == results["by layer"]["logits_max_abs"] > 0
    assert results["legacy"]["logits_max_abs"] == results["whole"]["logits_max_abs"]
    for name in ("both in transformers", "both in Megatron-Core"):
        assert results[name]["logits_max_abs"] == 0 and name in results[name]["logits_run"]


def test_samples_tolerance_and_incomparable_models(one_rank: RankPool, tmp_path: Path) -> None:
    window = pair(tmp_path / "window", "mistral", sliding_window=70)
    half = tmp_path / "half"
    convert(Path(window[0]), half, "hf", dtype=torch.bfloat16)
    wider = build_model_folder(tmp_path / "wider", "mistral", sliding_window=70, vocab_size=SIZES["vocab_size"] + 1)
    nan = tmp_path / "nan"
    shutil.copytree(window[0], nan)
    tensors = load_file(nan / "model.safetensors")
    tensors["lm_head.weight"][3] = torch.nan
    save_file(tensors, nan / "model.safetensors", {"format": "pt"})
    done = run(
        one_rank,
        {
            "window": [*window, "--json"],
            "shorter": [*window, "--json", "--tokens", "8"],
            "strict": [*window, "--tolerance", "1e-12"],
            "rounded": [window[0], str(half), "--tolerance", "1"],
            "vocabulary": [window[0], str(wider)],
            "nan": [str(nan), window[1]],
        },
    )
    assert "2 samples of 64 and 134 tokens" in json.loads(done["window"]["out"])["logits_run"]
    assert "2 samples of 8 and 78 tokens" in json.loads(done["shorter"]["out"])["logits_run"]
    assert done["strict"]["code"] == 1 and "their logits differ" in done["strict"]["err"]
    assert "they differ in" not in done["strict"]["err"]
    assert done["rounded"]["code"] == 1 and "their logits agree, by 0.0" in done["rounded"]["err"]
    assert done["vocabulary"]["code"] == 1
    assert "vocab_size=77 and 78" in done["vocabulary"]["err"] and "not compared" in done["vocabulary"]["err"]
    assert done["nan"]["code"] == 1 and "their logits differ by nan" in done["nan"]["err"]


def in_fp8(tensors: Tensors) -> Tensors:
    """Projections as FP8 codes with scales of 16 x 16 blocks."""
    result = dict(tensors)
    for name in [name for name in tensors if "_proj" in name]:
        codes = tensors[name].to(torch.float8_e4m3fn)
        rows, cols = codes.shape
        result |= {name: codes, f"{name}_scale_inv": torch.rand(-(-rows // 16), -(-cols // 16)) + 0.5}
    return result


def test_quantized_weights_and_mtp_layers(one_rank: RankPool, tmp_path: Path) -> None:
    folder = build_model_folder(tmp_path / "hf", "deepseek_v3", dtype=torch.bfloat16, num_mtp_layers=1)
    path = folder / "model.safetensors"
    config = json.loads((folder / "config.json").read_text())
    family = all_families()["deepseek_v3"]
    shapes, tensors = family.hf_shapes(family.to_architecture(config)), load_file(path)
    mtp = {name: torch.randn(shape).bfloat16() for name, shape in shapes.items() if name not in tensors}
    assert mtp
    quantization = {"quant_method": "fp8", "weight_block_size": [16, 16]}
    save_file(in_fp8(tensors | mtp), path, {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    convert(folder, tmp_path / "megatron")
    args = [str(folder), str(tmp_path / "megatron"), "--json"]
    for done in run(one_rank, {"whole": args, "by layer": [*args, "--layer-by-layer"]}).values():
        assert done["code"] == 0, done["err"]
        assert 0 < json.loads(done["out"])["logits_max_abs"] < 1e-5


@pytest.mark.thorough
def test_layerwise_memory_is_one_layer(tmp_path: Path) -> None:
    deep = {"num_hidden_layers": 40, "hidden_size": 128, "intermediate_size": 3072, "head_dim": 32}
    large, small = pair(tmp_path / "big", "llama", dtype=torch.bfloat16, **deep), pair(tmp_path / "small", "llama")
    size = 2 * (Path(large[0]) / "model.safetensors").stat().st_size
    code = (
        "import sys\n"
        "from isthmus.cli.main import main\n"
        "def peak():\n"
        "    lines = open('/proc/self/status').read().splitlines()\n"
        "    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith('VmHWM'))\n"
        "args = ['--logits', '--layer-by-layer', '--tokens', '16']\n"
        "assert main(['verify', *sys.argv[1:3], *args]) == 0\n"
        "before = peak()\n"
        "assert main(['verify', *sys.argv[3:5], *args]) == 0\n"
        "print(peak() - before)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, *small, *large], capture_output=True, text=True, check=True)
    peak = int(done.stdout.splitlines()[-1])
    assert peak < size / 4
