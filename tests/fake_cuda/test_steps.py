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
            rank.model.stages[
                0
            ].config.variable_seq_lengths = False  # lengths are not exchanged, as they have no values
            batches = [rank.batch(23, 41)] * LAYOUTS[layout].get("pp", 1)
            with record() as trace:
                rank.stepper.train_step(batches)
            assert trace.num_kernels
            error = ""
        except Exception:
            error = traceback.format_exc()[-4500:]
        errors[f"{layout}, {precision}"] = error
    return errors


@pytest.mark.parametrize("trait", TRAITS)
def test_step(fake_cuda: FakeCuda, trait: str) -> None:
    errors = fake_cuda.run(train_steps, trait=trait, gpu_cases=cases(trait))
    assert {case: error for case, error in errors.items() if error} == {}
