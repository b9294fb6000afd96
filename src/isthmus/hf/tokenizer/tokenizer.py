"""A Hugging Face tokenizer with the methods that training needs: batches, offsets, chat templates, generation marks.

A folder with only a sentencepiece ``tokenizer.model`` is read by ``sentencepiece_model``: transformers 5.23 omits the
word mark before a text.
"""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
from tokenizers import Encoding, processors
from tokenizers import Tokenizer as Backend
from transformers import CONFIG_MAPPING, AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerBase

from isthmus.data.chat.chat_templates import find_template
from isthmus.data.chat.chat_text import ChatRenderer
from isthmus.data.chat.loss_spans import MaskedIds, Span, token_mask
from isthmus.data.chat.message_normalization import Messages, Tools
from isthmus.data.chat.template_capabilities import default_template
from isthmus.errors import DataError, IOFailure, IsthmusError, MissingInput, UnsafeInput, UsageError, disk_errors
from isthmus.hf.model_folder import check_small_files, read_json, tokenizer_files
from isthmus.hf.tokenizer.bounded_encoding import within_limits
from isthmus.hf.tokenizer.bounded_template import render_jinja_template, template_errors
from isthmus.hf.tokenizer.byte_lengths import ByteLengths, tokens_of
from isthmus.hf.tokenizer.sentencepiece_model import read_sentencepiece
from isthmus.hf.tokenizer.turn_template import TurnTemplate, turn_template

_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tokenizer_config.json")


def load_tokenizer(path: Path | str, *, trust_remote_code: bool = False) -> Tokenizer:
    """Read the tokenizer of a local model folder."""
    path = Path(path)
    if not path.is_dir():
        raise MissingInput(f"{path}: no such model folder.")
    if not any((path / name).is_file() for name in _FILES):
        raise MissingInput(f"{path}: no tokenizer files. Expected tokenizer.json or tokenizer.model.")
    check_small_files(path)
    only_sentencepiece = not (path / "tokenizer.json").is_file() and (path / "tokenizer.model").is_file()
    if only_sentencepiece and (rebuilt := read_sentencepiece(path / "tokenizer.model")) is not None:
        return Tokenizer(rebuilt, path, differs_from_files=True)
    try:
        inner = AutoTokenizer.from_pretrained(
            path, config=_placeholder_config(path), trust_remote_code=trust_remote_code, local_files_only=True
        )
        return Tokenizer(inner, path)
    except IsthmusError:
        raise
    except BaseException as error:  # each kind of tokenizer fails in its own way, some by a panic of Rust
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        reason = str(error).strip().split("\n")[0]
        if "trust_remote_code" in str(error):
            raise UnsafeInput(
                f"{path}: the tokenizer requires code from this folder. Review the code, then set "
                "model.trust_remote_code (of a run) or --trust-remote-code (of isthmus prepare)."
            ) from error
        if isinstance(error, PermissionError):
            raise IOFailure(f"{path}: the tokenizer cannot be read: {reason}.") from error
        raise DataError(f"{path}: the tokenizer cannot be read: {type(error).__name__}: {reason}") from error


def _placeholder_config(path: Path) -> PreTrainedConfig | None:
    """An empty config for a model type that transformers does not know, so that none of its code runs; else None."""
    try:
        hf_config = read_json(path / "config.json")
        unknown = hf_config["model_type"] not in CONFIG_MAPPING
    except (OSError, DataError, LookupError, TypeError):
        return None
    settings: dict[str, Any] = {"tokenizer_class": hf_config.get("tokenizer_class")}
    return PreTrainedConfig(**settings) if unknown else None


MAX_TOKEN_ID = 1 << 24
"""tokenizers allocates memory for all smaller ids."""


