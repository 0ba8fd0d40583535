"""What RPC calls look like on the wire: JSON and a table of tensors, calls by name from an allow-list. No pickle.

``torch.distributed.rpc`` unpickles and runs whatever a peer names. :func:`install` replaces its codec before the
agent starts (C++ keeps the functions it finds then). What C++ still runs for a peer that gets this far (ATen
operators) is closed by the door, which lets only holders of the token through.
"""

# torch does not annotate these:
# mypy: disable-error-code="attr-defined, no-untyped-call, no-any-return, assignment"

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed.rpc as rpc
from torch.distributed.rpc import api, internal

from hf_diloco.errors import MessageError, UnsupportedError

MAX_CALL_BYTES = 40 << 20  # above channel.MAX_FRAME_BYTES
MAX_POLL_ITEMS = 64  # in one answer to `poll`: a gateway gives no more, a courier takes no more
_MAX_DEPTH = 32

if TYPE_CHECKING:
    Future = torch.futures.Future[Any]
else:
    Future = torch.futures.Future

_endpoints: dict[str, Callable[..., Any]] = {}  # what a peer may call in this process


def offer(name: str, function: Callable[..., Any], *, is_async: bool = False) -> None:
    """Let the peer call ``function``. With ``is_async`` it returns a Future that may be completed later."""
    _endpoints[name] = rpc.functions.async_execution(function) if is_async else function


def call(to: str, name: str, *args: Any, timeout_seconds: float, is_async: bool = False) -> Future:
    """Call an endpoint of the peer. ``is_async`` must be as it was offered; timeout 0 is none."""
    return rpc.rpc_async(to, _ASYNC_STUBS[name] if is_async else _Stub(name), args=args, timeout=timeout_seconds)


class _Stub:
    """Stands for an endpoint of the peer; only its name travels."""

    def __init__(self, name: str) -> None:
        self.__name__ = self.__qualname__ = name
        self.endpoint = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError("an endpoint of the peer is called through RPC")


class _AsyncStubs(dict[str, _Stub]):
    def __missing__(self, name: str) -> _Stub:
        stub = self[name] = _Stub(name)
        stub._wrapped_async_rpc_function = stub  # how RPC knows an async endpoint
        return stub


_ASYNC_STUBS = _AsyncStubs()


class _Codec:
    def serialize(self, value: Any) -> tuple[bytes, list[torch.Tensor]]:
        tensors: list[torch.Tensor] = []
        if isinstance(value, internal.PythonUDF):
            document = {"call": value.func.endpoint, "args": [_encode(argument, tensors) for argument in value.args]}
        elif isinstance(value, internal.RemoteException):
            document = {"error": str(value.msg)[:500]}
        else:
            document = {"value": _encode(value, tensors)}
        return json.dumps(document).encode(), tensors

    def deserialize(self, data: bytes, tensors: list[torch.Tensor]) -> Any:
        try:
            if len(data) > MAX_CALL_BYTES:
                raise MessageError(f"{len(data)} bytes in one call")
            document = json.loads(bytes(data))
            if "call" in document:
                function = _endpoints.get(document["call"])
                if function is None:
                    raise MessageError("no such endpoint")
                return internal.PythonUDF(function, tuple(_decode(document["args"], tensors)), {})
            if "error" in document:
                return internal.RemoteException(str(document["error"]), RemoteError)
            return _decode(document["value"], tensors)
        except Exception as error:
            # RPC's own way to say that something could not be read; anything raised here would end the process
            return AttributeError(f"refused: {type(error).__name__}: {str(error)[:100]}")


class RemoteError(Exception):
    """The peer's endpoint raised."""


def _encode(value: Any, tensors: list[torch.Tensor], depth: int = 0) -> Any:
    if depth > _MAX_DEPTH:
        raise MessageError("nested too deeply")
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return {"$tensor": len(tensors) - 1}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [_encode(item, tensors, depth + 1) for item in value]
    if isinstance(value, dict):
        return {str(key): _encode(item, tensors, depth + 1) for key, item in value.items()}
    raise MessageError(f"cannot send a {type(value).__name__}")


def _decode(value: Any, tensors: list[torch.Tensor], depth: int = 0) -> Any:
    if depth > _MAX_DEPTH:
        raise MessageError("nested too deeply")
    if isinstance(value, dict):
        if "$tensor" in value:
            return tensors[value["$tensor"]]
        return {key: _decode(item, tensors, depth + 1) for key, item in value.items()}
    if isinstance(value, list):
        return [_decode(item, tensors, depth + 1) for item in value]
    return value


def _run_function(call: Any) -> Any:
    try:
        if type(call) is not internal.PythonUDF or call.func not in _endpoints.values():
            raise MessageError(str(call)[:200] if isinstance(call, Exception) else "not a call")
        return call.func(*call.args)
    except Exception as error:
        return internal.RemoteException(f"{type(error).__name__}: {str(error)[:200]}", RemoteError)


def _handle_exception(result: Any) -> None:
    if isinstance(result, internal.RemoteException):
        raise RemoteError(result.msg)
    if isinstance(result, AttributeError):
        raise RemoteError(str(result))


TESTED_TORCH = "2.13"
_REPLACED = ("serialize", "deserialize", "_run_function", "_handle_exception", "_internal_rpc_pickler")


def install() -> None:
    """Replace RPC's codec. Before the agent starts.

    Raises:
        UnsupportedError: this torch release keeps its codec elsewhere.
    """
    missing = [name for name in _REPLACED if not hasattr(internal, name)]
    missing += [name for name in ("_default_pickler", "_internal_rpc_pickler") if not hasattr(api, name)]
    if missing:
        raise UnsupportedError(
            f"torch {torch.__version__} has no {missing[0]!r} in torch.distributed.rpc, where hf-diloco replaces its "
            f"pickle codec; install torch {TESTED_TORCH}, with which hf-diloco is tested."
        )
    codec = _Codec()
    internal._internal_rpc_pickler = api._internal_rpc_pickler = api._default_pickler = codec
    internal.serialize, internal.deserialize = codec.serialize, codec.deserialize
    internal._run_function, internal._handle_exception = _run_function, _handle_exception
