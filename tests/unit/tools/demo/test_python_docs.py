"""The documentation of the installed Python as training data, and questions about it."""

from __future__ import annotations

import hashlib
import subprocess
import sys

import pytest

from isthmus.tools.demo.python_docs import DocEntry, python_documentation
from isthmus.tools.demo.questions import Question, chance_level, exact_match, make_questions, mentions, split_entries

PROBE = """
import sys
before = set(sys.modules)
from isthmus.tools.demo.python_docs import python_documentation
import hashlib
print(hashlib.sha256(repr(python_documentation()).encode()).hexdigest())
print(sorted({"antigravity", "this", "tkinter", "turtle", "idlelib", "http.server"} & (set(sys.modules) - before)))
"""


@pytest.fixture(scope="module")
def entries() -> list[DocEntry]:
    return python_documentation()


@pytest.mark.sweep
def test_entries(entries: list[DocEntry]) -> None:
    assert 4000 <= len(entries) <= 9000
    by_name = {entry.name: entry for entry in entries}
    assert len(by_name) == len(entries)
    put = by_name["asyncio.queues.Queue.put"]
    assert (put.module, put.unit, put.kind) == ("asyncio.queues", "asyncio.queues.Queue", "method")
    assert put.parameters == ("item",)
    assert by_name["json.decoder.JSONDecodeError"].kind == "exception"
    assert by_name["shutil.copyfile"].parameters == ("src", "dst")
    text = (
        "In Python, shutil.copyfile() is a function defined in shutil. It has 2 parameters: src, dst.\nCopy data from"
    )
    assert by_name["shutil.copyfile"].document.startswith(text)


@pytest.mark.sweep
def test_no_training_text_mentions_a_validation_name(entries: list[DocEntry]) -> None:
    training, validation = split_entries(entries)
    names = {entry.name for entry in validation}
    assert len(validation) > 300 and len(training) > 0.8 * len(entries)
    assert not names & {entry.name for entry in training}
    texts = [entry.document for entry in training]
    texts += [text for question in make_questions(training) for text in (question.text, question.answer)]
    assert not any(mentions(text, names) for text in texts)
    assert not any(name in text.split() for text in texts for name in (validation[0].name, validation[-1].name))


def test_mentions() -> None:
    names = {"json.loads", "queue.Queue"}
    assert mentions("see json.loads.", names) and mentions("calls queue.Queue.put()", names)
    assert not mentions("json.loadsx, ajson.loads and Queue", names)


def test_questions_and_scores() -> None:
    put = DocEntry("queue", "Queue.put", "method", ("item", "block"), "")
    questions = {question.topic: question for question in make_questions([put])}
    assert questions["parameters"].text == "How many parameters has queue.Queue.put(item, block)?"
    assert questions["parameters"].answer == "2"
    training = [Question("kind", str(n), answer) for n, answer in enumerate(("class", "class", "method"))]
    asked = [Question("kind", "a", "class"), Question("kind", "b", "method")]
    assert exact_match(asked, ["class", "  method\n"]) == 1
    assert exact_match(asked, ["class", "methods"]) == 0.5
    assert chance_level(asked, training) == 0.5


@pytest.mark.processes
def test_the_same_in_every_process_and_nothing_is_imported(entries: list[DocEntry]) -> None:
    done = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [hashlib.sha256(repr(entries).encode()).hexdigest(), "[]"]
