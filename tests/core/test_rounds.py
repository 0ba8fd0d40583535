"""How rounds open, ask, close and merge, rule by rule; and what nonsense does to them."""

import pytest
from rounds_by_hand import FIRST, Syncer, asked, at_first_round, finish_round

from hf_diloco.core import events as ev
from hf_diloco.core.messages import RoundId, Version
from hf_diloco.core.rounds import grace_seconds

pytestmark = pytest.mark.fast


def test_a_round_closes_at_once_when_all_have_answered():
    syncer, round = at_first_round(2)
    assert not syncer.answer(0, round).got(ev.MergeRound)
    (merge,) = syncer.answer(1, round).got(ev.MergeRound)
    assert merge.participants == ((0, f"0/{round.number}"), (1, f"1/{round.number}"))
    assert (merge.version, merge.num_asked) == (Version(1, 4), 2)
    assert not syncer.got(ev.CloseRound)


def test_a_round_closes_when_the_others_have_left():
    syncer, round = at_first_round(3)
    syncer.answer(0, round)
    assert not syncer.lose(1).got(ev.MergeRound)
    assert syncer.lose(2).got(ev.MergeRound)


def test_the_grace_window_opens_at_the_quorum_and_is_at_least_a_step_and_a_return_trip():
    syncer, round = at_first_round(3, min_quorum=2)
    syncer.rounds.members[2].return_trip_seconds.value = 1.5
    syncer.now = 2.0
    assert not syncer.answer(0, round).got(ev.MergeRound)
    syncer.tick(20.0)
    for who in range(3):
        seconds = (1.0, 1.0, 3.0)[who]
        assert not syncer.step(who, 5, step_seconds=seconds).got(ev.MergeRound)  # one is not a quorum of two
    syncer.now = 30.0
    syncer.answer(1, round)
    assert syncer.rounds.open_rounds[0].grace_seconds == 4.5
    assert syncer.wakes_at <= 34.5
    assert not syncer.tick(34.4).got(ev.MergeRound)
    syncer.tick(34.5)
    (merge,) = syncer.got(ev.MergeRound)
    assert len(merge.participants) == 2
    assert (merge.quorum_seconds, merge.grace_seconds) == (30.0, 4.5)
    assert syncer.got(ev.CloseRound) == [ev.CloseRound(learner_ids=(2,), round=round, fragment_index=0)]


def test_the_grace_window_is_never_longer_than_its_maximum():
    syncer, round = at_first_round(2, max_grace_seconds=2.5)
    syncer.rounds.members[1].step_seconds = 300.0
    syncer.answer(0, round)
    assert syncer.rounds.open_rounds[0].grace_seconds == 2.5


def test_the_quorum_is_lowered_when_a_learner_leaves():
    syncer, round = at_first_round(3, min_quorum=3)
    syncer.answer(0, round).answer(1, round)
    assert syncer.lose(2).got(ev.MergeRound)


def test_the_quorum_counts_an_answer_whose_sender_has_left():
    syncer, round = at_first_round(3, min_quorum=3)
    syncer.answer(0, round).answer(1, round).lose(0)
    assert syncer.rounds.open_rounds[0].quorum_at == 0.0  # two answers; two of those asked are present
    (merge,) = syncer.tick(9.0).got(ev.MergeRound)
    assert [who for who, _ in merge.participants] == [0, 1]


def test_answers_without_steps_do_not_count_towards_the_quorum():
    syncer, round = at_first_round(3, min_quorum=1)
    syncer.answer(0, round, steps=0)
    assert syncer.rounds.open_rounds[0].quorum_at is None
    assert not syncer.tick(20.0).got(ev.MergeRound)
    syncer.answer(1, round)
    assert syncer.rounds.open_rounds[0].quorum_at == 20.0


def test_a_round_closes_below_the_quorum_when_all_have_answered():
    syncer, round = at_first_round(2, min_quorum=2)
    (merge,) = syncer.answer(0, round).answer(1, round, steps=0).got(ev.MergeRound)
    assert [who for who, _ in merge.participants] == [0]


