"""Ranks that share a model, and how tensors travel between them.

The only file that knows the transports: gloo for host tensors (and for ranks that share one GPU), NCCL through cupy for
GPUs, queued on torch's current stream, so that a CUDA graph may capture it. Plans, results and errors go another way,
see `control.py`.
"""

from __future__ import annotations

import dataclasses
import datetime
import socket
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol, TypeVar

import torch
import torch.distributed
from torch import Tensor

from pagedray.engine.errors import ConfigError
from pagedray.engine.worker.control import PeersLost
from pagedray.engine.worker.layout import Layout

T = TypeVar("T")

_dist: Any = torch.distributed  # whose types lack most of what is used here

Transport = Literal["gloo", "nccl"]

_CONNECT_S = 60.0  # for ranks that have all come to find each other
_MAX_HOST = 64  # bytes of an address that tell machines apart
_GLOO_SENDS = 64  # may be on their way to one group's ranks; more than steps in flight ever have


class Group:
    """Ranks that exchange tensors. In a group of one every method returns its argument and does nothing.

    All ranks of a group call the same methods in the same order with the same shapes and dtypes: float32, bfloat16,
    float16, int32 or int64. On a GPU they are queued on the current stream; a group belongs to one stream at a time.

    Args:
        rank: this process's place in the group.
        wire: moves the bytes; None in a group of one.

    Raises:
        PeersLost: (all methods) a peer died or did not come within the timeout. NCCL has no timeout: a rank that hangs
            there is found by who waits for its step.
    """

    def __init__(self, rank: int = 0, size: int = 1, wire: Wire | None = None):
        if not 0 <= rank < size or (wire is None) != (size == 1):
            raise ValueError(f"rank {rank} of {size} with wire {wire}")
        self.rank, self.size = rank, size
        self._wire = wire

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over ranks, the same bits on each; in place if `x` is contiguous."""
        if self._wire is None:
            return x
        x = x.contiguous()
        self._wire.all_reduce(x)
        return x

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        """[.., n, ..] of each rank → [.., size * n, ..] in rank order along `dim`."""
        if self._wire is None:
            return x
        dim %= x.dim()
        parts = torch.empty((self.size, *x.shape), dtype=x.dtype, device=x.device)
        self._wire.all_gather(parts, x.contiguous())
        return parts.movedim(0, dim).flatten(dim, dim + 1)

    def all_to_all(self, x: Tensor, send_rows: Sequence[int], receive_rows: Sequence[int]) -> Tensor:
        """Give each rank its rows of `x`, in rank order; what they give to this one, in rank order.

        Args:
            x: [sum(send_rows), ..]
            send_rows, receive_rows: number of rows for and from each rank; known on the host.
        """
        if self._wire is None:
            return x
        out = torch.empty((sum(receive_rows), *x.shape[1:]), dtype=x.dtype, device=x.device)
        self._wire.all_to_all(out, x.contiguous(), list(send_rows), list(receive_rows))
        return out

    def send(self, x: Tensor, to: int) -> None:
        """Give `x` to a rank. Returns at once; `x` may be overwritten by what is queued next."""
        self._other(to).send(x.contiguous(), to)

    def receive(self, x: Tensor, source: int) -> None:
        """Wait for a tensor of a rank, and write it into `x`, which is contiguous."""
        if not x.is_contiguous():
            raise ValueError("a tensor is received into contiguous memory only")
        self._other(source).receive(x, source)

    def broadcast(self, x: Tensor, source: int) -> Tensor:
        """Overwrite `x`, which is contiguous, with that of rank `source`."""
        if self._wire is None:
            return x
        if not x.is_contiguous():
            raise ValueError("a tensor is received into contiguous memory only")
        self._wire.broadcast(x, source)
        return x

    def abort(self) -> None:
        """End what waits for peers that are gone, from any thread. The group is of no use afterwards."""
        if self._wire is not None:
            self._wire.abort()

    def _other(self, rank: int) -> Wire:
        if self._wire is None or rank == self.rank or not 0 <= rank < self.size:
            raise ValueError(f"rank {self.rank} of {self.size} can't exchange tensors with rank {rank}")
        return self._wire


@dataclasses.dataclass(frozen=True)
class Parallel:
    """This rank's place, and its groups."""

    world: Group  # all ranks; for host tensors only, on any device
    tp: Group  # the ranks of this stage: they share each layer
    pp: Group  # one rank of each stage, of this tp rank: group rank is the stage
    pp_ids: Group  # the same ranks with connections of their own: sampled ids go back while hidden states go forward
    ep: Group  # the ranks of this stage that share experts: tp with expert parallelism, else this rank alone
    num_ranks_here: int = 1  # on this machine, which shares its cores among them

    @property
    def is_first_stage(self) -> bool:
        return self.pp.rank == 0

    @property
    def is_last_stage(self) -> bool:
        return self.pp.rank == self.pp.size - 1

    def abort(self) -> None:
        for group in (self.world, self.tp, self.pp, self.pp_ids):
            group.abort()

    def minimum(self, value: int) -> int:
        """Of all ranks' values; also a point that none passes before all have come."""
        if self.world.size == 1:
            return value
        return int(self.world.all_gather(torch.tensor([value], dtype=torch.int64), 0).min())


