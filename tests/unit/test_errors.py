from __future__ import annotations

from pathlib import Path

from isthmus.errors import printable


def test_printable_message_has_no_control_characters() -> None:
    assert printable("key \x1b[2J\x07\x9b31m\r\u202e") == r"key \x1b[2J\x07\x9b31m\r\u202e"
    assert printable("two\nlines\tä") == "two\nlines\tä"


def test_printable_message_has_no_credentials() -> None:
    assert printable("https://user:p@ss@host/a@b and http://host/x") == "https://***@host/a@b and http://host/x"
    assert printable(str(Path("https://user:word@host/a"))) == "https:/***@host/a"
