from __future__ import annotations

import sys
from argparse import Namespace
from types import ModuleType
from typing import Any

import pytest
import torch

from isthmus.engine.upstream import packed_samples
from isthmus.errors import UsageError

_ARGS: dict[str, Any] = {
    "sft": True,
    "tokenizer_type": "SFTTokenizer",
    "legacy_tokenizer": True,
    "create_attention_mask_in_dataloader": False,
    "micro_batch_size": 1,
    "pipeline_model_parallel_size": 1,
}


@pytest.mark.parametrize(
    "name, value, hint",
    [
        ("tokenizer_type", "HuggingFaceTokenizer", "--tokenizer-type SFTTokenizer"),
        ("legacy_tokenizer", False, "--legacy-tokenizer"),
        ("create_attention_mask_in_dataloader", True, "--no-create-attention-mask-in-dataloader"),
        ("micro_batch_size", 2, "not 2"),
        ("pipeline_model_parallel_size", 2, "isthmus sft"),
    ],
)
def test_sft_with_other_arguments_is_refused(
    name: str, value: object, hint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    upstream: Any = ModuleType("sft_dataset")
    upstream.SFTDataset = type("SFTDataset", (), {"_split_conversations": None})
    for part in ("megatron.training", "megatron.training.datasets"):
        monkeypatch.setitem(sys.modules, part, ModuleType(part))
    monkeypatch.setitem(sys.modules, "megatron.training.datasets.sft_dataset", upstream)
    said: list[str] = []
    packed_samples.check(Namespace(**_ARGS), said.append)
    assert said
    packed_samples.check(Namespace(**_ARGS | {"sft": False, name: value}), said.append)
    with pytest.raises(UsageError, match=hint):
        packed_samples.check(Namespace(**_ARGS | {name: value}), said.append)


def test_local_attention_within_packed_samples() -> None:
    from megatron.core.packed_seq_params import PackedSeqParams

    class DotProductAttention:
        def forward(self, query: Any, key: Any, value: Any, attention_mask: Any, attn_mask_type: Any = None) -> Any:
            assert attention_mask is None
            q, k, v = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
            out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            return out.permute(2, 0, 1, 3).flatten(2)

    module: Any = ModuleType("dot_product_attention")
    module.DotProductAttention = DotProductAttention
    packed_samples._attend_within_samples(module)
    q, k, v = torch.randn(3, 9, 2, 4, generator=torch.Generator().manual_seed(0))
    ends = torch.tensor([0, 4, 9, 9], dtype=torch.int32)
    attention: Any = DotProductAttention()
    packed = attention.forward(q, k, v, None, packed_seq_params=PackedSeqParams(qkv_format="thd", cu_seqlens_q=ends))
    alone = [attention.forward(*(x[at, None] for x in (q, k, v)), None) for at in (slice(4), slice(4, 9))]
    assert torch.equal(packed, torch.cat(alone))
    assert not torch.equal(packed, attention.forward(q[:, None], k[:, None], v[:, None], None))
