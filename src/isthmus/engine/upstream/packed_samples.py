"""``--sft`` of Megatron-LM's pretrain_gpt.py: packed samples without TransformerEngine, and transformers 5.

megatron-core 0.16 packs the conversations of a record into a sample; before, each record is padded.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

import torch

from isthmus.engine.upstream.import_hooks import patch_on_import
from isthmus.errors import UsageError

Say = Callable[[str], None]


def install(*, without_te: bool) -> None:
    patch_on_import("megatron.training.tokenizer.sft_tokenizer", _token_lists)
    if without_te:
        patch_on_import("megatron.core.transformer.dot_product_attention", _attend_within_samples)
        patch_on_import("megatron.training.utils", _boundaries_on_all_ranks)


def check(args: Any, say: Say) -> None:
    """Refuse arguments with which upstream fails late or attends across samples.

    Raises:
        UsageError: names the argument.
    """
    if not getattr(args, "sft", False):
        return
    if args.tokenizer_type != "SFTTokenizer" or not args.legacy_tokenizer:
        raise UsageError(
            "--sft needs --tokenizer-type SFTTokenizer --legacy-tokenizer: no other tokenizer reads chats."
        )
    if args.create_attention_mask_in_dataloader:
        raise UsageError("--sft makes no attention masks: add --no-create-attention-mask-in-dataloader.")
    if not hasattr(import_module("megatron.training.datasets.sft_dataset").SFTDataset, "_split_conversations"):
        return
    if args.micro_batch_size != 1:
        raise UsageError(f"--sft packs samples, with --micro-batch-size 1, not {args.micro_batch_size}.")
    if args.pipeline_model_parallel_size != 1:
        raise UsageError(
            f"--sft with --pipeline-model-parallel-size {args.pipeline_model_parallel_size}: later stages do not get "
            "the boundaries of packed samples and would attend across them. Use tensor parallelism, or isthmus sft."
        )
    say("--sft: the local attention is called for each packed sample")


class _Pad(int):
    """The dataset of 0.16 extends a list with this number when it cuts a sample, which is a TypeError for an int."""

    def __iter__(self) -> Iterator[int]:
        yield int(self)


def _token_lists(module: Any) -> None:
    """Since transformers 5, apply_chat_template returns a dict by default."""
    cls = module.SFTTokenizer
    create = cls.__init__

    @functools.wraps(create)
    def __init__(self: Any, *args: Any, **named: Any) -> None:
        create(self, *args, **named)
        tokenizer, pad = self._tokenizer, self._prompt_config.pad_token_id
        if pad is None or self.eod is None:
            raise UsageError(
                "the tokenizer lacks the token for padding that --sft-tokenizer-prompt-format expects, or one for the "
                "end of text. The formats are those of Nemotron models; isthmus sft uses the model's own chat template."
            )
        self._prompt_config.pad_token_id = _Pad(pad)
        tokenizer.apply_chat_template = functools.partial(tokenizer.apply_chat_template, return_dict=False)

    cls.__init__ = __init__


def _attend_within_samples(module: Any) -> None:
    """The local attention refuses packed samples: call it for each."""
    cls = module.DotProductAttention
    attend = cls.forward

    @functools.wraps(attend)
    def forward(
        self: Any,
        query: Any,
        key: Any,
        value: Any,
        attention_mask: Any,
        *args: Any,
        packed_seq_params: Any = None,
        **named: Any,
    ) -> Any:
        """``query`` [t, heads, size]; the mask is causal within each sample."""
        if packed_seq_params is None:
            return attend(self, query, key, value, attention_mask, *args, **named)
        lengths = packed_seq_params.cu_seqlens_q.diff().tolist()
        samples = zip(*(tensor.unsqueeze(1).split(lengths) for tensor in (query, key, value)), strict=True)
        return torch.cat([attend(self, *sample, None, *args, **named) for sample in samples if len(sample[0])])

    cls.forward = forward


def _boundaries_on_all_ranks(utils: Any) -> None:
    """Upstream sends the longest length from the first tensor rank, but other ranks do not receive it.

    Its rotary embedding needs boundaries without a batch dimension.
    """
    get_batch = utils.get_batch_on_this_tp_rank

    @functools.wraps(get_batch)
    def get_batch_on_this_tp_rank(data_iterator: Any, *args: Any, **named: Any) -> Any:
        shown = None if data_iterator is None else _without_longest(data_iterator)
        batch = get_batch(shown, *args, **named)
        if batch.get("cu_seqlens") is not None:
            (batch["cu_seqlens"],) = batch["cu_seqlens"]
            batch["max_seqlen"] = batch["cu_seqlens"].diff().max()[None]
        return batch

    utils.get_batch_on_this_tp_rank = get_batch_on_this_tp_rank


def _without_longest(batches: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    yield {name: tensor for name, tensor in next(batches).items() if name != "max_seqlen"}
