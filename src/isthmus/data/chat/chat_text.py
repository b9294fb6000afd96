"""Renders conversations to text, with the spans of the assistant turns.

A template with ``{% generation %}`` marks gives the spans. Without marks, a span is the difference between the text up
to and including an answer, and the text before it with the generation prompt. Some templates render a turn differently
when others follow it (they drop its reasoning): such a turn gets a separate text that ends with it, or with
``split_turns=false`` the span of what the template renders of it in the whole text.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Literal, Protocol

from isthmus.data.chat.chat_records import Conversation, LabelledRecord, PreferenceRecord
from isthmus.data.chat.conversation_settings import UNCHANGED, ChatSettings
from isthmus.data.chat.loss_spans import MaskedIds, Span, following, merged, shared_prefix, turn_end
from isthmus.data.chat.message_normalization import Message, Messages, Tools
from isthmus.data.chat.rollout_records import PROMPT, PromptRecord
from isthmus.data.chat.template_capabilities import TemplateCapabilities, adapt
from isthmus.errors import DataError

LossOn = Literal["assistant", "all", "last"]
_SENTINELS = ("\ue000", "\ue001")  # private use characters: no template and no answer begins with them


class ChatTokenizer(Protocol):
    """The methods of ``isthmus.hf.tokenizer.tokenizer.Tokenizer`` that data preparation uses."""

    eos_id: int | None
    bos_id: int | None
    """The token that the tokenizer adds before a text, if any."""
    special_tokens: tuple[str, ...]
    """Special tokens as text, the longest first."""
    has_generation_marks: bool
    """Whether the chat template has ``{% generation %}`` marks."""

    def apply_chat_template(
        self, messages: Messages, tools: Tools = None, *, add_generation_prompt: bool = False
    ) -> str:
        """The text of a conversation; DataError if the template raises."""

    def apply_by_turn(self, messages: Messages) -> tuple[list[str], str] | None:
        """The text of each turn and the generation prompt; None if turns are not rendered independently."""

    def apply_marked_template(self, messages: Messages, tools: Tools = None) -> tuple[str, list[Span]]:
        """The text of a conversation and the spans between its generation marks."""

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids without added special tokens."""

    def encode_with_mask(self, texts: Sequence[str], spans: Sequence[Sequence[Span]]) -> list[MaskedIds]:
        """``encode_batch``, and 1 for each token that overlaps a span of its text."""


@dataclass(frozen=True, slots=True)
class ChatText:
    """A training text and the spans whose tokens have loss."""

    text: str
    loss_spans: list[Span]
    value: float = 0.0
    """The label of an answer, or the margin of a pair."""
    columns: str = ""
    """The fields of the record of a prompt, as JSON."""


