"""A training loop of your own in any parallel layout, with Megatron-Core's distributed optimizer and schedules.

torchrun --nproc-per-node 4 examples/python/train_loop_parallel.py MODEL_DIR OUT_DIR tp=2 pp=2
"""

# %% Read the weights, and wrap each pipeline stage for data parallelism
import sys

import torch
from megatron.core import parallel_state
from transformers import AutoTokenizer

import isthmus
from isthmus.config.schema import OptimConfig
from isthmus.data.batching.packed_batch import PackedBatch
from isthmus.engine.optim.learning_rate import build_schedule
from isthmus.engine.optim.optimizer import build_optimizer
from isthmus.engine.step import Stepper

source, destination, *layout = sys.argv[1:]
bridge = isthmus.AutoBridge.from_hf_pretrained(source)
sizes = {name: int(size) for name, size in (word.split("=") for word in layout)}
model = bridge.to_megatron_model(sizes, wrap_with_ddp=True)

# %% Optimizer, learning rate schedule and training step
STEPS = 20
settings = OptimConfig(lr=1e-3, warmup_steps=2)
optimizer = build_optimizer(model, settings)
stepper = Stepper(model, optimizer, build_schedule(optimizer, settings, STEPS))

# %% Each data-parallel rank takes its own samples; a step has one or more micro batches
tokenizer = AutoTokenizer.from_pretrained(source)
samples = [torch.tensor(tokenizer.encode(f"The number after {number} is {number + 1}.")) for number in range(8)]
own = samples[parallel_state.get_data_parallel_rank() :: parallel_state.get_data_parallel_world_size()]
micro_batches = [PackedBatch.for_training(own[::2]), PackedBatch.for_training(own[1::2])]

# %% The loop: loss and gradient norm are those of the global batch, the same on every rank
losses = []
for step in range(STEPS):
    result = stepper.train_step(micro_batches)
    losses.append(result.loss)
    if torch.distributed.get_rank() == 0:
        print(f"step {step + 1}  loss {result.loss:.4f}  grad norm {result.grad_norm:.3f}  lr {result.lr:.2e}")

# %% Write a Hugging Face folder: all ranks write their slices
bridge.save_hf_pretrained(model, destination)
