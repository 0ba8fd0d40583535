"""What children of `hf-diloco launch` print: never felt by who prints, whatever becomes of the log."""

from __future__ import annotations

import os
import shutil
import sys

import psutil
import pytest
from launches import wait_until
from rich.console import Console

from hf_diloco.cli.processes import Child
from hf_diloco.cli.table import Display

pytestmark = pytest.mark.distributed

# Prints numbered lines, and at each line of "more.txt" as many again.
PRINTS = """
import os, pathlib, sys, time
done = 0
while True:
    wanted = int(pathlib.Path(sys.argv[1]).read_text() or 0)
    for number in range(done, abs(wanted)):
        os.write(1 + number % 2, b"line %d %s\\n" % (number, b"x" * 100))
    done = max(done, abs(wanted))
    pathlib.Path(sys.argv[1] + ".done").write_text(str(done))
    if wanted < 0:
        sys.exit("the last words")
    time.sleep(0.02)
"""


class Printing:
    """A child that prints as many lines as it is told to."""

    def __init__(self, path, log):
        self.wanted = path / "wanted"
        self.wanted.write_text("0")
        self.child = Child([sys.executable, "-c", PRINTS, str(self.wanted)], log, os.environ, grace_seconds=5)

    def until(self, num_lines):
        """Have it print until it has printed so many; it ends if they are negative."""
        new = self.wanted.with_suffix(".new")
        new.write_text(str(num_lines))
        new.rename(self.wanted)
        done = self.wanted.with_name("wanted.done")
        wait_until(lambda: done.exists() and done.read_text() == str(abs(num_lines)), f"{num_lines} lines")


@pytest.fixture
def printing(tmp_path, small_disk):
    made = Printing(tmp_path, small_disk / "log")
    yield made
    made.child.stop()
    assert made.child.wait(60)
    made.child.close()


def fill(disk):
    with (disk / "filler").open("wb", buffering=0) as file:
        while shutil.disk_usage(disk).free:
            file.write(bytes(4096))


def test_a_full_disk_is_not_felt_and_what_it_cost_is_in_the_log(printing, small_disk):
    log = printing.child.log
    printing.until(10)
    wait_until(lambda: log.read_text().count("\n") == 10, "the first lines")
    fill(small_disk)
    printing.until(1000)  # 100 KB: more than the disk could hold, not more than is kept
    (small_disk / "filler").unlink()
    wait_until(lambda: log.read_text().count("\n") == 1000, "the lines that were kept")
    assert [int(line.split()[1]) for line in log.read_text().splitlines()] == list(range(1000))

    fill(small_disk)
    for number in range(2000, 60_000, 1000):  # 6 MB
        printing.until(number)
    assert printing.child.poll() is None
    memory = next(item for item in os.listdir(f"/proc/{os.getpid()}/fd") if printing.child._output == int(item))
    wait_until(lambda: os.stat(f"/proc/self/fd/{memory}").st_blocks * 512 < 2**21, "the memory to be given back")
    (small_disk / "filler").unlink()
    wait_until(lambda: "bytes of output are lost" in log.read_text(), "what is lost")
    printing.until(-60_000)
    assert printing.child.wait(60)
    assert printing.child.poll() == 1
    text = log.read_text()
    assert text.endswith("the last words\n")
    before, notice, after = text.partition("\n[hf-diloco: ")
    assert notice
    num_lost = int(after.split()[0].replace(",", ""))
    kept = len(before) + len(after.partition("]\n")[2])
    assert num_lost + kept == sum(len(f"line {number} {'x' * 100}\n") for number in range(60_000)) + len(
        "the last words\n"
    )


def test_the_last_words_are_shown_even_if_the_disk_is_full(printing, small_disk):
    printing.until(10)
    fill(small_disk)
    printing.until(-5000)
    assert printing.child.wait(60)
    assert printing.child.poll() == 1
    lines = printing.child.last_lines().splitlines()
    assert lines[-1] == "the last words"
    assert lines[-2].startswith("line 4999 ")
    assert len(lines) == 15
    assert "the last words" not in printing.child.log.read_text()


def test_who_prints_does_not_feel_the_death_of_the_guard(printing):
    printing.until(10)
    (pid,) = (process.pid for process in psutil.Process(printing.child._guard.pid).children())
    printing.child._guard.kill()
    printing.child._guard.wait()
    printing.until(20_000)  # more than a pipe would hold
    assert psutil.pid_exists(pid)
    assert printing.child.last_lines().splitlines()[-1].startswith("line 19999 ")
    printing.child.kill()
    wait_until(lambda: not psutil.pid_exists(pid), "its end")


def test_a_process_that_is_left_with_the_output_open_delays_nothing(tmp_path):
    script = "import os, subprocess; subprocess.Popen(['sleep', '600'], start_new_session=True); print('bye')"
    child = Child([sys.executable, "-c", script], tmp_path / "log", os.environ, grace_seconds=0.5)
    assert child.wait(60)
    assert child.poll() == 0
    assert (tmp_path / "log").read_text() == "bye\n"
    child.stop()
    child.close()


def test_all_that_is_printed_is_in_the_log_when_the_child_has_ended(tmp_path):
    script = "import sys; sys.stderr.write('first\\n'); sys.stdout.write('x' * 10_000_000 + '\\nlast\\n'); sys.exit(3)"
    child = Child([sys.executable, "-c", script], tmp_path / "log", os.environ, grace_seconds=5)
    assert child.wait(60)
    assert child.poll() == 3
    text = (tmp_path / "log").read_text()
    assert len(text) == 6 + 10_000_001 + 5
    assert "bytes of output are lost" not in text
    child.restart()
    assert child.wait(60)
    assert len((tmp_path / "log").read_text()) == 2 * len(text), "a restart goes on with the log"
    child.stop()
    child.close()


def test_an_output_that_is_truncated_goes_on(tmp_path):
    child = Child(
        ["bash", "-c", "echo the first; sleep 1; echo two > /dev/stderr; sleep 1; echo three"],
        tmp_path / "log",
        os.environ,
        grace_seconds=5,
    )
    assert child.wait(60)
    assert child.poll() == 0
    assert (tmp_path / "log").read_text() == "the first\ntwo\nthree\n"
    child.stop()
    child.close()


def test_the_display_of_a_run_outlives_a_full_disk():
    full = open("/dev/full", "w")  # noqa: SIM115
    display = Display(Console(file=full))
    for _ in range(1000):
        display.message("x" * 100)
    with pytest.raises(OSError, match="No space left"):
        full.close()


@pytest.mark.long
@pytest.mark.timeout(400)
def test_learners_train_on_while_the_disk_with_their_logs_is_full(launch, small_disk, tmp_path):
    """And they drain and save there when they are told to stop because launch is gone."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "logs").symlink_to(small_disk)
    run = launch("--steps", 100_000, "--slow", "--chatty")
    run.until_training()
    fill(small_disk)
    merges = run.directory.read_status()["merges"]
    wait_until(lambda: run.directory.read_status()["merges"] > merges + 10, "merges while the disk is full")
    assert len(run.trainers()) == 2
    run.process.kill()
    run.wait()
    wait_until(lambda: not run.all_processes(), "the end of all processes", 120)
    for learner_id in (0, 1):
        assert list((tmp_path / "out" / f"learner-{learner_id}").glob("checkpoint-*/optimizer.pt")), run.text()
    assert (run.directory.model / "model.safetensors").exists(), run.text()
