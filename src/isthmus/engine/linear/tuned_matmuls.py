"""Files of ``isthmus tune``, which runs use through ``tune.file``.

For AMD GPUs it is a results file of torch's TunableOp (CSV), otherwise JSON with a library for each matmul and a number
of threads.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import torch

from isthmus.engine.linear.matmul import use_table
from isthmus.engine.linear.matmul_table import Library, MatmulShape, MatmulTable, Operation
from isthmus.errors import DataError, MissingInput, UsageError
from isthmus.files.input_files import parse_json, read_bytes
from isthmus.platforms.base import Platform

FORMAT = "isthmus tune 1"
_DTYPES = {"float": torch.float32, "BFloat16": torch.bfloat16, "Half": torch.float16}
"""TunableOp's names."""
_GEMM = re.compile(r"Gemm\w*TunableOp_(\w+)_[NT]{2},[nt]{2}_(\d+)_(\d+)_(\d+)(?:_\w+)?,[^,]+(?:,[^,]*)*")
_AGAIN = "Run isthmus tune again with the settings of this run, or leave tune.file out."


@dataclass(frozen=True, slots=True, kw_only=True)
class TunedMatmuls:
    made_for: Mapping[str, str]
    """Device and versions; of TunableOp its validators."""
    choices: Sequence[tuple[MatmulShape, Library]] = ()
    threads: int | None = None
    """CPU threads of a single rank; None: as by default."""
    kernels: frozenset[tuple[torch.dtype, int, int, int]] = frozenset()
    """Dtype, m, k and n of TunableOp's results."""
    for_tunable_op: bool = False

    def covers(self, shape: MatmulShape) -> bool:
        """Whether the file has a choice for this matmul: TunableOp for the exact shape, else for any length."""
        if self.for_tunable_op:
            return (shape.dtype, shape.m, shape.k, shape.n) in self.kernels
        return shape in MatmulTable(self.choices)

    def to_json(self) -> str:
        """One matmul a line."""
        head = {"format": FORMAT, "made_for": dict(self.made_for), "threads": self.threads}
        rows = [
            {
                "operation": shape.operation,
                "dtype": str(shape.dtype).removeprefix("torch."),
                "m": shape.m,
                "k": shape.k,
                "n": shape.n,
                "transposed": shape.transposed,
                "library": library,
            }
            for shape, library in self.choices
        ]
        matmuls = ",\n  ".join(map(json.dumps, rows))
        return f'{json.dumps(head)[:-1]}, "matmuls": [\n  {matmuls}\n]}}\n'


def read_tuned(path: Path) -> TunedMatmuls:
    """Read a file of ``isthmus tune``, or of TunableOp.

    Raises:
        MissingInput: it does not exist.
        DataError: it is neither.
    """
    if not path.exists():
        raise MissingInput(f"tune.file={path} does not exist. isthmus tune writes it.")
    text = read_bytes(path).decode(errors="replace")
    try:
        return _from_json(parse_json(text)) if text.lstrip().startswith("{") else _from_csv(text)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(
            f"tune.file={path} is no file of isthmus tune or TunableOp ({type(error).__name__}: {error}). {_AGAIN}"
        ) from None


def _from_json(values: Any) -> TunedMatmuls:
    if values["format"] != FORMAT:
        raise ValueError(f"format {values['format']!r:.50}, expected {FORMAT!r}")
    threads = values["threads"]
    if threads is not None and (type(threads) is not int or threads < 1):
        raise ValueError(f"threads {threads!r:.50}, expected 1 or more")
    choices = []
    for row in values["matmuls"]:
        sizes = [row[name] for name in ("m", "k", "n")]
        if row["operation"] not in get_args(Operation) or row["library"] not in get_args(Library):
            raise ValueError(f"operation {row['operation']!r:.50} or library {row['library']!r:.50} is unknown")
        if any(type(size) is not int or size < 1 for size in sizes) or type(row["transposed"]) is not bool:
            raise ValueError(f"sizes {sizes!r:.80}, expected numbers of at least 1")
        dtype = {str(known): known for known in _DTYPES.values()}[f"torch.{row['dtype']}"]
        m, k, n = sizes
        choices.append((MatmulShape(row["operation"], m, k, n, row["transposed"], dtype), row["library"]))
    made_for = {str(name): str(value) for name, value in values["made_for"].items()}
    return TunedMatmuls(made_for=made_for, choices=choices, threads=threads)


