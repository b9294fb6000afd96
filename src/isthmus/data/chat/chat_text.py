"""Conversations to text, and the stretches of it that the assistant said.

A template with ``{% generation %}`` marks tells the stretches itself. Without marks they are found by prefix
difference: what the template writes for the turns up to and with an answer, less what it writes for the turns before
it and the opening of an answer. Some templates write a turn differently once others follow it (they drop its
reasoning): such a turn is learned in a text of its own that ends with it, as the model would have to write it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from isthmus.data.chat.chat_records import Conversation, Message
from isthmus.data.chat.loss_spans import Span, following, merged, shared_prefix, turn_end
from isthmus.data.chat.template_capabilities import TemplateCapabilities, adapt
from isthmus.errors import DataError

LossOn = Literal["assistant", "all", "last"]
_SENTINELS = ("\ue000", "\ue001")  # characters for private use: no template and no answer begins with them


class ChatTokenizer(Protocol):
    """What this room needs of a tokenizer; ``isthmus.hf.tokenizer.tokenizer`` has it."""

    @property
    def eos_id(self) -> int | None:
        """The end-of-sequence token."""

    @property
    def bos_id(self) -> int | None:
        """The first token of a text, where the tokenizer puts one; else None."""

    @property
    def special_tokens(self) -> tuple[str, ...]:
        """Special tokens as they stand in a text, the longest first."""

    @property
    def has_generation_marks(self) -> bool:
        """Whether the chat template has ``{% generation %}`` marks."""

    def apply_chat_template(
        self,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = False,
    ) -> str:
        """The text of a conversation; DataError where the template refuses it."""

    def apply_by_turn(self, messages: Sequence[Message]) -> tuple[list[str], str] | None:
        """What the template writes for each turn, and before an answer; None where turns cannot be told apart so.

        End to end, what it writes for the first k turns is the text of these k turns.
        """

    def apply_marked_template(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] | None = None
    ) -> tuple[str, list[Span]]:
        """The text of a conversation and the stretches between its generation marks."""

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids, nothing added."""

    def encode_with_mask(
        self, texts: Sequence[str], spans: Sequence[Sequence[Span]]
    ) -> list[tuple[npt.NDArray[np.int32], npt.NDArray[np.uint8]]]:
        """Token ids, nothing added, and 1 for each token that shares a character with one of its text's spans."""

    def encode_with_offsets(self, texts: Sequence[str]) -> list[tuple[list[int], list[Span]]]:
        """Token ids, nothing added, and the characters each token stands for."""


@dataclass(frozen=True, slots=True)
class ChatText:
    """A text to train on, and the spans whose tokens have loss."""

    text: str
    loss_spans: list[Span]