ALONE = Parallel(Group(), Group(), Group(), Group(), Group())


class Meeting(Protocol):
    """Where the ranks of a gang meet: `control.Lead` or `control.Member`."""

    rank: int
    host: str  # this rank's address, on which the others reach it

    def share(self, value: bytes | None) -> bytes:
        """Rank 0's value, on every rank, once all have come."""


def connect(
    meeting: Meeting,
    layout: Layout,
    device: torch.device,
    *,
    expert_parallel: bool = False,
    meet_timeout_s: float,
    step_timeout_s: float,
    transport: Transport | None = None,
) -> Parallel:
    """Make this rank's groups, together with all other ranks.

    Args:
        device: this process's; a GPU is its own in a gang with NCCL.
        meet_timeout_s: longest wait for the others while they load, once all have come here.
        step_timeout_s: longest wait for them in a step.
        transport: None: NCCL on a GPU, gloo on a CPU.

    Raises:
        ConfigError: NCCL is missing.
        EngineDead: the others don't come, which may be a PeersLost.
    """
    if layout.size == 1:
        return ALONE
    transport = transport or ("nccl" if device.type == "cuda" else "gloo")
    store = _open_store(meeting, layout.size)
    rank = meeting.rank

    def group(name: str, ranks: list[int], kind: Transport, timeout_s: float) -> Group:
        if len(ranks) == 1:
            return Group()
        place, size = ranks.index(rank), len(ranks)
        keys = _dist.PrefixStore(f"{name}-{ranks[0]}", store)
        called = f"rank {rank} (rank {place} of {size} in its {name} group)"
        if kind == "gloo":
            return Group(place, size, GlooWire(keys, place, size, meeting.host, timeout_s, called))
        return Group(place, size, NcclWire(keys, place, size, called))

    world = group("world", list(range(layout.size)), "gloo", meet_timeout_s)
    tp = group("tp", layout.tp_ranks(rank), transport, step_timeout_s)
    pp = group("pp", layout.pp_ranks(rank), transport, step_timeout_s)
    pp_ids = group("pp_ids", layout.pp_ranks(rank), transport, step_timeout_s)
    host = torch.tensor(list(meeting.host.encode().ljust(_MAX_HOST)[:_MAX_HOST]), dtype=torch.int32)
    hosts = world.all_gather(host[None], 0)
    num_ranks_here = int((hosts == host).all(1).sum())
    return Parallel(world, tp, pp, pp_ids, tp if expert_parallel else Group(), num_ranks_here)


