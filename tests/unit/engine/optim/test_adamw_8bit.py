"""8-bit moments are those of bitsandbytes, and survive the float32 numbers of a checkpoint."""

from __future__ import annotations

import torch

from isthmus.engine.optim.adamw import MIN_QUANTIZED, MOMENTS, AdamW8bit, create_state
from optional_packages import bitsandbytes

pytestmark = bitsandbytes.required
SETTINGS = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def _ours(sizes: tuple[int, ...]) -> tuple[AdamW8bit, list[torch.nn.Parameter]]:
    generator = torch.Generator().manual_seed(0)
    weights = [torch.nn.Parameter(torch.randn(size, generator=generator)) for size in sizes]
    adam = AdamW8bit.from_adamw(torch.optim.AdamW(weights, fused=True, **SETTINGS))  # type: ignore[arg-type]
    create_state(adam)
    return adam, weights


def _step(adam: torch.optim.Optimizer, weights: list[torch.nn.Parameter], number: int) -> None:
    generator = torch.Generator().manual_seed(number)
    for weight in weights:
        weight.grad = torch.randn(weight.shape, generator=generator) * torch.rand(weight.shape, generator=generator)
    adam.step()


def test_updates_equal_those_of_bitsandbytes() -> None:
    sizes = (MIN_QUANTIZED + 300, MIN_QUANTIZED - 1)
    (adam, ours), (_, theirs) = _ours(sizes), _ours(sizes)
    reference = bitsandbytes.optim.AdamW8bit(theirs, **SETTINGS)
    for number in range(5):
        _step(adam, ours, number)
        _step(reference, theirs, number)
    assert torch.equal(ours[0], theirs[0])
    assert torch.allclose(ours[1], theirs[1], rtol=0, atol=1e-6)
    state = adam.state[ours[0]]
    assert state["exp_avg"].dtype == torch.uint8 and adam.state[ours[1]]["exp_avg"].dtype == torch.float32
    assert sum(state[name].nbytes for name in (*MOMENTS, "absmax")) < 2.1 * sizes[0]


def test_a_checkpoint_restores_the_moments_bitwise() -> None:
    (adam, weights), (resumed, others) = _ours((40_000,)), _ours((40_000,))
    for number in range(7):
        _step(adam, weights, number)
    with adam.float32_moments(loading=False):
        saved = {name: tensor.clone() for name, tensor in adam.state[weights[0]].items()}
    with resumed.float32_moments(loading=True):
        for name in MOMENTS:
            resumed.state[others[0]][name].copy_(saved[name])
    others[0].data.copy_(weights[0])
    resumed.state[others[0]]["step"].fill_(7)
    with resumed.float32_moments(loading=False):
        for name in MOMENTS:
            assert torch.equal(resumed.state[others[0]][name], saved[name])
    for number in range(7, 10):
        _step(adam, weights, number)
        _step(resumed, others, number)
    assert torch.equal(weights[0], others[0])
