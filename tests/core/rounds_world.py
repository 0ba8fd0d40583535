"""A world for :class:`~hf_diloco.core.rounds.Rounds` in virtual time: model learners, their links, and faults.

The merge is symbolic. Inner steps of one learner process are numbered, an update is a range of them, and a value says
for each process up to which step it has been merged. Under ``carry`` every merged range must begin where the last one
ended, and what a learner holds as not yet merged must begin where the value ends that it holds: an overlap is a step
merged twice, a gap is a step lost. Only a learner that holds what the syncer, after its death, went on without (it
reported too late) gives steps up.

Messages of one direction travel on two lanes, with and without payload; each keeps its order, neither waits for the
other. What is under way when a link is lost never arrives; what has arrived at a learner is still applied.
"""

import heapq
import itertools
import random

from rounds_learner import Holding, Learner, Merge, Publication, Shipped, Speed
from rounds_learner_side import LearnerSide
from rounds_syncer import Disk, Syncer

from hf_diloco.config import SyncerConfig
from hf_diloco.core import events as ev
from hf_diloco.core.messages import RoundId, Version
from hf_diloco.core.rounds import Rounds

CHECKPOINT_SECONDS = 0.3  # at most, for the copies of all fragments
MERGE_SECONDS = 0.002
RELINK_SECONDS = 0.2
NOTHING = Version(0, 0)  # what a Hello says of a fragment that the learner does not hold


