"""How a run comes to its end: who is told to stop, the last rounds, the final values, who is let go."""

from __future__ import annotations

from collections.abc import Sequence

from hf_diloco.core import events as ev
from hf_diloco.core.members import Member, Members
from hf_diloco.core.messages import Version
from hf_diloco.core.pace import RoundsConfig

_LONG_PAUSE_SECONDS = 600.0  # an evaluation may take that long; a learner whose training hangs comes never


class Ending:
    """Where the run is on the way to its end.

    Args:
        config: the run's settings.
        members: all learners.
        phase: "training", "draining" (last rounds), "saving" or "finished".
    """

    def __init__(self, config: RoundsConfig, members: Members, phase: str) -> None:
        self.phase = phase
        self._config, self._members = config, members
        self._finish_at: float | None = None  # when those who still train are told to stop
        self._saved_at = 0.0  # when the final values were on disk
        self._lingers_until = 0.0  # for learners that come late

    def stop_stragglers(self, now: float) -> list[ev.Action]:
        """Tell those who still train to stop, some time after the first has finished."""
        if self._finish_at is None and any(member.finished for member in self._members.present(now)):
            self._finish_at = now + self._config.finish_wait_seconds
        actions: list[ev.Action] = []
        if self.phase != "training" or (self._finish_at is not None and now >= self._finish_at):
            for member in self._members.values():
                if member.linked and member.training and not member.finished and not member.stop_sent:
                    member.stop_sent = True
                    actions.append(ev.StopTraining(learner_id=member.learner_id))
        return actions

    def begins_to_drain(self, now: float) -> bool:
        """Whether the last rounds begin now: all who are here have finished."""
        if self.phase != "training" or not self._all_finished(now):
            return False
        self.phase = "draining"
        return True

    def _all_finished(self, now: float) -> bool:
        """Everybody who is here waits for the final values; who is away has been so for too long, or took leave."""
        if not self._members or self._members.may_return(now):
            return False
        if all(member.left for member in self._members.values()):
            return True
        if self._finish_at is None:  # nobody has finished: those who are away may still come back
            return False
        if now >= self._finish_at:
            return all(member.finished for member in self._members.present(now))
        training = [member for member in self._members.values() if member.linked and member.training]
        return bool(training) and all(member.finished for member in training)  # also those who are idle for now

    def save(self) -> list[ev.Action]:
        """The last rounds are over: have the final values saved."""
        if self.phase != "draining":
            return []
        self.phase = "saving"
        return [ev.SaveFinal()]

    def saved(self, now: float) -> None:
        """The final values are on disk."""
        if self.phase == "saving":
            self.phase, self._saved_at = "finished", now
            self._lingers_until = now + self._config.linger_seconds

    def release(self, current: Sequence[Version], now: float) -> list[ev.Action]:
        """Let those go who hold the final values (``current``), once these are on disk."""
        actions: list[ev.Action] = []
        if self.phase != "finished":
            return actions
        for member in self._members.values():
            versions = [held.version for held in member.fragments]
            if member.linked and not member.released and versions == list(current):
                member.released, member.released_at = True, now
                actions.append(ev.Release(learner_id=member.learner_id))
        return actions

    def settled(self, now: float) -> bool:
        """The final values are saved, and every learner has them, took leave, or is away or hangs for too long."""
        if self.phase != "finished":
            return False
        timeout = self._config.link_timeout_seconds
        return all(
            member.left
            or (member.released and now - member.released_at >= timeout)
            or (not member.linked and now - member.absent_since >= timeout)  # its release may have been lost
            or (member.hangs(now) and now >= self._waits_until(member))
            for member in self._members.values()
        )

    def _waits_until(self, member: Member) -> float:
        """How long a learner has to take the final values if its training hangs."""
        return max(self._saved_at, member.linked_at) + max(self._config.finish_wait_seconds, _LONG_PAUSE_SECONDS)

    def done(self, now: float) -> bool:
        """It is settled, and learners that come late have had their time."""
        return self.settled(now) and now >= self._lingers_until

    def deadlines(self) -> list[float]:
        """When those who still train are told to stop; when nobody is expected any more."""
        if self.phase == "finished":
            linked = [member for member in self._members.values() if member.linked and not member.released]
            return [self._lingers_until, *(self._waits_until(member) for member in linked)]
        return [self._finish_at] if self._finish_at is not None and self.phase == "training" else []
