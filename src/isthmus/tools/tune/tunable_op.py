"""torch's TunableOp: measures the kernels of rocBLAS and hipBLASLt for each GEMM on an AMD GPU."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from isthmus.engine.linear.matmul import use_table
from isthmus.errors import UsageError
from isthmus.tools.tune.measure import Operands

_DURATION_MS, _ITERATIONS = 30, 100
"""At most, for each kernel; torch's defaults."""
_Result = tuple[str, str]
"""Operation and parameters, as TunableOp names them."""


class Tuner:
    def __init__(self) -> None:
        self._rejected: set[_Result] = set()

    @contextlib.contextmanager
    def on(self) -> Iterator[None]:
        """GEMMs use the measured kernels."""
        torch.cuda.tunable.enable(True)
        use_table(None, tunable_op=True)
        try:
            yield
        finally:
            use_table(None)
            torch.cuda.tunable.enable(False)

    @contextlib.contextmanager
    def off(self) -> Iterator[None]:
        torch.cuda.tunable.enable(False)
        yield

    def measure(self, operands: Operands) -> _Result | None:
        """Measure the kernels of a GEMM; the new result, or None: TunableOp has none, or has measured this shape."""
        before = self._results().keys()
        torch.cuda.tunable.tuning_enable(True)
        try:
            with self.on():
                operands.run()
        finally:
            torch.cuda.tunable.tuning_enable(False)
        new = self._results().keys() - before
        return next(iter(new), None)

    def kernel(self, result: _Result) -> str:
        return self._results()[result][0]

    def reject(self, result: _Result) -> None:
        """Write the default kernel into the file."""
        self._rejected.add(result)

    def csv(self) -> str:
        """The results file, as the documentation of ``torch.cuda.tunable`` describes it.

        torch's function for it is not in all releases.
        """
        validators: Any = torch.cuda.tunable.get_validators()  # pairs, unlike its annotation
        lines = [f"Validator,{name},{value}" for name, value in validators]
        for (operation, parameters), (kernel, time_ms) in self._results().items():
            chosen = "Default" if (operation, parameters) in self._rejected else kernel
            lines.append(f"{operation},{parameters},{chosen},{time_ms}")
        return "\n".join(lines) + "\n"

    def _results(self) -> dict[_Result, tuple[str, float]]:
        results: Any = torch.cuda.tunable.get_results()  # tuples of four, unlike its annotation
        return {(operation, parameters): (kernel, time_ms) for operation, parameters, kernel, time_ms in results}


@contextlib.contextmanager
def tuning() -> Iterator[Tuner]:
    """Start TunableOp without earlier results; newer releases append each result to a file, which is thrown away.

    Raises:
        UsageError: variables control TunableOp.
    """
    tunable = torch.cuda.tunable
    tunable.enable(False)
    tunable.tuning_enable(False)
    if tunable.is_enabled() or tunable.tuning_is_enabled():
        raise UsageError("isthmus tune controls TunableOp itself. Unset the variables PYTORCH_TUNABLEOP_*.")
    with tempfile.TemporaryDirectory(prefix="isthmus-tune-") as folder:
        tunable.set_filename(str(Path(folder) / "results.csv"), False)
        tunable.set_max_tuning_duration(_DURATION_MS)
        tunable.set_max_tuning_iterations(_ITERATIONS)
        try:
            yield Tuner()
        finally:
            tunable.enable(False)
