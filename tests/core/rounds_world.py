"""A world for :class:`~hf_diloco.core.rounds.Rounds` in virtual time: model learners, their links, and faults.

The merge is symbolic. Inner steps of one learner process are numbered, an update is a range of them, and the world
keeps for each process and fragment up to which step it has been merged. Under ``carry`` every merged range must begin
where the last one ended: an overlap is a step merged twice, a gap is a step lost.

Messages of one direction travel on two lanes, with and without payload; each keeps its order, neither waits for the
other. What is under way when a link is lost never arrives.
"""

import heapq
import itertools
import random

from rounds_learner import Holding, Learner, Merge, Shipped, Speed

from hf_diloco.config import SyncerConfig
from hf_diloco.core import events as ev
from hf_diloco.core.messages import RoundId, Version
from hf_diloco.core.rounds import Rounds

REPORT_EVERY_SECONDS = 0.03
MERGE_SECONDS = 0.002
RELINK_SECONDS = 0.2
NOTHING = Version(0, 0)  # what a Hello says of a fragment that the learner does not hold


class World:
    """A syncer and its learners. Faults are methods, to be called between two ``run_until`` or put ``at`` a time."""

    def __init__(self, config: SyncerConfig, speeds: list[Speed], *, total_steps: int, seed: int = 0) -> None:
        self.config, self.total_steps, self.now = config, total_steps, 0.0
        self.rounds = Rounds(config)
        self.learners: dict[int, Learner] = {}
        self.processes: list[Learner] = []
        self.merges: list[Merge] = []
        self.discarded: list[RoundId] = []
        self.rejected: list[ev.RejectUpdate] = []
        self.merged_until: dict[tuple[str, int], int] = {}  # by incarnation and fragment
        self.merged_in: dict[str, Version] = {}  # by update id
        self.longest_gap = 0.0  # between merges, while somebody present made steps
        self._gap_since = 0.0
        self._accepted: dict[RoundId, list[tuple[Learner, Shipped]]] = {}
        self._random = random.Random(seed)
        self._queue: list[tuple[float, int, object]] = []
        self._order = itertools.count()
        self._lanes: dict[tuple[str, int, bool, bool], float] = {}
        self._tick = 0
        for learner_id, speed in enumerate(speeds):
            self.join(learner_id, speed)

    # -------------------------------------------------------------------------------------------------------- time

    def at(self, time: float, action) -> None:
        heapq.heappush(self._queue, (max(time, self.now), next(self._order), action))

    def after(self, seconds: float, action) -> None:
        self.at(self.now + seconds, action)

    def run_until(self, time: float) -> None:
        while self._queue and self._queue[0][0] <= time and not self.done:
            self.now, _, action = heapq.heappop(self._queue)
            action()
        if not self.done:
            self.now = time

    def run(self, limit: float) -> None:
        """To the end of the run, which must come before ``limit``."""
        self.run_until(limit)
        assert self.done, f"still {self.rounds.phase} at {self.now}: {self.describe()}"

    @property
    def done(self) -> bool:
        return self.rounds.done(self.now)

    def describe(self) -> str:
        states = {member.learner_id: member.state(self.now) for member in self.rounds.members.values()}
        return f"t={self.rounds.outer_step} {states} open={self.rounds.open_rounds}"

    # ------------------------------------------------------------------------------------------------------ faults

    def join(self, learner_id: int, speed: Speed) -> None:
        """A new process under this id; it must not have a living one."""
        assert learner_id not in self.learners or not self.learners[learner_id].alive
        holdings = [Holding() for _ in range(self.config.num_fragments)]
        learner = Learner(learner_id, len(self.processes), speed, holdings)
        self.learners[learner_id] = learner
        self.processes.append(learner)
        self._connect(learner)

    def cut(self, learner_id: int, seconds: float, *, silent: bool = False) -> None:
        """The link is lost and comes back; if ``silent`` the syncer notices only by its time-out."""
        learner = self.learners[learner_id]
        if not (learner.alive and learner.linked):
            return
        self._drop_link(learner, self.config.link_timeout_seconds if silent else 0.05)
        self.after(seconds, lambda: self._connect(learner))

    def crash(self, learner_id: int, restart_after: float | None = None) -> None:
        """SIGKILL; a new process takes the id over later, or never."""
        learner = self.learners[learner_id]
        if not learner.alive:
            return
        learner.alive = False
        self._drop_link(learner, 0.05)
        if restart_after is not None:
            self.after(restart_after, lambda: self.learners[learner_id].alive or self.join(learner_id, learner.speed))

    def hang(self, learner_id: int, seconds: float) -> None:
        """The training thread does nothing for a while (an evaluation, a compile); the link stays."""
        learner = self.learners[learner_id]
        learner.frozen_until = max(learner.frozen_until, self.now + seconds)
        self.at(learner.frozen_until, lambda: self._look_at_inbox(learner))

    def stop(self, learner_id: int, seconds: float) -> None:
        """SIGSTOP and, later, SIGCONT: beyond the time-out the link is given up."""
        learner, timeout = self.learners[learner_id], self.config.link_timeout_seconds
        self.hang(learner_id, seconds)
        if seconds > timeout and learner.linked:
            self._drop_link(learner, timeout)
            self.after(seconds + RELINK_SECONDS, lambda: self._connect(learner))

    def leave(self, learner_id: int) -> None:
        """Take leave for good (early stopping): what is not merged goes with it."""
        learner = self.learners[learner_id]
        if learner.alive and learner.linked:
            learner.alive = False
            self._up(learner, ev.Left(learner_id=learner_id, for_good=True), payload=True)

    # ------------------------------------------------------------------------------------------------------- links

    def _connect(self, learner: Learner) -> None:
        if learner.alive and not learner.linked:
            learner.linked = True
            learner.global_step = max(learner.global_step, self.rounds.outer_step)
            hello = ev.Joined(
                learner_id=learner.learner_id,
                incarnation=learner.incarnation,
                global_step=learner.global_step,
                held=tuple(holding.anchor or NOTHING for holding in learner.fragments),
            )
            self._tell(hello)

    def _drop_link(self, learner: Learner, noticed_after: float) -> None:
        learner.linked, learner.link = False, learner.link + 1
        learner.inbox, learner.asks, link = [], [], learner.link

        def notice() -> None:
            if learner.link == link and not learner.linked and self.learners[learner.learner_id] is learner:
                self._tell(ev.Left(learner_id=learner.learner_id, for_good=False))

        self.after(noticed_after, notice)

    def _send(self, learner: Learner, up: bool, payload: bool, deliver) -> None:
        seconds = learner.speed.up_seconds if up else learner.speed.down_seconds
        seconds *= self._random.uniform(1.0, learner.speed.link_jitter)
        lane, link = (learner.incarnation, learner.link, up, payload), learner.link
        self._lanes[lane] = time = max(self._lanes.get(lane, 0.0), self.now + seconds)
        self.at(time, lambda: deliver() if learner.link == link and learner.linked else None)

    def _up(self, learner: Learner, event: ev.Event, *, payload: bool = False, shipped: Shipped | None = None) -> None:
        if learner.linked:
            self._send(learner, True, payload, lambda: self._tell(event, (learner, shipped)))

    def _down(self, learner_id: int, message: object, *, payload: bool = False) -> None:
        learner = self.learners[learner_id]
        if learner.linked:
            self._send(learner, False, payload, lambda: self._receive(learner, message))

    # ------------------------------------------------------------------------------------------------------ syncer

    def _tell(self, event: ev.Event, sent: tuple[Learner, Shipped] | None = None) -> None:
        self._forgive_gap()
        t, versions = self.rounds.outer_step, list(self.rounds.current)
        for action in self.rounds.handle(event, self.now):
            self._perform(action, sent)
        assert self.rounds.outer_step >= t
        assert all(new >= old for new, old in zip(self.rounds.current, versions, strict=True))
        self._forgive_gap()

    def _perform(self, action: ev.Action, sent: tuple[Learner, Shipped] | None) -> None:
        match action:
            case ev.AcceptUpdate():
                self._accepted.setdefault(action.round, []).append(sent)
            case ev.MergeRound():
                self._merge(action)
            case ev.DiscardRound():
                assert not self._accepted.pop(action.round, [])
                self.discarded.append(action.round)
            case ev.RejectUpdate():
                self.rejected.append(action)
                self._down(action.learner_id, ("closed", action.round))
            case ev.CloseRound():
                for learner_id in action.learner_ids:
                    self._down(learner_id, ("closed", action.round))
            case ev.AskUpdates() | ev.Publish():
                for learner_id in action.learner_ids:
                    self._down(learner_id, action, payload=isinstance(action, ev.Publish))
            case ev.RequestValues():
                self._up(self.learners[action.learner_id], ev.ValuesSupplied())
            case ev.StartTraining() | ev.StopTraining() | ev.Release():
                self._down(action.learner_id, action)
            case ev.SaveFinal():
                self.after(0.1, lambda: self._tell(ev.Saved()))
            case ev.WaitUntil(time=time) if time is not None:
                self._tick += 1
                tick = self._tick
                self.at(time, lambda: self._tell(ev.Tick()) if tick == self._tick else None)

    def _merge(self, action: ev.MergeRound) -> None:
        accepted = self._accepted.pop(action.round)
        assert [(who.learner_id, update.update_id) for who, update in accepted] == list(action.participants)
        self.merges.append(Merge(self.now, action, self.rounds.phase))
        for who, update in accepted:
            key = (who.incarnation, action.fragment_index)
            end = self.merged_until.get(key, 0)
            if self.config.on_arrival == "carry":
                assert update.first == end, f"{key}: steps {update.first}..{update.last} merged after 0..{end}"
            assert update.first >= end
            self.merged_until[key] = update.last
            self.merged_in[update.update_id] = action.version
        self._note_gap()
        self._gap_since = self.now
        self.after(MERGE_SECONDS, lambda: self._tell(ev.Merged(round=action.round)))

    def _forgive_gap(self) -> None:
        """Nobody is there: no merge is missing."""
        if not self.rounds.present(self.now) or self.rounds.phase != "training":
            self._gap_since = self.now

    def _note_gap(self) -> None:
        self.longest_gap = max(self.longest_gap, self.now - self._gap_since)

    # ---------------------------------------------------------------------------------------------------- learners

    def _receive(self, learner: Learner, message: object) -> None:
        learner.inbox.append((message, self.now))
        self._look_at_inbox(learner)

    def _look_at_inbox(self, learner: Learner) -> None:
        if not learner.started or learner.finished:  # otherwise at the next step boundary
            self._boundary(learner)

    def _schedule_step(self, learner: Learner) -> None:
        seconds = learner.speed.step_seconds * self._random.uniform(1.0, learner.speed.jitter)
        self.after(seconds, lambda: self._step(learner))

    def _step(self, learner: Learner) -> None:
        if not learner.alive:
            return
        if self.now < learner.frozen_until:
            self.at(learner.frozen_until, lambda: self._step(learner))
            return
        learner.steps, learner.global_step = learner.steps + 1, learner.global_step + 1
        if (member := self.rounds.members.get(learner.learner_id)) and member.present(self.now):
            self._note_gap()
        self._boundary(learner)
        if not learner.finished:
            self._schedule_step(learner)

    def _boundary(self, learner: Learner) -> None:
        if not learner.alive or learner.released or self.now < learner.frozen_until:
            return
        inbox, learner.inbox = learner.inbox, []
        for message, arrived_at in inbox:
            match message:
                case ev.Publish():
                    self._apply(learner, message)
                case ev.AskUpdates():
                    learner.asks.append((message, arrived_at))
                case ("closed", round_id):
                    learner.closed.add(round_id)
                    for holding in learner.fragments:
                        if holding.shipped and holding.shipped.round == round_id:
                            assert holding.shipped.update_id not in self.merged_in, "told that a merged one was not"
                            holding.shipped = None
                case ev.StartTraining():
                    if not learner.started:
                        learner.started = True
                        learner.global_step = max(learner.global_step, self.rounds.outer_step)
                        self._schedule_step(learner)
                case ev.StopTraining():
                    learner.stopping = True
                case ev.Release():
                    learner.released = True
                    self._up(learner, ev.Left(learner_id=learner.learner_id, for_good=True), payload=True)
                    return
        asks, learner.asks = learner.asks, []
        for ask, arrived_at in asks:
            if ask.round not in learner.closed:
                self._ship(learner, ask, arrived_at)
        self._report(learner)

    def _apply(self, learner: Learner, publication: ev.Publish) -> None:
        index, version = publication.fragment_index, publication.version
        holding = learner.fragments[index]
        if publication.base is not None and publication.base != holding.anchor and version != holding.anchor:
            self._up(learner, ev.FullNeeded(learner_id=learner.learner_id, fragment_index=index))
            return
        shipped, merged = holding.shipped, dict(publication.merged_updates).get(learner.learner_id)
        if self.config.on_arrival == "overwrite" and version != holding.anchor:
            learner.steps_overwritten += learner.steps - (shipped.last if shipped else holding.first_unmerged)
            holding.first_unmerged, holding.shipped = learner.steps, None
        elif shipped and shipped.update_id == merged:
            assert self.merged_in[merged] <= version, f"{merged} is not in {version}"
            holding.first_unmerged, holding.shipped = shipped.last, None
        elif shipped and publication.closed_round and publication.closed_round >= shipped.round:
            assert shipped.update_id not in self.merged_in, f"{shipped.update_id} was merged, {version} says it was not"
            holding.shipped = None
        holding.anchor = version
        learner.global_step = max(learner.global_step, version.outer_step)
        self._up(learner, ev.Acknowledged(learner_id=learner.learner_id, fragment_index=index, version=version))

    def _ship(self, learner: Learner, ask: ev.AskUpdates, arrived_at: float) -> None:
        holding = learner.fragments[ask.fragment_index]
        assert holding.anchor is not None, "asked before it held the fragment"
        if holding.shipped is None or holding.shipped.round != ask.round:
            update_id = f"{learner.incarnation}/{ask.round.number}"
            holding.shipped = Shipped(update_id, ask.round, holding.first_unmerged, learner.steps, holding.anchor)
        shipped = holding.shipped
        if shipped.first == shipped.last:
            holding.shipped = None
        answer = ev.Answered(
            learner_id=learner.learner_id,
            round=ask.round,
            fragment_index=ask.fragment_index,
            update_id=shipped.update_id,
            steps=shipped.last - shipped.first,
            weight=float(shipped.last - shipped.first),
            anchor=shipped.anchor,
            held_seconds=self.now - arrived_at,
        )
        self._up(learner, answer, payload=True, shipped=shipped)

    def _report(self, learner: Learner) -> None:
        if not learner.started:
            return
        if not learner.finished and (learner.stopping or learner.global_step >= self.total_steps):
            learner.finished, learner.finished_at = True, self.now
        if learner.finished or self.now - learner.reported_at >= REPORT_EVERY_SECONDS:
            learner.reported_at = self.now
            report = ev.Reported(
                learner_id=learner.learner_id,
                global_step=learner.global_step,
                steps=learner.steps,
                step_seconds=learner.speed.step_seconds * (1 + learner.speed.jitter) / 2,
                finished=learner.finished,
            )
            self._up(learner, report)

    # ------------------------------------------------------------------------------------------------------ results

    def merged_share(self, learner_id: int) -> float:
        """Steps merged over steps trained, mean over the fragments, of all processes under this id."""
        processes = [learner for learner in self.processes if learner.learner_id == learner_id]
        fragments = self.config.num_fragments
        merged = sum(self.merged_until.get((who.incarnation, f), 0) for who in processes for f in range(fragments))
        return merged / fragments / max(sum(who.steps for who in processes), 1)

    def check_everything_merged(self, *learner_ids: int) -> None:
        for learner_id in learner_ids or self.learners:
            learner = self.learners[learner_id]
            for index in range(self.config.num_fragments):
                assert self.merged_until.get((learner.incarnation, index), 0) == learner.steps, (learner_id, index)
