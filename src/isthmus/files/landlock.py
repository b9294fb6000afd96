"""Files that a process of somebody else may open, with Landlock (Linux 5.13 and later)."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterable
from pathlib import Path

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
"""System calls; the numbers are the same on all architectures but Alpha."""
_PATH_BENEATH, _VERSION_FLAG, _NO_NEW_PRIVS = 1, 1, 38
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR, _TRUNCATE = 1 << 0, 1 << 1, 1 << 2, 1 << 3, 1 << 14
_OF_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE
_ALL_RIGHTS = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1}
"""Rights to files by version; version 5 adds one for devices, which no rule here has."""
_TCP, _TCP_SINCE = 0b11, 4
"""Bind and connect, for which no rule here is made."""


def restricted_files(readable: Iterable[Path], writable: Iterable[Path]) -> int | None:
    """A ruleset that :func:`restrict` applies: files and folders to read and run, and to write too; no TCP.

    A symbolic link among the paths is followed; one within a folder gives no access to its target. Paths that do not
    exist are left out. Returns None if the system has no Landlock.
    """
    if sys.platform != "linux" or (version := _call(_CREATE_RULESET, None, 0, _VERSION_FLAG)) < 1:
        return None
    rights = _ALL_RIGHTS[min(version, max(_ALL_RIGHTS))]
    attributes = (ctypes.c_uint64 * 2)(rights, _TCP)
    ruleset = _call(_CREATE_RULESET, attributes, ctypes.sizeof(attributes) if version >= _TCP_SINCE else 8, 0)
    if ruleset < 0:
        return None
    for paths, allowed in ((readable, _EXECUTE | _READ_FILE | _READ_DIR), (writable, rights)):
        for path in paths:
            _allow(ruleset, path, allowed & rights)
    return ruleset


def restrict(ruleset: int) -> None:
    """Restrict this process and those that it starts, for ever. OSError if the system refuses."""
    if _libc.prctl(_NO_NEW_PRIVS, 1, 0, 0, 0) or _call(_RESTRICT_SELF, ruleset, 0):
        raise OSError(ctypes.get_errno(), "Landlock cannot be applied")


class _PathBeneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("allowed", ctypes.c_uint64), ("parent", ctypes.c_int32))


_libc = ctypes.CDLL(None, use_errno=True)


def _call(number: int, *arguments: object) -> int:
    result: int = _libc.syscall(number, *arguments)
    return result


def _allow(ruleset: int, path: Path, rights: int) -> None:
    try:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return
    try:
        rule = _PathBeneath(rights if path.is_dir() else rights & _OF_FILES, descriptor)
        if _call(_ADD_RULE, ruleset, _PATH_BENEATH, ctypes.byref(rule), 0):
            raise OSError(ctypes.get_errno(), "Landlock refuses a path", str(path))
    finally:
        os.close(descriptor)
