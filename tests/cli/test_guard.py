"""`hf-diloco guard` with real processes."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

pytestmark = pytest.mark.distributed

GUARD = [sys.executable, "-m", "hf_diloco.cli.main", "guard"]
DRAINS = "import signal, sys; signal.signal(15, lambda *_: sys.exit(CODE)); print('ready', flush=True); signal.pause()"


@pytest.mark.parametrize(
    ("options", "own_code", "stopped", "code"),
    [
        (["--stopped-exit-code", "75"], 0, True, 75),
        (["--stopped-exit-code", "75"], 3, True, 3),
        (["--stopped-exit-code", "75"], 0, False, 0),
        ([], 0, True, 0),
    ],
)
def test_who_was_told_to_stop_can_be_told_from_who_has_finished(options, own_code, stopped, code):
    script = DRAINS.replace("CODE", str(own_code)) if stopped else f"print('ready'); raise SystemExit({own_code})"
    with subprocess.Popen(
        [*GUARD, *options, sys.executable, "-c", script], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        if stopped:
            process.send_signal(signal.SIGTERM)
        assert process.wait(60) == code


def test_nohup_is_respected(tmp_path):
    waits = (
        "import sys, time, pathlib\nprint('ready', flush=True)\n"
        "while not pathlib.Path(sys.argv[1]).exists():\n    time.sleep(0.05)"
    )
    with subprocess.Popen(
        ["nohup", *GUARD, "--stopped-exit-code", "75", sys.executable, "-c", waits, str(tmp_path / "end")],
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGHUP)
        (tmp_path / "end").touch()
        assert process.wait(60) == 0, "it was not told to stop"
