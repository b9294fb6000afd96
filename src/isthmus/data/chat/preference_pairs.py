"""Renders preference pairs: prompt and chosen answer, prompt and rejected answer."""

from __future__ import annotations

from isthmus.data.chat.chat_records import Conversation, Message, PreferenceRecord
from isthmus.data.chat.chat_text import ChatRenderer, ChatText, ChatTokenizer
from isthmus.errors import DataError


class PairRenderer:
    """Renders both conversations of a pair; the assistant turns after the prompt have loss."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self._render = ChatRenderer(tokenizer)

    @property
    def without_end(self) -> int:
        """Answers so far without a special token after them."""
        return self._render.without_end

    def __call__(self, pair: PreferenceRecord) -> tuple[ChatText, ChatText]:
        """The chosen and the rejected conversation; DataError if an answer is not one text."""
        # Assistant turns in the prompt have no loss.
        prompt = [turn | {"weight": 0} if turn["role"] == "assistant" else turn for turn in pair.prompt]
        return self._whole(pair, prompt, pair.chosen), self._whole(pair, prompt, pair.rejected)

    def _whole(self, pair: PreferenceRecord, prompt: list[Message], answer: list[Message]) -> ChatText:
        texts = self._render(Conversation([*prompt, *answer], pair.tools, pair.where))
        if len(texts) == 1:
            return texts[0]
        why = "the chat template rewrites earlier turns of an answer when later ones follow"
        raise DataError(
            f"{pair.where}: {why}, so it has no single probability. Use answers of one turn."
            if texts
            else f"{pair.where}: an answer has no assistant turn with loss."
        )
