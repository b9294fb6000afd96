"""A training loop of your own in plain PyTorch, on a Megatron-Core model with tensor parallelism.

torchrun --nproc-per-node 2 examples/python/train_loop.py MODEL_DIR OUT_DIR
"""

# %% Read the weights of a Hugging Face folder into a Megatron-Core model: each rank reads its slices
import os
import sys

import torch
from transformers import AutoTokenizer

import isthmus
from isthmus.data.batching.packed_batch import PackedBatch

source, destination = sys.argv[1:3]
bridge = isthmus.AutoBridge.from_hf_pretrained(source)
(model,) = bridge.to_megatron_model(parallel={"tp": int(os.environ.get("WORLD_SIZE", "1"))})
device = next(model.parameters()).device

# %% Samples of any length are packed into one sequence, without padding
tokenizer = AutoTokenizer.from_pretrained(source)
texts = [f"The number after {number} is {number + 1}." for number in range(8)]
batch = PackedBatch.for_training([torch.tensor(tokenizer.encode(text), device=device) for text in texts])
assert batch.loss_mask is not None
positions = batch.loss_mask.nonzero()[:, 0]

# %% The loop: the model returns the summed loss of the positions, or without them the logits [T, V]
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
model.train()
losses = []
for step in range(20):
    loss = model(batch, loss_positions=positions) / batch.num_loss_tokens
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
    if os.environ.get("RANK", "0") == "0":
        print(f"step {step + 1}  loss {losses[-1]:.4f}")

# %% Write a Hugging Face folder: all ranks write their slices
bridge.save_hf_pretrained([model], destination)
