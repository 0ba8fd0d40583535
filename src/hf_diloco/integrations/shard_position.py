"""Which shard of its data set a Trainer reads, and how far it is in it; kept in Trainer's checkpoints."""

from __future__ import annotations

import math
from typing import Any, cast

from transformers import TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import has_length

from hf_diloco.integrations.membership import Membership
from hf_diloco.learner.lease import ShardLease

_SHARD = "hf-diloco shard"  # in trainer_state.json


class ShardPosition:
    """One training's place in its data; made before the learner joins.

    Trainer resumes as if all passes were equally long from the first step on: it skips what was trained in all, modulo
    the length of a pass. That is right for a map-style data set, unless its shard has been lost to another learner and
    a pass began in between. An iterable one has no length, so all is skipped, and epochs are counted from 0. Where
    Trainer is wrong, only the batches of the pass that is under way are to be skipped, which the data loader is told.

    Args:
        lease: of this learner.
        args: of the Trainer.
        state: of the Trainer, with what a checkpoint holds if it resumes.
    """

    def __init__(self, lease: ShardLease, args: TrainingArguments, state: TrainerState) -> None:
        self._lease, self._args = lease, args
        # What is put here goes into Trainer's checkpoints, and comes from them.
        self._saved = cast(dict[str, Any], state.stateful_callbacks)
        self._skipping_from: int | None = None  # step at which a resumed pass begins, while Trainer is not to skip
        self._ignored_data_skip = args.ignore_data_skip
        self._resumed: dict[str, int] | None = self._saved.get(_SHARD) if state.global_step else None
        self._epoch = 0 if self._resumed is None else self._resumed["epoch"]  # of the pass that is under way
        lease.first_epoch = self._epoch
        if self._resumed is not None:
            lease.move(self._resumed["shard"] % lease.num_shards)  # it is asked for; another learner may have it by now

    def begin(self, member: Membership, state: TrainerState, dataloader: Any) -> int:
        """The learner has joined and has its shard.

        Returns:
            How many more passes were begun than Trainer takes for granted; the order of examples depends on it.
        """
        step, length = state.global_step, state.max_steps  # of a pass, in steps
        if has_length(dataloader):
            length = max(math.ceil(len(dataloader) / self._args.gradient_accumulation_steps), 1)
        pass_from = step - step % length
        if self._resumed is None:
            self._epoch = step // length
        else:
            same_shard = self._lease.shard == self._resumed["shard"]
            pass_from = self._resumed["pass_from"] if same_shard and not self._ignored_data_skip else step
        if step - pass_from >= length:  # the checkpoint was of the pass's last step
            member.end_pass()
            self._epoch, pass_from = self._epoch + 1, step
        if step - pass_from != step % length and not self._ignored_data_skip:
            # Instead of Trainer's own skipping. (Random numbers go on from the seed, not from the checkpoint.)
            self._args.ignore_data_skip = True
            dataloader.skip_batches = (step - pass_from) * self._args.gradient_accumulation_steps
            self._skipping_from = step
        self._note(pass_from)
        return self._epoch - step // length

    def end_pass(self, member: Membership, state: TrainerState, control: TrainerControl, dataloader: Any) -> None:
        """A pass has ended: go on with the shard that the syncer leases."""
        if self._skipping_from is not None:
            dataloader.skip_batches = 0
            if state.global_step == self._skipping_from:
                # The checkpoint was of the pass's last step; that no batch was left, Trainer took for the end of all.
                control.should_training_stop = False
            self.end()
        if not control.should_training_stop:
            member.end_pass()
            self._epoch += 1
            self._note(state.global_step)

    def end(self) -> None:
        """The training has ended, perhaps in the midst of a resumed pass: the arguments are the user's again."""
        if self._skipping_from is not None:
            self._args.ignore_data_skip, self._skipping_from = self._ignored_data_skip, None

    def _note(self, pass_from: int) -> None:
        self._saved[_SHARD] = {"shard": self._lease.shard, "pass_from": pass_from, "epoch": self._epoch}
