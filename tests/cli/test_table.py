"""What people see of a run: the live table, its plain lines, and restarts in them."""

import io

import pytest
from rich.console import Console

from hf_diloco.cli.supervised import Backoff, meaning
from hf_diloco.cli.table import Display, plain_lines, render

pytestmark = pytest.mark.fast

STATUS = {
    "state": "training", "outer_step": 1200, "total_steps": 3000, "merges": 7, "last_participants": [0, 2],
    "bytes_received": 1_500_000, "bytes_sent": 2e9,
    "learners": [
        {"learner_id": 0, "state": "training", "global_step": 1200, "loss": 2.5, "tokens_per_second": 1234.5,
         "tokens_trained": 2000, "tokens_merged": 1500},
        {"learner_id": 2, "state": "absent"},
    ],
}  # fmt: skip


def test_a_status_as_lines():
    run, first, second = plain_lines(STATUS)
    assert run == (
        "training · outer step 1,200 of 3,000 · 7 merges, the last from learners 0, 2 · in 1.5 MB, out 2,000.0 MB"
    )
    assert first == (
        "  learner 0: training, step 1,200, loss 2.5000, 1,234 tokens/s, 1,500 / 2,000 (0.750) tokens merged"
    )
    assert second == "  learner 2: absent, step -, loss -, - tokens/s, - / - tokens merged"


@pytest.mark.parametrize(("loss", "shown"), [(1.276e38, "1.28e+38"), (-2e9, "-2.00e+09"), (99999.5, "99999.5000")])
def test_a_huge_loss_is_short(loss, shown):
    learner = {**STATUS["learners"][0], "loss": loss}
    assert f"loss {shown}," in plain_lines({**STATUS, "learners": [learner]})[1]


def test_a_stretched_interval_and_late_updates_are_shown():
    learner = {**STATUS["learners"][0], "updates_late": 3}
    status = {**STATUS, "sync_every": 24, "effective_sync_every": 31.2, "learners": [learner, STATUS["learners"][1]]}
    run, first, second = plain_lines(status)
    assert "outer step 1,200 of 3,000 · H 24 -> 31 · 7 merges" in run
    assert first.endswith("tokens merged, late updates 3")
    assert second.endswith("tokens merged")
    file = io.StringIO()
    Console(file=file, width=150).print(render(status))
    assert "H 24 -> 31" in file.getvalue()
    assert "late updates" in file.getvalue()


def test_an_interval_that_is_kept_is_not_shown():
    assert " H " not in plain_lines({**STATUS, "sync_every": 24, "effective_sync_every": 24.4})[0]
    assert " H " not in plain_lines({**STATUS, "sync_every": 24, "effective_sync_every": 3.0})[0]


def test_a_run_that_waits_says_for_whom_and_how_long():
    waiting = {"state": "waiting", "expected_learners": 3, "learners_here": 1, "starts_in_seconds": 250.4}
    assert plain_lines(waiting)[0].startswith(
        "waiting for learners (1 of 3 here, without the others in 250 s) · outer step"
    )
    assert plain_lines({**waiting, "starts_in_seconds": None})[0].startswith("waiting for learners (1 of 3 here) ·")
    assert plain_lines({**waiting, "state": "training"})[0].startswith("training ·")


@pytest.mark.parametrize(
    "status",
    [
        STATUS,
        {"state": None, "learners": None, "last_participants": None},
        {"state": "\x1b[31mred", "learners": [None, 3, {"learner_id": "[bold]x", "state": "[/]", "loss": "nan"}]},
        {"outer_step": "x", "merges": [], "bytes_sent": {}, "last_participants": [None, "[red]"], "learners": {}},
        dict.fromkeys(STATUS, float("nan")),
    ],
)
def test_whatever_the_status_holds_it_is_shown(status):
    assert "\x1b" not in "".join(plain_lines(status))
    Console(file=io.StringIO(), width=120).print(render(status))


def test_without_a_terminal_lines_come_when_something_changed():
    file = io.StringIO()
    with Display(Console(file=file, width=40)) as display:
        display.update({})
        display.update(STATUS)
        display.update(STATUS, now=True)
        display.update({**STATUS, "merges": 8})  # too soon
        display.update({**STATUS, "merges": 9}, now=True)
    assert file.getvalue().count("outer step") == 2
    assert "9 merges" in file.getvalue()


def test_on_a_terminal_there_is_a_table():
    file = io.StringIO()
    with Display(Console(file=file, width=120, force_terminal=True)) as display:
        display.update(STATUS)
        display.message("hello [bold]")
    assert "merged / trained tokens" in file.getvalue()
    assert "hello [bold]" in file.getvalue()


def test_exit_codes_in_words():
    assert [meaning(code) for code in (0, 1, 137, 255)] == [
        "exit code 0", "exit code 1", "killed by SIGKILL", "exit code 255",
    ]  # fmt: skip


# ---------------------------------------------------------------------------------------------------- starting again


def test_who_dies_again_and_again_is_started_later_each_time_and_given_up():
    backoff = Backoff(8)
    assert [backoff.delay(0.5) for _ in range(9)] == [1, 2, 4, 8, 16, 32, 60, 60, None]
    assert backoff.delay(0.5) is None


def test_a_good_stretch_of_life_starts_the_count_anew():
    backoff = Backoff(2)
    assert [backoff.delay(lived) for lived in (1, 1, 300, 299, 1)] == [1, 2, 1, 2, None]


def test_without_restarts_there_is_none():
    assert Backoff(0).delay(1e6) is None


def test_restarts_are_shown():
    again = {**STATUS, "syncer_restarts": 1, "learners": [{**STATUS["learners"][0], "restarts": 3}]}
    run, learner = plain_lines(again)
    assert run.endswith("syncer restarts 1")
    assert learner.endswith("tokens merged, restarts 3")
    file = io.StringIO()
    Console(file=file, width=150).print(render(again))
    assert "restarts" in file.getvalue()
