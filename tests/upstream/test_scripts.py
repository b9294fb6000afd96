"""Unmodified scripts of Megatron-LM under ``isthmus run``: training, preparing data and converting checkpoints.

Set ``MEGATRON_LM_SCRIPTS`` to checkouts of core_v0.15 and core_v0.16, separated by ``:``; by default that of
``MEGATRON_LM``. Install ``einops`` and ``six``.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM

from isthmus.convert.legacy.legacy_layout import LegacyLayout
from isthmus.convert.transfer import convert
from isthmus.convert.verify.compare import compare_models
from isthmus.data.store.indexed_dataset import IndexedWriter, open_indexed
from isthmus.hf.tiny_model import build_tiny_qwen3, train_tokenizer
from isthmus.recipes.data.data_sources import find_source
from ranks.tiny import SEQ_LENGTH, build_model_folder
from upstream.checkout_marks import needs_packages

SFT_DATASET = "megatron/training/datasets/sft_dataset.py"
VOCAB = 80  # even, for tp=2
_NAMES = os.environ.get("MEGATRON_LM_SCRIPTS", "") or os.environ.get("MEGATRON_LM", "")
CHECKOUTS = [Path(name) for name in _NAMES.split(":") if name]
pytestmark = [
    pytest.mark.ranks,
    pytest.mark.skipif(not CHECKOUTS, reason="no Megatron-LM: set MEGATRON_LM_SCRIPTS to checkouts of 0.15 and 0.16"),
    needs_packages,
    pytest.mark.parametrize("megatron", CHECKOUTS, ids=lambda path: path.name),
]


def run_script(script: Path, *args: Any, ranks: int = 1, fails: bool = False) -> str:
    """Its stdout and stderr."""
    done = subprocess.run(
        [sys.executable, "-m", "isthmus", "run", "--platform", "cpu", "--nproc", str(ranks), script, *map(str, args)],
        env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == int(fails), done.stderr[-3000:]
    return done.stdout + done.stderr


def flags(folder: Path, to: Any, destination: Path, **options: Any) -> list[str]:
    """Convert; the flags for Megatron-LM."""
    return [arg for flag in convert(folder, destination, to, **options).megatron_flags for arg in shlex.split(flag)]


def periodic_tokens(prefix: Path) -> torch.Tensor:
    """Documents in which each sample has the same tokens, wherever it starts a multiple of its length; [S + 1]."""
    period = np.random.default_rng(0).integers(0, VOCAB, SEQ_LENGTH)
    with IndexedWriter(prefix, np.uint16) as writer:
        for _ in range(20):
            writer.add(np.tile(period, 4))
    return torch.tensor([*period, period[0]])


def test_training_on_two_ranks_between_conversions(megatron: Path, tmp_path: Path) -> None:
    """The validation loss of Megatron-LM after the last step is the loss of transformers with the result."""
    model = build_model_folder(tmp_path / "hf", "qwen3", vocab_size=VOCAB)
    sample = periodic_tokens(tmp_path / "data")
    training = shlex.split(
        f"--data-path {tmp_path}/data --split 80,20,0 --seq-length {SEQ_LENGTH} --tokenizer-type NullTokenizer "
        f"--vocab-size {VOCAB - 1} --tensor-model-parallel-size 2 --sequence-parallel --micro-batch-size 1 "
        "--global-batch-size 2 --lr 1e-2 --train-iters 3 --log-interval 1 --eval-iters 1 --eval-interval 3 "
        "--save-interval 3 --finetune --attention-dropout 0 --hidden-dropout 0"
    )
    converted = flags(model, "torch_dist", tmp_path / "megatron")
    words = [*converted, *training, "--save", str(tmp_path / "saved")]
    printed = run_script(megatron / "pretrain_gpt.py", *words, ranks=2)
    assert "Stack (most recent call first)" not in printed
    assert list(tmp_path.glob("data/cache/GPTDataset_indices/*-description.txt"))
    assert find_source("train", "data", "train", [str(tmp_path / "data")]).prepared  # not the cache in folder data
    convert(tmp_path / "saved", tmp_path / "back", hf_like=model)
    results = re.findall(r"validation loss at iteration 3 on validation set \| lm loss value: (\S+)", printed)
    assert len(results) == 1
    before, after = hf_loss(model, sample), hf_loss(tmp_path / "back", sample)
    assert abs(after - float(results[0])) < 1e-5
    assert after < before - 0.1


def test_arguments_that_older_commands_lack(megatron: Path, tmp_path: Path) -> None:
    (tmp_path / "vocab.json").write_text('{"a": 0, "<|endoftext|>": 1}')
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    words = shlex.split(
        "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --micro-batch-size 1 --lr 1e-4 "
        "--global-batch-size 1 --train-iters 1 --eval-iters 1 --eval-interval 9 --mock-data "
        f"--vocab-file {tmp_path}/vocab.json --merge-file {tmp_path}/merges.txt"
    )
    script = megatron / "pretrain_gpt.py"
    assert ". Add --max-position-embeddings, for example" in run_script(script, *words, fails=True)
    needed = ["--max-position-embeddings", "16"]
    assert "GPT2BPETokenizer and --legacy-tokenizer" in run_script(script, *words, *needed, fails=True)


def test_stages_with_different_numbers_of_layers(megatron: Path, tmp_path: Path) -> None:
    """Megatron-LM's validation loss with the first and the last stage as the flags describe them."""
    model = build_model_folder(tmp_path / "hf", "qwen3", vocab_size=VOCAB, num_hidden_layers=3)
    sample = periodic_tokens(tmp_path / "data")
    converted = flags(model, "torch", tmp_path / "megatron", layout=LegacyLayout(pp=2), spelling="local")
    assert converted[converted.index("--decoder-first-pipeline-num-layers") + 1] == "2"
    training = shlex.split(
        f"--data-path {tmp_path}/data --split 80,20,0 --seq-length {SEQ_LENGTH} --tokenizer-type NullTokenizer "
        f"--vocab-size {VOCAB - 1} --micro-batch-size 1 --global-batch-size 2 --lr 0 --train-iters 1 --log-interval 1 "
        "--eval-iters 1 --eval-interval 1 --finetune --attention-dropout 0 --hidden-dropout 0"
    )
    printed = run_script(megatron / "pretrain_gpt.py", *converted, *training, ranks=2)
    losses = re.findall(r"validation loss at iteration 1 on validation set \| lm loss value: (\S+)", printed)
    assert abs(float(losses[0]) - hf_loss(model, sample)) < 1e-5


