"""The lists of checksums of a folder as one file, which other processes map in place of parsing ``checksums.json``.

::

    length of the header, 8 bytes | header, JSON: [[name, bytes, block_bytes], ...] | hashes of all files
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from isthmus.files.file_checksums import HASH_BYTES, FileChecksums

_LENGTH_BYTES = 8


def packed(files: Mapping[str, FileChecksums]) -> bytes:
    """The list of a folder, by name of the file."""
    header = json.dumps([[name, listed.size, listed.block_bytes] for name, listed in files.items()]).encode()
    hashes = (listed.hashes for listed in files.values())
    return b"".join([len(header).to_bytes(_LENGTH_BYTES, "little"), header, *hashes])


def unpacked(content: memoryview) -> dict[str, FileChecksums]:
    """The reverse of :func:`packed`; the hashes are parts of ``content``, which is not copied."""
    at = _LENGTH_BYTES + int.from_bytes(content[:_LENGTH_BYTES], "little")
    files = {}
    for name, size, block_bytes in json.loads(bytes(content[_LENGTH_BYTES:at])):
        end = at + HASH_BYTES * -(-size // block_bytes)
        files[name] = FileChecksums(size, content[at:end], block_bytes)
        at = end
    return files
