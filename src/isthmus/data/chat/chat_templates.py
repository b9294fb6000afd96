"""Chat templates by name, in the published formats of model families."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path

from isthmus.data.chat.template_capabilities import CHATML, CHATML_MARKS
from isthmus.errors import MissingInput, UsageError
from isthmus.files.input_files import read_bytes

TEMPLATE_TOKENS: Mapping[str, tuple[str, ...]] = {
    "alpaca": (),
    "chatml": CHATML_MARKS,
    "deepseek": ("<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>"),  # noqa: RUF001 - as in the vocabulary
    "gemma": ("<start_of_turn>", "<end_of_turn>"),
    "llama2": (),
    "llama3": ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    "mistral": (
        *("[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
        *("[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
    ),
    "phi3": ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>"),
    "phi4": ("<|im_start|>", "<|im_sep|>", "<|im_end|>"),
    "qwen2.5": CHATML_MARKS,
    "qwen3": CHATML_MARKS,
    "vicuna": (),
    "zephyr": (),
}
"""The tokens that each template needs in the vocabulary."""
_FILE = "chat_template.jinja"


def find_template(source: str) -> tuple[str, tuple[str, ...]]:
    """The text of a template and the tokens that it needs; ``source``: a name, a file, a folder with
    chat_template.jinja, or the text itself.

    Raises UsageError for an unknown name, MissingInput for a folder without a template.
    """
    if "{%" in source or "{{" in source:
        return source, ()
    if source in TEMPLATE_TOKENS:
        file = files("isthmus.data.chat") / "templates" / f"{source}.jinja"
        text = CHATML if source == "chatml" else file.read_text(encoding="utf-8").strip()
        return text, TEMPLATE_TOKENS[source]
    path = Path(os.path.expanduser(source))
    try:
        if path.is_dir() and not (path := path / _FILE).is_file():
            raise MissingInput(f"chat.template: {path} does not exist. Name the file of the template.")
        return read_bytes(path).decode("utf-8").strip(), ()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        why = "" if isinstance(error, FileNotFoundError) else f" ({reason})"
        raise UsageError(
            f"chat.template={source:.80} is neither a text file nor a known template{why}. Known are "
            f"{', '.join(TEMPLATE_TOKENS)}."
        ) from error
