"""Pairs of answers, the better and the worse one, to texts: both behind their prompt, and what is learned of them."""

from __future__ import annotations

from isthmus.data.chat.chat_records import Conversation, Message, PreferenceRecord
from isthmus.data.chat.chat_text import ChatRenderer, ChatText, ChatTokenizer
from isthmus.errors import DataError


class PairRenderer:
    """Renders both conversations of a pair; learned is what follows the prompt and the assistant said."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        """Try the template; see :class:`~isthmus.data.chat.chat_text.ChatRenderer` for the errors."""
        self._render = ChatRenderer(tokenizer)

    @property
    def without_end(self) -> int:
        """Answers so far that end with no special token."""
        return self._render.without_end

    def __call__(self, pair: PreferenceRecord) -> tuple[ChatText, ChatText]:
        """The chosen and the rejected conversation.

        Raises:
            DataError: the template refuses one, or writes its answer in more than one way.
        """
        # What the assistant said in the prompt is the same in both, and nothing to prefer.
        asked = [turn | {"weight": 0} if turn["role"] == "assistant" else turn for turn in pair.prompt]
        return self._whole(pair, asked, pair.chosen), self._whole(pair, asked, pair.rejected)

    def _whole(self, pair: PreferenceRecord, asked: list[Message], answer: list[Message]) -> ChatText:
        texts = self._render(Conversation([*asked, *answer], pair.tools, pair.where))
        if len(texts) == 1:
            return texts[0]
        why = "the chat template writes earlier turns of an answer in another way once later ones follow"
        raise DataError(
            f"{pair.where}: {why}, so it has no one probability. Give answers of one turn."
            if texts
            else f"{pair.where}: an answer has no turn of the assistant that counts."
        )
