"""Makes the folder ``seeds``: a small valid file of each format, on which the damaged ones are based.

python tests/hostile/seeds.py
"""

from __future__ import annotations

import gzip
import importlib
import json
import shutil
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import pyarrow
import pyarrow.parquet
import torch
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING
from transformers.convert_slow_tokenizer import import_protobuf

from isthmus.convert.transfer import convert
from isthmus.data.store.indexed_dataset import IndexedWriter, write_manifest
from isthmus.families.inferred.family_file import write_family
from isthmus.families.known_keys import keys_read
from isthmus.families.registry import all_families
from isthmus.files.file_checksums import CHECKSUMS, write_checksums
from isthmus.hf.tiny_model import train_tokenizer
from isthmus.hf.tokenizer.tokenizer import save_tokenizer
from isthmus.tools.learn.learn import prove
from ranks.tiny import OWN_SIZES, build_model_folder
from ranks.tiny import SIZES as MODEL_SIZES
from unit.config.dialects.examples import MODEL_FILES, experiment
from unit.families.test_family_config import CONFIGS
from unit.families.test_family_config import SIZES as TEST_SIZES

SEEDS = Path(__file__).parent / "seeds"
SIZES = {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2, "head_dim": 4, "num_attention_heads": 2}
CHATS: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": "Hi é"}, {"role": "assistant", "content": "Hello."}]},
    {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}], "system": "s"},
    {"instruction": "Say it.", "input": "", "output": "It.", "history": [["q", "a"]]},
    {"prompt": "p", "chosen": "yes", "rejected": "no", "margin": 1.5},
    {"prompt": [{"role": "user", "content": "p"}], "completion": "c", "label": True},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]},
                  {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]},
                  {"role": "tool", "content": "1"}, {"role": "assistant", "content": "One."}],
     "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}]},
]  # fmt: skip
RUN = """
recipe: sft
out: run
model: {path: model, init: hf}
data: {files: [a.jsonl, b.jsonl], seq_length: 64, columns: {text: body}}
train: &t {steps: 10, global_batch_size: 4, seed: 1, recompute_modules: [core_attn]}
optim:
  lr: 2e-5
  lr_multipliers: {model.embed_tokens.*: 0.1}
lora: {rank: 8, targets: all-linear}
logging: {to: [tensorboard]}
"""
MEGATRON = """torchrun --nproc_per_node 2 pretrain_gpt.py --num-layers 2 --hidden-size 64 --num-attention-heads 4
--seq-length 128 --max-position-embeddings 128 --micro-batch-size 1 --global-batch-size 4 --train-iters 10 --lr 1e-4
--min-lr 1e-5 --lr-decay-style cosine --weight-decay 0.1 --clip-grad 1.0 --bf16 --mock-data --vocab-size 100
--tokenizer-type NullTokenizer --swiglu --normalization RMSNorm --position-embedding-type rope --rotary-base 10000
--num-experts 4 --moe-router-topk 2 --tensor-model-parallel-size 2 --group-query-attention --num-query-groups 2
--disable-bias-linear --untie-embeddings-and-output-weights --split 99,1,0 --save ckpt --save-interval 5"""
ROCM = "MBS=2 BS=16 TP=2 PP=1 SEQ_LENGTH=128 TOTAL_ITERS=5 MODEL_SIZE=8 FSDP=0 MOCK_DATA=1 train.seed=3 GEMM_TUNING=1"
METRICS: list[dict[str, Any]] = [{"step": 0, "valid_loss": 5.5}, {"step": 1, "loss": 5.0, "lr": 1e-5}]


def main() -> None:
    """Replace the folder."""
    shutil.rmtree(SEEDS, ignore_errors=True)
    model, texts = SEEDS / "model", [json.dumps(chat) for chat in CHATS]
    build_model_folder(model, "qwen3", **SIZES, vocab_size=20, num_key_value_heads=1)
    for to in ("torch_dist", "torch"):
        convert(model, SEEDS / to, to)
    _shard(model)
    _write_models(model)
    tokenizer = train_tokenizer(texts * 9, vocab_size=300)
    (SEEDS / "tokenizer").mkdir()
    save_tokenizer(tokenizer, SEEDS / "tokenizer")
    _write_sentencepiece()
    _write_data(texts)
    _write_texts()
    for path in SEEDS.rglob(CHECKSUMS):  # checksums would find all damage
        path.unlink()
    shutil.copytree(SEEDS / "peft", SEEDS / "checksums")
    write_checksums(SEEDS / "checksums")


def _shard(model: Path) -> None:
    tensors = load_file(model / "model.safetensors")
    (model / "model.safetensors").unlink()
    names = sorted(tensors)
    files = {f"model-0000{number}-of-00002.safetensors": names[number - 1 :: 2] for number in (1, 2)}
    for file, some in files.items():
        save_file({name: tensors[name] for name in some}, model / file, {"format": "pt"})
    weight_map = {name: file for file, some in files.items() for name in some}
    (model / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 2]}))


