"""The ranks of one learner: how they agree on what to do at a step boundary, without waiting for each other.

Rank 0 holds the link to the syncer and plans. At each boundary all ranks start one small ``all_reduce``, the header:
rank 0 puts into it what it plans, every rank what it has to tell. They wait for it at the *next* boundary, when it has
long arrived, and do what it says. A payload is broadcast when its operation has been announced; the operation is
executed at the first boundary whose header says that all ranks hold it. So all ranks do the same at the same step,
and none waits for the network. All collectives are started by the thread that trains, in the same order on all ranks,
in two gloo groups that nobody else uses.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from hf_diloco.errors import DiLoCoError
from hf_diloco.learner.operations import Kind, Operation, Plan, Word

_WINDOW = 8  # operations that are planned and not yet executed, at most
_FIELDS = 3  # of an operation in the header: kind (0: none), fragment index, outer step
_SCALARS = 5  # before them: word, save_wanted, steps, tokens, told to stop
_HELD = slice(_SCALARS, _SCALARS + _WINDOW)  # how many ranks hold the payload of the first pending operation, ...
_SIZE = _SCALARS + _WINDOW + _FIELDS * _WINDOW


class Ranks(Protocol):
    """The processes of one learner, as one of them sees them."""

    rank: int
    size: int
    bulk: dist.ProcessGroup | None  # for payloads, and for the rows of sharded models; None with one rank

    @property
    def room(self) -> int:
        """How many operations may be planned now."""

    @property
    def is_idle(self) -> bool:
        """Nothing is planned that has not been executed."""

    def expect(self, fragment_sizes: Sequence[int]) -> None:
        """From now on operations may be about fragments of these sizes."""

    def agree(self, plan: Plan) -> Plan:
        """What to do at this boundary; ``plan`` is for this one or a later one. All ranks call it at all boundaries."""

    def share(self, content: bytes | None) -> bytes:
        """Rank 0's content, on all ranks; waits."""

    def share_tensor(self, tensor: Tensor) -> None:
        """Rank 0's values, on all ranks; waits."""

    def any(self, is_true: bool) -> bool:
        """Whether it is true on some rank; waits."""

    def close(self) -> None:
        """The learner has ended on all ranks. Idempotent."""


class OneRank:
    """A learner of one process agrees with itself, at once."""

    rank = 0
    size = 1
    bulk: dist.ProcessGroup | None = None
    room = 1 << 30
    is_idle = True

    def expect(self, fragment_sizes: Sequence[int]) -> None:
        """Nothing to prepare."""

    def agree(self, plan: Plan) -> Plan:
        """The plan itself."""
        return plan

    def share(self, content: bytes | None) -> bytes:
        """The content itself."""
        assert content is not None
        return content

    def share_tensor(self, tensor: Tensor) -> None:
        """It is where it is."""

    def any(self, is_true: bool) -> bool:
        """What it is here."""
        return is_true

    def close(self) -> None:
        """Nothing to end."""


@dataclass(eq=False)
class _Pending:
    """An operation that all ranks know of and have not executed."""

    operation: Operation
    arriving: dist.Work | None = None

    @property
    def is_held(self) -> bool:
        return self.arriving is None or self.arriving.is_completed()