def _open_store(meeting: Meeting, size: int) -> Any:
    """Where groups find their peers' addresses; rank 0's process keeps it."""
    timeout = datetime.timedelta(seconds=_CONNECT_S)
    if meeting.rank == 0:
        listener = socket.create_server((meeting.host, 0))  # torch would listen on every interface
        port = listener.getsockname()[1]
        store = _dist.TCPStore(
            *(meeting.host, port, size, True),
            timeout=timeout,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
        meeting.share(f"{meeting.host} {port}".encode())
        return store
    host, port_text = meeting.share(None).decode().split()
    return _dist.TCPStore(host, int(port_text), size, False, timeout=timeout, wait_for_workers=False)


class Wire(Protocol):
    """A transport among the ranks of one group. Tensors are contiguous."""

    def all_reduce(self, x: Tensor) -> None: ...
    def all_gather(self, out: Tensor, x: Tensor) -> None: ...  # out [size, *x.shape]
    def all_to_all(self, out: Tensor, x: Tensor, send_rows: list[int], receive_rows: list[int]) -> None: ...
    def send(self, x: Tensor, to: int) -> None: ...
    def receive(self, x: Tensor, source: int) -> None: ...
    def broadcast(self, x: Tensor, source: int) -> None: ...
    def abort(self) -> None: ...


class GlooWire:
    """
    Args:
        host: this rank's address, where peers connect.
        called: how errors name this rank.
    """

    def __init__(self, store: Any, rank: int, size: int, host: str, timeout_s: float, called: str):
        self._rank, self._timeout_s, self._called = rank, timeout_s, called
        self._sends: deque[tuple[Any, Tensor]] = deque()  # on their way, with memory that must stay
        options = _dist.ProcessGroupGloo._Options()
        options._devices = [_dist.ProcessGroupGloo.create_device(hostname=host)]
        options._timeout = datetime.timedelta(seconds=timeout_s)
        options._threads = 1  # its calls come one after the other
        self._peers = self._named("the start", lambda: _dist.ProcessGroupGloo(store, rank, size, options))

    def all_reduce(self, x: Tensor) -> None:
        self._on_host(x, lambda host: self._wait("all_reduce", lambda: self._peers.allreduce([host])))

    def all_gather(self, out: Tensor, x: Tensor) -> None:
        own = x.reshape(-1).cpu()
        self._on_host(
            out, lambda host: self._wait("all_gather", lambda: self._peers._allgather_base(host.view(-1), own))
        )

    def all_to_all(self, out: Tensor, x: Tensor, send_rows: list[int], receive_rows: list[int]) -> None:
        own = x.cpu()
        self._on_host(
            out,
            lambda host: self._wait(
                "all_to_all", lambda: self._peers.alltoall_base(host, own, receive_rows, send_rows)
            ),
        )

    def send(self, x: Tensor, to: int) -> None:
        while self._sends and (self._sends[0][0].is_completed() or len(self._sends) >= _GLOO_SENDS):
            self._wait("send", lambda: self._sends[0][0])
            self._sends.popleft()
        host = x.cpu() if x.is_cuda else x.clone()
        self._sends.append((self._named("send", lambda: self._peers.send([host], to, 0)), host))

    def receive(self, x: Tensor, source: int) -> None:
        self._on_host(x, lambda host: self._wait("receive", lambda: self._peers.recv([host], source, 0)))

    def broadcast(self, x: Tensor, source: int) -> None:
        options = _dist.BroadcastOptions()
        options.rootRank = source
        self._on_host(x, lambda host: self._wait("broadcast", lambda: self._peers.broadcast([host], options)))

    def abort(self) -> None:
        self._peers.abort()

    def _on_host(self, x: Tensor, work: Callable[[Tensor], None]) -> None:
        """Ranks that share a GPU exchange its tensors through host memory, waiting for the device."""
        if not x.is_cuda:
            work(x)
            return
        host = x.cpu()
        work(host)
        x.copy_(host)

    def _wait(self, what: str, begin: Callable[[], Any]) -> None:
        self._named(what, lambda: begin().wait())

    def _named(self, what: str, action: Callable[[], T]) -> T:
        """Say who failed at what. The transport's own words are about sockets, in several lines."""
        try:
            return action()
        except RuntimeError as error:
            text = str(error)
            if "imed out" in text or "imeout" in text:
                reason = f"waited for its peers for over {self._timeout_s:g} s"
            else:
                reason = f"lost its peers: {text.strip().splitlines()[0].rpartition('] ')[2]}"
            raise PeersLost(f"{self._called} {reason} in {what}") from error


# Of nccl.h, where they are part of the library's interface: cupy names only some of them.
_NCCL_TYPES = {torch.int32: 2, torch.int64: 4, torch.float16: 6, torch.float32: 7, torch.bfloat16: 9}
_NCCL_SUM = 0


class NcclWire:
    """Over GPUs, one a rank, on torch's current stream.

    Args:
        store: through which the group's first rank hands on NCCL's id of the group.
    """

    def __init__(self, store: Any, rank: int, size: int, called: str):
        self._nccl = _import_nccl()
        self._rank, self._size, self._called = rank, size, called
        if rank == 0:
            store.set("id", self._nccl.get_unique_id().hex())
        identity = bytes.fromhex(store.get("id").decode())
        torch.cuda.init()
        self._peers = self._named("the start", lambda: self._nccl.NcclCommunicator(size, identity, rank))

    def all_reduce(self, x: Tensor) -> None:
        at, count, kind = _memory(x)
        self._named("all_reduce", lambda: self._peers.allReduce(at, at, count, kind, _NCCL_SUM, _stream(x)))

    def all_gather(self, out: Tensor, x: Tensor) -> None:
        at, count, kind = _memory(x)
        self._named("all_gather", lambda: self._peers.allGather(at, out.data_ptr(), count, kind, _stream(x)))

    def all_to_all(self, out: Tensor, x: Tensor, send_rows: list[int], receive_rows: list[int]) -> None:
        def exchange() -> None:
            self._nccl.groupStart()
            try:
                for peer, (given, taken) in enumerate(zip(x.split(send_rows), out.split(receive_rows), strict=True)):
                    if given.numel():
                        self._peers.send(*_memory(given), peer, _stream(x))
                    if taken.numel():
                        self._peers.recv(*_memory(taken), peer, _stream(x))
            finally:
                self._nccl.groupEnd()

        self._named("all_to_all", exchange)

    def send(self, x: Tensor, to: int) -> None:
        self._named("send", lambda: self._peers.send(*_memory(x), to, _stream(x)))

    def receive(self, x: Tensor, source: int) -> None:
        self._named("receive", lambda: self._peers.recv(*_memory(x), source, _stream(x)))

    def broadcast(self, x: Tensor, source: int) -> None:
        self._named("broadcast", lambda: self._peers.bcast(*_memory(x), source, _stream(x)))

    def abort(self) -> None:
        self._peers.abort()

    def _named(self, what: str, action: Callable[[], T]) -> T:
        try:
            return action()
        except (RuntimeError, KeyError) as error:  # KeyError: a status that cupy has no name for
            raise PeersLost(f"{self._called} failed in NCCL's {what}: {error}") from error


def _import_nccl() -> Any:
    try:
        from cupy.cuda import nccl
    except ImportError as error:
        raise ConfigError(
            f"several ranks on GPUs need NCCL through cupy ({error}); install pagedray[gpu], or use device cpu"
        ) from error
    if not nccl.available:
        raise ConfigError("cupy is installed without NCCL; install nvidia-nccl-cu13 beside it")
    return nccl


def _memory(x: Tensor) -> tuple[int, int, int]:
    """Address, number of elements, NCCL's name of the dtype."""
    if x.dtype not in _NCCL_TYPES:
        raise ValueError(f"ranks can't exchange tensors of {x.dtype}; known: {', '.join(map(str, _NCCL_TYPES))}")
    return x.data_ptr(), x.numel(), _NCCL_TYPES[x.dtype]


def _stream(x: Tensor) -> int:
    return torch.cuda.current_stream(x.device).cuda_stream
