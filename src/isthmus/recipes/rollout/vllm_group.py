"""Weights for vLLM servers through process groups, driven by vLLM's requests for weight transfers.

Rank 0 gets the full tensors of the policy from the ranks that have their parts, and broadcasts them in buckets to the
workers of each server. A server has a group of its own, so that the loss of one does not end the transfer to another.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from isthmus.errors import IsthmusError
from isthmus.recipes.rollout.vllm_plugin.isthmus_vllm import (
    aligned_bytes,
    broadcast_from_training,
    close_group,
    open_group,
    tensor_hash,
    tensor_views,
)
from isthmus.recipes.rollout.vllm_server import ServerLost, VllmServer

BUCKET_BYTES = 2**30
"""Bytes of a bucket on the device of rank 0; larger tensors have one of their own."""
_POLL_S = 0.001
_REASON_S = 5.0
"""Longest time in which a server may say why a broadcast has failed."""
_CLOSE_S = 10.0
"""Longest time of a request that closes a group."""
_T = TypeVar("_T")


@dataclass(slots=True)
class Bucket:
    """Consecutive tensors in one buffer."""

    names: list[str]
    dtypes: list[torch.dtype]
    shapes: list[list[int]]
    buffer: Tensor
    """uint8 [bytes]."""

    @property
    def views(self) -> list[Tensor]:
        return tensor_views(self.buffer, self.dtypes, self.shapes)

    def request(self, timeout_s: float) -> dict[str, Any]:
        """The body of vLLM's request ``/update_weights``."""
        dtypes = [str(dtype).removeprefix("torch.") for dtype in self.dtypes]
        return {"update_info": {"names": self.names, "dtypes": dtypes, "shapes": self.shapes, "timeout_s": timeout_s}}


def packed(tensors: Iterable[tuple[str, Tensor]], limit: int = BUCKET_BYTES) -> Iterator[Bucket]:
    """Copy tensors into buckets of at most ``limit`` bytes, or of one tensor; all use the same memory."""
    memory: Tensor | None = None
    bucket: Bucket | None = None
    for name, tensor in tensors:
        size, used = aligned_bytes(tensor.dtype, tensor.shape), 0 if bucket is None else bucket.buffer.numel()
        if bucket is not None and used + size > limit:
            yield bucket
            bucket, used = None, 0
        if memory is None:
            memory = torch.empty(limit, dtype=torch.uint8, device=tensor.device)
        if bucket is None:
            bucket = Bucket([], [], [], memory[:0])
        whole = memory if used + size <= limit else memory.new_empty(size)
        bucket.buffer = whole[: used + size]
        tensor_views(bucket.buffer[used:], [tensor.dtype], [tensor.shape])[0].copy_(tensor)
        bucket.names.append(name)
        bucket.dtypes.append(tensor.dtype)
        bucket.shapes.append(list(tensor.shape))
    if bucket is not None:
        yield bucket


