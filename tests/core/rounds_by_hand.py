"""The protocol's state machine, told event by event what happens."""

from hf_diloco.config import SyncerConfig
from hf_diloco.core import events as ev
from hf_diloco.core.messages import Version
from hf_diloco.core.rounds import Rounds

FIRST = Version(1, 0)


class Syncer:
    """A machine and a clock, with the events in short form."""

    def __init__(self, num_learners=0, **settings):
        settings = {"num_fragments": 2, "sync_every": 4, "expected_learners": max(num_learners, 1), **settings}
        self.rounds, self.now, self.actions = Rounds(SyncerConfig(**settings)), 0.0, []
        if num_learners:
            for who in range(num_learners):
                self.join(who)
            self.tell(ev.ValuesSupplied())
            for who in range(num_learners):
                while not self.rounds.members[who].healed:  # not all fragments are sent at once
                    self.heal(who)
            for who in range(num_learners):
                self.step(who, 1)

    def tell(self, event):
        self.actions = self.rounds.handle(event, self.now)
        return self

    def got(self, *kinds):
        return [action for action in self.actions if isinstance(action, kinds)]

    def tick(self, time):
        self.now = time
        return self.tell(ev.Tick())

    @property
    def wakes_at(self):
        return self.actions[-1].time

    def join(self, who, incarnation="a", held=(), g=0):
        return self.tell(ev.Joined(learner_id=who, incarnation=incarnation, global_step=g, held=held))

    def lose(self, who, for_good=False):
        return self.tell(ev.Left(learner_id=who, for_good=for_good))

    def acknowledge(self, who, fragment=None):
        """Whatever is on its way to it (of one fragment) has been applied."""
        for index, held in enumerate(self.rounds.members[who].fragments):
            if held.in_flight and fragment in (None, index):
                self.tell(ev.Acknowledged(learner_id=who, fragment_index=index, version=held.in_flight))
        return self

    heal = acknowledge

    def step(self, who, g, finished=False, step_seconds=1.0):
        steps = self.rounds.members[who].steps + (not finished)
        return self.tell(
            ev.Reported(learner_id=who, global_step=g, steps=steps, step_seconds=step_seconds, finished=finished)
        )

    def open_round(self, fragment):
        return self.rounds.open_rounds[fragment].id

    def answer(self, who, round, fragment=0, steps=4, anchor=None, update_id=None, **more):
        return self.tell(
            ev.Answered(
                learner_id=who,
                round=round,
                fragment_index=fragment,
                update_id=update_id or f"{who}/{round.number}",
                steps=steps,
                weight=float(steps),
                anchor=anchor or self.rounds.current[fragment],
                held_seconds=0.0,
                **more,
            )
        )

    def merge_all(self):
        """Every merge that is under way is done."""
        for round in list(self.rounds.open_rounds.values()):
            if not round.collecting:
                self.tell(ev.Merged(round=round.id))
        return self


def asked(syncer):
    return [(action.fragment_index, action.learner_ids) for action in syncer.got(ev.AskUpdates)]


def at_first_round(num_learners=2, **settings):
    """Fragment 0 is due (at t = 4), everybody is asked."""
    syncer = Syncer(num_learners, **settings)
    syncer.step(0, 2)
    for who in range(1, num_learners):
        syncer.step(who, 4)
    syncer.step(0, 4)
    round = syncer.rounds.open_rounds[0]
    assert set(round.asked_at) == set(range(num_learners))
    if 1 in syncer.rounds.open_rounds:  # of no interest here
        finish_round(syncer, 1, range(num_learners))
    return syncer, round.id


def finish_round(syncer, fragment, who, steps=4):
    round = syncer.open_round(fragment)
    for learner_id in who:
        syncer.answer(learner_id, round, fragment, steps=steps)
    syncer.merge_all()
    for learner_id in who:
        syncer.acknowledge(learner_id)
