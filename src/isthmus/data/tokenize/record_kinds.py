"""What distinguishes the kinds of records: texts, chats, preference pairs and answers with labels."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from isthmus.data.chat.chat_records import Conversation, Kind, LabelledRecord, PreferenceRecord, kinds_of, parse_chat
from isthmus.data.chat.preference_records import parse_labelled, parse_preference
from isthmus.data.chat.rollout_records import PromptRecord, parse_prompt
from isthmus.data.readers.chunks import Record
from isthmus.errors import DataError, counted


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordKind:
    """A kind of records, as it is read, tokenized and named in messages."""

    name: Kind
    phrase: str
    """One record."""
    recipe: str
    """Recipe that messages recommend for it."""
    parse: Callable[[Record], Conversation | PreferenceRecord | LabelledRecord | PromptRecord] | None = None
    """None: the record is a text, whose tokens are all targets."""
    is_answers: bool = False
    """Its sequences are a prompt with an answer, and are never split."""
    roles: tuple[str, ...] = ()
    """Roles of the sequences of a record that are kept or dropped together."""
    has_values: bool = False
    """Each sequence has a value, also if it is zero."""
    has_columns: bool = False
    """Each sequence has the fields of its record, of any name."""

    def check(self, record: Record) -> None:
        """Raise DataError for a record that is of other kinds only."""
        kinds = kinds_of(record)
        if kinds and not self.has_columns and self.name not in kinds:
            other = RECORD_KINDS[kinds[0]]
            raise DataError(
                f"{record.where}: {other.phrase} among data of kind {self.name}. Expected {self.phrase}; "
                f"{other.recipe} trains on {other.phrase}."
            )

    @property
    def is_text(self) -> bool:
        return self.parse is None

    def counted(self, sequences: int) -> str:
        """So many sequences as users count them: those of a pair are one."""
        return counted(sequences // len(self.roles), "pair") if self.roles else counted(sequences, "sample")


_KINDS = (
    RecordKind(name="text", phrase="plain text", recipe="pretrain"),
    RecordKind(name="chat", phrase="a chat record", recipe="sft", parse=parse_chat),
    RecordKind(
        name="preference",
        phrase="a preference pair",
        recipe="dpo",
        parse=parse_preference,
        is_answers=True,
        roles=("chosen", "rejected"),
    ),
    RecordKind(
        name="unpaired",
        phrase="an answer with a label",
        recipe="kto",
        parse=parse_labelled,
        is_answers=True,
        has_values=True,
    ),
    RecordKind(name="prompt", phrase="a prompt", recipe="grpo", parse=parse_prompt, has_columns=True),
)
RECORD_KINDS: Mapping[Kind, RecordKind] = {kind.name: kind for kind in _KINDS}
TEXT, CHAT, PREFERENCE, UNPAIRED, PROMPT = _KINDS
