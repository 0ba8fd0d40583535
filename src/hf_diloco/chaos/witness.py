"""``python -m hf_diloco.chaos.witness LOG SCRIPT ARGS...``: runs a training script and writes down what it trained.

The syncer's tape says what was merged; this log is the learner's own word on what was trained, written before
anything is sent, so that the two can be held against each other (:mod:`accounting <hf_diloco.chaos.accounting>`). One
JSON line for each of these, with ``time`` on the machine's monotonic clock:

start      the training process is there
joining    it looks for the syncer; its incarnation
joined     it holds the global parameters and the run has started
step       one inner step is done: tokens of this step
applied    a fragment took a new version: the update of ours that is part of it, and the steps overwritten, if any
evaluated  metrics of an evaluation, and whether the model held the global parameters
finished   it holds the final values
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import time
from collections.abc import Callable
from typing import Any

from hf_diloco.integrations.transformers import DiLoCoCallback
from hf_diloco.learner.accounts import Accounts
from hf_diloco.learner.learner import Learner
from hf_diloco.learner.local import LocalFragment, Prepared

_START = time.monotonic()


class Witness:
    """Writes the log; watches the learner's methods."""

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self._incarnation = ""
        self._is_over = False

    def write(self, kind: str, **fields: Any) -> None:
        """One line, in one write: SIGKILL leaves it whole or not there."""
        line = {"kind": kind, "time": round(time.monotonic(), 4), "incarnation": self._incarnation, **fields}
        os.write(self._file, (json.dumps(line) + "\n").encode())

    def watch(self) -> None:
        """Put itself between the training loop and the learner."""
        self._watch_joining()
        self._watch_steps()
        self._watch_the_end()

    def _watch_joining(self) -> None:
        join = Learner.join

        def joined(learner: Learner, *arguments: Any, **more: Any) -> bool:
            self._incarnation, self._is_over = learner._incarnation, False
            self.write("joining", pid=os.getpid())
            is_in = join(learner, *arguments, **more)
            if is_in:
                self.write("joined", global_step=learner.global_step)
            return is_in

        _replace(Learner, "join", joined)

    def _watch_steps(self) -> None:
        step, settle = Learner.step, Accounts.settle

        def stepped(learner: Learner, tokens: int, **more: Any) -> bool:
            self.write("step", global_step=learner.global_step + 1, steps=learner._accounts.steps + 1, tokens=tokens)
            return step(learner, tokens, **more)

        def settled(accounts: Accounts, index: int, local: LocalFragment, prepared: Prepared, *more: Any) -> None:
            before, merged = local.accounted_steps, prepared.merged
            settle(accounts, index, local, prepared, *more)
            self.write(
                "applied",
                fragment_index=index,
                version=list(prepared.version),
                merged=merged.update_id if merged else None,
                overwritten_steps=local.accounted_steps - before - (merged.steps if merged else 0),
            )

        _replace(Learner, "step", stepped)
        _replace(Accounts, "settle", settled)

    def _watch_the_end(self) -> None:
        finish = Learner.finish

        def finished(learner: Learner, *arguments: Any, **more: Any) -> bool:
            holds_global = finish(learner, *arguments, **more)
            self._is_over = holds_global
            self.write("finished", holds_global=holds_global)
            return holds_global

        def evaluated(callback: DiLoCoCallback, *_: Any, metrics: dict[str, Any], **__: Any) -> None:
            numbers = {name: value for name, value in metrics.items() if isinstance(value, int | float)}
            self.write("evaluated", is_global=self._is_over, metrics=numbers)

        _replace(Learner, "finish", finished)
        _replace(DiLoCoCallback, "on_evaluate", evaluated)


def _replace(owner: type, name: str, function: Callable[..., Any]) -> None:
    assert hasattr(owner, name)
    setattr(owner, name, function)


def main() -> None:
    """Run the script under a witness."""
    log, script, *arguments = sys.argv[1:]
    witness = Witness(log)
    witness.write("start", pid=os.getpid(), loading_seconds=round(time.monotonic() - _START, 3))
    witness.watch()
    sys.argv = [script, *arguments]
    sys.path[0] = os.path.dirname(os.path.abspath(script))
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
