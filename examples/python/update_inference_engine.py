"""Reinforcement learning loops: send the weights of a model in training to an inference engine.

torchrun --nproc-per-node 2 examples/python/update_inference_engine.py MODEL_DIR
"""

# %% A Megatron-Core model for training, and an engine with the same weights on every rank
import os
import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import isthmus
from isthmus.data.batching.packed_batch import PackedBatch

source = sys.argv[1]
bridge = isthmus.AutoBridge.from_hf_pretrained(source)
(model,) = bridge.to_megatron_model(parallel={"tp": int(os.environ.get("WORLD_SIZE", "1"))})
device = next(model.parameters()).device
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
tokenizer = AutoTokenizer.from_pretrained(source)
engine = AutoModelForCausalLM.from_pretrained(source).to(device)
prompt = tokenizer("The number", return_tensors="pt").to(device)


# %% Gather whole tensors, a bucket at a time, under their Hugging Face names
def update_engine() -> None:
    """With vLLM: ``engine_model.load_weights(bridge.export_weights(model))``."""
    parameters = dict(engine.named_parameters())
    with torch.no_grad():
        for name, weight in bridge.export_weights(model):
            parameters[name].copy_(weight)


# %% Rollout, training step, update
for _ in range(3):
    rollout = engine.generate(**prompt, do_sample=False, min_new_tokens=8, max_new_tokens=8)[0]
    batch = PackedBatch.for_training([rollout])
    reward = 1.0  # that of your task
    logits = model(batch)  # [T, V]; any loss of PyTorch
    (reward * torch.nn.functional.cross_entropy(logits.float(), batch.labels)).backward()
    optimizer.step()
    optimizer.zero_grad()
    update_engine()
    if os.environ.get("RANK", "0") == "0":
        print(tokenizer.decode(rollout))
