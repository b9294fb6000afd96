"""Fingerprints of the tensors in safetensors files, from which a run knows its model again."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

from isthmus.hf.tensors.safetensors_format import TensorInfo

_BLOCK_BYTES = 1024
_THREADS = 16
"""Blocks on a network disk have a latency of milliseconds."""


def fingerprint_of(tensors: Mapping[str, TensorInfo]) -> str:
    """Fingerprint of names, dtypes, shapes and up to three blocks (start, middle, end) of each tensor.

    Independent of how the tensors are divided into files. Training changes almost every element, so another model has
    another fingerprint; a single changed element may be outside of the blocks.
    """
    with ExitStack() as files, ThreadPoolExecutor(_THREADS) as pool:
        paths = {info.file for info in tensors.values()}
        numbers = {path: files.enter_context(path.open("rb")).fileno() for path in paths}

        def tensor_digest(name: str) -> bytes:
            info = tensors[name]
            hasher = hashlib.blake2b(json.dumps([name, str(info.dtype), info.shape]).encode(), digest_size=16)
            last = max(0, info.nbytes - _BLOCK_BYTES)
            for start in sorted({0, last // 2, last}):
                hasher.update(os.pread(numbers[info.file], min(_BLOCK_BYTES, info.nbytes), info.offset + start))
            return hasher.digest()

        fingerprint = hashlib.blake2b(digest_size=16)
        for digest in pool.map(tensor_digest, sorted(tensors)):
            fingerprint.update(digest)
    return fingerprint.hexdigest()
