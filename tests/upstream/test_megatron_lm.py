"""Interoperability with unmodified Megatron-LM core_v0.16.1: it loads our checkpoints, and we convert its checkpoints.

Set ``MEGATRON_LM`` to a checkout, and install ``einops`` and ``six``. Each test runs Megatron-LM's ``pretrain_gpt.py``
or its loader and model (``driver.py``) with ``isthmus run`` on a CPU.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from isthmus.cli.main import parse_and_run
from isthmus.convert.legacy.legacy_layout import LegacyLayout
from isthmus.convert.transfer import convert
from ranks.tiny import SEQ_LENGTH, VOCAB, build_model_folder
from upstream.checkout_marks import MEGATRON_LM, needs_checkout, needs_packages

pytestmark = [
    pytest.mark.ranks,
    needs_checkout,
    needs_packages,
]
DRIVER = Path(__file__).with_name("driver.py")
RUN = (sys.executable, "-m", "isthmus", "run", "--platform", "cpu")
DATA = shlex.split(
    f"--seq-length {SEQ_LENGTH} --max-position-embeddings 128 --mock-data --tokenizer-type NullTokenizer "
    f"--vocab-size {VOCAB - 1} --micro-batch-size 1 --global-batch-size 2 --lr 1e-3 --train-iters 3 --log-interval 1 "
    "--eval-iters 0 --eval-interval 100"
)
_LLAMA = (
    "--num-layers 4 --hidden-size 32 --ffn-hidden-size 48 --num-attention-heads 4 --swiglu --normalization RMSNorm "
    "--disable-bias-linear --position-embedding-type rope --untie-embeddings-and-output-weights "
    "--attention-dropout 0 --hidden-dropout 0 "
)
MODELS = {
    "llama": _LLAMA + "--group-query-attention --num-query-groups 2 --rotary-base 500000 --norm-epsilon 1e-6",
    "mixtral": _LLAMA + "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 24",
    "gpt2": "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --attention-dropout 0 --hidden-dropout 0",
}
LIMIT = 1e-4


def run_script(script: Path | str, *args: Any, ranks: int = 1) -> str:
    """``isthmus run``; returns its stdout."""
    done = subprocess.run(
        [*RUN, "--nproc", str(ranks), str(script), *map(str, args)],
        env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def pretrain_gpt(*args: Any, ranks: int = 1) -> str:
    return run_script(Path(MEGATRON_LM, "pretrain_gpt.py"), *args, ranks=ranks)


@pytest.fixture
def ids(tmp_path: Path) -> Path:
    tokens = torch.randint(0, VOCAB, (2, 20), generator=torch.Generator().manual_seed(0))
    torch.save(tokens, tmp_path / "ids.pt")
    return tmp_path / "ids.pt"


def megatron_logits(ids: Path, *flags: str, ranks: int = 1) -> torch.Tensor:
    out = ids.with_name("logits.pt")
    args = ("logits", MEGATRON_LM, ids, out, *flags, *DATA, "--exit-on-missing-checkpoint")
    printed = run_script(DRIVER, *args, ranks=ranks)
    assert "load_return" not in printed, "a strict load failed and Megatron-LM continued"
    result: torch.Tensor = torch.load(out)
    return result[..., :VOCAB]


@torch.no_grad()
def hf_logits(ids: Path, folder: Path) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, trust_remote_code=True).eval()
    logits: torch.Tensor = model(torch.load(ids)).logits
    return logits


def difference(logits: torch.Tensor, other: torch.Tensor) -> float:
    return float((logits - other).abs().max())


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("llama", {}),
        ("llama", {"tie_word_embeddings": True}),
        ("qwen3", {}),
        ("mistral", {"sliding_window": 5}),
        ("gpt2", {}),
        ("starcoder2", {}),
        ("smollm3", {}),
        ("mixtral", {}),
        ("qwen2_moe", {"mlp_only_layers": [1]}),
        ("glm4_moe", {}),
        ("isthmus", {"router_bias": True}),
    ],
)
@pytest.mark.parametrize("to", ["torch_dist", "torch"])
def test_megatron_lm_loads_converted_checkpoint(
    family: str, settings: dict[str, Any], to: Any, ids: Path, tmp_path: Path
) -> None:
    model = build_model_folder(tmp_path / "hf", family, **settings)
    done = convert(model, tmp_path / "megatron", to, spelling="local" if to == "torch" else None)
    assert done.megatron_lacks == []
    flags = [arg for flag in done.megatron_flags for arg in shlex.split(flag)]
    logits_difference = difference(megatron_logits(ids, *flags), hf_logits(ids, model))
    assert logits_difference <= LIMIT


@pytest.mark.parametrize(("family", "tp"), [("gpt2", 1), ("qwen3", 2), ("mixtral", 1)])
def test_names_of_transformer_engine_load_into_local_layers(family: str, tp: int, ids: Path, tmp_path: Path) -> None:
    model = build_model_folder(tmp_path / "hf", family)
    done = convert(model, tmp_path / "megatron", "torch", layout=LegacyLayout(tp=tp))
    flags = [arg for flag in done.megatron_flags for arg in shlex.split(flag)]
    assert difference(megatron_logits(ids, *flags, ranks=tp), hf_logits(ids, model)) <= LIMIT


def test_a_checkpoint_without_tensors_of_the_model_is_refused(ids: Path, tmp_path: Path) -> None:
    model = build_model_folder(tmp_path / "hf", "llama")
    done = convert(model, tmp_path / "megatron", "torch")
    flags = [arg for flag in done.megatron_flags for arg in shlex.split(flag)]
    args = ("logits", MEGATRON_LM, ids, tmp_path / "out", *flags, *DATA, "--qk-layernorm")
    run = subprocess.run([*RUN, str(DRIVER), *map(str, args)], capture_output=True, text=True)
    assert run.returncode == 65
    assert "without decoder.layers.0.self_attention.k_layernorm.weight" in run.stderr.splitlines()[-1]


@pytest.mark.parametrize("family", ["gpt2", "qwen3", "mixtral"])
def test_a_config_as_arguments_builds_its_model_and_trains(
    family: str, ids: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = build_model_folder(tmp_path / "hf", family)
    convert(model, tmp_path / "megatron")
    settings = "recipe=pretrain data.mock=true data.seq_length=16 data.valid_fraction=0 train.steps=3 logging.every=1"
    settings += " train.precision=fp32 checkpoint.resume=never checkpoint.save_final=false logging.to=[]"
    settings += " moe.dispatcher=allgather"  # the other one needs CUDA streams
    assert parse_and_run(["config", "to-megatron", f"model.path={model}", "out=run", *settings.split()]) == 0
    args = shlex.split(capsys.readouterr().out)
    assert difference(megatron_logits(ids, *args, "--load", str(tmp_path / "megatron")), hf_logits(ids, model)) <= LIMIT
    assert "iteration        3/       3" in pretrain_gpt(*args)


def test_missing_flag_changes_logits(ids: Path, tmp_path: Path) -> None:
    model = build_model_folder(tmp_path / "hf", "mistral", sliding_window=5)
    flags = convert(model, tmp_path / "megatron").megatron_flags
    assert flags.pop() == "--window-size 4,0"
    result = megatron_logits(ids, *(arg for flag in flags for arg in shlex.split(flag)))
    assert difference(result, hf_logits(ids, model)) > 100 * LIMIT


@pytest.mark.parametrize(
    ("family", "ranks", "layout"),
    [
        ("llama", 1, ""),
        ("llama", 2, "--tensor-model-parallel-size 2 --use-distributed-optimizer"),
        ("llama", 4, "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --ckpt-format torch"),
        (
            "llama",
            4,
            "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --ckpt-format torch "
            "--use-distributed-optimizer",
        ),
        ("gpt2", 2, "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 --ckpt-format torch"),
        ("mixtral", 2, "--expert-model-parallel-size 2"),
        ("mixtral", 2, "--expert-model-parallel-size 2 --ckpt-format torch"),
    ],
)
def test_megatron_lm_checkpoint_converts(family: str, ranks: int, layout: str, ids: Path, tmp_path: Path) -> None:
    built = [*shlex.split(MODELS[family]), *layout.split(), "--make-vocab-size-divisible-by", "8"]
    saved = tmp_path / "saved"
    pretrain_gpt(*built, *DATA, "--save", saved, "--save-interval", 3, ranks=ranks)
    assert convert(saved, tmp_path / "hf").family == family
    theirs = megatron_logits(ids, "--load", str(saved), "--no-load-optim", "--no-load-rng", *built, ranks=ranks)
    logits_difference = difference(theirs, hf_logits(ids, tmp_path / "hf"))
    assert logits_difference <= LIMIT


@pytest.mark.parametrize(("to", "layout"), [("torch_dist", {}), ("torch", {"tp": 2})])
def test_training_between_conversions(to: Any, layout: dict[str, int], ids: Path, tmp_path: Path) -> None:
    model = build_model_folder(tmp_path / "hf", "qwen3")
    options = {"layout": LegacyLayout(**layout), "spelling": "local"} if to == "torch" else {}
    done = convert(model, tmp_path / "megatron", to, **options)  # type: ignore[arg-type]
    flags = [arg for flag in done.megatron_flags for arg in shlex.split(flag)]
    saved, ranks = tmp_path / "saved", layout.get("tp", 1)
    pretrain_gpt(*flags, *DATA, "--save", saved, "--save-interval", 3, ranks=ranks)
    convert(saved, tmp_path / "back")
    loading = [flags[0], str(saved), *flags[2:]]
    theirs = megatron_logits(ids, *loading, "--no-load-optim", "--no-load-rng", ranks=ranks)
    back = hf_logits(ids, tmp_path / "back")
    logits_difference = difference(theirs, back)
    assert logits_difference <= LIMIT
    assert difference(back, hf_logits(ids, model)) > LIMIT, "training did not change the model"
