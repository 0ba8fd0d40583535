"""Warnings and refusals on the tape, as `hf-diloco launch` shows them."""

import pytest

from hf_diloco.cli.notices import Notices
from hf_diloco.syncer.tape import Tape

pytestmark = pytest.mark.fast


def test_each_is_told_once_and_updates_are_not_among_them(tmp_path):
    path = tmp_path / "tape.jsonl"
    assert Notices(path).new() == []
    tape = Tape(path)
    tape.write("warning", learner_ids=[0], text="of the life before")
    notices = Notices(path)
    tape.write("join", learner_id=0)
    tape.write("warning", learner_ids=[0, 1], text="they read the same")
    tape.write("refusal", learner_id=1, reason="another layout")
    tape.write("refusal", learner_id=1, update_id="a", reason="NaN", start_over=False)
    tape.write("refusal", learner_id=1, fragment_index=0, reason="misfit")
    assert notices.new() == ["Warning: they read the same", "Learner 1 is refused: another layout"]
    assert notices.new() == []
    tape.close()


def test_half_a_line_is_waited_for(tmp_path):
    path = tmp_path / "tape.jsonl"
    path.touch()
    notices = Notices(path)
    with path.open("a") as file:
        file.write('{"kind": "warning", "text": "a')
        file.flush()
        assert notices.new() == []
        file.write('ll"}\n')
    assert notices.new() == ["Warning: all"]
