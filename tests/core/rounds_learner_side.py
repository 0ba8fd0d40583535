"""What model learners do with their messages and at their step boundaries; the world is made of this."""

from rounds_learner import Learner, Publication, Shipped

from hf_diloco.core import events as ev

REPORT_EVERY_SECONDS = 0.03


class LearnerSide:
    """The part of :class:`rounds_world.World` that stands for learners."""

    def _receive(self, learner: Learner, message: object) -> None:
        if isinstance(message, ev.RequestHandBack):  # the training thread has no part in it
            self._hand_back(learner, message.fragment_index)
            return
        learner.inbox.append((message, self.now))
        self._look_at_inbox(learner)

    def _look_at_inbox(self, learner: Learner) -> None:
        if learner.waits:  # otherwise at the next step boundary
            self._boundary(learner)

    def _hand_back(self, learner: Learner, index: int) -> None:
        version, value = learner.fragments[index].anchor, learner.fragments[index].value
        assert version is not None

        def arrive() -> None:
            if self.syncer.recovery is not None:
                taken = self.syncer.take(index, version, value)
                who = learner.learner_id
                self._tell(ev.HandedBack(learner_id=who, fragment_index=index, version=version, refused=not taken))

        self._send(learner, True, True, arrive)

    def _schedule_step(self, learner: Learner) -> None:
        seconds = learner.speed.step_seconds * self._random.uniform(1.0, learner.speed.jitter)
        self.after(seconds, lambda: self._step(learner))

    def _step(self, learner: Learner) -> None:
        if not learner.alive or learner.waits:
            return
        if self.now < learner.frozen_until:
            self.at(learner.frozen_until, lambda: self._step(learner))
            return
        learner.steps, learner.global_step = learner.steps + 1, learner.global_step + 1
        member = self.rounds.members.get(learner.learner_id)
        if member and member.present(self.now) and self.syncer.alive and not self.syncer.recovery:
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
                case Publication():
                    self._apply(learner, message)
                case ev.AskUpdates():
                    learner.asks.append((message, arrived_at))
                case ("closed", round_id):
                    learner.closed.add(round_id)
                    for holding in learner.fragments:
                        if holding.shipped and holding.shipped.round == round_id:
                            assert holding.shipped.update_id not in self.disk.merged_in, (
                                "told that a merged one was not"
                            )
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
        if learner.leaving:
            self._drain(learner)

    def _drain(self, learner: Learner) -> None:
        if learner.all_merged:
            learner.alive = False
            self._up(learner, ev.Left(learner_id=learner.learner_id, for_good=True), payload=True)
        elif learner.linked and learner.said_on != learner.link:
            learner.said_on, learner.reported_at = learner.link, -1.0
            self._report(learner)
            self._up(learner, ev.Leaving(learner_id=learner.learner_id))

    def _apply(self, learner: Learner, publication: Publication) -> None:
        action = publication.action
        index, version, holding = action.fragment_index, action.version, learner.fragments[action.fragment_index]
        assert holding.anchor is None or version >= holding.anchor, f"from {holding.anchor} back to {version}"
        if version != holding.anchor:
            if publication.base is not None and action.base != holding.anchor:
                self._up(learner, ev.FullNeeded(learner_id=learner.learner_id, fragment_index=index))
                return
            assert publication.base is None or publication.base == holding.value
            assert publication.value == self.disk.published[index, version], "two values of one version"
            self._settle(learner, index, publication)
            holding.anchor, holding.value = version, publication.value
            learner.global_step = max(learner.global_step, version.outer_step)
        self._up(learner, ev.Acknowledged(learner_id=learner.learner_id, fragment_index=index, version=version))

    def _settle(self, learner: Learner, index: int, publication: Publication) -> None:
        """What of the learner's own steps is in the value that it applies, and what is not."""
        action, holding = publication.action, learner.fragments[index]
        shipped, merged = holding.shipped, dict(action.merged_updates).get(learner.learner_id)
        if self.config.on_arrival == "overwrite":
            learner.steps_overwritten += learner.steps - (shipped.last if shipped else holding.first_unmerged)
            holding.first_unmerged, holding.shipped = learner.steps, None
            return
        if shipped and shipped.update_id == merged:
            holding.first_unmerged, holding.shipped = shipped.last, None
        elif shipped and action.closed_round and action.closed_round >= shipped.round:
            assert shipped.update_id not in self.disk.merged_in, f"{action.version} says it was not merged"
            holding.shipped = None
        key, merged_until = (learner.incarnation, index), publication.value.get(learner.incarnation, 0)
        if (index, holding.anchor) in self.disk.void and merged_until < holding.first_unmerged:
            self.given_up[key] = holding.first_unmerged
            self.steps_given_up += holding.first_unmerged - merged_until
        assert holding.first_unmerged in (merged_until, self.given_up.get(key)), (key, action, holding)

    def _ship(self, learner: Learner, ask: ev.AskUpdates, arrived_at: float) -> None:
        holding = learner.fragments[ask.fragment_index]
        assert holding.anchor is not None, "asked before it held the fragment"
        if holding.shipped is None or holding.shipped.round != ask.round:
            update_id = f"{learner.incarnation}/{ask.round.incarnation}.{ask.round.number}"
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
        at_end = learner.stopping or learner.global_step >= self.total_steps
        if at_end and not (learner.finished or learner.leaving):
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
