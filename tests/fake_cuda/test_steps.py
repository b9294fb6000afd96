"""A training step of every trait of an architecture, in every layout and precision."""

from __future__ import annotations

import traceback

import pytest

from fake_cuda.architectures import LAYOUTS, TRAITS, cases, config_of
from fake_cuda.runner import FakeCuda
from fake_cuda.trace import record
from fake_cuda.world import build


def train_steps(trait: str, gpu_cases: list[tuple[str, str]]) -> dict[str, str]:
    """The error of each case, or an empty text."""
    config = config_of(trait)
    errors = {}
    for layout, precision in gpu_cases:
        try:
            rank = build(config, precision=precision, **LAYOUTS[layout])
            batches = [rank.batch(23, 41)] * LAYOUTS[layout].get("pp", 1)
            with record() as trace:
                rank.stepper.train_step(batches)
            assert trace.num_kernels
            error = ""
        except Exception:
            error = traceback.format_exc()[-4500:]
        errors[f"{layout}, {precision}"] = error
    return errors


@pytest.mark.parametrize("gpu", ["sm_90", "gfx942", "gfx950"])
@pytest.mark.parametrize("trait", TRAITS)
def test_step(fake_cuda: FakeCuda, trait: str, gpu: str) -> None:
    """gfx942 has other FP8 types than gfx950."""
    if gpu == ("gfx950", "gfx942")[list(TRAITS).index(trait) % 2]:
        pytest.skip("one AMD GPU for each trait")
    errors = fake_cuda.run(train_steps, gpu=gpu, trait=trait, gpu_cases=cases(trait, gpu))
    assert {case: error for case, error in errors.items() if error} == {}