class SeveralRanks:
    """A learner of several processes.

    Args:
        control: a gloo group for headers.
        bulk: a gloo group for payloads, of the same processes.
    """

    def __init__(self, control: dist.ProcessGroup, bulk: dist.ProcessGroup) -> None:
        self.rank, self.size = control.rank(), control.size()
        self.bulk: dist.ProcessGroup | None = bulk
        self._control, self._payloads = control, bulk
        self._fragment_sizes: Sequence[int] = ()
        self._header = torch.zeros(_SIZE, dtype=torch.int64)  # the last one
        self._arriving: dist.Work | None = None
        self._announced: list[Operation] = []  # in the last header; known on rank 0 only
        self._pending: list[_Pending] = []

    @property
    def room(self) -> int:
        """How many operations rank 0 may plan now."""
        return _WINDOW - len(self._pending) - len(self._announced)

    @property
    def is_idle(self) -> bool:
        """Nothing is planned that has not been executed; for rank 0."""
        return not self._pending and not self._announced

    def expect(self, fragment_sizes: Sequence[int]) -> None:
        """From now on operations may be about fragments of these sizes."""
        self._fragment_sizes = fragment_sizes

    def agree(self, plan: Plan) -> Plan:
        """What the last header says; ``plan`` goes into the next one.

        Raises:
            DiLoCoError: another rank is gone.
        """
        agreed = self._read()
        agreed.operations = self._executable()
        header = torch.zeros(_SIZE, dtype=torch.int64)
        fields = [int(plan.word), plan.save_wanted or 0, plan.steps, plan.tokens, int(plan.interrupted)]
        fields += [int(pending.is_held) for pending in self._pending]
        header[: len(fields)] = torch.tensor(fields)
        if plan.operations:
            assert self.rank == 0
            assert len(plan.operations) <= _WINDOW - len(self._pending)
            rows = [(int(one.kind), one.fragment_index, one.outer_step) for one in plan.operations]
            header[_HELD.stop : _HELD.stop + _FIELDS * len(rows)] = torch.tensor(rows).view(-1)
        self._header, self._announced = header, plan.operations
        self._arriving = self._started(self._control.allreduce([header]))
        return agreed

    def share(self, content: bytes | None) -> bytes:
        """Rank 0's content, on all ranks; waits."""
        size = torch.tensor([len(content or b"")])
        self.share_tensor(size)
        values = torch.empty(int(size), dtype=torch.uint8)
        if self.rank == 0 and content:
            values.copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
        self.share_tensor(values)
        return bytes(values.numpy())

    def share_tensor(self, tensor: Tensor) -> None:
        """Rank 0's values, on all ranks; waits."""
        if tensor.numel():
            self._wait(self._payloads.broadcast(tensor, 0))

    def any(self, is_true: bool) -> bool:
        """Whether it is true on some rank; waits."""
        num_true = torch.tensor([int(is_true)])
        self._wait(self._payloads.allreduce([num_true]))
        return int(num_true) > 0

    def close(self) -> None:
        """Give up the groups, unless something is under way in them (an error cut the learner short)."""
        if self._arriving is not None and self._arriving.is_completed() and not self._pending:
            self._arriving = None
            for group in (self._control, self._payloads):
                with contextlib.suppress(ValueError):  # it is gone already, with the default group
                    dist.destroy_process_group(group)

    def _read(self) -> Plan:
        """Wait for the last header; the operations that it announces become pending."""
        if self._arriving is None:
            return Plan()
        self._wait(self._arriving)
        values = self._header.tolist()
        if self.rank:
            rows = [values[first : first + _FIELDS] for first in range(_HELD.stop, _SIZE, _FIELDS)]
            self._announced = [Operation(Kind(kind), index, outer) for kind, index, outer in rows if kind]
        self._pending += [self._begin(operation) for operation in self._announced]
        word, save_wanted, steps, tokens, interrupted = values[:_SCALARS]
        return Plan(Word(word), save_wanted or None, [], steps, tokens, interrupted > 0)

    def _begin(self, operation: Operation) -> _Pending:
        """Have its payload on its way to all ranks."""
        if not operation.kind.has_payload:
            return _Pending(operation)
        if self.rank:
            operation.payload = torch.empty(self._fragment_sizes[operation.fragment_index], dtype=torch.float32)
        assert operation.payload is not None
        return _Pending(operation, self._started(self._payloads.broadcast(operation.payload, 0)))

    def _executable(self) -> list[Operation]:
        """Take those out of the queue whose payload is everywhere; operations on one fragment keep their order."""
        num_holders = self._header[_HELD].tolist()
        now: list[Operation] = []
        later: list[_Pending] = []
        waiting: set[int] = set()
        for position, pending in enumerate(self._pending):
            operation = pending.operation
            is_held = not operation.kind.has_payload or (position < _WINDOW and num_holders[position] == self.size)
            has_turn = not later if operation.kind.concerns_all else operation.fragment_index not in waiting
            if is_held and has_turn and not any(one.operation.kind.concerns_all for one in later):
                if pending.arriving is not None:
                    self._wait(pending.arriving)
                now.append(operation)
            else:
                later.append(pending)
                waiting.add(operation.fragment_index)
        self._pending = later
        return now

    def _started(self, work: dist.Work | None) -> dist.Work:
        assert work is not None
        return work

    def _wait(self, work: dist.Work | None) -> None:
        try:
            self._started(work).wait()
        except RuntimeError as error:
            raise DiLoCoError(
                f"a process of this learner is gone or does not answer ({error}), so rank {self.rank} of {self.size} "
                "ends as well. Its log says why. Start this learner again; the run goes on meanwhile."
            ) from error


def ranks_of_this_learner() -> Ranks:
    """The processes of the default group; all of them call this at the same time."""
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return OneRank()
    return SeveralRanks(dist.new_group(backend="gloo"), dist.new_group(backend="gloo"))
