"""What holds for every input: it is read, or refused with a message for users."""

from __future__ import annotations

import traceback
from pathlib import Path

from hostile.readers import Reader
from isthmus.errors import IsthmusError, explain

_MAX_MESSAGE = 25_000


class Finding(Exception):
    """An input that is neither read nor refused."""


def attempt(reader: Reader, content: bytes, folder: Path) -> str:
    """Give one input to its reader, in a copy of its seed; returns ``read`` or ``refused``.

    Raises:
        Finding: any other error, or one without a message for users.
    """
    path = folder / reader.file.partition("/")[2]
    path.write_bytes(content)
    try:
        reader.read(path)
    except IsthmusError as error:
        code, message = explain(error)
        if code == IsthmusError.exit_code or not 0 < len(message) <= _MAX_MESSAGE:
            raise Finding(f"exit code {code}, a message of {len(message)} characters") from error
        return "refused"
    except BaseException as error:  # some errors of libraries are not an Exception
        frames = traceback.extract_tb(error.__traceback__)
        frame = next((item for item in reversed(frames) if "isthmus" in item.filename), frames[-1])
        where = f"{Path(frame.filename).name}:{frame.lineno}"
        raise Finding(f"{type(error).__name__} at {where}: {' '.join(str(error).split())[:200]}") from error
    return "read"