class Tokenizer:
    """A tokenizer and its chat template; without one, a default template is used (``template_source``)."""

    def __init__(
        self, inner: PreTrainedTokenizerBase, folder: Path | None = None, *, differs_from_files: bool = False
    ) -> None:
        """Wrap a fast tokenizer; its chat template is set if it has none.

        With ``differs_from_files``, transformers would tokenize differently with the files of the folder.
        """
        backend = getattr(inner, "backend_tokenizer", None)
        if not isinstance(backend, Backend):
            raise UsageError(
                f"the tokenizer {type(inner).__name__} is not a fast tokenizer, which loss masks require. "
                "Convert it to tokenizer.json first."
            )
        self.inner = inner
        self.folder = folder
        if (last := max(backend.get_vocab().values(), default=0)) >= MAX_TOKEN_ID:
            raise DataError(
                f"{self._origin} has the token id {last}, expected less than {MAX_TOKEN_ID}. Copy its files again."
            )
        self._backend = Backend.from_str(backend.to_str())
        # Byte-level tokenizers may trim spaces from offsets; a mask needs every character.
        self._backend.post_processor = processors.ByteLevel(trim_offsets=False, add_prefix_space=False)
        self._backend.no_padding()
        self._backend.no_truncation()
        added = inner.added_tokens_decoder.values()
        specials = {token.content for token in added if token.special} | set(inner.all_special_tokens)
        self.special_tokens: tuple[str, ...] = tuple(sorted(specials, key=lambda token: (-len(token), token)))
        first = self._first_ids("") or self._first_ids("0")[:1]
        self.eos_id: int | None = inner.eos_token_id
        self.bos_id: int | None = inner.bos_token_id if first[:1] == [inner.bos_token_id] else None
        """The token that this tokenizer adds before a text; None if it adds none."""
        self.template_source: Literal["tokenizer", "chat.template", "chatml", "plain"] = "tokenizer"
        self.template_origin: str = "the chat template" if folder is None else f"the chat template of {folder}"
        """In messages."""
        template = inner.chat_template
        if isinstance(template, dict):  # several templates by name
            template = template.get("default")
        if template is None:
            name, template = default_template(inner.get_vocab(), adds_bos=self.bos_id is not None)
            if name == "plain" and inner.eos_token is None:
                raise UsageError("the tokenizer has neither a chat template nor an eos_token to end turns with.")
            self.template_source = name
            self.template_origin = f"the default chat template ({name})"
        self.differs_from_files: bool = differs_from_files
        self.turn_end_id: int | None = None
        """The token that ends an assistant turn of a chat template that was chosen, if it has one."""
        self._set_template(template)

    @property
    def _origin(self) -> str:
        """The tokenizer in messages."""
        return "the tokenizer" if self.folder is None else f"the tokenizer of {self.folder}"

    def _first_ids(self, text: str) -> list[int]:
        return list(within_limits(partial(self.inner.encode, text, add_special_tokens=True), len(text), self._origin))

    def _set_template(self, template: str) -> None:
        self.chat_template = template
        self.has_generation_marks: bool = re.search(r"\{%[-+]?\s*generation\s*[-+]?%\}", template) is not None
        self.__dict__.pop("_turns", None)
        if self.template_source != "tokenizer":
            self.inner.chat_template, self.differs_from_files = template, True

    def use_chat_template(self, source: str | None) -> None:
        """Replace the chat template: a name, a file or its text, as in ``chat.template``; None keeps it.

        Raises UsageError for an unknown or invalid template, and for one whose tokens the tokenizer lacks.
        """
        if source is None:
            return
        template, tokens = find_template(source)
        vocabulary = self.inner.get_vocab()
        lacking = [token for token in tokens if token not in vocabulary]
        if "eos_token" in template and self.inner.eos_token is None:
            lacking.append("eos_token")
        if lacking:
            raise UsageError(
                f"chat.template={source:.40}: the tokenizer has no {', '.join(lacking)}, which the template needs. Use "
                "another template, or the tokenizer of a model with this format (tokenizer.path)."
            )
        if self.bos_id is not None and "bos_token" not in template:
            template = "{{- bos_token -}}" + template
        self.template_source = "chat.template"
        self.template_origin = f"chat.template={source:.200}"
        self._set_template(template)
        try:
            self.apply_chat_template([{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}])
            turn_token = ChatRenderer(self).turn_token
        except DataError as error:
            raise UsageError(f"chat.template={source:.40}: {error}") from error
        self.turn_end_id = None if turn_token is None else vocabulary[turn_token]

    @property
    def files(self) -> list[Path]:
        """Files that an export copies; empty if the tokenizer has to be saved instead."""
        return [] if self.folder is None or self.differs_from_files else tokenizer_files(self.folder)

    @property
    def has_own_template(self) -> bool:
        """Whether the chat template is that of the tokenizer's files or a chosen one, and not a default."""
        return self.template_source in ("tokenizer", "chat.template")

    @property
    def note(self) -> str | None:
        """A remark on the chat template for the user; None without one."""
        if self.has_own_template:
            return None
        return f"the tokenizer has no chat template; the default one ({self.template_source}) is used"

    @cached_property
    def vocab_size(self) -> int:
        """The largest id plus one; a model's embedding needs at least as many rows."""
        return int(max(self.inner.get_vocab().values())) + 1

    @cached_property
    def _turns(self) -> TurnTemplate | None:
        with template_errors(self.template_origin):
            return turn_template(self.chat_template, self.inner.special_tokens_map)

    def __getstate__(self) -> dict[str, Any]:
        """Omit the compiled template, which cannot be pickled."""
        return {name: value for name, value in self.__dict__.items() if name != "_turns"}

    def encode(self, text: str) -> list[int]:
        """Token ids of one text without added tokens; special tokens in the text are recognised."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of many texts without added tokens, in parallel threads."""
        return [encoding.ids for encoding in self._encoded(texts, offsets=False)]

    def _encoded(self, texts: Sequence[str], *, offsets: bool = True) -> list[Encoding]:
        encode = self._backend.encode_batch if offsets else self._backend.encode_batch_fast
        call = partial(encode, list(texts), add_special_tokens=False)
        try:
            return within_limits(call, sum(map(len, texts)), self._origin)
        except UnsafeInput:
            raise
        except Exception as error:  # the library raises bare exceptions
            raise DataError(f"{self.folder or 'the tokenizer'}: the tokenizer fails on a text: {error}.") from error

    def encode_with_offsets(self, texts: Sequence[str]) -> list[tuple[list[int], list[Span]]]:
        """Token ids, and for each token its characters [first, last + 1)."""
        return [(encoding.ids, encoding.offsets) for encoding in self._encoded(texts)]

    def encode_with_mask(self, texts: Sequence[str], spans: Sequence[Sequence[Span]]) -> list[MaskedIds]:
        """Token ids, and a mask with 1 for each token that overlaps with one of its text's ``spans``.

        Equals ``token_mask`` of ``encode_with_offsets``, without computing all offsets.
        """
        if self._byte_lengths is None:
            return self._encode_with_edges(texts, spans)
        ids, counts = array("i"), []
        for encoding in self._encoded(texts, offsets=False):
            ids.fromlist(encoding.ids)
            counts.append(len(encoding))
        tokens = np.frombuffer(ids, dtype=np.int32)
        mask, wrong = self._byte_lengths.masks(texts, spans, tokens, counts)
        encoded, end = [], 0
        for count in counts:
            start, end = end, end + count
            encoded.append((tokens[start:end], mask[start:end]))
        again = self._encode_with_edges([texts[number] for number in wrong], [spans[number] for number in wrong])
        for number, masked in zip(wrong, again, strict=True):
            encoded[number] = masked
        return encoded

    def _encode_with_edges(self, texts: Sequence[str], spans: Sequence[Sequence[Span]]) -> list[MaskedIds]:
        encoded = []
        for encoding, text_spans in zip(self._encoded(texts), spans, strict=True):
            ids = np.frombuffer(array("i", encoding.ids), dtype=np.int32)
            mask = np.zeros(len(ids), dtype=np.uint8)
            for span in text_spans:
                part = tokens_of(encoding, span)
                if part is None:
                    mask = token_mask(encoding.offsets, text_spans)
                    break
                mask[part] = 1
            encoded.append((ids, mask))
        return encoded

    @cached_property
    def _byte_lengths(self) -> ByteLengths | None:
        return ByteLengths.of(self._backend)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        return str(self.inner.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def apply_chat_template(
        self,
        messages: Messages,
        tools: Tools = None,
        *,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
    ) -> str:
        """The text of a conversation, with ``continue_final_message`` without the end of its last turn.

        Raises DataError if the template rejects it, UnsafeInput if the template needs too much time or memory.
        """
        ends = {"add_generation_prompt": add_generation_prompt, "continue_final_message": continue_final_message}
        return self._render(messages, tools, **ends)[0]

    def apply_by_turn(self, messages: Messages) -> tuple[list[str], str] | None:
        """The text of each turn and the generation prompt; None if the template cannot be rendered turn by turn.

        The texts of the first k turns concatenate to the text of a conversation of k turns.
        """
        if self._turns is None:
            return None
        with template_errors(self.template_origin):
            turns = self._turns(messages)
        return None if turns is None else (turns, self._turns.opening)

    def apply_marked_template(self, messages: Messages, tools: Tools = None) -> tuple[str, list[Span]]:
        """The text of a conversation and the spans between ``{% generation %}`` marks."""
        return self._render(messages, tools, return_assistant_tokens_mask=True)

    def _render(self, messages: Messages, tools: Tools, **options: bool) -> tuple[str, list[Span]]:
        with template_errors(self.template_origin):
            rendered, marks = render_jinja_template(
                [list(messages)],
                tools=None if tools is None else list(tools),
                chat_template=self.chat_template,
                **options,
                **self.inner.special_tokens_map,
            )
        return rendered[0], [(int(start), int(end)) for start, end in marks[0]] if marks else []


def save_tokenizer(inner: PreTrainedTokenizerBase, folder: Path | str) -> list[str]:
    """Write a tokenizer in a form that transformers 4 and 5 both read; returns the names of the files."""
    config = Path(folder) / "tokenizer_config.json"
    with disk_errors(Path(folder)):
        written = {Path(name).name for name in inner.save_pretrained(folder)}
        values = json.loads(config.read_bytes())
        # Names that only transformers 5 knows; it reads the older ones too.
        values["tokenizer_class"] = "PreTrainedTokenizerFast"
        values.pop("backend", None)
        if isinstance(extra := values.pop("extra_special_tokens", None), list):
            values["additional_special_tokens"] = extra
        config.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        return sorted(name for name in written if (Path(folder) / name).is_file())