class ChatRenderer:
    """Renders conversations with one tokenizer's chat template, which is probed once."""

    def __init__(
        self, tokenizer: ChatTokenizer, *, loss_on: LossOn = "assistant", settings: ChatSettings = UNCHANGED
    ) -> None:
        """Raises DataError if the template does not render the content of assistant turns."""
        self._tokenizer, self._loss_on, self._settings = tokenizer, loss_on, settings
        self.capabilities: TemplateCapabilities = TemplateCapabilities.probe(tokenizer.apply_chat_template)
        self.turn_token: str | None = self._find_turn_token()
        self.without_end: int = 0
        """Number of texts so far whose last answer has no special token after it."""
        self.empty_answers: int = 0
        """Number of answers so far that have loss and neither text nor calls."""

    def prompt(self, messages: list[Message], tools: Tools = None) -> str:
        """The text before the next answer; DataError if the template rejects the turns."""
        messages, tools = adapt(self._settings.applied(messages), tools, self.capabilities)
        return self._tokenizer.apply_chat_template(messages, tools, add_generation_prompt=True)

    def prompt_text(self, record: PromptRecord) -> ChatText:
        """The text before the answer to a prompt, with the fields of its record."""
        prompt = record.prompt
        with _errors_with(record.where):
            text = self.prompt(
                [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt, record.tools
            )
            text.encode("utf-8")
        columns = json.dumps({**record.columns, PROMPT: record.prompt}, default=str)  # dates of tables become text
        return ChatText(text, [(0, len(text))], columns=columns)

    def __call__(self, conversation: Conversation) -> list[ChatText]:
        """The texts of one conversation: one, none without loss, or more if the template rewrites earlier turns."""
        with _errors_with(conversation.where):
            messages = self._settings.applied(conversation.messages)
            messages, tools = adapt(messages, conversation.tools, self.capabilities)
            texts = [chat for chat in self._render(messages, tools) if chat.loss_spans]
            self.empty_answers += sum(map(_is_empty_answer, conversation.messages))
            for chat in texts:
                chat.text.encode("utf-8")
                self.without_end += not chat.text.endswith(self._tokenizer.special_tokens, 0, chat.loss_spans[-1][1])
        return texts

    def _render(self, messages: list[Message], tools: Tools) -> list[ChatText]:
        if self._loss_on == "all":
            return [self._render_all(messages, tools)]
        turns = [k for k, message in enumerate(messages) if message["role"] == "assistant"]
        messages = messages[: turns[-1] + 1]  # the text after the last answer has no loss
        without_loss = [k for k in turns if messages[k].get("weight") == 0]
        turns = turns[-1:] if self._loss_on == "last" else turns
        if (
            self._tokenizer.has_generation_marks
            and not without_loss
            and (marked := self._render_marked(messages, tools, turns))
        ):
            return [marked]
        return self._render_by_prefix(messages, tools, [k for k in turns if k not in without_loss])

    def _render_all(self, messages: list[Message], tools: Tools) -> ChatText:
        """The whole text; everything has loss except answers with weight 0."""
        text, spans, at = self._tokenizer.apply_chat_template(messages, tools), [], 0
        for turn, message in enumerate(messages):
            if message.get("weight") != 0:
                continue
            before, start = self._turn(messages, tools, turn) if message["role"] == "assistant" else ("", 0)
            if not before or not text.startswith(before):
                raise DataError(
                    f"turn {turn + 1} must have no loss, and with loss_on=all its span cannot be found: it is not an "
                    "answer, or the chat template renders it differently when others follow. Use loss_on=assistant."
                )
            spans.append((at, start))
            at = len(before)
        return ChatText(text, merged([*spans, (at, len(text))]))

    def _render_marked(self, messages: list[Message], tools: Tools, turns: list[int]) -> ChatText | None:
        """One text with the spans of the template's marks; None without marked text."""
        text, spans = self._tokenizer.apply_marked_template(messages, tools)
        spans_with_loss = []
        for span in merged(spans):
            end = turn_end(text, span, self._tokenizer.special_tokens, self.turn_token)
            if not text.endswith(self._tokenizer.special_tokens, span[0], end):
                # The marks contain only the content; the end token has loss too.
                end = following(text, span[1], self.turn_token) or end
            spans_with_loss.append((span[0], end))
        if self._loss_on == "last" and spans_with_loss:
            try:
                start = self._turn(messages, tools, turns[-1])[1]
            except DataError:
                start = spans_with_loss[-1][0]
            spans_with_loss = [span for span in spans_with_loss if span[1] > start]
        return ChatText(text[: spans_with_loss[-1][1]], spans_with_loss) if spans_with_loss else None

    def _render_by_prefix(self, messages: list[Message], tools: Tools, turns: list[int]) -> list[ChatText]:
        """The fewest texts that contain every turn as the model generates it."""
        rendered = self._by_turn(messages, turns) if not tools else {}
        for turn in turns:
            if turn not in rendered:
                rendered[turn] = self._turn(messages, tools, turn)
        texts = []
        if turns and not self._settings.split_turns:
            text = rendered[turns[-1]][0]
            spans = [self._span_in(text, messages[: turns[-1] + 1], tools, turn, rendered[turn]) for turn in turns]
            return [ChatText(text, merged(spans))]
        while turns:
            text = rendered[turns[-1]][0]
            here = [turn for turn in turns if text.startswith(rendered[turn][0])]
            texts.append(ChatText(text, merged([(rendered[turn][1], len(rendered[turn][0])) for turn in here])))
            turns = [turn for turn in turns if turn not in here]
        return texts[::-1]

    def _span_in(
        self, full_text: str, messages: list[Message], tools: Tools, turn: int, answer_span: tuple[str, int]
    ) -> Span:
        """The span of an answer in the text of all turns, where the template may render it differently."""
        text, start = answer_span
        if full_text.startswith(text):
            return start, len(text)
        trials = []
        for mark in _SENTINELS:
            answer = {"role": "assistant", "content": mark}
            trials.append(self._tokenizer.apply_chat_template([*messages[:turn], answer, *messages[turn + 1 :]], tools))
        start = len(shared_prefix(full_text, *trials))
        after = len(shared_prefix(*(trial.rstrip()[::-1] for trial in trials), full_text.rstrip()[::-1]))
        end = len(full_text.rstrip()) - after
        return start, following(full_text, end, self.turn_token) or end

    def _by_turn(self, messages: list[Message], turns: list[int]) -> dict[int, tuple[str, int]]:
        """The result of ``_turn`` for independent turns, without rendering each prefix."""
        applied = self._tokenizer.apply_by_turn(messages)
        if applied is None:
            return {}
        pieces, opening = applied
        text, ends = "".join(pieces), list(accumulate(map(len, pieces)))
        rendered = {}
        for turn in turns:
            if turn and text.startswith(opening, ends[turn - 1], ends[turn]):
                start = ends[turn - 1] + len(opening)
                end = turn_end(text, (start, ends[turn]), self._tokenizer.special_tokens, self.turn_token)
                if text[start:end].strip():
                    rendered[turn] = (text[:end], start)
        return rendered

    def _turn(self, messages: list[Message], tools: Tools, turn: int) -> tuple[str, int]:
        """The text up to the end of turn ``turn``, and the start of the assistant's answer in it."""
        render = self._tokenizer.apply_chat_template
        text = render(messages[: turn + 1], tools)
        try:
            opening = render(messages[:turn], tools, add_generation_prompt=True)
        except DataError:
            opening = None  # some templates raise without turns, or with a system turn alone
        if opening is not None and text.startswith(opening):
            start = len(opening)
        else:
            start = self._start_by_trial(messages, tools, turn, text, opening)
        end = turn_end(text, (start, len(text)), self._tokenizer.special_tokens, self.turn_token)
        if not text[start:end].strip():
            raise DataError(f"the chat template renders nothing of the assistant's turn {turn + 1}.")
        return text[:end], start

    def _start_by_trial(self, messages: list[Message], tools: Tools, turn: int, text: str, opening: str | None) -> int:
        """The start of the answer if the text does not begin with the earlier turns and the generation prompt.

        The generation prompt may contain more than the answer's opening (``<think>``), or the template may count turns:
        two trial answers show where the text of the template ends.
        """
        render = self._tokenizer.apply_chat_template
        trials = [render([*messages[:turn], {"role": "assistant", "content": mark}], tools) for mark in _SENTINELS]
        after = shared_prefix(*(trial[::-1] for trial in trials))[::-1]
        if any(len(m["content"].strip()) > 2 and m["content"].strip() in after for m in messages[:turn]):
            raise DataError(
                f"the chat template renders earlier turns after turn {turn + 1}, so the span of the answer is unknown. "
                "Add {% generation %} marks to the template, or set data.loss_on=all."
            )
        start = len(shared_prefix(text, *trials))
        if opening is not None:
            shared = len(shared_prefix(text, opening))
            before = shared_prefix(render(messages[:turn], tools), opening)
            if shared >= len(before):  # only the opening differs: the answer starts after the shared part
                start = min(start, shared)
        return start

    def _find_turn_token(self) -> str | None:
        """The special token after an assistant turn; DataError if a trial answer is not rendered."""
        answers = ("trialanswer", "secondanswer")
        trial = [
            {"role": "user", "content": "trialquestion"},
            {"role": "assistant", "content": answers[0]},
            {"role": "user", "content": "secondquestion"},
            {"role": "assistant", "content": answers[1]},
        ]
        try:
            text = self._tokenizer.apply_chat_template(trial)
        except DataError:
            return None
        if not all(answer in text for answer in answers):
            raise DataError(
                "the chat template does not render the content of assistant turns that are plain text. "
                "Use another template (chat.template)."
            )
        rest = text[text.index(answers[0]) + len(answers[0]) :].lstrip()
        return next((special for special in self._tokenizer.special_tokens if rest.startswith(special)), None)


@contextmanager
def _errors_with(where: str) -> Iterator[None]:
    """Errors name the record."""
    try:
        yield
    except DataError as error:
        raise DataError(f"{where}: {error}") from error
    except UnicodeEncodeError as error:
        raise DataError(f"{where}: the text contains a lone surrogate.") from error


def _is_empty_answer(message: Message) -> bool:
    has_loss = message["role"] == "assistant" and message.get("weight") != 0
    return has_loss and not (message["content"].strip() or message.get("tool_calls"))


class AnswerRenderer:
    """Renders answers with their prompt; the assistant turns after the prompt have loss."""

    def __init__(self, tokenizer: ChatTokenizer, *, settings: ChatSettings = UNCHANGED) -> None:
        self._render = ChatRenderer(tokenizer, settings=replace(settings, split_turns=True))

    @property
    def without_end(self) -> int:
        """Answers so far without a special token after them."""
        return self._render.without_end

    @property
    def empty_answers(self) -> int:
        """Answers so far without text."""
        return self._render.empty_answers

    def __call__(self, record: PreferenceRecord | LabelledRecord) -> list[ChatText]:
        """The chosen and the rejected conversation, or each answer; DataError if an answer is not one text."""
        # Assistant turns in the prompt have no loss.
        prompt = [turn | {"weight": 0} if turn["role"] == "assistant" else turn for turn in record.prompt]
        if isinstance(record, LabelledRecord):
            return [
                replace(self._single_text(record, prompt, turns), value=float(label)) for turns, label in record.answers
            ]
        answers = (record.chosen, record.rejected)
        return [replace(self._single_text(record, prompt, turns), value=record.margin) for turns in answers]

    def _single_text(
        self, record: PreferenceRecord | LabelledRecord, prompt: list[Message], answer: list[Message]
    ) -> ChatText:
        texts = self._render(Conversation([*prompt, *answer], record.tools, record.where))
        if len(texts) == 1:
            return texts[0]
        why = "the chat template rewrites earlier turns of an answer when later ones follow"
        raise DataError(
            f"{record.where}: {why}, so it has no single probability. Use answers of one turn."
            if texts
            else f"{record.where}: an answer has no assistant turn with loss."
        )