def _write_models(model: Path) -> None:
    (SEEDS / "configs").mkdir()
    for name, family in all_families().items():
        if name in CONFIG_MAPPING:
            full = CONFIG_MAPPING[name](**{**MODEL_SIZES, **OWN_SIZES.get(name, {})}).to_dict()
            config = {key: value for key, value in full.items() if key in keys_read(family, full) | {"model_type"}}
            (SEEDS / "configs" / f"{name}.json").write_text(json.dumps(config, separators=(",", ":")))
    for name, config in CONFIGS.items():
        (SEEDS / "configs" / f"of-tests-{name}.json").write_text(json.dumps(TEST_SIZES | config, separators=(",", ":")))
    peft = SEEDS / "peft"
    peft.mkdir()
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"], "rank_pattern": {"q.*": 2}}
    (peft / "adapter_config.json").write_text(json.dumps(config | {"bias": "none", "base_model_name_or_path": "org/a"}))
    start = "base_model.model.model.layers.0.self_attn.q_proj.lora_"
    save_file(
        {f"{start}A.weight": torch.ones(2, 8), f"{start}B.weight": torch.ones(8, 2)}, peft / "adapter_model.safetensors"
    )
    torch.save({"a.weight": torch.ones(2, 3), "b": torch.ones(4, 4).T, "c": {"d": [1, 2.5, "x", (None, True)]}},
               SEEDS / "torch" / "state.pt")  # fmt: skip


def _write_sentencepiece() -> None:
    messages = import_protobuf()
    proto = messages.ModelProto()
    pieces = [("<unk>", 2), ("<s>", 3), ("</s>", 3), *((f"<0x{byte:02X}>", 6) for byte in range(256))]
    for piece, kind in [*pieces, ("\u2581", 1), ("a", 1), ("b", 1), ("ab", 1), ("\u2581ab", 1), ("<mask>", 4)]:
        proto.pieces.add(piece=piece, score=-float(len(proto.pieces)), type=kind)
    proto.trainer_spec.model_type, proto.trainer_spec.byte_fallback = 2, True
    proto.trainer_spec.bos_id, proto.trainer_spec.eos_id, proto.trainer_spec.pad_id = 1, 2, -1
    proto.normalizer_spec.name, proto.normalizer_spec.remove_extra_whitespaces = "identity", False
    (SEEDS / "sentencepiece").mkdir()
    (SEEDS / "sentencepiece" / "tokenizer.model").write_bytes(proto.SerializeToString())
    tokenizer_config = {"bos_token": {"content": "<s>"}, "eos_token": "</s>"}
    (SEEDS / "sentencepiece" / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))


def _write_data(texts: list[str]) -> None:
    data = SEEDS / "data"
    data.mkdir()
    lines = "\n".join(texts) + "\n"
    (data / "a.jsonl").write_text(lines)
    (data / "a.json").write_text(json.dumps(CHATS, indent=1, ensure_ascii=False))
    (data / "a.jsonl.gz").write_bytes(gzip.compress(lines.encode(), mtime=0))
    zstd = importlib.import_module("compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd")
    (data / "a.jsonl.zst").write_bytes(zstd.compress(lines.encode()))
    (data / "a.csv").write_text('text,b\n"x, y",1\n"a ""b""\nc",2\n\n z ,\n')
    table = pyarrow.table({"text": ["a", "b", None], "n": [1, 2, 3], "m": [[{"role": "user"}], [], None]})
    pyarrow.parquet.write_table(table, data / "a.parquet")
    from datasets import Dataset

    Dataset(table).save_to_disk(SEEDS / "arrow")
    writer = IndexedWriter(SEEDS / "indexed", "uint16", masked=True)
    for tokens in ([1, 2, 3], [4], [5, 6]):
        writer.add(tokens, [1] * len(tokens))
        writer.end_document()
    write_manifest(SEEDS / "indexed", {"pair": writer.close(), "kind": "text", "tokenizer": {}, "seq_length": None})
    (SEEDS / "store").mkdir()
    for path in SEEDS.glob("indexed*"):
        path.rename(SEEDS / "store" / path.name)


def _write_texts() -> None:
    folder = SEEDS / "texts"
    folder.mkdir()
    (folder / "run.yaml").write_text(RUN)
    (folder / "base.yaml").write_text("out: base\ntrain: {threads: 1}\n")
    (folder / "model.yaml").write_text(
        "bases: [base.yaml]\nmodel_type: qwen3\nrope_scaling: {type: yarn, factor: '${A:2}'}\n"
    )
    (folder / "overrides.txt").write_text(
        "optim.lr=2e-5\ndata.files=[a, b]\ntrain={steps: 3}\nmodel.config={a: {b: 1}}\n"
    )
    (folder / "megatron.txt").write_text(MEGATRON)
    (folder / "rocm.txt").write_text(ROCM)
    (folder / "prompts.jsonl").write_text('{"prompt": "a"}\n{"messages": [{"role": "user", "content": "b"}]}\n"c"\n')
    (folder / "trackers.json").write_text('{"wandb": "a1"}\n')
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in METRICS))
    (folder / "latest_checkpointed_iteration.txt").write_text("12\n")
    (folder / "iter_0000012").mkdir()
    (folder / "iter_0000012" / ".metadata").write_text("")
    learned = prove({"model_type": "qwen3", **MODEL_SIZES, "num_key_value_heads": 2})
    (folder / "family.json").write_text(write_family(learned))
    primus = SEEDS / "primus"
    primus.mkdir()
    (primus / "first.yaml").write_text(experiment("mixtral_tiny"))
    for name, text in MODEL_FILES.items():
        (primus / name).write_text(text)


if __name__ == "__main__":
    main()
