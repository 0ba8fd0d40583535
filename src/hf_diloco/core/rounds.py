"""The protocol as a state machine: events in, actions out, time an argument (paper Algorithm 2).

``Rounds`` decides who is asked for which fragment, when a round closes, who was merged, what each learner is sent
and when the run is over. It does no I/O and never blocks: the syncer drives this object, over real links and over
those inside one process, and so do the tests with virtual time.

After every event, everything that depends on it or on the time is worked out anew (``_settle``), so that no order
of events, and no lost one, can leave something waiting that should not. An event that makes no sense (an unknown
learner, an answer to a round long closed) changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable

from hf_diloco.core import events as ev
from hf_diloco.core.clock import DueFragments
from hf_diloco.core.ending import Ending
from hf_diloco.core.members import HeldFragment, Member, Members
from hf_diloco.core.messages import RoundId, Version
from hf_diloco.core.open_rounds import OpenRound, OpenRounds
from hf_diloco.core.pace import Pace, RoundsConfig, grace_seconds
from hf_diloco.core.recovery import Recovered

__all__ = ["Rounds", "RoundsConfig", "grace_seconds"]

_MOST_IN_FLIGHT_WHILE_JOINING = 4  # full fragments on their way to one newcomer


class Rounds:
    """The syncer's mind.

    Args:
        config: the run's settings, ``num_fragments`` being what the model really has.
        incarnation: of this syncer process; versions and rounds carry it.
        recovered: what to go on from, stamped with ``incarnation``: the versions before the stamp are the previous
            ones. None: the run begins, and the first learner must supply the initial values.
    """

    def __init__(self, config: RoundsConfig, *, incarnation: int = 1, recovered: Recovered | None = None) -> None:
        self.config = config
        self.incarnation = incarnation
        self.outer_step = recovered.outer_step if recovered else 0
        self.started = recovered.started if recovered else False
        self.members = Members(config)
        held = recovered.held if recovered else [Version(incarnation, 0)] * config.num_fragments
        self.current = [Version(incarnation, version.outer_step) for version in held]
        self._previous: list[Version | None] = list(held) if recovered else [None] * config.num_fragments
        self._merged_before = recovered.merged if recovered else [{}] * config.num_fragments
        # Of the rounds before the restart, those that are not in these values never will be.
        closed = [RoundId(incarnation, 0) if recovered else None] * config.num_fragments
        self._pace = Pace(config)
        self.open_rounds = OpenRounds(config, incarnation, self.members, self._pace, closed)
        self._closed_at = [0.0] * config.num_fragments  # when the round that made the current version closed
        self._due = DueFragments(config)
        self._ending = Ending(config, self.members, "draining" if recovered and recovered.ended else "training")
        self.has_values = recovered is not None
        self._supplier: int | None = None
        self._first_healed_at: float | None = None
        self._actions: list[ev.Action] = []

    # ------------------------------------------------------------------------------------------------ what to ask

    def handle(self, event: ev.Event, now: float) -> list[ev.Action]:
        """Take one event in; the actions that follow from it, the last one a :class:`WaitUntil`.

        Args:
            event: what happened.
            now: seconds on any clock that does not go back.
        """
        self._actions = []
        handler: Callable[[ev.Event, float], None] | None = getattr(self, f"_on_{type(event).__name__.lower()}", None)
        if handler:
            handler(event, now)
        self._settle(now)
        actions, self._actions = self._actions, []
        return [*actions, ev.WaitUntil(time=self._next_deadline(now))]

    @property
    def phase(self) -> str:
        """Training, draining (last rounds), saving or finished."""
        return self._ending.phase

    def present(self, now: float) -> list[Member]:
        """Learners that are counted, asked and waited for."""
        return self.members.present(now)

    @property
    def effective_sync_every(self) -> float:
        """Outer steps that really lie between two merges of one fragment: H, or more if the network cannot keep up."""
        return max(self._pace.steps_between_merges.get(float(self.config.sync_every)), 1.0)

    def settled(self, now: float) -> bool:
        """The final values are saved, and every learner has them, took leave, or is away or hangs for too long."""
        return self._ending.settled(now)

    def done(self, now: float) -> bool:
        """It is settled, and learners that come late have had their time (``linger_seconds``)."""
        return self._ending.done(now)

    # ------------------------------------------------------------------------------------------- events, one by one

    def _on_joined(self, event: ev.Joined, now: float) -> None:
        member = self.members.get(event.learner_id)
        if member is None or member.incarnation != event.incarnation or member.left:
            member = self._new_member(event.learner_id, event.incarnation)
        if len(event.held) == len(self.current):
            for held, version in zip(member.fragments, event.held, strict=True):
                held.version = version if version.incarnation > 0 else None
        for held in member.fragments:
            held.in_flight = None
        self.open_rounds.forget_asks(member.learner_id)
        if self._supplier == event.learner_id:
            self._supplier = None  # what it had sent of the values went down with the old link
        member.linked, member.stop_sent, member.released = True, False, False
        member.linked_at = now
        member.to_merge.clear()  # a leaving learner says so again on its new link
        member.global_step = max(member.global_step, event.global_step)
        self.started = self.started or event.global_step > 0  # before the syncer died
        if member.training:
            self._actions.append(ev.StartTraining(learner_id=member.learner_id))

    def _new_member(self, learner_id: int, incarnation: str) -> Member:
        fragments = [HeldFragment() for _ in self.current]
        for held, current, merged in zip(fragments, self.current, self._merged_before, strict=True):
            if learner_id in merged:
                held.merged_update, held.merged_version = merged[learner_id], current
        member = self.members[learner_id] = Member(learner_id, incarnation, fragments)
        return member

    def _on_leaving(self, event: ev.Leaving, now: float) -> None:
        if (member := self.members.get(event.learner_id)) is not None and member.linked:
            member.to_merge, member.leaving_at = set(range(len(self.current))), now

    def _on_left(self, event: ev.Left, now: float) -> None:
        if (member := self.members.get(event.learner_id)) is None:
            return
        if member.linked:
            member.absent_since = now
        member.linked, member.left = False, member.left or event.for_good
        self.open_rounds.forget_asks(member.learner_id)
        if self._supplier == event.learner_id:
            self._supplier = None

    def _on_valuessupplied(self, event: ev.ValuesSupplied, now: float) -> None:
        self.has_values, self._supplier = True, None

    def _on_reported(self, event: ev.Reported, now: float) -> None:
        member = self.members.get(event.learner_id)
        if member is None or not member.linked:
            return
        member.global_step = max(member.global_step, event.global_step)
        if event.step_seconds > 0:
            member.step_seconds = event.step_seconds
        if event.steps > member.steps:
            member.steps, member.progressed_at = event.steps, now
        member.finished = member.finished or event.finished

    def _on_answered(self, event: ev.Answered, now: float) -> None:
        member = self.members.get(event.learner_id)
        if member is None or not 0 <= event.fragment_index < len(self.current):
            return
        held = member.fragments[event.fragment_index]
        if held.merged_update == event.update_id:
            return  # sent twice, and merged: the publication tells
        if held.asked_round == event.round:  # late answers are measured too: else who is far away stays too late
            member.return_trip_seconds.add(now - held.asked_at - event.held_seconds)
            held.asked_round = None
        round = self.open_rounds.get(event.fragment_index)
        if round is not None and round.id == event.round and event.learner_id in round.answered:
            return  # sent twice, and in the round, which may be closed and merging: a rejection would free it again
        if round is None or round.id != event.round or not round.collecting:
            self._reject(event, "it came after the round had closed")
            return
        if event.learner_id not in round.asked_at:
            self._reject(event, "it was not asked for")
            return
        round.answered.add(event.learner_id)
        if round.asked_at[event.learner_id] >= member.leaving_at:  # an earlier ask may have been answered before
            member.to_merge.discard(event.fragment_index)  # its last step
        if event.refused:
            self._reject(event, "it must not be merged")
        elif event.steps > 0 and event.weight > 0:
            self._take_update(event, round)

    def _take_update(self, event: ev.Answered, round: OpenRound) -> None:
        current = self.current[event.fragment_index]
        stale = event.anchor != current
        if self.config.on_arrival == "overwrite" and stale and event.anchor != self._previous[event.fragment_index]:
            self._reject(event, "it starts from a value too old")
            self.members[event.learner_id].fragments[event.fragment_index].full_needed = True
            return
        round.participants.append((event.learner_id, event.update_id))
        self._actions.append(
            ev.AcceptUpdate(learner_id=event.learner_id, round=round.id, weight=event.weight, stale_anchor=stale)
        )

    def _reject(self, event: ev.Answered, reason: str) -> None:
        self._actions.append(
            ev.RejectUpdate(
                learner_id=event.learner_id,
                round=event.round,
                fragment_index=event.fragment_index,
                reason=reason,
                refused=event.refused,
            )
        )

    def _on_merged(self, event: ev.Merged, now: float) -> None:
        if (round := self.open_rounds.take_merged(event.round)) is None:
            return
        fragment_index, previous = round.fragment_index, self.current[round.fragment_index]
        self._previous[fragment_index] = previous
        self.current[fragment_index] = Version(self.incarnation, round.outer_step)
        self._closed_at[fragment_index] = now if round.closed_at is None else round.closed_at
        for learner_id, update_id in round.participants:
            held = self.members[learner_id].fragments[fragment_index]
            held.merged_update, held.merged_version = update_id, self.current[fragment_index]
        self._pace.round_seconds.add(now - round.opened_at)
        if previous.outer_step > 0 and not round.final:
            self._pace.steps_between_merges.add(round.outer_step - previous.outer_step)

    def _on_acknowledged(self, event: ev.Acknowledged, now: float) -> None:
        member = self.members.get(event.learner_id)
        if member is None or not 0 <= event.fragment_index < len(self.current):
            return
        held = member.fragments[event.fragment_index]
        if held.in_flight == event.version:
            held.in_flight = None
            held.version = event.version
            if event.version == self.current[event.fragment_index] and member.progressed_at is not None:
                self._pace.sync_seconds.add(now - self._closed_at[event.fragment_index])

    def _on_fullneeded(self, event: ev.FullNeeded, now: float) -> None:
        member = self.members.get(event.learner_id)
        if member is not None and 0 <= event.fragment_index < len(self.current):
            held = member.fragments[event.fragment_index]
            held.version = held.in_flight = None

    def _on_saved(self, event: ev.Saved, now: float) -> None:
        self._ending.saved(now)

    # ---------------------------------------------------------------------------------------- what follows from it

    def _settle(self, now: float) -> None:
        self._request_values()
        self._open_start_gate(now)
        self._advance_clock(now)
        self._finish(now)
        self._actions += self.open_rounds.close(now)
        if self.phase in ("training", "draining"):
            self.open_rounds.open_due(self._due, self.current, now, final=self.phase == "draining")
        if not self._due and not self.open_rounds:
            self._actions += self._ending.save()
        self._actions += self.open_rounds.ask(now)
        self._publish()
        self._actions += self._ending.release(self.current, now)

    def _request_values(self) -> None:
        if self.has_values or self._supplier is not None:
            return
        linked = [member.learner_id for member in self.members.values() if member.linked]
        if linked:
            self._supplier = min(linked)
            self._actions.append(ev.RequestValues(learner_id=self._supplier))

    def _open_start_gate(self, now: float) -> None:
        healed = [member for member in self.members.values() if member.linked and member.healed]
        if healed and self._first_healed_at is None:
            self._first_healed_at = now
        if not self.started and self._first_healed_at is not None and healed:
            late = now >= self._first_healed_at + self.config.start_timeout_seconds
            self.started = len(healed) >= self.config.expected_learners or late
        if self.started and self.phase == "training":
            for member in healed:
                if not member.training:
                    member.training = True
                    self._actions.append(ev.StartTraining(learner_id=member.learner_id))

    def start_gate(self, now: float) -> dict[str, float | None]:
        """Who is waited for, and for how long at most, for people who watch; empty once the run has started."""
        if self.started:
            return {}
        opens_at = None if self._first_healed_at is None else self._first_healed_at + self.config.start_timeout_seconds
        return {
            "expected_learners": self.config.expected_learners,
            "learners_here": sum(member.linked and member.healed for member in self.members.values()),
            "starts_in_seconds": None if opens_at is None else max(opens_at - now, 0.0),
        }

    def _advance_clock(self, now: float) -> None:
        pace_setter = self.members.pace_setter(now)
        if pace_setter is None or self.phase != "training":
            return
        self._due.advance(self.outer_step, pace_setter.global_step)
        self.outer_step = max(self.outer_step, pace_setter.global_step)
        self._due.hasten(self.present(now), self.open_rounds, self.outer_step)

    def _finish(self, now: float) -> None:
        self._actions += self._ending.stop_stragglers(now)
        if self.started and self._ending.begins_to_drain(now):
            self.outer_step += 1
            self._due.all_at(self.outer_step)

    def _publish(self) -> None:
        if not self.has_values:
            return
        merging = self.open_rounds.merging()
        for fragment_index, current in enumerate(self.current):
            if fragment_index in merging:
                continue  # the next value is moments away, and may have taken the place of this one already
            by_base: dict[Version | None, list[int]] = {}
            for member in self.members.values():
                held = member.fragments[fragment_index]
                up_to_date = held.version == current and not held.full_needed
                if not member.linked or held.in_flight is not None or up_to_date:
                    continue
                if not member.healed and self._num_in_flight(member) >= _MOST_IN_FLIGHT_WHILE_JOINING:
                    continue
                fits = held.version is not None and held.version == self._previous[fragment_index]
                fits, held.full_needed = fits and not held.full_needed, False
                by_base.setdefault(held.version if fits else None, []).append(member.learner_id)
                held.in_flight = current
            for base, learner_ids in by_base.items():
                self._publish_to(tuple(learner_ids), fragment_index, base)

    def _publish_to(self, learner_ids: tuple[int, ...], fragment_index: int, base: Version | None) -> None:
        merged = ((learner_id, self.members[learner_id].fragments[fragment_index]) for learner_id in learner_ids)
        self._actions.append(
            ev.Publish(
                learner_ids=learner_ids,
                fragment_index=fragment_index,
                version=self.current[fragment_index],
                base=base,
                merged_updates=tuple((who, held.merged_update) for who, held in merged if held.merged_update),
                closed_round=self.open_rounds.last_closed[fragment_index],
            )
        )

    def _num_in_flight(self, member: Member) -> int:
        return sum(held.in_flight is not None for held in member.fragments)

    def _next_deadline(self, now: float) -> float | None:
        deadlines = self.open_rounds.deadlines() + self._ending.deadlines() + self.members.deadlines()
        if not self.started and self._first_healed_at is not None:
            deadlines.append(self._first_healed_at + self.config.start_timeout_seconds)
        return min((deadline for deadline in deadlines if deadline > now), default=None)
