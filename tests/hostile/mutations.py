"""Damaged and hostile versions of a file, by its format; a function of the random numbers that are given.

Most change the structure and keep what would hide it from a reader: lengths, CRCs, compression.
"""

from __future__ import annotations

import copy
import gzip
import io
import json
import pickletools
import random
import re
import zipfile
from collections.abc import Callable
from typing import Any

_MAX_BYTES = 1 << 18
Mutate = Callable[[bytes, random.Random], bytes]
NUMBERS: tuple[Any, ...] = (
    *(0, 1, -1, 2, 7, 255, 256, 2**15, 2**16, 2**31 - 1, 2**31, 2**32, 2**53, 2**63 - 1, 2**63, 2**64, 10**30, 10**400),
    *(-(2**31), -(2**63), -(2**64), 0.5, -0.5, 1e-320, 1e308, float("inf"), float("-inf"), float("nan"), 1000000000),
)
TEXTS = (
    *(
        "",
        " ",
        "a",
        "\0",
        "\n",
        "..",
        "../a",
        "/etc/passwd",
        "a" * 300,
        "a" * 5000,
        "\ud800",
        "{",
        "{}",
        "{{",
        "%s",
        "${X}",
    ),
    *("null", "true", "1e999", "\u2581", "\U0001f600", "é", "F64", "bfloat16", "model_type", "llama", "a.b.c", "."),
    *("(a+)+$", "(" * 200, "[", "*", "nan", "0x1F", "1_000", "C:\\a", "file:///a", "hf:a/b", "{% for x in y %}"),
)
_WORDS = re.compile(r"[A-Za-z_]+|[0-9.]+|\s+|.", re.DOTALL)
_INSERTED = (
    *(
        "&a ",
        "*a",
        "<<: *a\n",
        "!!int ",
        "!!binary ",
        "!!set ",
        "!!omap ",
        "? ",
        "- ",
        ": ",
        "# ",
        "\t",
        "---\n",
        "...\n",
    ),
    *(
        "[",
        "]",
        "{",
        "}",
        "[" * 300,
        "{a: " * 100,
        '"',
        "'",
        "|\n",
        ">\n",
        "%YAML 1.1\n",
        "~",
        "0x",
        "1e999",
        "\0",
        "\ufeff",
    ),
    *(
        "${A}",
        "${A:1}",
        "bases: [a]\n",
        "extends: x\n",
        "overrides: 1\n",
        "--",
        "=",
        " ",
        "\\",
        "\u2028",
        "\r",
        ",",
        ";",
        "`",
    ),
)


