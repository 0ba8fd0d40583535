"""A learner that follows a script."""

import torch


class ScriptedLearner:
    """Stands for Learner: jumps the clock and ends the run where the test says."""

    instances: list["ScriptedLearner"] = []  # noqa: RUF012
    starts_at, jumps, ends_at, finishes, join_error = 0, {}, None, True, None
    run_steps = None  # of the run; None: as many as the learner says

    def __init__(self, parameters, plugin, *, total_steps, steps_from_epochs, files, optimizer, link, ranks):
        self.optimizer = optimizer
        self.parameters, self.total_steps, self.files, self.link = parameters, total_steps or 0, files, link
        self.steps_from_epochs = steps_from_epochs
        self.calls, self.tokens, self.losses, self.digests, self.global_step = [], [], [], [], 0
        self.instances.append(self)

    def join(self, *, interrupted):
        self.calls.append("join")
        if self.join_error:
            raise self.join_error
        self.global_step, self.total_steps = self.starts_at, self.run_steps or self.total_steps
        return not interrupted()

    def step(self, tokens, *, loss=None, data_digest=None):
        self.tokens.append(tokens)
        self.losses.append(loss)
        self.digests.append(data_digest)
        self.global_step = max(self.global_step + 1, self.jumps.get(len(self.tokens), 0))
        return self.global_step < (self.ends_at or self.total_steps)

    def _fill(self):
        with torch.no_grad():
            for parameter in self.parameters.trainable.values():
                parameter.fill_(0.25)

    def finish(self, *, interrupted):
        self.calls.append("finish")
        finishes = self.finishes and not interrupted()
        if finishes:
            self._fill()
        return finishes

    def restore(self):
        self.calls.append("restore")
        self._fill()

    def starts_over(self):
        return False

    def take_save_wanted(self):
        return None

    def metrics(self):
        return {}

    def leave(self, reason, *, drain_seconds, for_good):
        self.calls.append(f"leave: {reason}" if for_good else f"away: {reason}")

    def close(self):
        self.calls.append("close")