def test_a_round_without_weight_is_discarded():
    syncer, round = at_first_round(2)
    before = list(syncer.rounds.current)
    syncer.answer(0, round, steps=0).answer(1, round, steps=0)
    assert syncer.got(ev.DiscardRound) == [ev.DiscardRound(round=round, fragment_index=0)]
    assert not syncer.got(ev.MergeRound, ev.Publish)
    assert syncer.rounds.current == before


def test_a_late_answer_enters_no_round_and_its_sender_is_told():
    syncer, round = at_first_round(2, max_grace_seconds=0)
    assert syncer.answer(0, round).got(ev.MergeRound)
    (rejected,) = syncer.answer(1, round).got(ev.RejectUpdate)
    assert (rejected.learner_id, rejected.round, rejected.fragment_index) == (1, round, 0)
    assert not rejected.refused
    syncer.merge_all()
    (rejected,) = syncer.answer(1, round).got(ev.RejectUpdate)
    assert not syncer.got(ev.AcceptUpdate)


def test_a_refused_update_is_an_answer_without_weight():
    syncer, round = at_first_round(2)
    (rejected,) = syncer.answer(0, round, refused=True).got(ev.RejectUpdate)
    assert rejected.refused
    assert not syncer.got(ev.AcceptUpdate)
    (merge,) = syncer.answer(1, round).got(ev.MergeRound)
    assert [who for who, _ in merge.participants] == [1]


def test_an_answer_sent_twice_is_ignored_whenever_it_comes():
    syncer, round = at_first_round(2, max_grace_seconds=5)
    kinds = (ev.AcceptUpdate, ev.RejectUpdate, ev.MergeRound)
    assert not syncer.answer(0, round).answer(0, round).got(*kinds)  # while the round is open
    syncer.answer(1, round)
    assert not syncer.answer(0, round).got(*kinds)  # while it is merged: "rejected" would have it merged once more
    syncer.merge_all()
    assert not syncer.answer(0, round).got(*kinds)  # and after


def test_an_answer_that_was_not_asked_for_is_rejected():
    syncer, round = at_first_round(2)
    syncer.join(2)
    assert syncer.answer(2, round).got(ev.RejectUpdate)
    assert not syncer.got(ev.AcceptUpdate)


def test_the_same_incarnation_is_asked_again_after_a_lost_link():
    syncer, round = at_first_round(3)
    held = tuple(syncer.rounds.current)
    syncer.lose(1)
    assert asked(syncer.join(1, held=held)) == [(0, (1,))]
    assert syncer.answer(1, round).got(ev.AcceptUpdate)


def test_it_is_not_asked_again_if_its_answer_is_here():
    syncer, round = at_first_round(3)
    held = tuple(syncer.rounds.current)
    syncer.answer(1, round).lose(1)
    assert asked(syncer.join(1, held=held)) == []
    assert not syncer.answer(0, round).got(ev.MergeRound)
    (merge,) = syncer.answer(2, round).got(ev.MergeRound)
    assert len(merge.participants) == 3


def test_a_new_link_without_word_of_the_old_ones_end_is_asked_again_too():
    syncer, _ = at_first_round(2)
    assert asked(syncer.join(1, held=tuple(syncer.rounds.current))) == [(0, (1,))]


def test_a_new_incarnation_replaces_the_old_one():
    syncer, round = at_first_round(2)
    syncer.join(1, incarnation="b", g=4)
    assert not asked(syncer)  # it holds nothing
    assert syncer.rounds.members[1].steps == 0
    assert syncer.answer(0, round).got(ev.MergeRound)  # nobody waits for it


def test_an_unhealed_newcomer_is_never_asked_nor_merged():
    syncer, round = at_first_round(2)
    syncer.join(2).acknowledge(2, 0)
    syncer.step(2, 500)
    assert not asked(syncer)
    assert syncer.rounds.outer_step == 4
    syncer.answer(2, round)
    assert not syncer.got(ev.AcceptUpdate)


def test_who_needs_a_full_value_is_not_asked_until_it_has_it():
    syncer = Syncer(2)
    syncer.tell(ev.FullNeeded(learner_id=1, fragment_index=1)).step(0, 4)
    assert set(syncer.rounds.open_rounds[0].asked_at) == {0}
    assert (0, (1,)) in asked(syncer.acknowledge(1, 1))


