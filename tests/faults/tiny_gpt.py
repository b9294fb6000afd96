"""A script in Megatron-LM's way, for ``isthmus run``: trains a tiny GPT on a device that it calls CUDA."""

from __future__ import annotations

import os
import sys

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig

assert torch.cuda.is_available(), "Megatron requires CUDA."


def build(ranks: int) -> GPTModel:
    torch.distributed.init_process_group("gloo")
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=ranks)
    model_parallel_cuda_manual_seed(1)
    config = TransformerConfig(
        num_layers=1, hidden_size=16, num_attention_heads=2, normalization="RMSNorm", persist_layer_norm=False,
        tensor_model_parallel_size=ranks, sequence_parallel=ranks > 1, hidden_dropout=0.0, attention_dropout=0.0,
    )  # fmt: skip
    return GPTModel(config, get_gpt_layer_local_spec(normalization="RMSNorm"), vocab_size=32, max_sequence_length=8)


def main() -> None:
    ranks = int(os.environ["WORLD_SIZE"])
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    model = build(ranks)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    tokens = torch.arange(8, device=torch.cuda.current_device())[None]
    mask = torch.triu(torch.ones(1, 1, 8, 8, dtype=torch.bool, device="cuda"), diagonal=1)
    losses = []
    for _ in range(2):
        loss = model(tokens, tokens, mask, labels=tokens).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(round(loss.item(), 4))
    print("rank", torch.distributed.get_rank(), "losses", *losses, "args", *sys.argv[1:], flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
