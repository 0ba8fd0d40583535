"""Settings. The syncer's are the run's and are told to the learners; a learner has only where and who it is."""

from __future__ import annotations

import dataclasses
import inspect
import math
import os
import shlex
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hf_diloco.core.messages import WIRE_FORMATS
from hf_diloco.errors import ConfigError


class DefaultNumber(int):
    """A default that is told from the same number given by the user: it gives way where it does not fit."""


DEFAULT_NUM_FRAGMENTS = DefaultNumber(24)


def _setting(default: Any, help: str) -> Any:
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True, kw_only=True)
class SyncerConfig:
    """Everything that both sides must agree on. It belongs to the syncer and is told to each learner that joins.

    Raises:
        ConfigError: a value is out of range; the message says which, what it was, and what is allowed.
    """

    num_fragments: int = _setting(
        DEFAULT_NUM_FRAGMENTS,
        "Fragments (P) that the parameters are split into. The default is lowered for a model with fewer pieces; "
        "a number that is given, and above the number of pieces, is an error.",
    )
    sync_every: int = _setting(24, "Outer steps (H) between two merges of one fragment.")
    min_quorum: int = _setting(
        1, "Fewest learners (K) that must have reported before a round may close. 1: the fastest learner sets the pace."
    )
    expected_learners: int = _setting(1, "Nobody trains before this many learners hold the initial parameters ...")
    start_timeout_seconds: float = _setting(300.0, "... or this much time has passed since the first one did.")
    overlap_steps: int = _setting(2, "Inner steps (tau) that a merge may take while training goes on.")
    max_open_rounds: int = _setting(8, "Most rounds open at once, on different fragments.")
    grace_fraction: float = _setting(0.8, "Share (gamma) of the slack time that the grace window may use.")
    max_grace_seconds: float = _setting(
        10.0, "Longest grace window. A learner whose inner step takes longer than this is often merged late."
    )
    merge: str = _setting(
        "rda", "How updates are merged: rda (radial-directional average; plain average for embeddings) or average."
    )
    on_arrival: str = _setting(
        "carry",
        "What a learner does when a merged fragment arrives: carry (replace only the progress that was merged, keep "
        "the rest) or overwrite (the paper's: replace the whole fragment).",
    )
    local_mix: float = _setting(0.0, "With overwrite: share (alpha) of the local value that is kept.")
    outer_lr: float = _setting(0.7, "Learning rate of the outer optimizer (SGD).")
    outer_momentum: float = _setting(0.7, "Nesterov momentum of the outer optimizer; 0 for none.")
    wire_format: str = _setting("bf16", "Format of updates and publications on the wire: fp32, bf16, int8 or int4.")
    total_steps: int | None = _setting(None, "Outer step at which the run ends. Default: what the first learner says.")
    num_shards: int | None = _setting(None, "Shards of the training set. Default: what the first learner says.")
    finish_wait_seconds: float = _setting(
        60.0, "How long the others may go on training after the first learner has finished."
    )
    linger_seconds: float = _setting(
        0.0,
        "How long the syncer stays, once the run has ended and its model is written, for learners that come late: they "
        "get the final values and end with exit code 0. Ctrl-C or SIGTERM ends it at once.",
    )
    link_timeout_seconds: float = _setting(10.0, "A learner that shows no sign of life for this long is absent.")
    checkpoint_every_seconds: float = _setting(60.0, "How often the syncer writes a checkpoint, in the background.")
    keep_checkpoints: int = _setting(3, "How many checkpoints the run directory keeps, and how many of the whole run.")
    save_every: int | None = _setting(
        None,
        "Outer steps between checkpoints of the whole run, for which each learner saves its own too. Default: none.",
    )

    def __post_init__(self) -> None:
        _require_types(self)
        for name in (
            "num_fragments",
            "sync_every",
            "min_quorum",
            "expected_learners",
            "overlap_steps",
            "max_open_rounds",
            "keep_checkpoints",
        ):
            _require(self, name, getattr(self, name) >= 1, "at least 1")
        for name in ("total_steps", "num_shards", "save_every"):
            _require(self, name, getattr(self, name) is None or getattr(self, name) >= 1, "at least 1")
        _require(self, "start_timeout_seconds", 0 <= self.start_timeout_seconds < math.inf, "at least 0, and finite")
        for name in ("max_grace_seconds", "finish_wait_seconds", "linger_seconds"):
            _require(self, name, getattr(self, name) >= 0, "at least 0")
        for name in ("link_timeout_seconds", "checkpoint_every_seconds"):
            _require(self, name, getattr(self, name) > 0, "above 0")
        _require(self, "grace_fraction", 0 <= self.grace_fraction <= 1, "between 0 and 1")
        _require(self, "local_mix", 0 <= self.local_mix < 1, "at least 0 and below 1")
        _require(self, "outer_lr", 0 < self.outer_lr < math.inf, "above 0, and finite")
        _require(self, "outer_momentum", 0 <= self.outer_momentum < 1, "at least 0 and below 1")
        _require(self, "merge", self.merge in ("rda", "average"), "rda or average")
        _require(self, "on_arrival", self.on_arrival in ("carry", "overwrite"), "carry or overwrite")
        _require(self, "wire_format", self.wire_format in WIRE_FORMATS, "one of " + ", ".join(WIRE_FORMATS))
        if self.min_quorum > self.expected_learners:
            raise ConfigError(
                f"min_quorum={self.min_quorum} is above expected_learners={self.expected_learners}: no round could "
                "close. Lower min_quorum, or raise expected_learners to the number of learners you start."
            )
        if self.local_mix and self.on_arrival == "carry":
            raise ConfigError(
                f"local_mix={self.local_mix} has no effect with on_arrival='carry', which keeps all unmerged progress. "
                "Leave it at 0, or set on_arrival='overwrite'."
            )

    @classmethod
    def paper(cls, **settings: Any) -> SyncerConfig:
        """The settings of the Decoupled DiLoCo paper, as far as it publishes them; momentum 0.9 is DiLoCo's."""
        published = {"min_quorum": 1, "on_arrival": "overwrite", "num_fragments": DEFAULT_NUM_FRAGMENTS,
                     "sync_every": 24, "overlap_steps": 2, "outer_lr": 0.7, "outer_momentum": 0.9}  # fmt: skip
        return cls(**{**published, **settings})


