"""Who may join, and what the people who watch want to know of each learner."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import hf_diloco
from hf_diloco.config import DefaultNumber, SyncerConfig, config_from_dict, config_to_dict
from hf_diloco.core.fragments import FragmentLayout, first_difference, most_fragments
from hf_diloco.core.message_json import from_wire, to_wire
from hf_diloco.core.messages import Hello, Progress, Welcome
from hf_diloco.errors import ConfigError

_RATE_SECONDS = 2.0


@dataclass(frozen=True)
class Terms:
    """What the first learner's Hello and the settings fixed; every other learner must agree."""

    config: SyncerConfig  # num_fragments, total_steps and num_shards resolved
    layout: FragmentLayout
    hello: Hello  # of the learner that was first
    learner_id: int
    lowered_from: int | None = None  # num_fragments before it was lowered to what the model allows

    @classmethod
    def from_first(cls, config: SyncerConfig, learner_id: int, hello: Hello) -> Terms:
        """Fix the terms from the first learner.

        Raises:
            ConfigError: nobody says how many steps the run has.
        """
        total_steps = config.total_steps or hello.total_steps
        if total_steps is None:
            raise ConfigError(
                "neither the syncer nor the learner says how long the run is. Say it in one of these ways: "
                "DiLoCo(..., total_steps=...) in an Accelerate loop; max_steps in the TrainingArguments; "
                "--total-steps for `hf-diloco launch` or `hf-diloco syncer`."
            )
        shapes = dict(hello.shapes)
        num_fragments = config.num_fragments
        if isinstance(num_fragments, DefaultNumber):
            num_fragments = min(int(num_fragments), most_fragments(shapes))
        layout = FragmentLayout.build(shapes, num_fragments, hello.averaged)
        resolved = dataclasses.replace(
            config,
            num_fragments=num_fragments,
            total_steps=total_steps,
            num_shards=config.num_shards or hello.num_shards,
        )
        lowered_from = config.num_fragments if num_fragments < config.num_fragments else None
        return cls(resolved, layout, hello, learner_id, lowered_from)

    def to_dict(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {"config": config_to_dict(self.config), "hello": to_wire(self.hello), "learner_id": self.learner_id}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Terms:
        """The terms that :meth:`to_dict` described.

        Raises:
            ConfigError, MessageError: they were not written by this release.
        """
        config, hello = config_from_dict(values["config"]), from_wire(values["hello"])
        assert isinstance(hello, Hello)
        layout = FragmentLayout.build(dict(hello.shapes), config.num_fragments, hello.averaged)
        return cls(config, layout, hello, int(values["learner_id"]))

    def welcome(self, incarnation: int, outer_step: int) -> Welcome:
        """What a learner is told that is let in, by this incarnation of the syncer at this outer step."""
        config = self.config
        assert config.total_steps is not None
        return Welcome(
            incarnation=incarnation,
            num_fragments=config.num_fragments,
            sync_every=config.sync_every,
            outer_step=outer_step,
            total_steps=config.total_steps,
            on_arrival=config.on_arrival,
            local_mix=config.local_mix,
            wire_format=config.wire_format,
            averaged=self.hello.averaged,
            expected_learners=config.expected_learners,
            start_timeout_seconds=config.start_timeout_seconds,
        )

    def objection(self, hello: Hello) -> str | None:
        """Why a learner that says this may not join, with the remedy; None if it may."""
        ours = self.hello
        who = f"learner {self.learner_id} (first in this run)"
        if hello.library_version != hf_diloco.__version__:
            return (
                f"this learner runs hf-diloco {hello.library_version}, the syncer {hf_diloco.__version__}. Install the "
                "same version on both."
            )
        difference = first_difference(dict(ours.shapes), dict(hello.shapes), ours.averaged, hello.averaged)
        if difference:
            return f"its model has another layout than that of {who}: {difference}. Load the same model everywhere."
        if hello.constants_digest != ours.constants_digest:
            return (
                f"this learner's frozen parameters or persistent buffers differ from those of {who} (digest "
                f"{hello.constants_digest[:12]} instead of {ours.constants_digest[:12]}). Load the same base model "
                "and revision."
            )
        if not hello.steps_from_epochs and hello.total_steps not in (None, self.config.total_steps):
            return (
                f"this learner wants to train {hello.total_steps} steps, the run has {self.config.total_steps}. Set "
                f"max_steps={self.config.total_steps} in its training arguments (--max_steps), or begin a new run: "
                f"start the syncer with --total-steps {hello.total_steps} and another --run-dir."
            )
        if None not in (hello.num_shards, self.config.num_shards) and hello.num_shards != self.config.num_shards:
            return (
                f"this learner splits its training set into {hello.num_shards} shards, the run into "
                f"{self.config.num_shards}. Set HF_DILOCO_NUM_SHARDS={self.config.num_shards} on its machine."
            )
        return None


def fragments_misfit(config: SyncerConfig, hello: Hello) -> str | None:
    """Why no learner with this model may join, with the remedy: ``num_fragments`` was given, and is too large."""
    most = most_fragments(dict(hello.shapes))
    if isinstance(config.num_fragments, DefaultNumber) or config.num_fragments <= most:
        return None
    return (
        f"num_fragments={config.num_fragments}, but this model can be split into {most} pieces at most. Start the "
        f"syncer with --num-fragments {most} or less."
    )


@dataclass
class Account:
    """What one learner id has trained and what became of it, over all its processes."""

    learner_id: int
    host: str = ""
    steps: int = 0
    global_step: int = 0
    loss: float | None = None
    tokens_per_second: float | None = None
    tokens_merged: float = 0.0  # mean over the fragments
    tokens_overwritten: int = 0
    num_late: int = 0
    num_refused: int = 0
    incarnation: str = ""
    tokens_before: int = 0  # of earlier processes
    tokens: int = 0  # of the last one
    _measured_at: float | None = field(default=None, init=False, repr=False)
    _measured_tokens: int = field(default=0, init=False, repr=False)

    def save(self) -> dict[str, Any]:
        """For a checkpoint: ``Account(**values)`` gives it back."""
        return {item.name: getattr(self, item.name) for item in dataclasses.fields(self) if item.init}

    def begin(self, hello: Hello) -> None:
        """A link of this learner is up."""
        self.host = hello.host
        if hello.incarnation != self.incarnation:  # a new process
            self.incarnation = hello.incarnation
            self.tokens_before += self.tokens
            self.tokens, self._measured_at, self.tokens_per_second = 0, None, None

    def report(self, progress: Progress) -> None:
        """Take in a progress report."""
        self.tokens = progress.tokens
        self._measure(time.monotonic())
        self.steps, self.global_step = progress.steps, progress.global_step
        self.tokens_overwritten = progress.tokens_overwritten
        self.loss = self.loss if progress.loss is None else progress.loss

    def _measure(self, now: float) -> None:
        """Tokens a second, over at least two seconds: reports come in bursts."""
        if self._measured_at is None:
            self._measured_at, self._measured_tokens = now, self.tokens
        elif now - self._measured_at >= _RATE_SECONDS:
            self.tokens_per_second = (self.tokens - self._measured_tokens) / (now - self._measured_at)
            self._measured_at, self._measured_tokens = now, self.tokens

    @property
    def tokens_trained(self) -> int:
        """Tokens trained by all processes under this id."""
        return self.tokens_before + self.tokens

    def to_dict(self, state: str) -> dict[str, Any]:
        """For ``status.json``."""
        return {
            "learner_id": self.learner_id, "state": state, "host": self.host, "global_step": self.global_step,
            "steps": self.steps, "loss": self.loss, "tokens_per_second": self.tokens_per_second,
            "tokens_trained": self.tokens_trained, "tokens_merged": round(self.tokens_merged),
            "tokens_overwritten": self.tokens_overwritten, "updates_late": self.num_late,
            "updates_refused": self.num_refused,
        }  # fmt: skip