def havoc(raw: bytes, rng: random.Random) -> bytes:
    """Flipped bits, other bytes and integers, and removed, repeated and moved ranges."""
    data = bytearray(raw)
    for _ in range(rng.choice((1, 1, 1, 2, 2, 4, 8, 32))):
        if not data:
            return bytes(rng.randbytes(rng.randrange(64)))
        at, end = rng.randrange(len(data)), len(data)
        end = min(end, at + rng.choice((1, 2, 4, 8, 16, 64, 256, len(data))))
        kind = rng.randrange(9)
        if kind == 0:
            data[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            data[at] = rng.choice((0, 1, 127, 128, 255, 10, 32, 34, 91, 123, rng.randrange(256)))
        elif kind == 2:
            size = rng.choice((1, 2, 4, 8))
            number = rng.choice([n for n in NUMBERS if isinstance(n, int)]) % 2 ** (8 * size)
            data[at : at + size] = number.to_bytes(size, rng.choice(("little", "big")))
        elif kind == 3:
            del data[at:end]
        elif kind == 4:
            data[at:at] = data[at:end] * rng.choice((1, 1, 2, 16))
        elif kind == 5:
            other = rng.randrange(len(data))
            data[at:end] = data[other : other + end - at]
        elif kind == 6:
            data[at:end] = bytes([rng.choice((0, 255, 32))]) * (end - at)
        elif kind == 7:
            del data[at:]
        else:
            data[at:at] = rng.choice((rng.randbytes(rng.randrange(1, 9)), rng.choice(TEXTS).encode("utf-8", "replace")))
    return bytes(data)


def text(raw: bytes, rng: random.Random) -> bytes:
    """Words and marks of a text removed, repeated, exchanged or replaced."""
    if rng.random() < 0.1:
        return havoc(raw, rng)
    words = _WORDS.findall(raw.decode("utf-8", "replace"))
    for _ in range(rng.choice((1, 1, 2, 3, 6))):
        if not words:
            break
        at = rng.randrange(len(words))
        end = min(len(words), at + rng.choice((1, 1, 2, 5, 20)))
        kind = rng.randrange(6)
        if kind == 0:
            del words[at:end]
        elif kind == 1:
            words[at:at] = words[at:end] * rng.choice((1, 1, 3, 30))
        elif kind == 2:
            words[at] = str(rng.choice(NUMBERS))[:30]
        elif kind == 3:
            words[at] = rng.choice(TEXTS)
        elif kind == 4:
            words.insert(at, rng.choice(_INSERTED))
        else:
            other = rng.randrange(len(words))
            words[at], words[other] = words[other], words[at]
    return "".join(words).encode("utf-8", "replace")


def json_tree(raw: bytes, rng: random.Random) -> bytes:
    """Values of other types and sizes, removed, renamed and exchanged keys, and deep nesting."""
    if rng.random() < 0.1:
        return text(raw, rng)
    tree = [json.loads(raw)]
    for _ in range(rng.choice((1, 1, 1, 2, 3, 5))):
        places = list(_places(tree))
        owner, key = rng.choice(places)
        kind = rng.randrange(8)
        if kind == 0:
            owner[key] = rng.choice(NUMBERS)
        elif kind == 1:
            owner[key] = rng.choice(TEXTS)
        elif kind == 2:
            owner[key] = rng.choice((None, True, False, [], {}, [[]], {"a": {}}, [None], [1, "a", None]))
        elif kind == 3 and isinstance(owner, dict):
            del owner[key]
        elif kind == 4 and isinstance(owner, dict):
            owner[rng.choice((rng.choice(TEXTS), str(rng.choice(places)[1])))] = owner.pop(key)
        elif kind == 5:
            other, other_key = rng.choice(places)
            owner[key] = copy.deepcopy(other[other_key])
        elif kind == 6:
            for _ in range(rng.choice((1, 2, 10, 80, 300))):
                owner[key] = rng.choice(([owner[key]], {"a": owner[key]}))
        elif isinstance(owner[key], list | str) and len(owner[key]) < 1000:
            owner[key] = owner[key] * rng.choice((0, 2, 3, 50))
    return json.dumps(tree[0]).encode("utf-8", "replace")[:_MAX_BYTES]


def json_lines(raw: bytes, rng: random.Random) -> bytes:
    """One line's tree, or the text."""
    lines = raw.split(b"\n")
    if rng.random() < 0.3:
        return text(raw, rng)
    at = rng.randrange(len(lines))
    lines[at] = json_tree(lines[at], rng) if lines[at].strip() else lines[at]
    return b"\n".join(lines)


def safetensors(raw: bytes, rng: random.Random) -> bytes:
    """The header's tree under a length that fits, or the bytes."""
    if rng.random() < 0.3:
        return havoc(raw, rng)
    length = int.from_bytes(raw[:8], "little")
    header = json_tree(raw[8 : 8 + length], rng)
    return len(header).to_bytes(8, "little") + header + raw[8 + length :]


def torch_pickle(raw: bytes, rng: random.Random) -> bytes:
    """Operations of a pickle removed, repeated, exchanged or with other arguments."""
    if rng.random() < 0.4:
        return havoc(raw, rng)
    positions = [position for _, _, position in pickletools.genops(raw) if position is not None]
    ops = [raw[start:stop] for start, stop in zip(positions, [*positions[1:], len(raw)], strict=True)]
    for _ in range(rng.choice((1, 1, 2, 4))):
        at, other = rng.randrange(len(ops)), rng.randrange(len(ops))
        kind = rng.randrange(6)
        if kind == 0:
            ops[at] = b""
        elif kind == 1:
            ops[at] = ops[other]
        elif kind == 2:
            ops[at] = ops[at] * rng.choice((2, 3, 100))
        elif kind == 3 and ops[at]:
            ops[at] = ops[at][:1] + havoc(ops[at][1:], rng)
        elif kind == 4:
            number = rng.choice([n for n in NUMBERS if isinstance(n, int)])
            ops[at] = b"J" + (number % 2**32).to_bytes(4, "little") if rng.random() < 0.5 else f"I{number}\n".encode()
        else:
            ops.insert(
                at, rng.choice((b"r\xff\xff\xff\x7f", b"(", b"0", b"2", b"}", b"]", b")", b"N", b"R", b"b", b"Q", b"."))
            )
    return b"".join(ops)


def torch_zip(raw: bytes, rng: random.Random) -> bytes:
    """A file of ``torch.save``: its pickle in an archive that is whole, or the bytes."""
    if rng.random() < 0.25:
        return havoc(raw, rng)
    changed = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(raw)) as source, zipfile.ZipFile(changed, "w") as target:
        for member in source.infolist():
            with source.open(member) as opened:
                opened._expected_crc = None  # type: ignore[attr-defined]  # Isthmus leaves it out for tensors
                content = opened.read()
            if member.filename.endswith("data.pkl"):
                content = torch_pickle(content, rng)
            elif rng.random() < 0.05:
                content = havoc(content, rng)
            packed = zipfile.ZIP_DEFLATED if rng.random() < 0.05 else zipfile.ZIP_STORED
            if rng.random() > 0.02:
                target.writestr(zipfile.ZipInfo(member.filename), content, packed)
    return changed.getvalue()


def gzipped(raw: bytes, rng: random.Random) -> bytes:
    """JSON lines in an archive that is whole, or the bytes of the archive."""
    if rng.random() < 0.5:
        return havoc(raw, rng)
    return gzip.compress(json_lines(gzip.decompress(raw), rng), 1, mtime=0)


def _places(tree: Any) -> list[tuple[Any, Any]]:
    """Every container and key, without recursion."""
    results: list[tuple[Any, Any]] = []
    remaining = [tree]
    while remaining:
        inner = remaining.pop()
        keys = list(inner) if isinstance(inner, dict) else range(len(inner))
        for key in keys:
            results.append((inner, key))
            if isinstance(inner[key], dict | list):
                remaining.append(inner[key])
    return results
