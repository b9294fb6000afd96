"""The documentation of the installed Python as training data."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from isthmus.data.chat.chat_records import Conversation, Document, parse_record
from isthmus.demo.python_docs import python_documentation, write_chats, write_texts
from unit.data.records import read_records

PROBE = """
import sys
before = set(sys.modules)
from isthmus.demo.python_docs import python_documentation
import hashlib
print(hashlib.sha256(repr(python_documentation()).encode()).hexdigest())
print(sorted({"antigravity", "this", "tkinter", "turtle", "idlelib", "http.server"} & (set(sys.modules) - before)))
"""


def test_entries_are_many_and_written_as_chats_and_texts(tmp_path):
    entries = python_documentation()
    assert 2000 <= len(entries) <= 4000
    assert len({entry.answer for entry in entries}) == len(entries)
    assert all(40 <= len(entry.answer) <= 1200 for entry in entries)
    assert not any(" at 0x" in entry.document for entry in entries)
    write_chats(entries[:50], tmp_path / "chats.jsonl")
    write_texts(entries[:50], tmp_path / "texts.jsonl")
    chats = [parse_record(record) for record in read_records(tmp_path / "chats.jsonl")]
    assert all(isinstance(chat, Conversation) for chat in chats)
    texts = [parse_record(record) for record in read_records(tmp_path / "texts.jsonl")]
    assert all(isinstance(text, Document) for text in texts)
    assert json.loads((tmp_path / "texts.jsonl").read_text().split("\n")[0])["text"].endswith(entries[0].answer + "\n")


@pytest.mark.processes
def test_the_same_in_every_process_and_nothing_odd_is_imported():
    runs = [
        subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, check=True).stdout.split("\n")
        for _ in range(2)
    ]
    assert runs[0] == runs[1]
    assert runs[0][1] == "[]"