def _require_types(config: Any) -> None:
    """Each field is of the type that its annotation says; where a float is wanted an int is as good."""
    kinds: dict[str, tuple[type, ...]] = {"int": (int,), "float": (int, float), "str": (str,), "None": (type(None),)}
    for name, annotation in _annotations(config).items():
        value, allowed = getattr(config, name), annotation.split(" | ")
        if isinstance(value, bool) or not any(isinstance(value, kinds[kind]) for kind in allowed):
            shown = type(value).__name__ if name == "token" else f"{value!r} ({type(value).__name__})"
            raise ConfigError(f"{name} must be {' or '.join(allowed)}, not {shown}.")


def _annotations(config: Any) -> dict[str, str]:
    """As they are written above; HfArgumentParser puts its own into ``Field.type``, without the None."""
    written = {name: kind for base in type(config).__mro__ for name, kind in inspect.get_annotations(base).items()}
    return {item.name: written[item.name] for item in dataclasses.fields(config)}


def _require(config: Any, name: str, holds: bool, allowed: str) -> None:
    if not holds:
        raise ConfigError(f"{name}={getattr(config, name)!r} is out of range; it must be {allowed}.")


@dataclass(frozen=True)
class _NotGiven:
    """Stands for a default until it is known that the environment has nothing else."""

    default: Any

    def __repr__(self) -> str:
        return repr(self.default)


def _fillable(default: Any, help: str, *, repr: bool = True) -> Any:
    return field(default=_NotGiven(default), repr=repr, metadata={"help": help})


