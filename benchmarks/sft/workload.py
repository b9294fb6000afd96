"""The model folder and the tokenized samples of the fine-tuning benchmark."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from isthmus.data.readers.file_sources import find_sources
from isthmus.data.store.indexed_dataset import IndexedWriter, open_indexed, write_manifest
from isthmus.data.store.sample_store import SampleStore
from isthmus.data.store.sample_views import chat_samples
from isthmus.data.tokenize.record_kinds import CHAT
from isthmus.data.tokenize.tokenize_records import TokenizeOptions
from isthmus.hf.tiny_model import train_tokenizer
from isthmus.hf.tokenizer.tokenizer import Tokenizer, load_tokenizer, save_tokenizer
from isthmus.recipes.data.prepare import tokenize_files
from isthmus.tools.demo.python_docs import python_documentation

VOCAB_SIZE = 32000


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """Sizes of the Qwen3 model."""

    hidden_size: int = 512
    intermediate_size: int = 1536
    num_hidden_layers: int = 8
    num_attention_heads: int = 8
    num_key_value_heads: int = 4
    head_dim: int = 64
    vocab_size: int = VOCAB_SIZE
    max_position_embeddings: int = 1024
    tie_word_embeddings: bool = False


TINY = Shape(
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """The spec of one run."""

    folder: str
    """Contains ``model`` (Hugging Face) and ``samples`` (indexed files)."""
    precision: Literal["fp32", "bf16"]
    style: str
    """Batch layout; the names depend on the contestant."""
    seq_length: int = 512
    micro_batch_size: int = 4
    accumulation: int = 4
    warmup_steps: int = 1
    timed_tokens: int = 1
    """Steps are timed until this many tokens without padding have run: one pass over the samples."""
    timed_steps: int = 1
    """Minimum number of timed steps."""
    lr: float = 1e-4
    lora_rank: int | None = None
    """Train adapters of this rank on all linear layers; None: all weights."""
    quantize: Literal["nf4", "int8"] | None = None
    """The other weights of linear layers, by bitsandbytes."""
    ceiling: dict[str, Any] | None = None
    """Spec of the ceiling that ``sft.ceiling_process`` measures at each timed step; only for Isthmus."""
    profile: bool = False
    """Profile one more step after the timed ones; only for Isthmus."""

    @property
    def model(self) -> Path:
        """The model folder."""
        return Path(self.folder) / "model"

    def samples(self) -> SampleStore:
        """The tokenized samples with their masks, in the order of unpacked batches."""
        return SampleStore.from_indexed(open_indexed(Path(self.folder) / "samples"))

    def spec(self) -> dict[str, Any]:
        """For JSON; ``Turn(**spec)`` is the inverse."""
        return asdict(self)


def make_workload(
    folder: Path, *, data: Path | None, tokenizer: Path | None, seq_length: int, num_samples: int, shape: Shape
) -> dict[str, Any]:
    """Write model and samples into ``folder`` and describe them.

    Without ``data`` the chats are the documentation of the installed Python; without ``tokenizer`` one is trained on
    the data. Samples have at most ``seq_length`` tokens. ``num_samples`` of them are drawn, in the order in which
    contestants that neither pack nor sort read them.
    """
    import numpy as np

    if data is None:
        data = folder / "python-documentation.jsonl"
        _write_documentation(data)
    if tokenizer is None:
        chosen = Tokenizer(train_tokenizer(data.read_text(encoding="utf-8").splitlines(), vocab_size=8192))
    else:
        chosen = load_tokenizer(tokenizer)
    options = TokenizeOptions("chat", seq_length - 1)
    stats = tokenize_files(find_sources([data]), folder / "prepared", chosen, options)
    store, _ = chat_samples(open_indexed(folder / "prepared"), seq_length - 1, "truncate")
    if store.max_token_id >= shape.vocab_size:
        raise SystemExit(f"the tokenizer has more than the model's {shape.vocab_size} tokens. Use another one.")
    store = store.select(np.random.default_rng(0).permutation(len(store))[:num_samples])
    with IndexedWriter(folder / "samples", np.int32, masked=True) as writer:
        for tokens, mask in (store[k] for k in range(len(store))):
            writer.extend(tokens, (len(tokens),), mask)
            writer.end_documents((1,))
    write_manifest(folder / "samples", {"pair": writer.close()})
    parameters = _write_model(folder / "model", shape)
    save_tokenizer(chosen.inner, folder / "model")  # TRL needs one, although the samples are tokenized
    return {
        "model": {"family": "qwen3", "parameters": parameters, **asdict(shape)},
        "data": {
            "file": data.name,
            "sha256": hashlib.sha256(data.read_bytes()).hexdigest(),
            "tokenizer": "trained on the data" if tokenizer is None else tokenizer.name,
            "prepared": stats.summary(CHAT),
            "samples": len(store),
            "tokens": store.num_tokens,
            "mean_sample_tokens": float(store.lengths.mean()),
            "loss_token_share": sum(int(store[k][1][1:].sum()) for k in range(len(store))) / store.num_tokens,
            "samples_digest": store.digest(),
        },
    }


def _write_model(folder: Path, shape: Shape) -> int:
    """Random weights in float32, drawn by transformers; returns their number."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    model: Any = Qwen3ForCausalLM(Qwen3Config(**asdict(shape), rope_parameters=rope, bos_token_id=1, eos_token_id=2))
    model.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def _write_documentation(path: Path) -> None:
    """Write a question about each documented object of the standard library, and its docstring as the answer."""
    with path.open("w", encoding="utf-8") as file:
        for entry in python_documentation():
            if entry.doc:
                question = {"role": "user", "content": f"What is {entry.reference}?"}
                record = {"messages": [question, {"role": "assistant", "content": entry.document.strip()}]}
                file.write(json.dumps(record, ensure_ascii=False) + "\n")