def _from_csv(text: str) -> TunedMatmuls:
    """The format that the documentation of ``torch.cuda.tunable`` describes."""
    validators, kernels = dict[str, str](), set[tuple[torch.dtype, int, int, int]]()
    for line in filter(None, map(str.strip, text.splitlines())):
        kind, _, rest = line.partition(",")
        if kind == "Validator":
            name, _, validators[name] = rest.partition(",")
        elif (gemm := _GEMM.fullmatch(line)) is not None:
            n, m, k = map(int, gemm.groups()[1:])  # of column-major matrices
            if gemm[1] in _DTYPES:
                kernels.add((_DTYPES[gemm[1]], m, k, n))
        elif line.count(",") < 2:
            raise ValueError(f"line {line[:80]!r}")
    if "PT_VERSION" not in validators:
        raise ValueError("it has no line Validator,PT_VERSION")
    return TunedMatmuls(made_for=validators, kernels=frozenset(kernels), for_tunable_op=True)


def tune_path(file: str, platform: Platform) -> Path:
    """``%d`` is the number of the rank's GPU, as in the names of TunableOp's files."""
    return Path(file.replace("%d", str(platform.device_index())))


def made_for(platform: Platform) -> dict[str, str]:
    """What a choice by time depends on."""
    device = platform.describe()
    return {"device": device.partition(" x ")[2] or device, "torch": torch.__version__}


def check_made_for(path: Path, there: Mapping[str, str], here: Mapping[str, str]) -> None:
    """Raises UsageError if a file is for another device or other versions, with the differences."""
    names = sorted(name for name in there.keys() | here.keys() if there.get(name) != here.get(name))
    if names:
        differences = "; ".join(f"{name} is {here.get(name)} here and {there.get(name)} in the file" for name in names)
        raise UsageError(f"tune.file={path} was made elsewhere: {differences}. {_AGAIN}")


def tuned_threads(file: str | None, platform: Platform) -> int | None:
    """CPU threads of a single rank, if the file has a number."""
    return None if file is None else read_tuned(tune_path(file, platform)).threads


def use_tuned(file: str, platform: Platform) -> str:
    """Use the choices of a file in this process; returns a line for the log.

    Raises:
        UsageError: TunableOp does not accept the file on this GPU, or a variable switches it off.
    """
    path = tune_path(file, platform)
    tuned = read_tuned(path)
    if tuned.for_tunable_op:
        _read_by_tunable_op(path, tuned)
        use_table(None, tunable_op=True)
        return f"tune.file: TunableOp uses {len(tuned.kernels)} measured GEMM kernels of {path}"
    use_table(MatmulTable(tuned.choices))
    return f"tune.file: libraries for {len(tuned.choices)} measured matmuls of {path}"


def _read_by_tunable_op(path: Path, tuned: TunedMatmuls) -> None:
    tunable = torch.cuda.tunable
    tunable.enable(True)
    if not tunable.is_enabled():
        raise UsageError("tune.file: TunableOp stays off. Unset the variable PYTORCH_TUNABLEOP_ENABLED.")
    tunable.tuning_enable(False)  # a variable of train.gemm_tuning wins
    tunable.set_filename(str(path), False)
    small = torch.ones(16, 16, device="cuda", dtype=torch.bfloat16)
    small @ small  # releases before 2.7 know the versions of the libraries from the first GEMM on
    validators: Any = tunable.get_validators()  # pairs, unlike its annotation
    check_made_for(path, tuned.made_for, dict(validators))
    if not tunable.read_file(str(path)):
        raise UsageError(f"tune.file={path}: torch {torch.__version__} rejects the file. {_AGAIN}")