@dataclass(slots=True, eq=False)
class ServerGroup:
    """The process group of this process with the workers of a server, which are its other ranks."""

    server: VllmServer
    _store: dist.Store
    _group: Any
    _reply: Future[Any] | None = None
    """The answer to the request of the last bucket: it comes when the workers have loaded its tensors."""
    _work: Any = None

    @classmethod
    def open(cls, server: VllmServer, device: torch.device, timeout_s: float, deadline: float) -> ServerGroup:
        """Let the workers of ``server`` join a new group.

        Raises:
            ServerLost, UsageError, Hang: as :meth:`VllmServer.post`.
        """
        try:
            return cls._open(server, device, timeout_s, deadline)
        except (RuntimeError, OSError) as error:  # of the store, of the group, of the port
            raise ServerLost(f"{server.name} joins no process group: {error}") from error

    @classmethod
    def _open(cls, server: VllmServer, device: torch.device, timeout_s: float, deadline: float) -> ServerGroup:
        size = 1 + server.world_size(deadline)
        server.rpc("isthmus_end_update", deadline=deadline)
        address = server.address_here(deadline)
        # torch's own server would listen on all interfaces.
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        listener = socket.create_server((address, 0), family=family)
        port = int(listener.getsockname()[1])
        limit = timedelta(seconds=max(1.0, deadline - time.monotonic()))
        store = dist.TCPStore(
            address, port, is_master=True, timeout=limit, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        info = {"host": address, "port": port, "world_size": size, "timeout_s": timeout_s}
        reply = _in_thread(lambda: server.post("/init_weight_transfer_engine", {"init_info": info}, deadline))
        names = [f"joins/{rank}" for rank in range(1, size)]
        _wait(lambda: store.check(names), reply, server, "/init_weight_transfer_engine", deadline)
        group = open_group(store, 0, size, device=device, address=address, timeout_s=timeout_s)
        reply.result()
        return cls(server, store, group)

    def start(self, deadline: float) -> None:
        """Begin an update."""
        self.server.post("/start_weight_update", {}, deadline)

    def send(self, bucket: Bucket, deadline: float) -> None:
        """Start the broadcast of a bucket, after the workers have loaded the one before."""
        self._wait_loaded()
        timeout_s = max(1.0, deadline - time.monotonic())
        body = bucket.request(timeout_s)
        self._reply = _in_thread(lambda: self.server.post("/update_weights", body, deadline))
        try:
            self._work = broadcast_from_training(self._group, bucket.buffer, timeout_s)
        except RuntimeError as error:
            raise self._left(error) from error

    def wait(self, deadline: float) -> None:
        """Wait for the broadcast; then the buffer may change."""
        assert self._reply is not None
        _wait(self._work.is_completed, self._reply, self.server, "/update_weights", deadline)
        try:
            self._work.wait()
        except RuntimeError as error:
            raise self._left(error) from error

    def finish(self, deadline: float) -> Any:
        """End the update; returns what each worker has received."""
        self._wait_loaded()
        self.server.post("/finish_weight_update", {}, deadline)
        return self.server.rpc("isthmus_received", deadline=deadline)

    def close(self) -> None:
        """Leave the group. A broadcast that still runs ends when the workers have left it, or at its deadline."""
        groups, work = [self._group], self._work
        self._group = self._work = None

        def release() -> None:
            try:
                self.server.post("/shutdown_weight_transfer_engine", {}, time.monotonic() + _CLOSE_S)
            except (ServerLost, IsthmusError):
                pass
            close_group(groups[0])
            while work is not None and not work.is_completed():  # the end of a group would block all threads until then
                time.sleep(_POLL_S)
            groups.clear()

        thread = threading.Thread(target=release, name="leave vLLM", daemon=True)
        thread.start()
        thread.join(_CLOSE_S)

    def _left(self, error: RuntimeError) -> Exception:
        """The error of a broadcast, or of the request that belongs to it."""
        assert self._reply is not None
        try:
            reason = self._reply.exception(_REASON_S)
        except FutureTimeout:  # vLLM does not answer the requests of an engine that has died
            reason = None
        if isinstance(reason, Exception):
            return reason
        return ServerLost(f"{self.server.name} has left the process group: {error}")

    def _wait_loaded(self) -> None:
        """Raise the error of the last bucket, if it has one."""
        if self._reply is not None:
            self._reply.result()


@dataclass(slots=True)
class GroupTransfer:
    """The groups of rank 0 with all servers; other ranks have none."""

    device: torch.device
    timeout_s: float
    bucket_s: float
    """Longest time of a bucket; the other ranks wait for it in a collective."""
    _groups: dict[VllmServer, ServerGroup] = field(default_factory=dict)
    failures: dict[VllmServer, Exception] = field(default_factory=dict)
    """Errors of the present transfer."""

    def start(self, servers: Iterable[VllmServer], deadline: float) -> None:
        """Begin an update of ``servers``, with a new group for those that have none."""
        self.failures.clear()
        for server in servers:
            try:
                if server not in self._groups:
                    self._groups[server] = ServerGroup.open(server, self.device, self.timeout_s, deadline)
                self._groups[server].start(deadline)
            except (ServerLost, IsthmusError) as error:
                self._fail(server, error)

    def send(self, tensors: Iterable[tuple[str, Tensor]], deadline: float) -> Mapping[str, str]:
        """Send all tensors; returns their hashes. Errors of servers are in :attr:`failures`."""
        hashes: dict[str, str] = {}
        for bucket in packed(tensors):
            limit = min(deadline, time.monotonic() + self.bucket_s)
            self._all(partial(ServerGroup.send, bucket=bucket, deadline=limit))
            hashes |= {name: tensor_hash(view) for name, view in zip(bucket.names, bucket.views, strict=True)}
            self._all(partial(ServerGroup.wait, deadline=limit))
        return hashes

    def finish(self, server: VllmServer, deadline: float) -> Any:
        """End the update of a server; returns what its workers have received, or raises its error."""
        if server not in self.failures:
            try:
                return self._groups[server].finish(deadline)
            except (ServerLost, IsthmusError) as error:
                self._fail(server, error)
        raise self.failures[server]

    def close(self) -> None:
        """Leave all groups."""
        for group in self._groups.values():
            group.close()
        self._groups.clear()

    def _all(self, act: Callable[[ServerGroup], None]) -> None:
        for server, group in list(self._groups.items()):
            if server not in self.failures:
                try:
                    act(group)
                except (ServerLost, IsthmusError) as error:
                    self._fail(server, error)

    def _fail(self, server: VllmServer, error: Exception) -> None:
        """Leave the group of a server: its next update gets a new one."""
        self.failures[server] = error
        if server in self._groups:
            self._groups.pop(server).close()


def _in_thread(call: Callable[[], _T]) -> Future[_T]:
    """The result of ``call`` in a daemon thread, which does not delay the end of the process."""
    future: Future[_T] = Future()

    def work() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=work, name="vLLM requests", daemon=True).start()
    return future


def _wait(is_done: Callable[[], bool], reply: Future[Any], server: VllmServer, path: str, deadline: float) -> None:
    """Wait for ``is_done``, the deadline or an error of the request that belongs to it."""
    while not is_done():
        if reply.done():
            reply.result()
        if time.monotonic() > deadline:
            raise server.late(path)
        time.sleep(_POLL_S)
