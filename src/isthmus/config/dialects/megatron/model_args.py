"""Model arguments, as in a Megatron-LM checkpoint, and the tokenizer."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping
from typing import Any

from isthmus.config.dialects.megatron.arguments import Arguments, WrittenArguments
from isthmus.config.dialects.megatron.known_args import ARGUMENTS, TABLES, untranslated
from isthmus.config.dialects.translation import Translation

_TYPES = ("HuggingFaceTokenizer", "Llama2Tokenizer", "DeepSeekV2Tokenizer", "GPT2BPETokenizer", "NullTokenizer")
_BY_FILE = ("SentencePieceTokenizer", "GPTSentencePieceTokenizer")
"""Types that depend on the tokenizer's file."""
_UNSUPPORTED = tuple(
    "BertWordPieceLowerCase BertWordPieceCase TikTokenizer MultimodalTokenizer NullMultimodalTokenizer".split()
)
_WITHOUT_FLAGS = ("original_max_position_embeddings", "beta_fast", "beta_slow")
"""Arguments that only Primus has; Megatron-LM has their usual values."""


def model_arguments(args: Arguments, translation: Translation) -> dict[str, Any]:
    """Model arguments as in a checkpoint; without ``padded_vocab_size`` if no argument gives the vocabulary size."""
    if missing := [name for name in ("num_layers", "hidden_size", "num_attention_heads") if not args.has(name)]:
        for name in missing:
            args.errors.append(f"--{name.replace('_', '-')}  is missing: every model needs it")
        args.raise_errors()
    arguments = {name: args.get(name) for name in ARGUMENTS}
    if args.get("use_rotary_position_embeddings"):
        arguments["position_embedding_type"] = "rope"
    hidden, heads = arguments["hidden_size"], arguments["num_attention_heads"]
    # Megatron-LM's default of gated models: 2/3 of 4 x hidden size, in multiples of 64.
    ffn = int(4 * hidden * 2 / 3 / 64) * 64 if arguments["swiglu"] else 4 * hidden
    arguments["ffn_hidden_size"] = args.get("ffn_hidden_size") or ffn
    arguments["moe_ffn_hidden_size"] = args.get("moe_ffn_hidden_size") or arguments["ffn_hidden_size"]
    arguments["kv_channels"] = args.get("kv_channels") or hidden // heads
    arguments["max_position_embeddings"] = args.get("max_position_embeddings") or args.get("seq_length") or 2048
    if args.has("padded_vocab_size"):
        arguments["padded_vocab_size"] = args.get("padded_vocab_size")
    elif args.has("vocab_size"):
        # NullTokenizer adds an end-of-document token.
        arguments["padded_vocab_size"] = args.get("vocab_size") + (args.get("tokenizer_type") == "NullTokenizer")
    if args.get("moe_router_force_load_balancing"):
        why = "Tokens go to the experts that the router chooses, so step times are those of real routing."
        translation.remark(args.source("moe_router_force_load_balancing"), "unsupported", why)
    return arguments


def rows_by_name(translation: Translation) -> int | None:
    """Embedding rows of the model that the tokenizer belongs to; None for an unknown name."""
    if translation.settings.get("tokenizer.type") == "GPT2BPETokenizer":
        return 50257
    name = str(translation.settings.get("tokenizer.path", "")).lower().replace("_", "-").replace("meta-", "")
    return next((rows for pattern, rows in TABLES["vocab_sizes"].items() if re.search(pattern, name)), None)


def put_tokenizer(args: Arguments, translation: Translation) -> None:
    kind, path = args.get("tokenizer_type"), args.get("tokenizer_model")
    if kind in _UNSUPPORTED or (kind is not None and not str(kind).endswith("Tokenizer")):
        args.errors.append(f"{args.source('tokenizer_type')}  is not supported; use one of {', '.join(_TYPES)}")
        return
    if path is not None:
        args.put(translation, "tokenizer.path")
    elif args.has("vocab_file"):
        source = args.source("vocab_file", "merge_file")
        files = [args.get("vocab_file"), args.get("merge_file") or args.get("vocab_file")]
        folder, other = (posixpath.dirname(file) or "." for file in files)
        if folder != other:
            args.errors.append(f"{source}  must be in one folder, which becomes tokenizer.path")
        translation.put("tokenizer.path", folder, source)
        if kind is None:
            kind = "GPT2BPETokenizer"  # the only type with these two files
    if kind in _TYPES:
        translation.put("tokenizer.type", kind, args.source("tokenizer_type"))
    elif kind is not None:
        # Primus has a dozen names for Hugging Face tokenizers.
        if kind not in _BY_FILE:
            translation.put("tokenizer.type", "HuggingFaceTokenizer", args.source("tokenizer_type"))
        why = "The files at tokenizer.path decide the type of the tokenizer."
        translation.remark(args.source("tokenizer_type"), "different", why)
    if kind == "NullTokenizer" and args.has("vocab_size"):
        args.put(translation, "tokenizer.vocab_size")
    if args.get("trust_remote_code"):
        args.put(translation, "model.trust_remote_code")


def write_model(model: Mapping[str, Any], written: WrittenArguments) -> None:
    """``model`` are the args of its architecture."""
    grouped = model["group_query_attention"]
    for name, value in model.items():
        if (name in ARGUMENTS and name not in _WITHOUT_FLAGS) or name in untranslated():
            written.set(name, value if name != "num_query_groups" or grouped else None)
    written.set("num_layers", model["num_layers"], "model.path", "model.config", "model.init")
    if written.config.model.init == "hf":
        why = (
            f"The arguments have no weights. isthmus convert {written.config.model.path} CHECKPOINT --to torch_dist "
            "writes them for --pretrained-checkpoint CHECKPOINT."
        )
        written.remark("model.init=hf", "unsupported", why)


def write_tokenizer(written: WrittenArguments, rows: int) -> None:
    """``rows`` are the rows of the model's embedding."""
    config, kind = written.config, written.config.tokenizer.type
    path, numbers = config.tokenizer.path, config.tokenizer.vocab_size
    if kind is None and path is None and config.data.mock:
        kind, numbers = "NullTokenizer", rows - 1
    if kind == "NullTokenizer":
        written.set("tokenizer_type", kind, "tokenizer.type")
        written.set("vocab_size", numbers, "tokenizer.vocab_size")
    elif kind == "GPT2BPETokenizer" and path is not None:
        written.set("tokenizer_type", kind, "tokenizer.type", "tokenizer.path")
        for name, file in (("vocab_file", "vocab.json"), ("merge_file", "merges.txt")):
            written.set(name, posixpath.join(path, file))
    elif path is not None:
        by_file = "SentencePieceTokenizer" if path.endswith(".model") else "HuggingFaceTokenizer"
        written.set("tokenizer_type", kind or by_file, "tokenizer.type")
        written.set("tokenizer_model", path, "tokenizer.path")
    else:
        written.remark("tokenizer.path", "mistake", "It is not given, and the model has no tokenizer.")
    if numbers != rows - 1:
        # Without padding, if tensor parallelism allows it.
        written.set("vocab_size" if rows % config.parallel.tp else "padded_vocab_size", rows)
    written.put("model.trust_remote_code")