class World(LearnerSide):
    """A syncer and its learners. Faults are methods, to be called between two ``run_until`` or put ``at`` a time."""

    def __init__(self, config: SyncerConfig, speeds: list[Speed], *, total_steps: int, seed: int = 0) -> None:
        self.config, self.total_steps, self.now = config, total_steps, 0.0
        self.disk = Disk()
        self.syncer = Syncer(config, self.disk)
        self.learners: dict[int, Learner] = {}
        self.processes: list[Learner] = []
        self.discarded: list[RoundId] = []
        self.rejected: list[ev.RejectUpdate] = []
        self.given_up: dict[tuple[str, int], int] = {}  # process and fragment: what it merged before this step is void
        self.steps_given_up = 0
        self.longest_gap = 0.0  # between merges, while somebody present made steps
        self._gap_since = 0.0
        self._checkpointing = False
        self._random = random.Random(seed)
        self._queue: list[tuple[float, int, object]] = []
        self._order = itertools.count()
        self._lanes: dict[tuple[str, int, bool, bool], float] = {}
        self._tick = 0
        for learner_id, speed in enumerate(speeds):
            self.join(learner_id, speed)
        self._checkpoint_now_and_then(self.syncer)

    @property
    def rounds(self) -> Rounds:
        return self.syncer.rounds

    @property
    def merges(self) -> list[Merge]:
        return self.disk.merges

    @property
    def merged_until(self) -> dict[tuple[str, int], int]:
        """By process and fragment: up to which step it is in the syncer's values."""
        return {(who, f): last for f, kept in enumerate(self.syncer.fragments) for who, last in kept.value.items()}

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
        return self.syncer.alive and self.syncer.recovery is None and self.rounds.done(self.now)

    def describe(self) -> str:
        if self.syncer.recovery or not self.syncer.alive:
            return f"syncer {self.syncer.incarnation} is {'recovering' if self.syncer.alive else 'dead'}"
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
        self._connect_later(learner, seconds)

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
            self._connect_later(learner, seconds + RELINK_SECONDS)

    def leave(self, learner_id: int) -> None:
        """Take leave for good (early stopping): what is not merged goes with it."""
        learner = self.learners[learner_id]
        if learner.alive and learner.linked:
            learner.alive = False
            self._up(learner, ev.Left(learner_id=learner_id, for_good=True), payload=True)

    def take_leave(self, learner_id: int) -> None:
        """Train no more, wait until all that was done is merged, then take leave for good."""
        learner = self.learners[learner_id]
        if learner.alive and learner.started and not learner.finished:
            learner.leaving = True
            self._boundary(learner)

    def kill_syncer(self, down_seconds: float, late: dict[int, float] | None = None) -> None:
        """SIGKILL; another process goes on from the disk. Learners link again within a second, or these seconds."""
        if not self.syncer.alive:
            return
        self.syncer.alive = False
        for learner in self.learners.values():
            if learner.alive and learner.linked:
                self._drop_link(learner, 0.0)
        self.after(down_seconds, lambda: self._start_syncer(late or {}))

    def _start_syncer(self, late: dict[int, float]) -> None:
        self.syncer = Syncer(self.config, self.disk)
        self._checkpointing = False
        for learner in self.learners.values():
            self._connect_later(learner, late.get(learner.learner_id, self._random.uniform(0.0, 1.0)))
        self._tell(ev.Tick())
        self._checkpoint_now_and_then(self.syncer)

    # ------------------------------------------------------------------------------------------------------- links

    def _connect_later(self, learner: Learner, seconds: float) -> None:
        learner.cut_until = max(learner.cut_until, self.now + seconds)
        self.at(learner.cut_until, lambda: self._connect(learner))

    def _connect(self, learner: Learner) -> None:
        goes_on = learner.alive and not learner.released
        if goes_on and not learner.linked and self.syncer.alive and self.now >= learner.cut_until:
            learner.linked, learner.inbox, learner.asks = True, [], []
            hello = ev.Joined(
                learner_id=learner.learner_id,
                incarnation=learner.incarnation,
                global_step=learner.global_step,
                held=tuple(holding.anchor or NOTHING for holding in learner.fragments),
            )
            self.syncer.join(learner, hello)
            self._tell(hello)
            self._look_at_inbox(learner)

    def _drop_link(self, learner: Learner, noticed_after: float) -> None:
        learner.linked, learner.link = False, learner.link + 1
        learner.inbox = [(message, time) for message, time in learner.inbox if isinstance(message, Publication)]
        learner.asks, link, syncer = [], learner.link, self.syncer

        def notice() -> None:
            is_last = learner.link == link and not learner.linked and self.learners[learner.learner_id] is learner
            if is_last and self.syncer is syncer:
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
        if not self.syncer.alive:
            return
        self._forgive_gap()
        rounds = self.rounds
        t, versions = rounds.outer_step, list(rounds.current)
        if isinstance(event, ev.Left):
            self.syncer.leave(event)
        self.syncer.tell(event, self.now, lambda action: self._perform(action, sent))
        if self.rounds is not rounds:
            self._gap_since = self.now
            self._begin_checkpoint()
        assert self.rounds.outer_step >= t
        assert all(new >= old for new, old in zip(self.rounds.current, versions, strict=True))
        self._forgive_gap()

    def _perform(self, action: ev.Action, sent: tuple[Learner, Shipped] | None) -> None:
        match action:
            case ev.AcceptUpdate():
                self.syncer.accepted.setdefault(action.round, []).append(sent)
            case ev.MergeRound():
                self.syncer.merge(action, self.now, self.given_up)
                self._note_gap()
                self._gap_since = self.now
                self._soon(MERGE_SECONDS, lambda: self._tell(ev.Merged(round=action.round)))
            case ev.DiscardRound():
                assert not self.syncer.accepted.pop(action.round, [])
                self.discarded.append(action.round)
            case ev.RejectUpdate():
                self.rejected.append(action)
                self._down(action.learner_id, ("closed", action.round))
            case ev.CloseRound():
                for learner_id in action.learner_ids:
                    self._down(learner_id, ("closed", action.round))
            case ev.Publish():
                self._publish(action)
            case ev.AskUpdates():
                for learner_id in action.learner_ids:
                    self._down(learner_id, action)
            case ev.RequestValues():
                self._send(self.learners[action.learner_id], True, True, self._begin_checkpoint)
            case ev.StartTraining() | ev.StopTraining() | ev.Release() | ev.RequestHandBack():
                self._down(action.learner_id, action)
            case ev.SaveFinal():
                self._begin_checkpoint(final=True)
            case ev.WaitUntil(time=time) if time is not None:
                self._tick += 1
                tick = self._tick
                self.at(time, lambda: self._tell(ev.Tick()) if tick == self._tick else None)

    def _publish(self, action: ev.Publish) -> None:
        kept = self.syncer.fragments[action.fragment_index]
        assert kept.version == action.version
        base = self.syncer.previous[action.fragment_index] if action.base is not None else None
        for learner_id in action.learner_ids:
            self._down(learner_id, Publication(action, kept.value, base), payload=True)

    def _soon(self, seconds: float, action) -> None:
        """Unless the syncer dies before."""
        syncer = self.syncer
        self.after(seconds, lambda: action() if syncer.alive else None)

    def _checkpoint_now_and_then(self, syncer: Syncer) -> None:
        if syncer.alive:
            if syncer.may_checkpoint():
                self._begin_checkpoint()
            self.after(self._random.uniform(1.0, 20.0), lambda: self._checkpoint_now_and_then(syncer))

    def _begin_checkpoint(self, *, final: bool = False) -> None:
        """The first one comes before anybody trains, the last one before anybody is released."""
        syncer = self.syncer
        if self._checkpointing and not final:
            return
        self._checkpointing, checkpoint = True, syncer.begin_checkpoint()

        def copy() -> None:
            if not syncer.alive:
                return
            if len(checkpoint.fragments) < self.config.num_fragments:
                checkpoint.fragments.append(syncer.fragments[len(checkpoint.fragments)])
                seconds = self._random.uniform(0.0, CHECKPOINT_SECONDS) / self.config.num_fragments
                self.after(seconds, copy)
                return
            if syncer.rounds.phase != "finished":  # then the final one is there already
                syncer.disk.checkpoint = checkpoint
            self._checkpointing = False
            if final:
                self._tell(ev.Saved())
            elif not syncer.rounds.has_values:
                self._tell(ev.ValuesSupplied())

        copy()

    def _forgive_gap(self) -> None:
        """Nobody is there: no merge is missing."""
        if self.syncer.recovery or not self.rounds.present(self.now) or self.rounds.phase != "training":
            self._gap_since = self.now

    def _note_gap(self) -> None:
        self.longest_gap = max(self.longest_gap, self.now - self._gap_since)

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
