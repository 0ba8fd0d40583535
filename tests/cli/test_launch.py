"""`hf-diloco launch` with real processes: whatever happens, it ends, says how, and leaves nothing behind."""

from __future__ import annotations

import os
import signal

import psutil
import pytest
from launches import wait_until

from hf_diloco.syncer.saved_run import latest_run
from hf_diloco.syncer.tape import read_tape

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(280)]


def test_a_run_that_finishes(launch):
    run = launch("--steps", 20, "--help-me=1", RANK="3", WORLD_SIZE="4", MASTER_ADDR="nowhere")
    assert run.wait() == 0, run.text()
    run.assert_nothing_left()
    output = run.output.read_text()
    assert "The run has finished" in output
    assert "mean participants" in output
    assert "model: run/model" in output.splitlines(), "from the working directory, as that is shorter"
    assert "learner 1: tokens merged / trained" in output
    import transformers

    transformers.AutoModelForCausalLM.from_pretrained(run.directory.model)
    for learner_id in (0, 1):
        log = (run.directory.logs / f"learner-{learner_id}.log").read_text()
        assert f"arguments --steps 20 --help-me=1 of learner {learner_id} of 2, world size 1" in log
    token = run.directory.token.read_text().strip()
    assert not [log.name for log in run.logs() if token in log.read_text(errors="replace")]


def test_ctrl_c_in_a_terminal(launch):
    master, slave = os.openpty()
    try:
        run = launch("--steps", 100_000, prefix=("setsid", "--ctty"), terminal=slave)
        run.until_training()
        os.write(master, b"\x03")
        assert run.wait(60) == 1, run.text()
    finally:
        os.close(master)
        os.close(slave)
    run.assert_nothing_left()
    run.assert_drained_and_saved()


@pytest.mark.long
@pytest.mark.parametrize("numbers", [[signal.SIGTERM], [signal.SIGTERM, signal.SIGINT]])
def test_a_signal_ends_all_and_keeps_the_model(launch, numbers):
    """Two at once are one request."""
    run = launch("--steps", 100_000)
    run.until_training()
    for number in numbers:
        run.process.send_signal(number)
    assert run.wait(60) == 1, run.text()
    run.assert_nothing_left()
    run.assert_drained_and_saved()


@pytest.mark.long
@pytest.mark.skipif(os.geteuid() != 0, reason="only root may make a pid namespace")
def test_as_the_first_process_of_a_container(launch):
    run = launch("--steps", 100_000, prefix=("unshare", "--pid", "--fork", "--mount-proc", "--kill-child"))
    run.until_training()
    (first,) = psutil.Process(run.process.pid).children()
    first.terminate()
    assert run.wait(60) == 1, run.text()
    run.assert_nothing_left()
    run.assert_drained_and_saved()


@pytest.mark.long
def test_when_all_learners_are_preempted_the_syncer_writes_the_model(launch):
    run = launch("--steps", 100_000)
    run.until_training()
    for process in run.trainers():
        process.terminate()
    assert run.wait(90) == 1, run.text()
    run.assert_nothing_left()
    run.assert_drained_and_saved()


@pytest.mark.long
def test_what_the_syncer_warns_of_when_it_ends_is_shown(launch):
    run = launch("--steps", 100_000, "--batch-norm")
    run.until_training()
    for process in run.trainers():
        process.kill()
    assert run.wait() == 1, run.text()
    run.assert_nothing_left()
    assert "Warning: no learner has said what its running statistics are" in run.output.read_text(), run.text()
    assert "Warning: the architecture (Normalized) is not a model class of tr" in run.output.read_text(), run.text()


@pytest.mark.long
def test_ctrl_c_before_anything_runs(launch):
    run = launch("--steps", 100_000)
    wait_until(lambda: "Run directory" in run.output.read_text(), "the start")
    run.process.send_signal(signal.SIGINT)
    assert run.wait(60) == 1, run.text()
    run.assert_nothing_left()


@pytest.mark.long
def test_when_launch_is_killed_nothing_stays(launch):
    run = launch("--steps", 100_000)
    run.until_training()
    run.process.kill()
    run.wait()
    wait_until(lambda: not run.all_processes(), "the end of all processes", 60)
    assert (run.directory.model / "model.safetensors").exists(), run.text()


@pytest.mark.long
@pytest.mark.parametrize("twice", [False, True])
def test_a_script_that_ignores_signals_is_killed(launch, twice):
    """After the grace time, or when the user has lost patience."""
    run = launch("--deaf", options=("--grace-seconds", 600 if twice else 5))
    wait_until(lambda: len(run.trainers()) == 2, "the scripts")
    wait_until(lambda: "deaf" in (run.directory.logs / "learner-0.log").read_text(), "a deaf script")
    run.process.send_signal(signal.SIGTERM)
    if twice:
        wait_until(lambda: "Stopping the learners" in run.output.read_text(), "the first to be taken notice of")
        with pytest.raises(AssertionError, match="did not end"):
            run.wait(2)  # longer than the time for which a second one is taken for the same
        run.process.send_signal(signal.SIGTERM)
    assert run.wait(90) == 1, run.text()
    run.assert_nothing_left()


def test_a_learner_that_is_killed_is_named_and_the_other_goes_on(launch):
    run = launch("--steps", 400)
    run.until_training()
    run.trainer(1).kill()
    assert run.wait(180) == 1, run.text()
    run.assert_nothing_left()
    output = run.output.read_text()
    assert "Learner 1 died" in output
    assert "The run has finished" in output, run.text()
    assert "learner 1 did not end well" in output
    assert "Learner 0 has ended (exit code 0)" in output