def test_who_is_healed_but_has_made_no_step_is_not_counted():
    syncer, _ = at_first_round(2)
    syncer.join(2).heal(2)
    assert not asked(syncer)
    assert asked(syncer.step(2, 5)) == [(0, (2,))]  # its first step: asked while the round is open


def test_an_idle_learner_is_neither_waited_for_nor_counted():
    syncer, round = at_first_round(2, min_quorum=2)
    syncer.now = 29.0
    syncer.step(0, 5).answer(0, round)
    assert syncer.wakes_at == 30.0
    assert not syncer.tick(29.9).got(ev.MergeRound)
    assert syncer.tick(30.0).got(ev.MergeRound)
    assert syncer.rounds.outer_step == 5  # K is 1 by now
    syncer.merge_all().acknowledge(0)
    assert (0, (0,)) in asked(syncer.step(0, 8))
    syncer.acknowledge(1)
    syncer.now = 50.0
    assert (0, (1,)) in asked(syncer.step(1, 5))  # until its next step


def test_slow_steps_do_not_make_a_learner_idle():
    syncer = Syncer(1)
    syncer.step(0, 2, step_seconds=20.0)
    assert syncer.tick(199.0).rounds.present(199.0)
    assert not syncer.tick(200.0).rounds.present(200.0)


def test_who_was_merged_is_not_asked_again_before_it_has_applied_that_version():
    syncer, round = at_first_round(2, max_grace_seconds=0)
    syncer.answer(0, round).merge_all()  # 1 was late
    syncer.step(0, 8).step(1, 8)
    assert (0, (1,)) in asked(syncer) or set(syncer.rounds.open_rounds[0].asked_at) == {1}
    assert (0, (0,)) in asked(syncer.acknowledge(0, 0))


def test_a_publication_names_what_is_in_it_and_which_round_is_over():
    syncer, round = at_first_round(2)
    syncer.answer(0, round, update_id="x").answer(1, round, steps=0).merge_all()
    (publication,) = [action for action in syncer.got(ev.Publish) if action.fragment_index == 0]
    assert publication.learner_ids == (0, 1)
    assert (publication.version, publication.base) == (Version(1, 4), FIRST)
    assert (0, "x") in publication.merged_updates
    assert publication.closed_round == round


def test_no_value_is_sent_while_the_next_one_is_merged():
    # The round is closed, and whoever merges may have replaced the value already: it would go out as the one before.
    syncer, round = at_first_round(2)
    syncer.answer(0, round).answer(1, round)
    syncer.lose(0).join(0, held=(Version(0, 0), syncer.rounds.current[1]))
    assert syncer.got(ev.Publish) == []
    publications = syncer.merge_all().got(ev.Publish)
    assert {publication.version for publication in publications} == {Version(1, 4)}
    assert {who for publication in publications for who in publication.learner_ids} == {0, 1}


def test_who_joins_as_a_round_closes_is_not_sent_the_value_before_it():
    # The grace window ends without a tick: the event that comes first is a learner that is to be sent the value.
    syncer, round = at_first_round(3)
    syncer.lose(2).answer(0, round)
    assert syncer.open_round(0) == round
    syncer.now = 1000.0
    syncer.join(2)
    assert [action.round for action in syncer.got(ev.MergeRound)] == [round]
    assert all(publication.fragment_index != 0 for publication in syncer.got(ev.Publish))


def test_one_publication_of_a_fragment_is_under_way_and_the_next_skips_what_was_missed():
    syncer, round = at_first_round(2, max_grace_seconds=0)
    syncer.answer(0, round).merge_all().acknowledge(0)
    for g in (8, 12):  # learner 1 acknowledges nothing
        syncer.step(0, g)
        finish_round(syncer, 0, [0])
    (publication,) = [action for action in syncer.acknowledge(1, 0).got(ev.Publish) if 1 in action.learner_ids]
    assert (publication.version, publication.base) == (Version(1, 12), None)


