"""Checkpoints while the run goes on: written by a thread of their own, so that no merge waits for a disk."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from pathlib import Path

from hf_diloco.errors import DiLoCoError
from hf_diloco.syncer.checkpoint import prune_checkpoints
from hf_diloco.syncer.roster import Terms
from hf_diloco.syncer.run_directory import RunDirectory
from hf_diloco.syncer.saved_run import Facts, save_run
from hf_diloco.syncer.state import GlobalState
from hf_diloco.syncer.supply import Supply
from hf_diloco.syncer.tape import Tape

_RETRY_SECONDS = 10.0
_FINAL_RETRY_SECONDS = 1.0


class Saver:
    """Writes one checkpoint at a time. All methods are for the syncer's one thread.

    Args:
        run_directory: where they go; those of the whole run into a directory of their own.
        terms: of the run: how often, and how many are kept.
        state: what is kept.
        supply: constants and files.
        earlier: the checkpoint that the run goes on from.
    """

    def __init__(
        self, run_directory: RunDirectory, terms: Terms, state: GlobalState, supply: Supply, earlier: Path | None = None
    ) -> None:
        self._directory, self._terms, self._state, self._supply = run_directory, terms, state, supply
        self._earlier = earlier
        self._results: queue.SimpleQueue[Path | Exception] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self.due_at = time.monotonic() + terms.config.checkpoint_every_seconds

    @property
    def is_writing(self) -> bool:
        """A checkpoint is being written, or its result has not been taken."""
        return self._thread is not None

    def begin(self, facts: Facts) -> None:
        """Start to write one; not while another is being written."""
        assert self._thread is None
        self._thread = threading.Thread(target=self._work, args=(facts,), name="hf-diloco checkpoint", daemon=True)
        self._thread.start()

    def result(self, *, wait: bool = False) -> Path | None:
        """The checkpoint that was begun, once it is on disk.

        Raises:
            DiLoCoError: it could not be written; earlier ones are as they were. It is tried again soon.
        """
        if self._thread is None:
            return None
        if wait:
            self._thread.join()
        try:
            result = self._results.get_nowait()
        except queue.Empty:
            return None
        self._thread.join()
        self._thread = None
        if isinstance(result, Exception):
            self.due_at = time.monotonic() + min(_RETRY_SECONDS, self._terms.config.checkpoint_every_seconds)
            raise result
        if result.parent == self._directory.checkpoints:  # a syncer that dies does not go on from the others
            self.due_at = time.monotonic() + self._terms.config.checkpoint_every_seconds
        self._earlier = result
        return result

    def write_now(self, facts: Facts, tape: Tape) -> Path:
        """Write one and wait for it, as at the end of the run. A full disk holds the syncer up until there is room.

        Raises:
            DiLoCoError: it could not be written, and the run is to be stopped.
        """
        with contextlib.suppress(DiLoCoError):  # what is under way is superseded
            self.result(wait=True)
        said = False
        while True:
            try:
                self._earlier = self._write(facts)
                return self._earlier
            except DiLoCoError as error:
                if tape.stopping.is_set():
                    raise
                if not said:
                    tape.warn(f"{error} It is tried again until it is written; learners wait.")
                said = True
                tape.stopping.wait(_FINAL_RETRY_SECONDS)

    def _work(self, facts: Facts) -> None:
        try:
            self._results.put(self._write(facts))
        except DiLoCoError as error:
            self._results.put(error)
        except Exception as error:  # whatever it was, the run goes on, and the next one may succeed
            self._results.put(DiLoCoError(f"the checkpoint could not be written: {error!r}"))

    def _write(self, facts: Facts) -> Path:
        directory = self._directory.joint if facts.learner_checkpoints else self._directory.checkpoints
        path = save_run(directory, self._terms, self._state, self._supply, facts, earlier=self._earlier)
        prune_checkpoints(directory, self._terms.config.keep_checkpoints)
        return path
