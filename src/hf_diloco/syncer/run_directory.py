"""Where one run keeps what it leaves behind: tape, checkpoints, token and certificate, model."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import shutil
import socket
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from hf_diloco.config import config_from_dict, config_to_dict, read_secret_file
from hf_diloco.errors import ConfigError, DiLoCoError
from hf_diloco.links.token import make_certificate, read_token, write_token
from hf_diloco.syncer.tape import iterate_tape


class RunDirectory:
    """The files of one run.

    ``with RunDirectory(path)`` (or :meth:`claim`) takes the directory, so that no two syncers ever share it; merely
    making the object does not.

    Args:
        path: of the directory.
        create: make it, and what belongs in it, if it is not there.

    Raises:
        ConfigError: it is not there, and ``create`` is False.
        DiLoCoError: it cannot be written.
    """

    def __init__(self, path: str | Path, *, create: bool = True) -> None:
        self.path = Path(path).absolute()
        self.tape = self.path / "tape.jsonl"
        self.checkpoints = self.path / "checkpoints"
        self.joint = self.path / "joint"  # checkpoints of the whole run
        self.token = self.path / "token"
        self.certificate = self.path / "certificate.pem"  # with its private key
        self.model = self.path / "model"
        self.config = self.path / "config.json"
        self.status = self.path / "status.json"
        self.address = self.path / "address"  # where learners look for the run's syncer
        self.logs = self.path / "logs"
        self._lock = self.path / "lock"
        self._lock_descriptor: int | None = None
        self._made: list[Path] = []  # that were not there before this object was
        if create:
            self._create()
        elif not self.path.is_dir():
            raise ConfigError(f"there is no run directory {self.path}; give the --run-dir of a run.")

    def _create(self) -> None:
        own = (
            self.checkpoints,
            self.logs,
            self._lock,
            self.token,
            self.certificate,
            self.tape,
            self.status,
            self.address,
        )
        self._made = [path for path in (*own, self.path, *self.path.parents) if not path.exists()]
        try:
            for directory in (self.checkpoints, self.logs):
                directory.mkdir(parents=True, exist_ok=True)
            probe = self.path / f".probe-{os.getpid()}"  # a full or read-only file system shows only when written to
            probe.write_bytes(b"x")
            probe.unlink()
        except (FileExistsError, NotADirectoryError) as error:
            raise ConfigError(f"--run-dir {self.path} is no directory: {error}. Choose another.") from error
        except OSError as error:
            self.withdraw()
            raise DiLoCoError(
                f"the run directory {self.path} cannot be written: {error}. Choose another --run-dir, or make room."
            ) from error

    # ------------------------------------------------------------------------------------------------ one run, alone

    def claim(self) -> None:
        """Take the directory, until :meth:`release` or the end of this process.

        Raises:
            ConfigError: another syncer holds it.
        """
        descriptor = os.open(self._lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            holder = os.pread(descriptor, 200, 0).decode(errors="replace").strip() or "another process"
            os.close(descriptor)
            raise ConfigError(
                f"the run directory {self.path} is in use by {holder}. Stop that run, or choose another --run-dir."
            ) from None
        try:
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"the syncer with pid {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        except BaseException:
            os.close(descriptor)
            raise
        self._lock_descriptor = descriptor

    def release(self) -> None:
        """Give the directory back. Idempotent."""
        if self._lock_descriptor is not None:
            fcntl.flock(self._lock_descriptor, fcntl.LOCK_UN)  # also for children that inherited the descriptor
            os.close(self._lock_descriptor)
            self._lock_descriptor = None

    def __enter__(self) -> RunDirectory:
        self.claim()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and self._lock_descriptor is not None:
            self.withdraw()
        self.release()

    def withdraw(self) -> None:
        """After a start that failed: delete what this object has made, key and token too, if no run has begun."""
        if self.has_run:
            return
        for path in self._made:  # innermost first
            with contextlib.suppress(OSError):
                if path in (self.checkpoints, self.logs):
                    shutil.rmtree(path)
                elif path.is_dir():
                    path.rmdir()  # unless somebody else has put something there
                else:
                    path.unlink()

    @property
    def has_run(self) -> bool:
        """A run has begun here, which a syncer can go on with."""
        return self.tape.exists() and self.tape.stat().st_size > 0

    def settings_of_run(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """The settings that the run here began with, by name; None: not given.

        Those in ``given`` must be the same, once a learner has supplied the values of the run; before that they win.

        Raises:
            ConfigError: one differs, or they were written by another release.
        """
        try:
            kept = json.loads(self.config.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"{self.config} cannot be read: {error}; choose another --run-dir.") from error
        settings = config_to_dict(config_from_dict(kept))
        told = self._told_by_first_learner()
        if told is None:
            return {**settings, **given}
        for name, value in told.items():
            if settings[name] is None:
                settings[name] = value
        if "linger_seconds" in given:  # nothing to the learners, and wanted of a run that has ended already
            settings["linger_seconds"] = given["linger_seconds"]
        for name, value in given.items():
            if value != settings[name]:
                kept_value = (
                    f"without {name}, not with" if settings[name] is None else f"with {name}={settings[name]!r}, not"
                )
                raise ConfigError(
                    f"the run in {self.path} began {kept_value} {value!r}. Leave "
                    f"--{name.replace('_', '-')} away to go on with it, or choose another --run-dir for a new run."
                )
        return settings

    def _told_by_first_learner(self) -> dict[str, Any] | None:
        """What the settings left to the first learner; None until one has supplied the values of the run."""
        told: dict[str, Any] = {}
        for line in iterate_tape(self.tape):
            if line.get("kind") == "layout":
                told = {name: line[name] for name in ("num_fragments", "total_steps", "num_shards") if name in line}
            elif line.get("kind") == "values":
                return told
        return None

    # ------------------------------------------------------------------------------------------------- what is in it

    def read_or_make_token(self, *, tls: bool = True) -> str:
        """The run's token: a secret and, with ``tls``, the fingerprint of the certificate in :attr:`certificate`.

        Secret (32 random bytes as hex digits), key and certificate are made once, readable by this user only, so that
        learners know the syncer again when it comes back. Other choice of ``tls``: the token file follows.

        Raises:
            ConfigError: a file cannot be read, or others can read it too.
            DiLoCoError: a file cannot be written, or does not hold what it should.
        """
        certificate = None
        if tls:
            if not self.certificate.exists():
                self._write_secret(self.certificate, make_certificate())
            certificate = read_secret_file(self.certificate)
        present = read_secret_file(self.token) if self.token.exists() else secrets.token_hex(32)
        try:
            token = write_token(read_token(present).secret, certificate)
        except ValueError as error:
            broken = self.token if isinstance(error, ConfigError) else self.certificate
            raise DiLoCoError(f"{broken} is empty or broken. Delete it, and a new one is made: {error}") from error
        if token != present or not self.token.exists():
            self._write_secret(self.token, token)
        return token

    def _write_secret(self, path: Path, text: str) -> None:
        aside = path.with_name(f".{path.name}-{os.getpid()}")
        try:
            descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            os.fchmod(descriptor, 0o600)  # should it have been there
            with os.fdopen(descriptor, "w", encoding="ascii") as file:
                file.write(text.rstrip() + "\n")
                file.flush()
                os.fsync(file.fileno())
            aside.rename(path)
        except OSError as error:
            raise DiLoCoError(f"{path} cannot be written: {error}") from error

    def write_address(self, address: str) -> None:
        """Keep the address for the next syncer of this run, in one move: a killed process leaves the old one."""
        aside = self.path / ".address"
        aside.write_text(f"{address}\n", encoding="utf-8")
        aside.replace(self.address)

    def read_address(self) -> str | None:
        """Where the last syncer that could start listened; None if none did."""
        try:
            return self.address.read_text(encoding="utf-8").strip() or None
        except (OSError, ValueError):
            return None

    def read_status(self) -> dict[str, Any]:
        """What the syncer last wrote to ``status.json``; empty when it has written nothing (or nothing whole)."""
        try:
            status = json.loads(self.status.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return status if isinstance(status, dict) else {}
