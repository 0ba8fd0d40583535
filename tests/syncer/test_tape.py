import json
import logging
import resource
import threading
import time

import pytest

from hf_diloco.core.messages import Version
from hf_diloco.errors import DiLoCoError
from hf_diloco.syncer.history import History
from hf_diloco.syncer.saved_run import last_incarnation
from hf_diloco.syncer.tape import Tape, iterate_tape, read_tape

pytestmark = pytest.mark.fast


def test_what_is_written_is_read(tmp_path):
    tape = Tape(tmp_path / "tape.jsonl")
    tape.write("start", time=1.0, incarnation=1)
    middle = tape.size_bytes
    tape.write("round", durable=True, version=(1, 2))
    tape.close()
    lines = read_tape(tmp_path / "tape.jsonl")
    assert [line["kind"] for line in lines] == ["start", "round"]
    assert lines[1]["version"] == [1, 2]
    assert [line["kind"] for line in iterate_tape(tmp_path / "tape.jsonl", middle)] == ["round"]


@pytest.mark.parametrize("torn", [b"", b'{"kind": "rou', b"x" * 100_000])
def test_a_line_that_a_crash_cut_off_is_removed(tmp_path, torn):
    path = tmp_path / "tape.jsonl"
    path.write_bytes(b'{"kind": "start", "seconds": 0, "incarnation": 3}\n' + torn)
    assert len(read_tape(path)) == 1
    assert last_incarnation(path) == 3
    tape = Tape(path)
    tape.write("finish")
    tape.close()
    assert [json.loads(line)["kind"] for line in path.read_text().splitlines()] == ["start", "finish"]


def test_seconds_go_on_after_a_restart(tmp_path):
    path = tmp_path / "tape.jsonl"
    path.write_text(json.dumps({"kind": "start", "seconds": 2.0, "time": time.time() - 100}) + "\n")
    tape = Tape(path)
    tape.write("finish")
    tape.close()
    assert 102 <= read_tape(path)[-1]["seconds"] < 160


class FullDisk:
    """No file of this process can grow beyond ``limit`` bytes, as on a disk that is full."""

    def __init__(self, limit):
        self._limit = limit

    def __enter__(self):
        self._before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (self._limit, self._before[1]))
        return self

    def __exit__(self, *_):
        resource.setrlimit(resource.RLIMIT_FSIZE, self._before)


def test_a_full_disk_holds_the_writer_up_until_there_is_room(tmp_path, caplog):
    tape = Tape(tmp_path / "tape.jsonl")
    tape.write("start", time=1.0)
    writer = threading.Thread(target=lambda: tape.write("round", durable=True, text="x" * 200))
    with caplog.at_level(logging.ERROR), FullDisk(tape.size_bytes + 50):
        writer.start()
        writer.join(1.5)
        assert writer.is_alive()
    assert "cannot be written" in caplog.text
    assert "Learners train on" in caplog.text
    writer.join(30)
    assert not writer.is_alive()
    tape.close()
    assert [line["kind"] for line in read_tape(tmp_path / "tape.jsonl")] == ["start", "round"]


def test_a_full_disk_does_not_hold_up_the_end(tmp_path):
    stopping = threading.Event()
    tape = Tape(tmp_path / "tape.jsonl", stopping)
    stopping.set()
    with FullDisk(0), pytest.raises(DiLoCoError, match="cannot be written"):
        tape.write("finish")
    tape.close()


def merge(incarnation, step, *ids):
    participants = [{"learner_id": number, "update_id": text, "tokens": 8} for number, text in enumerate(ids)]
    return {"kind": "round", "fragment_index": 0, "version": [incarnation, step], "digest": f"d{incarnation}.{step}",
            "participants": participants}  # fmt: skip


def recovered(incarnation, adopted, outer_step):
    return {"kind": "recovered", "incarnation": incarnation, "outer_step": outer_step,
            "fragments": [{"adopted": adopted, "digest": "adopted"}]}  # fmt: skip


def history():
    return History(
        held=[Version(1, 4)], merged=[{0: "a0", 1: "b0"}], known_learners={0}, incarnation=1, outer_step=4
    )  # fmt: skip


def test_the_last_merged_updates_are_those_of_the_value_and_not_of_the_whole_tape():
    told = history().read([merge(1, 4, "a0", "b0"), merge(1, 8, "a1"), merge(1, 12, "a2", "b2")])
    assert told.merged_in(0, Version(1, 4)) == {0: "a0", 1: "b0"}
    assert told.merged_in(0, Version(1, 8)) == {0: "a1", 1: "b0"}
    assert told.merged_in(0, Version(1, 12)) == {0: "a2", 1: "b2"}
    assert told.outer_step == 12
    assert told.digest(0, Version(1, 8)) == "d1.8"
    assert [len(participants) for participants in told.merges_up_to([Version(1, 8)])] == [2, 1]


def test_what_a_restart_left_behind_is_void_for_the_next_one():
    told = history().read([merge(1, 8, "a1"), merge(1, 12, "a2"), recovered(2, [1, 8], 12), merge(2, 16, "a3", "b3")])
    assert list(told.made[0]) == [(1, 8), (2, 8), (2, 16)]
    assert told.merged_in(0, Version(2, 16)) == {0: "a3", 1: "b3"}
    assert told.merged_in(0, Version(2, 8)) == {0: "a1", 1: "b0"}
    assert told.outer_step == 16


def test_who_is_known():
    told = history().read(
        [
            {"kind": "join", "learner_id": 1},
            {"kind": "join", "learner_id": 2},
            {"kind": "leave", "learner_id": 1, "for_good": False},
            {"kind": "leave", "learner_id": 2, "for_good": True},
            {"kind": "finish", "stopped": False},
            {"kind": "start", "incarnation": 2},
        ]
    )
    assert told.known_learners == {0, 1}
    assert told.incarnation == 2
    assert not told.finished
    assert told.read([{"kind": "finish", "stopped": True}]).finished is False
    assert told.read([{"kind": "finish", "stopped": False}]).finished is True