class ChatRenderer:
    """Renders conversations with one tokenizer's template; what the template can do is found out once."""

    def __init__(self, tokenizer: ChatTokenizer, *, loss_on: LossOn = "assistant") -> None:
        """Try the template: which turns it shows, and which token ends an assistant's turn.

        Raises:
            DataError: the template does not show what is said.
        """
        self._tokenizer = tokenizer
        self._loss_on = loss_on
        self.abilities = TemplateCapabilities.of(tokenizer.apply_chat_template)
        self.turn_token = self._find_turn_token()
        self.without_end = 0
        """Texts so far whose last answer ends with no special token: nothing in them teaches to stop."""

    def __call__(self, conversation: Conversation) -> list[ChatText]:
        """The texts of one conversation: one, or more where the template rewrites earlier turns.

        Raises:
            DataError: the template refuses the conversation, or does not show what the assistant said.
        """
        try:
            messages, tools = adapt(conversation.messages, conversation.tools, self.abilities)
            texts = self._texts(messages, tools)
            for chat in texts:
                chat.text.encode("utf-8")
                self.without_end += not chat.text.endswith(self._tokenizer.special_tokens, 0, chat.loss_spans[-1][1])
        except DataError as error:
            raise DataError(f"{conversation.where}: {error}") from error
        except UnicodeEncodeError as error:
            raise DataError(f"{conversation.where}: the text holds a lone surrogate, which is no character.") from error
        return texts

    def _texts(self, messages: list[Message], tools: list[dict[str, Any]] | None) -> list[ChatText]:
        if self._loss_on == "all":
            return [self._all(messages, tools)]
        turns = [k for k, message in enumerate(messages) if message["role"] == "assistant"]
        messages = messages[: turns[-1] + 1]  # nothing is learned from what comes after the last answer
        silent = [k for k in turns if messages[k].get("weight") == 0]
        turns = turns[-1:] if self._loss_on == "last" else turns
        if self._tokenizer.has_generation_marks and not silent and (marked := self._by_marks(messages, tools, turns)):
            return [marked]
        return self._by_prefix(messages, tools, [k for k in turns if k not in silent])

    def _all(self, messages: list[Message], tools: list[dict[str, Any]] | None) -> ChatText:
        """The whole text, all of it learned but the answers that say that they are not."""
        text, spans, at = self._tokenizer.apply_chat_template(messages, tools), [], 0
        for turn, message in enumerate(messages):
            if message.get("weight") != 0:
                continue
            said, start = self._turn(messages, tools, turn) if message["role"] == "assistant" else ("", 0)
            if not said or not text.startswith(said):
                raise DataError(
                    f"turn {turn + 1} is not to be learned, and with loss_on=all it cannot be told apart: it is no "
                    "answer, or the chat template writes it otherwise once others follow. Take loss_on=assistant."
                )
            spans.append((at, start))
            at = len(said)
        return ChatText(text, merged([*spans, (at, len(text))]))

    def _by_marks(
        self, messages: list[Message], tools: list[dict[str, Any]] | None, turns: list[int]
    ) -> ChatText | None:
        """One text by the template's own marks; None when it marked nothing."""
        text, spans = self._tokenizer.apply_marked_template(messages, tools)
        learned = []
        for span in merged(spans):
            end = turn_end(text, span, self._tokenizer.special_tokens, self.turn_token)
            if not text.endswith(self._tokenizer.special_tokens, span[0], end):
                # Marks drawn around the words alone: the end of the turn is part of the answer all the same.
                end = following(text, span[1], self.turn_token) or end
            learned.append((span[0], end))
        if self._loss_on == "last" and learned:
            try:
                start = self._turn(messages, tools, turns[-1])[1]
            except DataError:
                start = learned[-1][0]
            learned = [span for span in learned if span[1] > start]
        return ChatText(text[: learned[-1][1]], learned) if learned else None

    def _by_prefix(
        self, messages: list[Message], tools: list[dict[str, Any]] | None, turns: list[int]
    ) -> list[ChatText]:
        """As few texts as show every turn the way the model would have to write it."""
        found = self._by_turn(messages, turns) if not tools else {}
        for turn in turns:
            if turn not in found:
                found[turn] = self._turn(messages, tools, turn)
        texts = []
        while turns:
            text = found[turns[-1]][0]
            here = [turn for turn in turns if text.startswith(found[turn][0])]
            texts.append(ChatText(text, merged([(found[turn][1], len(found[turn][0])) for turn in here])))
            turns = [turn for turn in turns if turn not in here]
        return texts[::-1]

    def _by_turn(self, messages: list[Message], turns: list[int]) -> dict[int, tuple[str, int]]:
        """What ``_turn`` would find, of the turns whose place shows where the template writes one after the other."""
        applied = self._tokenizer.apply_by_turn(messages)
        if applied is None:
            return {}
        pieces, opening = applied
        text, ends = "".join(pieces), list(accumulate(map(len, pieces)))
        found = {}
        for turn in turns:
            if turn and text.startswith(opening, ends[turn - 1], ends[turn]):
                start = ends[turn - 1] + len(opening)
                end = turn_end(text, (start, ends[turn]), self._tokenizer.special_tokens, self.turn_token)
                if text[start:end].strip():
                    found[turn] = (text[:end], start)
        return found

    def _turn(self, messages: list[Message], tools: list[dict[str, Any]] | None, turn: int) -> tuple[str, int]:
        """The text up to the end of turn number ``turn``, and where in it the assistant begins to speak."""
        render = self._tokenizer.apply_chat_template
        text = render(messages[: turn + 1], tools)
        try:
            opening = render(messages[:turn], tools, add_generation_prompt=True)
        except DataError:
            opening = None  # templates that cannot do with no turn at all, or with none but a system turn
        if opening is not None and text.startswith(opening):
            start = len(opening)
        else:
            start = self._start_by_trial(messages, tools, turn, text, opening)
        end = turn_end(text, (start, len(text)), self._tokenizer.special_tokens, self.turn_token)
        if not text[start:end].strip():
            raise DataError(f"the chat template shows nothing of the assistant's turn {turn + 1}.")
        return text[:end], start

    def _start_by_trial(
        self, messages: list[Message], tools: list[dict[str, Any]] | None, turn: int, text: str, opening: str | None
    ) -> int:
        """Where the answer begins when the turns before it and the opening of an answer are not how the text begins.

        The opening may say more than an answer in the data does (``<think>``), or the template may count the turns: two
        trial answers in the same place show where the template stops writing on its own account.
        """
        render = self._tokenizer.apply_chat_template
        trials = [render([*messages[:turn], {"role": "assistant", "content": mark}], tools) for mark in _SENTINELS]
        after = shared_prefix(*(trial[::-1] for trial in trials))[::-1]
        if any(len(m["content"].strip()) > 2 and m["content"].strip() in after for m in messages[:turn]):
            raise DataError(
                f"the chat template writes earlier turns after turn {turn + 1}, so the assistant's words cannot be "
                "told apart. Put {% generation %} marks into the template, or set data.loss_on=all."
            )
        start = len(shared_prefix(text, *trials))
        if opening is not None:
            shared = len(shared_prefix(text, opening))
            before = shared_prefix(render(messages[:turn], tools), opening)
            if shared >= len(before):  # only the opening itself differs: all that comes after what they share was said
                start = min(start, shared)
        return start

    def _find_turn_token(self) -> str | None:
        """The special token after an assistant's words in the middle of a conversation, seen in a trial.

        Raises:
            DataError: the words themselves are not there; a mask would hold nothing but the ends of turns.
        """
        words = ("trialanswer", "secondanswer")
        trial = [
            {"role": "user", "content": "trialquestion"},
            {"role": "assistant", "content": words[0]},
            {"role": "user", "content": "secondquestion"},
            {"role": "assistant", "content": words[1]},
        ]
        try:
            text = self._tokenizer.apply_chat_template(trial)
        except DataError:
            return None
        if not all(word in text for word in words):
            raise DataError(
                "the chat template does not show what the assistant says when it is given as plain text. "
                "Use another template (chat_template.jinja in the model folder)."
            )
        rest = text[text.index(words[0]) + len(words[0]) :].lstrip()
        return next((special for special in self._tokenizer.special_tokens if rest.startswith(special)), None)