def test_scripts_that_do_not_use_hf_diloco_are_told_so(launch):
    run = launch("--without-us")
    assert run.wait() == 1, run.text()
    run.assert_nothing_left()
    output = run.output.read_text()
    assert "waiting for learners (0 of 2 here)" in output
    assert "No learner ever joined the run" in output
    assert "with DiLoCo(...) as diloco:" in output.replace("\n", " ")


@pytest.mark.long
def test_who_is_refused_is_named_and_why_the_others_wait(launch):
    run = launch("--steps", 20, "--other-model-at", 1)
    wait_until(lambda: "Ctrl-C ends it" in run.output.read_text(), "what is said of it")
    output = run.output.read_text()
    assert "Learner 1 is refused: " in output or "Learner 0 is refused: " in output  # whoever came second
    assert "The run has not begun: it is waiting for learners (" in output
    run.process.send_signal(signal.SIGINT)
    assert run.wait(60) == 1, run.text()
    run.assert_nothing_left()


@pytest.mark.long
def test_scripts_that_all_fail_end_the_run(launch):
    run = launch("--fail")
    assert run.wait() == 1, run.text()
    run.assert_nothing_left()
    output = run.output.read_text()
    assert "Learner 0 died (exit code 1)" in output
    assert "a mistake in the script" in output  # its last lines
    first, said, rest = output.partition("No learner of this launch is left")  # of both, if they died at once
    assert said
    assert first.count("The others go on") <= 1
    assert "The others go on" not in rest
    assert "model: none" in output


@pytest.mark.long
@pytest.mark.timeout(600)
def test_what_dies_is_started_again(launch):
    """A learner, and then the syncer, while the learners train on."""
    run = launch("--steps", 2400, "--slow", options=("--restart",))
    run.until_training()
    run.trainer(1).kill()

    wait_until(lambda: len(set(run.joins(1))) == 2, "the learner to come back")
    address = run.directory.read_status()["address"]
    psutil.Process(run.directory.read_status()["pid"]).kill()
    wait_until(lambda: len(run.joins(0)) == 2, "the learners to find the syncer again")
    assert run.wait(280) == 0, run.text()
    run.assert_nothing_left()
    output = run.output.read_text()
    assert "Learner 1 died (exit code 1) and is started again in 1 s (restart 1 of at most 10 in a row)" in output
    assert "Learner 1 is started again." in output
    assert "tokens merged, restarts 1" in output
    assert "The syncer died (killed by SIGKILL) and is started again in 1 s" in output
    assert "syncer restarts 1" in output
    assert run.directory.read_status()["address"] == address
    assert len(set(run.joins(0))) == 1, "the learners were kept alive"
    assert "The run has finished" in output


@pytest.mark.long
def test_who_is_not_back_in_time_is_called_off(launch):
    """The second life of the learner has not begun to train when the run is over."""
    run = launch("--steps", 300, "--one-life", options=("--restart",))
    run.until_training()
    run.trainer(1).kill()
    assert run.wait(120) == 0, run.text()
    run.assert_nothing_left()
    assert "Learner 1 was not back before the run had ended." in run.output.read_text(), run.text()


@pytest.mark.long
def test_what_dies_again_and_again_is_given_up(launch):
    run = launch("--fail", options=("--max-restarts", 1))
    assert run.wait() == 1, run.text()
    run.assert_nothing_left()
    output = run.output.read_text()
    for learner_id in (0, 1):
        assert f"Learner {learner_id} died (exit code 1) and is given up; restarts in a row: 1." in output
        assert (run.directory.logs / f"learner-{learner_id}.log").read_text().count("a mistake in the script") == 2
    assert "a mistake in the script" in output


@pytest.mark.long
def test_the_syncer_is_started_again_in_any_case(launch):
    run = launch("--steps", 100_000)
    run.until_training()
    psutil.Process(run.directory.read_status()["pid"]).kill()
    wait_until(lambda: len(run.joins(0)) == 2, "the learners to find the syncer again")
    assert len(set(run.joins(0))) == 1, "the learners were kept alive"
    run.process.terminate()
    assert run.wait(90) == 1, run.text()
    run.assert_nothing_left()
    assert "The syncer died (killed by SIGKILL) and is started again" in run.output.read_text()


@pytest.mark.long
def test_a_run_that_was_stopped_is_resumed(launch):
    run = launch("--steps", 400, "--slow")
    run.until_training()
    run.process.terminate()
    assert run.wait(90) == 1, run.text()
    step = latest_run(run.directory).facts.outer_step
    assert step > 0
    run = launch("--steps", 400, "--slow", options=("--resume",))
    assert run.wait() == 0, run.text()
    run.assert_nothing_left()
    tape = read_tape(run.directory.tape)
    began_again = [number for number, line in enumerate(tape) if line["kind"] == "start"][1]
    assert min(line["version"][1] for line in tape[began_again:] if line["kind"] == "round") >= step
    assert "The run has finished" in run.output.read_text()
    assert "before its last step" not in run.output.read_text()
    run = launch("--steps", 400, "--slow", options=("--resume",))
    assert run.wait() == 0, run.text()
    assert "has ended; its global model is in" in run.output.read_text()


def test_a_syncer_that_cannot_start_is_shown(launch, tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import sys\nif 'syncer' in sys.argv: sys.exit('no syncer today')\n")
    run = launch("--steps", 10, PYTHONPATH=str(tmp_path))
    assert run.wait() == 1, run.text()
    run.assert_nothing_left()
    assert "no syncer today" in run.output.read_text()
