"""One rank of a learner: what every one of them does at a step boundary."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from torch import Tensor
from torch.optim import Optimizer

from hf_diloco.config import DiLoCoPlugin
from hf_diloco.core import messages as ms
from hf_diloco.core.fragments import Fragment
from hf_diloco.learner.lease import lease_of
from hf_diloco.learner.operations import Kind, Operation, Plan
from hf_diloco.learner.optimizer_state import has_learned, optimizer_state
from hf_diloco.learner.parameters import ModelParameters
from hf_diloco.learner.ranks import Ranks
from hf_diloco.learner.snapshots import Snapshot
from hf_diloco.learner.warm_up import warm_up

logger = logging.getLogger(__name__)


def never() -> bool:
    """The answer of a learner that nobody can interrupt."""
    return False


class Rank(ABC):
    """One process of a learner. All methods are for the thread that trains, and all ranks call them alike.

    Args:
        parameters: the live model.
        plugin: which learner this is.
        ranks: the processes of this learner.
        optimizer: the inner optimizer.
    """

    def __init__(
        self, parameters: ModelParameters, plugin: DiLoCoPlugin, ranks: Ranks, optimizer: Optimizer | None
    ) -> None:
        assert plugin.learner_id is not None
        self.learner_id = plugin.learner_id
        self.global_step = 0
        self.total_steps = 0
        self._parameters, self._plugin, self._ranks = parameters, plugin, ranks
        self._lease, self._num_passes = lease_of(plugin), 0
        self._constants_digest = parameters.constants_digest()
        self._optimizer = optimizer
        self._optimizer_state, self._why_not = optimizer_state(parameters.trainable, optimizer)
        self._fragments: Sequence[Fragment] = ()
        self._welcome: ms.Welcome | None = None
        self._interrupted: Callable[[], bool] = never
        self._was_interrupted = False
        self._save_wanted: int | None = None
        self._starts_over = False

    @property
    def interrupted(self) -> bool:
        """Whether this learner was told to stop: with several ranks, any of them, as all knew at the last boundary."""
        return self._was_interrupted or (self._ranks.size == 1 and self._interrupted())

    def end_pass(self, *, interrupted: Callable[[], bool] = never) -> bool:
        """Between two passes over the data: take the shard that the syncer leases for the next one.

        Args:
            interrupted: looked at while waiting for the syncer's answer.

        Returns:
            Whether it is another shard. It is the same one without a data set whose shard can change.
        """
        if self._lease is None:
            return False
        self._num_passes += 1
        own = self._lease.shard
        self._lease.move(int(self._ranks.share(self._next_shard(own, interrupted))))
        logger.info("[learner %d · step %d] reads shard %d", self.learner_id, self.global_step, self._lease.shard)
        return self._lease.shard != own

    def take_save_wanted(self) -> int | None:
        """Outer step of a checkpoint of the whole run that this learner is to save its part of, now; said once."""
        wanted, self._save_wanted = self._save_wanted, None
        return wanted

    def starts_over(self) -> bool:
        """Whether the syncer refused so many updates that the model now holds the global parameters; said once."""
        said, self._starts_over = self._starts_over, False
        return said

    def restore(self) -> None:
        """Write the global values, as this learner last received them, into the model."""
        for index, fragment in enumerate(self._fragments):
            value = self._value(index)
            self._ranks.share_tensor(value)
            self._parameters.write_(fragment, value)

    def close(self) -> None:
        """End the link without a word, as after an exception; the syncer counts this learner as absent. Idempotent."""
        self._ranks.close()

    def _has_own_state(self) -> bool:
        """Whether the inner optimizer has state that was restored with it, on any rank; all ranks call it."""
        return self._ranks.any(has_learned(self._optimizer))

    def _warm_up(self) -> None:
        """Warm up the inner learning rate: the optimizer begins without state."""
        assert self._optimizer is not None
        num_steps = warm_up(self._optimizer)
        logger.info("[learner %d] its learning rate is warmed up over %d steps", self.learner_id, num_steps)

    # ------------------------------------------------------------------------------------------------ step boundaries

    def _boundary(self, plan: Plan) -> Plan:
        """Agree with the other ranks, and do what was agreed."""
        plan.interrupted = self._interrupted()
        agreed = self._ranks.agree(plan)
        if self._ranks.size > 1:
            self._was_interrupted = self._was_interrupted or agreed.interrupted
        self._save_wanted = agreed.save_wanted or self._save_wanted
        self._count(agreed.steps, agreed.tokens)
        for operation in agreed.operations:
            snapshot = self._execute(operation)
            if operation.done is not None:
                operation.done(snapshot)
        return agreed

    def _execute(self, operation: Operation) -> Snapshot | None:
        """Do it to the model; what was read is complete on rank 0."""
        if operation.kind is Kind.WELCOME:
            self._on_welcome()
        elif operation.kind is Kind.SUPPLY:
            self._supply()
        elif operation.kind is Kind.START_OVER:
            self.restore()
            self._keep_up(operation.outer_step)
            self._starts_over = True
        elif operation.kind is Kind.KEEP_UP:
            self._keep_up(operation.outer_step)
        elif operation.kind is Kind.CUT:
            return self._parameters.read(self._fragments[operation.fragment_index])
        else:
            return self._apply(operation)
        return None

    def _apply(self, operation: Operation) -> Snapshot | None:
        """Put a publication into the model; read it back where it can be compared bit for bit."""
        fragment, welcome = self._fragments[operation.fragment_index], self._welcome
        assert operation.payload is not None
        assert welcome is not None
        if operation.kind is Kind.ADD:
            self._parameters.add_(fragment, operation.payload)
        else:
            mix = welcome.local_mix if operation.kind is Kind.MIX else 0.0
            self._parameters.write_(fragment, operation.payload, mix)
        self._keep_up(operation.outer_step)
        logger.debug(
            "[learner %d · step %d] rank %d applied fragment %d of outer step %d",
            self.learner_id, self.global_step, self._ranks.rank, operation.fragment_index, operation.outer_step,
        )  # fmt: skip
        exact = welcome.on_arrival == "overwrite" and not welcome.local_mix and welcome.wire_format == "fp32"
        return self._parameters.read(fragment) if exact else None

    def _keep_up(self, outer_step: int) -> None:
        """The model holds a version of this outer step, or the syncer's clock says it on a new link."""
        assert self._welcome is not None
        self.global_step = max(self.global_step, min(outer_step, self._welcome.total_steps))

    # -------------------------------------------------------------------------------- what differs from rank to rank

    @abstractmethod
    def _count(self, steps: int, tokens: int) -> None:
        """So many steps were done, with so many tokens on all ranks together."""

    @abstractmethod
    def _on_welcome(self) -> None:
        """Take over what the syncer said: the layout, and the settings."""

    @abstractmethod
    def _next_shard(self, own: int, interrupted: Callable[[], bool]) -> bytes | None:
        """What the syncer leases, for rank 0 to tell."""

    @abstractmethod
    def _supply(self) -> None:
        """Send the syncer all there is in the model."""

    @abstractmethod
    def _value(self, fragment_index: int) -> Tensor:
        """The published value of a fragment, or room for it."""
