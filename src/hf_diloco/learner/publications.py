"""What a publication means for the live value of its fragment."""

from __future__ import annotations

import logging

from torch import Tensor

from hf_diloco.core import messages as ms
from hf_diloco.core.codec import decode, digest
from hf_diloco.learner.local import LocalFragment, Prepared

logger = logging.getLogger(__name__)

_CARRY_LIMIT = 4  # times H: local progress that is not merged for so many steps after it was asked for is given up


def published_value(
    learner_id: int,
    message: ms.Publication,
    payload: Tensor,
    num_parameters: int,
    anchor: Tensor | None,
    version: ms.Version | None,
) -> Tensor | None:
    """The published value; None if it cannot be had from this payload and the anchor of this version."""
    shape = (num_parameters,)
    if message.base is None:
        decoded = decode(payload, message.wire_format, shape)
    elif anchor is None or message.base != version:
        return None
    elif not payload.numel():  # the same value under a new version
        decoded = anchor.clone()
    else:
        decoded = decode(payload, message.wire_format, shape).add_(anchor)
    if digest(decoded) != message.digest:
        logger.error(
            "[learner %d] fragment %d of outer step %d has the wrong digest; asking for the full value",
            learner_id, message.fragment_index, message.version.outer_step,
        )  # fmt: skip
        return None
    return decoded


def prepare(
    learner_id: int,
    message: ms.Publication,
    local: LocalFragment,
    published: Tensor,
    welcome: ms.Welcome,
    steps_done: int,
) -> Prepared:
    """What to do to the live value (DESIGN, on arrival).

    Args:
        learner_id: this learner's number.
        message: the publication.
        local: its fragment.
        published: its value.
        welcome: the run's settings.
        steps_done: inner steps of this learner.
    """
    merged_id = dict(message.merged_updates).get(learner_id)
    shipped = local.shipped
    merged = shipped if shipped is not None and shipped.update_id == merged_id else None
    if shipped is not None and merged is None and message.closed_round and shipped.round <= message.closed_round:
        local.shipped = shipped = None
    # What nobody asked for could not be merged: while the syncer was away, or waited for others when it came back.
    carried_steps = 0 if local.asked_at is None else steps_done - max(local.accounted_steps, local.asked_at)
    give_up = shipped is None and not local.cutting and carried_steps > _CARRY_LIMIT * welcome.sync_every
    correction = None
    if local.anchor is not None and welcome.on_arrival == "carry" and not give_up:
        correction = published - local.anchor
        if merged is not None:
            correction.add_(decode(merged.payload, merged.wire_format, correction.shape))
    return Prepared(message.version, published, correction, merged)
