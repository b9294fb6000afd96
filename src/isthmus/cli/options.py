"""Options of several commands, and commands whose options are one dataclass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, fields
from inspect import Parameter, Signature
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer


def verb(function: Callable[[Any], int]) -> Callable[..., int]:
    """A typer command whose options are the fields of the dataclass that ``function`` takes as ``options``."""
    options = get_type_hints(function)["options"]
    annotations = get_type_hints(options, include_extras=True)

    def command(**values: Any) -> int:
        return function(options(**values))

    command.__name__, command.__doc__ = function.__name__, function.__doc__
    command.__annotations__ = annotations
    command.__signature__ = Signature(  # type: ignore[attr-defined]
        [
            Parameter(
                field.name,
                Parameter.KEYWORD_ONLY,
                default=Parameter.empty if field.default is MISSING else field.default,
                annotation=annotations[field.name],
            )
            for field in fields(options)
        ]
    )
    return command


def _trust(context: typer.Context, value: bool) -> bool:
    if value:
        from isthmus.files.checked_files import trusting

        context.with_resource(trusting())
    return value


Trust = Annotated[
    bool,
    typer.Option(
        "--trust", callback=_trust, help="Do not check the checksums of what is read: damage may stay undetected."
    ),
]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error and the output of every rank.")]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
HfLike = Annotated[
    Path | None,
    typer.Option(
        metavar="HF_DIR", help="Model folder, or preset:NAME, whose config describes a checkpoint without a config."
    ),
]
Bin = Annotated[
    bool,
    typer.Option(
        "--bin",
        help="Read pytorch_model*.bin instead of safetensors. These files are pickles: none of their code is run, and "
        "a file with code is refused. Prefer safetensors if the model has them.",
    ),
]
Tp = Annotated[int | None, typer.Option(min=1, metavar="N", help="Tensor parallel size of --to torch.")]
Pp = Annotated[int | None, typer.Option(min=1, metavar="N", help="Pipeline parallel size of --to torch.")]
Vpp = Annotated[int | None, typer.Option(min=1, metavar="N", help="Layer chunks per pipeline stage of --to torch.")]
Ep = Annotated[int | None, typer.Option(min=1, metavar="N", help="Expert parallel size of --to torch.")]
Etp = Annotated[int | None, typer.Option(min=1, metavar="N", help="Expert tensor parallel size; default: tp.")]
Spelling = Annotated[
    str | None,
    typer.Option(
        metavar="NAMES", help="Tensor names of --to torch: te (TransformerEngine's layers, default) or local."
    ),
]
Dtype = Annotated[
    str | None, typer.Option(metavar="DTYPE", help="fp32, bf16 or fp16; default: the dtype of each tensor.")
]
VocabSize = Annotated[
    int | None,
    typer.Option(min=1, metavar="N", help="Embedding rows without padding, for a checkpoint that lacks this number."),
]
HfFamily = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="model_type to write with --to hf; isthmus includes its modeling files."),
]
Learn = Annotated[
    bool,
    typer.Option(
        "--learn", help="Infer the weight mapping of an unsupported model type, and prove it on small random models."
    ),
]
Keep = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR|FILE.py",
        help="Save the result of --learn in DIR, for ISTHMUS_FAMILIES=DIR, or as a module of families/models.",
    ),
]
Adapter = Annotated[
    Path | None, typer.Option(metavar="DIR", help="Merge this LoRA adapter of PEFT into the Hugging Face folder SRC.")
]
Push = Annotated[
    str | None, typer.Option(metavar="REPO_ID", help="Upload the Hugging Face folder to this repository at the end.")
]
Public = Annotated[bool, typer.Option("--public", help="Make a repository that --push creates public.")]
ChatTemplate = Annotated[
    str | None, typer.Option("--chat-template", metavar="TEMPLATE", help="Chat template, as chat.template of a run.")
]
Workers = Annotated[int | None, typer.Option(min=1, max=1024, metavar="N", help="Processes; default: one per core.")]