@dataclass(kw_only=True)
class DiLoCoPlugin:
    """Where the syncer is and who this learner is.

    A field that is not given is filled from the environment variable ``HF_DILOCO_<FIELD>``; what is given wins, also
    ``syncer=None``. Without a syncer address nothing is synced: the script trains as if hf-diloco were not there, and
    says so once.

    Raises:
        ConfigError: a value cannot be parsed, or a syncer is given without ``learner_id`` or token.
    """

    syncer: str | None = _fillable(None, "Address of the syncer, host:port.")
    learner_id: int | None = _fillable(None, "Number of this learner, unique in the run; keep it when you restart it.")
    token_file: str | None = _fillable(None, "File with the run's token (run directory: token).")
    token: str | None = _fillable(None, "The token itself; a file is safer.", repr=False)
    num_shards: int | None = _fillable(None, "Over how many shards shard_dataset splits the training set.")
    join_timeout_seconds: float = _fillable(60.0, "How long to look for the syncer before giving up at the start.")
    lost_timeout_seconds: float = _fillable(
        600.0, "How long a learner that has finished waits for a syncer that went away."
    )
    drain_seconds: float = _fillable(
        10.0, "How long a learner that leaves early (SIGTERM, early stopping) waits for what it has to be merged."
    )

    def __post_init__(self) -> None:
        for name, annotation in _annotations(self).items():
            value, variable = getattr(self, name), f"HF_DILOCO_{name.upper()}"
            if isinstance(value, _NotGiven):
                text = os.environ.get(variable)
                setattr(self, name, _parse(variable, text, annotation) if text else value.default)
        self.token_file = os.fspath(self.token_file) if isinstance(self.token_file, os.PathLike) else self.token_file
        _require_types(self)
        for name in ("join_timeout_seconds", "lost_timeout_seconds", "drain_seconds"):
            _require(self, name, getattr(self, name) >= 0, "at least 0")
        if not self.syncer:
            return
        host, _, port = self.syncer.rpartition(":")
        is_host = host and not any(letter in "/@" or letter.isspace() for letter in host)
        if not is_host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise ConfigError(f"syncer={self.syncer!r} is not an address; give host:port, e.g. 10.0.0.5:29600.")
        if self.learner_id is None:
            raise ConfigError(
                "a syncer is set but no learner_id. Set HF_DILOCO_LEARNER_ID (or DiLoCoPlugin(learner_id=...)) to a "
                "number that no other learner of this run uses."
            )
        if self.learner_id < 0:
            raise ConfigError(f"learner_id={self.learner_id} is out of range; it must be at least 0.")
        if self.num_shards is not None and self.num_shards < 1:
            raise ConfigError(f"num_shards={self.num_shards} is out of range; it must be at least 1.")

    def read_token(self) -> str:
        """The run's token, from ``token`` or ``token_file``.

        Raises:
            ConfigError: neither is set, or the file cannot be read, or others can read it too.
        """
        if self.token:
            return self.token.strip()
        if not self.token_file:
            raise ConfigError(
                "a syncer is set but no token. Copy the file `token` from the syncer's run directory to this machine "
                "and set HF_DILOCO_TOKEN_FILE to its path."
            )
        token = read_secret_file(self.token_file)
        if not token:
            raise ConfigError(
                f"token_file={self.token_file!r} is empty. Copy it from the syncer's run directory again."
            )
        return token

    @property
    def address(self) -> tuple[str, int]:
        """Host and port of the syncer."""
        assert self.syncer
        host, _, port = self.syncer.rpartition(":")
        return host.strip("[]"), int(port)


def read_secret_file(path: str | os.PathLike[str]) -> str:
    """The text of a file that only its owner may read.

    Raises:
        ConfigError: it cannot be read, or others can read it too.
    """
    try:
        with open(path, encoding="utf-8") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            if mode & 0o077:
                raise ConfigError(
                    f"{path} holds a secret and other users of this machine may read or write it (mode {mode:04o}). "
                    f"Run: chmod 600 {shlex.quote(str(path))}"
                )
            return file.read().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error


def _parse(name: str, value: str, kind: str) -> Any:
    try:
        return int(value) if kind.startswith("int") else float(value) if kind.startswith("float") else value
    except ValueError:
        raise ConfigError(f"{name}={value!r} is not a number.") from None


def config_to_dict(config: SyncerConfig) -> dict[str, Any]:
    """All settings by name, as written to ``config.json`` in the run directory; None: not given."""
    settings = dataclasses.asdict(config)
    return {name: None if isinstance(value, DefaultNumber) else value for name, value in settings.items()}


def config_from_dict(values: Mapping[str, Any]) -> SyncerConfig:
    """The settings that :func:`config_to_dict` wrote.

    Raises:
        ConfigError: a setting is unknown or out of range.
    """
    known = {item.name for item in dataclasses.fields(SyncerConfig)}
    if unknown := values.keys() - known:
        raise ConfigError(f"unknown setting {sorted(unknown)[0]!r}; known are {', '.join(sorted(known))}.")
    return SyncerConfig(**{name: value for name, value in values.items() if value is not None})
