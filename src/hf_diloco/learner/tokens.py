"""Count the tokens that a model is trained on, and note the examples, from its own forward calls."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from hf_diloco.learner.examples import ExamplesRead

_IGNORED_LABEL = -100


class TokenCounter:
    """Counts what goes through a model's forwards with gradients enabled, whether in training or evaluation mode.

    Tokens of a call: the sum of a two-dimensional ``attention_mask``; else the size of ``input_ids``; else that of
    ``inputs_embeds`` without its last dimension; else the number of samples (vision). Encoder-decoder models: plus the
    labels that are not ignored (or ``decoder_input_ids``).

    Args:
        model: The module whose ``forward`` is called with a batch; :meth:`attach` puts a hook on it.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._is_encoder_decoder = bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))
        self._main_input = getattr(model, "main_input_name", None) or "input_ids"
        self._handle: RemovableHandle | None = None
        self._known = 0  # tokens whose number follows from shapes
        self._on_device: dict[torch.device, Tensor] = {}  # int64 sums that have not been read
        self._pending: deque[_Reading] = deque()
        self._examples = ExamplesRead()

    def attach(self) -> None:
        """Start to count. Idempotent."""
        if self._handle is None:
            # Dynamo must not trace the hook: it would compile the counter into the graph, or break the graph at it.
            hook = torch.compiler.disable(self._before_forward)  # type: ignore[no-untyped-call]
            self._handle = self._model.register_forward_pre_hook(hook, with_kwargs=True)

    def detach(self) -> None:
        """Stop to count and take the hook away. Idempotent."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def take(self, *, wait: bool = False) -> int:
        """Tokens since the last call; call it once a step boundary.

        Sums that are on an accelerator travel home asynchronously and are returned by the next call, so that the host
        never waits for the step just queued. Every token is returned once.

        Args:
            wait: Wait for everything counted so far, as before the end of training.
        """
        tokens, self._known = self._known, 0
        for device, total in self._on_device.items():
            if device.type == "cpu":
                tokens += int(total)
                total.zero_()
            else:
                self._pending.append(_Reading.start(total))
        num_new = sum(device.type != "cpu" for device in self._on_device)
        while self._pending and (wait or len(self._pending) > num_new or self._pending[0].is_here()):
            tokens += self._pending.popleft().tokens()
        return tokens

    def data_digest(self) -> tuple[int, ...] | None:
        """A few hashes of the examples read (see :mod:`hf_diloco.core.data_digest`), if there are new ones to tell."""
        return self._examples.news()

    def forget_examples(self) -> None:
        """The learner reads another part of the data from now on: :meth:`data_digest` begins anew."""
        self._examples = ExamplesRead()

    def _before_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not torch.is_grad_enabled():  # evaluation; the mode does not tell: a base model may be tuned in eval mode
            return
        inputs = kwargs
        if args and isinstance(args[0], Tensor) and self._main_input not in kwargs:
            inputs = {self._main_input: args[0], **kwargs}
        self._count(inputs)
        examples = self._main(inputs)
        if examples is not None:
            self._examples.add(examples, inputs.get("attention_mask"))

    def _count(self, inputs: Mapping[str, Any]) -> None:
        mask, ids, embeddings = (inputs.get(name) for name in ("attention_mask", "input_ids", "inputs_embeds"))
        if isinstance(mask, Tensor) and mask.dim() == 2:
            self._add(mask.sum(dtype=torch.int64))
        elif isinstance(ids, Tensor):
            self._known += ids.numel()
        elif isinstance(embeddings, Tensor):
            self._known += embeddings[..., 0].numel()
        else:
            main = self._main(inputs)
            self._known += 0 if main is None else len(main)
        if self._is_encoder_decoder:
            labels, decoder_ids = inputs.get("labels"), inputs.get("decoder_input_ids")
            if isinstance(labels, Tensor):
                self._add(labels.ne(_IGNORED_LABEL).sum())
            elif isinstance(decoder_ids, Tensor):
                self._known += decoder_ids.numel()

    def _add(self, tokens: Tensor) -> None:
        total = self._on_device.get(tokens.device)
        if total is None:
            self._on_device[tokens.device] = tokens.detach().clone()
        else:
            total.add_(tokens)

    def _main(self, inputs: Mapping[str, Any]) -> Tensor | None:
        """The tensor with a row for each sample."""
        values = (inputs.get(self._main_input), *inputs.values())
        return next((value for value in values if isinstance(value, Tensor) and value.dim()), None)


class _Reading(NamedTuple):
    """A sum on its way from an accelerator."""

    value: Tensor
    copied: torch.cuda.Event | None  # None: the copy was not asynchronous

    @classmethod
    def start(cls, total: Tensor) -> _Reading:
        """Copy ``total`` and reset it, both in the order of its stream."""
        if total.is_cuda:
            value = torch.empty((), dtype=torch.int64, pin_memory=True)
            value.copy_(total, non_blocking=True)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(total.device))
        else:
            value, event = total.to("cpu", copy=True), None
        total.zero_()
        return cls(value, event)

    def is_here(self) -> bool:
        return self.copied is None or bool(self.copied.query())  # type: ignore[no-untyped-call]

    def tokens(self) -> int:
        if self.copied is not None:
            self.copied.synchronize()
        return int(self.value)
