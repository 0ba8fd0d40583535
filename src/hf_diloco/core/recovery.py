"""What happens between the restart of a syncer and its first round: which values the run goes on from.

The checkpoint is older than what learners hold. Each learner that links says which version of each fragment it
holds; newer ones are handed back, and become the global values. A state machine like
:class:`~hf_diloco.core.rounds.Rounds`, which takes over when this one has said :class:`EndRecovery`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from hf_diloco.core import events as ev
from hf_diloco.core.messages import Version

REPORT_SECONDS = 5.0  # the others have this long to report, from the first report on


@dataclass(frozen=True, kw_only=True)
class Recovered:
    """What a run goes on from after its syncer died."""

    held: Sequence[Version]  # version of each fragment, as an earlier incarnation made it
    merged: Sequence[Mapping[int, str]]  # for each fragment: id of the last update of each learner that is in it
    outer_step: int  # t; not below any that a learner has seen
    started: bool  # the start gate had been opened
    ended: bool = False  # the run had come to its end: nothing is left to merge


class Recovery:
    """Collects what learners hold after the syncer died.

    It ends when every learner that the tape knows is there and has reported, or ``REPORT_SECONDS`` after the first
    report; and not before the values that were asked for have come, or their holders have gone. With nobody there it
    waits for ever, unless the run had come to its end: then perhaps all learners have got the final values, and gone.

    Args:
        held: version of each fragment in the checkpoint.
        known_learners: who had joined, and not left for good, before the syncer died.
        vouched: versions of each fragment whose participants and digest the tape knows. Others are not taken: nobody
            could say which updates are in them.
        ended: the run had come to its end; the learners have ``REPORT_SECONDS`` from the first event on.
    """

    def __init__(
        self,
        held: Sequence[Version],
        known_learners: Collection[int],
        vouched: Sequence[Collection[Version]],
        *,
        ended: bool = False,
    ) -> None:
        self.held = list(held)
        self._known = set(known_learners)
        self._missing = set(known_learners)  # those of them that are not there (yet)
        self._vouched = vouched
        self._reports: dict[int, tuple[Version, ...]] = {}  # of learners that are linked
        self._said: dict[int, list[ev.Event]] = {}  # by each of them since it was linked
        self._asked: dict[int, tuple[int, Version]] = {}  # fragment -> whom, for which version
        self._refused: set[tuple[int, int]] = set()  # learner and fragment
        self._run_ended = ended
        self._report_until: float | None = None  # set by the first report
        self._ended = False

    def handle(self, event: ev.Event, now: float) -> list[ev.Action]:
        """Take one event in; as in :meth:`Rounds.handle <hf_diloco.core.rounds.Rounds.handle>`.

        Events that only rounds can answer change nothing, nor does anything after :class:`EndRecovery`.
        """
        if self._ended:
            return [ev.WaitUntil(time=None)]
        if self._report_until is None and (self._run_ended or isinstance(event, ev.Joined)):
            self._report_until = now + REPORT_SECONDS
        if isinstance(event, ev.Joined):
            self._missing.discard(event.learner_id)
            self._reports[event.learner_id] = event.held if len(event.held) == len(self.held) else ()
            self._said[event.learner_id] = [event]
            self._forget_asks(event.learner_id)  # its answer went down with the old link
        elif isinstance(event, ev.Left):
            self._reports.pop(event.learner_id, None)
            self._said.pop(event.learner_id, None)
            self._forget_asks(event.learner_id)
            if event.for_good:
                self._known.discard(event.learner_id)
                self._missing.discard(event.learner_id)
            elif event.learner_id in self._known:
                self._missing.add(event.learner_id)  # a link that was lost for a moment: what it holds still counts
        elif isinstance(event, ev.Reported | ev.Leaving):
            if event.learner_id in self._said:
                self._said[event.learner_id].append(event)
        elif isinstance(event, ev.HandedBack):
            self._on_handed_back(event)
        actions = self._ask()
        if not self._asked and self._all_reported(now):
            self._ended = True
            actions.append(ev.EndRecovery())
        return [*actions, ev.WaitUntil(time=self._deadline(now))]

    def said(self) -> list[ev.Event]:
        """What the rounds that follow must be told: who is linked, and then what they said.

        All joins come first: else the first learner that had finished would end the run before the next is there.
        What was said on a link that is gone is left out: the steps of a process that died would make the one that
        took its place look idle for ever.
        """
        joins = [said[0] for said in self._said.values()]
        return joins + [event for said in self._said.values() for event in said[1:]]

    def _on_handed_back(self, event: ev.HandedBack) -> None:
        index, asked = event.fragment_index, (event.learner_id, event.version)
        if not 0 <= index < len(self.held):
            return
        if not event.refused:  # also if a newer one has been asked for since: its holder may die
            self.held[index] = max(self.held[index], event.version)
        if self._asked.get(index) == asked:
            del self._asked[index]
            if event.refused:
                self._refused.add((event.learner_id, index))

    def _forget_asks(self, learner_id: int) -> None:
        self._asked = {index: ask for index, ask in self._asked.items() if ask[0] != learner_id}

    def _ask(self) -> list[ev.Action]:
        actions: list[ev.Action] = []
        for index, held in enumerate(self.held):
            best = max(
                (
                    (report[index], learner_id)
                    for learner_id, report in self._reports.items()
                    if report and report[index] in self._vouched[index] and (learner_id, index) not in self._refused
                ),
                default=None,
            )
            asked = self._asked.get(index)
            if best is None or best[0] <= held or (asked is not None and asked[1] >= best[0]):
                continue
            version, learner_id = best
            self._asked[index] = (learner_id, version)
            actions.append(ev.RequestHandBack(learner_id=learner_id, fragment_index=index, version=version))
        return actions

    def _all_reported(self, now: float) -> bool:
        return not self._missing or (self._report_until is not None and now >= self._report_until)

    def _deadline(self, now: float) -> float | None:
        if self._ended or self._report_until is None or now >= self._report_until:
            return None
        return self._report_until
