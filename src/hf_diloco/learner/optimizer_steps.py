"""When an optimizer steps, whoever tells it to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer


def around_steps(
    optimizer: Any, *, before: Callable[[], None] = lambda: None, after: Callable[[], None]
) -> Callable[[], None]:
    """Call ``before`` and ``after`` around each step, until what is returned is called, in a step or between two.

    They are also called for a step that is then skipped inside, because gradients overflowed. DeepSpeed's ZeRO
    optimizers are none of torch's and have no hooks, and one step of theirs may be several of the optimizer within:
    there the method is wrapped.
    """
    calls: list[Callable[[], None]] = [before, after]

    def call(index: int) -> None:
        if calls:
            calls[index]()

    if isinstance(optimizer, Optimizer):
        optimizer.register_step_pre_hook(lambda *_: call(0))
        optimizer.register_step_post_hook(lambda *_: call(1))
    else:
        step = optimizer.step

        def watched(*args: Any, **kwargs: Any) -> Any:
            call(0)
            result = step(*args, **kwargs)
            call(1)
            return result

        optimizer.step = watched
    # Hooks and wrapper stay: torch may be on its way through its hooks, and another wrapper may be around this one.
    return calls.clear
