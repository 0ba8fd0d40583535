"""What a tape says of a run that goes on, line by line."""

from __future__ import annotations

from typing import Any

import pytest

from hf_diloco.core.messages import Version
from hf_diloco.syncer.history import History

pytestmark = pytest.mark.fast


def round_line(outer_step: int, *participants: tuple[int, str], incarnation: int = 1) -> dict[str, Any]:
    return {
        "kind": "round", "fragment_index": 0, "version": [incarnation, outer_step], "digest": f"d{outer_step}",
        "participants": [{"learner_id": who, "update_id": update_id} for who, update_id in participants],
    }  # fmt: skip


def recovered_line(incarnation: int, adopted: Version, outer_step: int) -> dict[str, Any]:
    fragments = [{"adopted": list(adopted), "digest": f"d{adopted.outer_step}"}]
    return {"kind": "recovered", "incarnation": incarnation, "outer_step": outer_step, "fragments": fragments}


def history(*lines: dict[str, Any], merged: dict[int, str] | None = None, known: tuple[int, ...] = (0, 1)) -> History:
    start = History([Version(1, 4)], [merged or {0: "0/a"}], set(known), incarnation=1, outer_step=5)
    return start.read(lines)


def test_merged_updates_are_those_up_to_the_version_that_is_adopted() -> None:
    lines = round_line(8, (0, "0/b"), (1, "1/a")), round_line(12, (0, "0/c"))
    read = history(*lines)
    assert read.merged_in(0, Version(1, 4)) == {0: "0/a"}
    assert read.merged_in(0, Version(1, 8)) == {0: "0/b", 1: "1/a"}
    assert read.merged_in(0, Version(1, 12)) == {0: "0/c", 1: "1/a"}
    assert read.outer_step == 12


def test_merges_that_are_in_the_checkpoint_already_do_not_count_again() -> None:
    """The checkpoint copies its fragments after the tape's place was noted: it may hold newer merges than that."""
    read = history(round_line(4, (1, "1/z")))
    assert read.merged_in(0, Version(1, 4)) == {0: "0/a"}


def test_values_that_a_recovery_went_on_without_are_void() -> None:
    read = history(
        round_line(8, (0, "0/b")),
        round_line(12, (1, "1/a")),
        {"kind": "start", "incarnation": 2},
        recovered_line(2, Version(1, 8), 12),
        round_line(13, (0, "0/d"), incarnation=2),
    )
    assert read.made[0].keys() == {Version(1, 8), Version(2, 8), Version(2, 13)}
    assert read.merged_in(0, Version(2, 13)) == {0: "0/d"}  # and nothing of learner 1
    assert read.digest(0, Version(2, 8)) == "d8"
    assert (read.incarnation, read.outer_step) == (2, 13)


def test_who_has_left_for_good_is_not_known_any_more() -> None:
    away = {"kind": "leave", "learner_id": 0, "for_good": False}
    gone = {"kind": "leave", "learner_id": 0, "for_good": True}
    assert history(away).known_learners == {0, 1}
    assert history(gone).known_learners == {1}
    assert history(gone, {"kind": "join", "learner_id": 7}).known_learners == {1, 7}


def test_a_run_that_everybody_has_left() -> None:
    gone = {"kind": "leave", "learner_id": 0, "for_good": True}
    assert not history(gone).all_left
    assert history(gone, known=(0,)).all_left
    assert not history(gone, {"kind": "join", "learner_id": 0}, known=(0,)).all_left
    went_back = history(gone, known=(0,))
    went_back.forget(3)
    assert not went_back.all_left


@pytest.mark.parametrize("stopped", [True, False])
def test_a_run_that_has_finished(stopped: bool) -> None:
    finish = {"kind": "finish", "stopped": stopped}
    assert history(finish).finished == (not stopped)
    assert not history(finish, {"kind": "start", "incarnation": 2}).finished