@torch.no_grad()
def hf_loss(folder: Path, sample: torch.Tensor) -> float:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    logits = model(sample[None, :-1]).logits[0]
    return float(torch.nn.functional.cross_entropy(logits, sample[1:]))


def test_fine_tuning_on_packed_conversations(megatron: Path, tmp_path: Path) -> None:
    """The validation loss after the last step is that of transformers with the result, on each conversation alone."""
    asked = [["two plus three", "five"], ["three plus three", "six"]]
    names = {"user": "<SPECIAL_11>User\n{}\n<SPECIAL_11>Assistant\n", "system": "<SPECIAL_10>System\n{}\n"}
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<SPECIAL_10>", "<SPECIAL_11>", "<SPECIAL_233>"]
    words = ["System User Assistant add", *map(" ".join, asked)]
    tokenizer = train_tokenizer(words, vocab_size=VOCAB * 4, special_tokens=special)
    size = len(tokenizer) + len(tokenizer) % 2  # even, for tp=2
    model = build_model_folder(tmp_path / "hf", "qwen3", vocab_size=size)
    tokenizer.save_pretrained(model)
    chats = [[("system", "add"), ("user", question), ("assistant", answer)] for question, answer in asked]
    samples = []
    for (_, system), (_, question), (_, answer) in chats:
        prompt = tokenizer.encode(names["system"].format(system) + names["user"].format(question))
        samples.append((prompt, [*tokenizer.encode(f"{answer}\n"), tokenizer.eos_token_id]))
    if "_split_conversations" in (megatron / SFT_DATASET).read_text():  # 0.16 packs the conversations of a record
        length = (sum(len(prompt + answer) for prompt, answer in samples) - 1) // 2 * 2  # and cuts the last one
        samples[1] = samples[1][0], samples[1][1][: length - len(samples[0][0] + samples[0][1] + samples[1][0])]
        assert len(samples[1][1]) >= 1
    else:
        chats, samples, length = chats[:1], samples[:1], 96
    turns = [{"role": role, "content": text} for chat in chats for role, text in chat]
    (tmp_path / "chats.jsonl").write_text(f"{json.dumps({'messages': turns})}\n" * 20)
    training = shlex.split(
        f"--sft --data-path {tmp_path}/chats.jsonl --split 80,20,0 --seq-length {length} --legacy-tokenizer "
        f"--tokenizer-type SFTTokenizer --tokenizer-model {model} --make-vocab-size-divisible-by 1 --lr 1e-2 "
        "--micro-batch-size 1 --global-batch-size 1 --train-iters 3 --log-interval 1 --eval-iters 1 --eval-interval 3 "
        "--save-interval 3 --finetune --attention-dropout 0 --hidden-dropout 0 --sequence-parallel "
        "--tensor-model-parallel-size 2 --no-create-attention-mask-in-dataloader"
    )
    converted = flags(model, "torch_dist", tmp_path / "megatron")
    printed = run_script(
        megatron / "pretrain_gpt.py", *converted, *training, "--save", str(tmp_path / "saved"), ranks=2
    )
    convert(tmp_path / "saved", tmp_path / "back", hf_like=model)
    results = re.findall(r"validation loss at iteration 3 on validation set \| lm loss value: (\S+)", printed)
    before, after = answer_loss(model, samples), answer_loss(tmp_path / "back", samples)
    assert abs(after - float(results[0])) < 1e-5
    assert after < before - 0.1