def test_what_did_not_fit_is_sent_in_full():
    syncer, round = at_first_round(2)
    syncer.answer(0, round).answer(1, round).merge_all()
    (publication,) = syncer.tell(ev.FullNeeded(learner_id=1, fragment_index=0)).got(ev.Publish)
    assert (publication.learner_ids, publication.version, publication.base) == ((1,), Version(1, 4), None)


def test_overwrite_refuses_an_update_from_before_the_previous_value():
    syncer, round = at_first_round(2, on_arrival="overwrite", max_grace_seconds=0)
    syncer.answer(0, round).merge_all().acknowledge(0).acknowledge(1)
    for g in (8, 12):
        syncer.step(0, g).step(1, g)
        newest = syncer.open_round(0)
        if g == 8:
            finish_round(syncer, 0, [0])
            syncer.acknowledge(1)
    syncer.answer(1, newest, anchor=FIRST)
    assert syncer.got(ev.RejectUpdate)
    assert not syncer.got(ev.AcceptUpdate)
    assert 1 in syncer.rounds.open_rounds[0].answered
    (publication,) = syncer.got(ev.Publish)
    assert (publication.learner_ids, publication.version, publication.base) == ((1,), Version(1, 8), None)
    assert 1 in {member.learner_id for member in syncer.rounds.present(0.0)}
    assert syncer.answer(0, newest, anchor=Version(1, 4)).got(ev.AcceptUpdate)[0].stale_anchor


# --------------------------------------------------------------------------------------------------- pace, nonsense


@pytest.mark.parametrize(
    ("overlap_steps", "step", "quorum", "sync", "fraction", "most", "expected"),
    [
        (2, 1.0, 0.5, 0.25, 0.8, 10.0, 1.0),  # 0.8 * (2 - 0.75)
        (2, 1.0, 1.5, 0.5, 0.8, 10.0, 0.0),  # no slack
        (2, 1.0, 3.0, 2.0, 0.8, 10.0, 0.0),  # negative slack
        (4, 10.0, 1.0, 1.0, 0.8, 10.0, 10.0),  # 30.4, capped
        (1, 2.0, 0.0, 0.0, 1.0, 10.0, 2.0),
    ],
)
def test_grace_seconds_are_equation_3(overlap_steps, step, quorum, sync, fraction, most, expected):
    assert grace_seconds(
        step_seconds=step,
        quorum_seconds=quorum,
        sync_seconds=sync,
        overlap_steps=overlap_steps,
        grace_fraction=fraction,
        max_grace_seconds=most,
    ) == pytest.approx(expected)


def test_h_as_measured_grows_when_rounds_cannot_keep_up():
    syncer = Syncer(1, num_fragments=1, sync_every=4, max_open_rounds=1)
    assert syncer.rounds.effective_sync_every == 4
    for g in (4, 12, 20, 28, 36):  # each second one finds the round still open
        syncer.step(0, g).step(0, g + 4)
        finish_round(syncer, 0, [0])
        if 0 in syncer.rounds.open_rounds:
            finish_round(syncer, 0, [0], steps=0)
    assert syncer.rounds.effective_sync_every > 5


@pytest.mark.parametrize(
    "event",
    [
        ev.Left(learner_id=9, for_good=True),
        ev.ValuesSupplied(),
        ev.Reported(learner_id=9, global_step=99, steps=9, step_seconds=1.0, finished=True),
        ev.Merged(round=RoundId(7, 7)),
        ev.Acknowledged(learner_id=0, fragment_index=77, version=FIRST),
        ev.Acknowledged(learner_id=0, fragment_index=0, version=Version(1, 99)),
        ev.FullNeeded(learner_id=0, fragment_index=-1),
        ev.Saved(),
    ],
)
def test_senseless_events_change_nothing(event):
    syncer, round = at_first_round(2)
    t = syncer.rounds.outer_step
    assert len(syncer.tell(event).actions) == 1
    assert (syncer.rounds.outer_step, syncer.open_round(0)) == (t, round)


def test_a_step_of_no_time_at_all_does_not_raise():
    syncer, round = at_first_round(1, max_open_rounds=2)
    syncer.now = 5.0
    syncer.answer(0, round).merge_all().acknowledge(0)
    syncer.step(0, 9, step_seconds=5e-324)
    assert len(syncer.rounds.open_rounds) <= 2
