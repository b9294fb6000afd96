"""The secret that the ranks of a run share (``ISTHMUS_RUN_TOKEN``), so that no other process takes part in it.

The rendezvous store of several machines has no password. With a token, what ranks write there is sealed with a code
that only they can make, and each proves in the first collective that it has the token.
"""

from __future__ import annotations

import hashlib
import hmac
import re

from isthmus.errors import UnsafeInput
from isthmus.platforms import rank_env
from isthmus.platforms.base import Platform

_SEAL = re.compile(r"[0-9a-f]{64} ")
_SAME = f"Give every rank the same {rank_env.RUN_TOKEN}, or none."


def sealed(key: str, text: str) -> str:
    """The value to store for ``text``: itself without a token."""
    token = rank_env.run_token()
    return text if token is None else f"{_code(token, key, text).hex()} {text}"


def unsealed(key: str, value: bytes | str) -> str:
    """The text of a stored value.

    Raises:
        UnsafeInput: it was not sealed with the token of this rank.
    """
    text = value.decode("utf-8", "replace") if isinstance(value, bytes) else value
    token, is_sealed = rank_env.run_token(), _SEAL.match(text) is not None
    if token is None and not is_sealed:
        return text
    if token is not None and is_sealed and hmac.compare_digest(text, sealed(key, text[65:])):
        return text[65:]
    writer = "with a token, and this rank has none" if token is None else "with another token, or none"
    raise UnsafeInput(f"the rendezvous store has a value ({key}) of a process {writer}. {_SAME}")


def check_ranks(token: str, platform: Platform, agreed: bytes) -> None:
    """Let each rank prove that it has the token; a collective.

    ``agreed`` is the same on all ranks and in no other run.

    Raises:
        UnsafeInput: a rank has not proved it.
    """
    # Ranks of the launcher import this module before they handle signals, and torch after.
    import torch
    import torch.distributed as dist

    digest = hashlib.sha256(agreed).hexdigest()
    expected = [_code(token, f"rank {rank}", digest) for rank in range(dist.get_world_size())]
    proof = torch.tensor(list(expected[dist.get_rank()]), dtype=torch.uint8, device=platform.device_type)
    proofs = [torch.empty_like(proof) for _ in expected]
    dist.all_gather(proofs, proof)
    for rank, received in enumerate(proofs):
        if not hmac.compare_digest(bytes(received.tolist()), expected[rank]):
            raise UnsafeInput(f"rank {rank} has not the token of this run: is it another process? {_SAME}")


def _code(token: str, key: str, text: str) -> bytes:
    message = "\0".join([str(rank_env.attempt()), key, text])
    return hmac.new(token.encode(), message.encode(), hashlib.sha256).digest()
