"""When an optimizer steps, whoever tells it to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer


def around_steps(
    optimizer: Any, *, before: Callable[[], None] = lambda: None, after: Callable[[], None]
) -> Callable[[], None]:
    """Call ``before`` and ``after`` around each step, until what is returned is called.

    DeepSpeed's ZeRO optimizers are none of torch's and have no hooks, and one step of theirs may be several of the
    optimizer within: there the method is wrapped. It is also called for a step that is then skipped, because gradients
    overflowed.
    """
    if isinstance(optimizer, Optimizer):
        hooks = (
            optimizer.register_step_pre_hook(lambda *_: before()),
            optimizer.register_step_post_hook(lambda *_: after()),
        )

        def remove() -> None:
            for hook in hooks:
                hook.remove()

        return remove
    step, is_watched = optimizer.step, True

    def watched(*args: Any, **kwargs: Any) -> Any:
        if not is_watched:
            return step(*args, **kwargs)
        before()
        result = step(*args, **kwargs)
        after()
        return result

    def end() -> None:
        nonlocal is_watched
        is_watched = False  # the wrapper stays: another may be around it

    optimizer.step = watched
    return end