@torch.no_grad()
def answer_loss(folder: Path, samples: list[tuple[list[int], list[int]]]) -> float:
    """Mean over the tokens of all answers."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    losses = []
    for prompt, answer in samples:
        logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
        losses.append(torch.nn.functional.cross_entropy(logits, torch.tensor(answer), reduction="none"))
    return float(torch.cat(losses).mean())


def test_experts_train_with_the_flags_of_gpus(megatron: Path) -> None:
    words = shlex.split(
        "--num-layers 2 --hidden-size 32 --ffn-hidden-size 48 --num-attention-heads 4 --swiglu --disable-bias-linear "
        "--normalization RMSNorm --position-embedding-type rope --seq-length 16 --max-position-embeddings 64 "
        "--mock-data --tokenizer-type NullTokenizer --vocab-size 4223 --micro-batch-size 1 --global-batch-size 2 "
        "--lr 1e-3 --train-iters 2 --log-interval 1 --eval-iters 0 --eval-interval 9 --num-experts 4 --bf16 "
        "--moe-router-topk 2 --moe-grouped-gemm --moe-token-dispatcher-type alltoall --expert-model-parallel-size 2 "
        "--use-distributed-optimizer --overlap-grad-reduce --attention-backend flash --distributed-backend nccl"
    )
    printed = run_script(megatron / "pretrain_gpt.py", *words, ranks=2)
    assert re.search(r"iteration +2/ +2 .* lm loss: \d", printed)
    assert "without --moe-grouped-gemm, one GEMM per expert (TransformerEngine is missing)" in printed


def test_prepared_data_equals_that_of_preprocess_data(megatron: Path, tmp_path: Path) -> None:
    texts = [" ".join(f"The number is {n * m % 97}." for m in range(9)) for n in range(30)]
    build_tiny_qwen3(
        tmp_path / "hf", texts, vocab_size=300, hidden_size=32, intermediate_size=64, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8,
    )  # fmt: skip
    file = tmp_path / "texts.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    words = ["--input", file, "--output-prefix", tmp_path / "theirs", "--tokenizer-type", "HuggingFaceTokenizer"]
    words += ["--tokenizer-model", tmp_path / "hf", "--workers", 2, "--append-eod"]
    run_script(megatron / "tools/preprocess_data.py", *words)
    command = [sys.executable, "-m", "isthmus", "prepare", file, tmp_path / "ours", "--tokenizer", tmp_path / "hf"]
    subprocess.run([*map(str, command), "--kind", "text"], check=True, capture_output=True)
    for suffix in (".bin", ".idx"):
        ours, theirs = tmp_path / f"ours{suffix}", tmp_path / f"theirs_text_document{suffix}"
        assert len(ours.read_bytes()) > 500
        assert ours.read_bytes() == theirs.read_bytes(), suffix


def test_bos_of_llama_tokenizers_is_that_of_preprocess_data(megatron: Path, tmp_path: Path) -> None:
    """With special tokens the bytes are equal; core 0.15 and 0.16 leave BOS out by default, 0.17 writes it."""
    texts = [" ".join(f"The number is {n * m % 97}." for m in range(9)) for n in range(30)]
    tokenizer = train_tokenizer(texts, vocab_size=300, bos_token="<|endoftext|>")
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", tokenizer.bos_token_id)]
    )
    tokenizer.save_pretrained(tmp_path / "hf")
    file = tmp_path / "texts.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    words = ["--input", file, "--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", tmp_path / "hf"]
    words += ["--workers", 1, "--append-eod", "--output-prefix"]
    command = [sys.executable, "-m", "isthmus", "prepare", file, tmp_path / "ours", "--tokenizer", tmp_path / "hf"]
    subprocess.run([*map(str, command), "--kind", "text"], check=True, capture_output=True)
    ours = open_indexed(tmp_path / "ours")
    assert (ours.tokens[ours.starts] == tokenizer.bos_token_id).all()
    script, arguments = megatron / "tools/preprocess_data.py", (megatron / "megatron/training/arguments.py").read_text()
    with_bos, without_bos = "--tokenizer-hf-include-special-tokens", "--tokenizer-hf-no-include-special-tokens"
    by_default = without_bos in arguments
    if with_bos in arguments:
        run_script(script, *words, tmp_path / "with", *([] if by_default else [with_bos]))
        for suffix in (".bin", ".idx"):
            theirs = tmp_path / f"with_text_document{suffix}"
            assert theirs.read_bytes() == (tmp_path / f"ours{suffix}").read_bytes(), suffix
    run_script(script, *words, tmp_path / "without", *([without_bos] if by_default else []))
    without = open_indexed(tmp_path / "without_text_document")
    assert without.tokens.tolist() == np.delete(ours.tokens, ours.starts).tolist()


@pytest.mark.parametrize("spelling", ["local", "te"])
def test_checkpoint_of_the_converter(spelling: Any, megatron: Path, tmp_path: Path) -> None:
    """tools/checkpoint/convert.py changes tp=2 to pp=2; the tensors are those of the source."""
    model = build_model_folder(tmp_path / "hf", "llama", vocab_size=VOCAB)
    saved, split = tmp_path / "legacy", tmp_path / "split"
    flags(model, "torch", saved, layout=LegacyLayout(tp=2), spelling=spelling)
    sizes = ["--target-tensor-parallel-size", 1, "--target-pipeline-parallel-size", 2]
    words = ["--model-type", "GPT", "--loader", "core", "--saver", "core", "--load-dir", saved, "--save-dir", split]
    run_script(megatron / "tools/checkpoint/convert.py", *words, *sizes, "--position-embedding-type", "rope")
    assert {path.parent.name for path in split.glob("*/*/*.pt")} == {"mp_rank_00_000", "mp_rank_00_001"}
    compare_models(saved, split, hf_like=model)  # raises if a tensor differs


def test_the_loader_of_hugging_face_folders(megatron: Path, shared_data: Path, tmp_path: Path) -> None:
    """--loader llama_mistral; it gives the model the sizes of Llama 2 that config.json does not decide."""
    sizes = {"max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "head_dim": 8}
    model = build_model_folder(tmp_path / "hf", "llama", vocab_size=32000, **sizes)
    for path in (shared_data / "llama2-tokenizer").iterdir():
        shutil.copyfile(path, model / path.name)
    words = ["--model-type", "GPT", "--loader", "llama_mistral", "--checkpoint-type", "hf", "--model-size", "llama2-7B"]
    words += ["--saver", "core", "--target-tensor-parallel-size", 2, "--target-pipeline-parallel-size", 1]
    words += ["--tokenizer-model", model, "--load-dir", model, "--save-dir", tmp_path / "saved"]
    run_script(megatron / "tools/checkpoint/convert.py", *words)
    compare_models(model, tmp_path / "saved")
