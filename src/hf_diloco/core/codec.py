"""Wire formats: how fp32 differences travel as bytes.

| format | bits a value | one block of 128 values |
|---|---|---|
| fp32 | 32     | no blocks; exact |
| bf16 | 16     | no blocks; rounded to the nearest |
| int8 | 8.125  | step (bf16), then one signed byte a value: value = step · byte |
| int4 | 4.125  | scale (bf16), then 64 bytes of two values each: value = scale · level |

The levels of int4 are E3M0, a sign and three bits of exponent: 0, ±2^-6, ±2^-5, … ±1 (Streaming DiLoCo, arXiv
2501.18512, section 2.3; Decoupled DiLoCo, arXiv 2604.21428, table 10: it costs no quality). Step and scale are bf16
because it has the range of fp32, and because its 8 bits times a 7-bit integer or a power of two are exact in fp32:
decoding does not round, hence gives the same bits everywhere. The last block is filled up with zeros.

Rounding is to the nearest and differs between machines for denormal numbers at most (some processors flush them).
Numbers are in the byte order of the machine, which is little-endian wherever torch runs.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from hf_diloco.core.messages import WIRE_FORMATS
from hf_diloco.errors import ConfigError, MessageError

_BLOCK = 128  # values with a common step or scale
_SLAB = 1024 * _BLOCK  # values that are worked on at a time: the temporaries stay in the processor's cache
_SCALE_BYTES = 2
_ROW_BYTES = {"int8": _SCALE_BYTES + _BLOCK, "int4": _SCALE_BYTES + _BLOCK // 2}
_BF16_MAX = torch.finfo(torch.bfloat16).max
# The largest step of finite values, 2^121 · 129/128: the largest fp32 over 127, in bf16. 127 times it is finite.
_INT8_MAX_STEP = 2.0**121 * 129 / 128


def encoded_size(num_values: int, wire_format: str) -> int:
    """Number of bytes that :func:`encode` makes of ``num_values`` values.

    Raises:
        ConfigError: unknown ``wire_format``.
    """
    if wire_format == "fp32":
        return 4 * num_values
    if wire_format == "bf16":
        return 2 * num_values
    if wire_format in _ROW_BYTES:
        return math.ceil(num_values / _BLOCK) * _ROW_BYTES[wire_format]
    raise ConfigError(f"wire_format must be one of {', '.join(WIRE_FORMATS)}, got {wire_format!r}")


def encode(tensor: Tensor, wire_format: str) -> Tensor:
    """The bytes of a tensor in a wire format.

    Every finite value stays finite. NaN and infinity stay what they are in fp32 and bf16, so that the receiver sees
    and refuses them; blocks with a common scale cannot carry them.

    Args:
        tensor: Any shape, floating point. Never changed; the result does not share its memory.
        wire_format: "fp32", "bf16", "int8" or "int4".

    Returns:
        uint8, one dimension, ``encoded_size(tensor.numel(), wire_format)`` bytes.

    Raises:
        ConfigError: unknown ``wire_format``.
        ValueError: NaN or infinity, with int8 and int4.
    """
    flat = tensor.detach().reshape(-1)
    data = torch.empty(encoded_size(len(flat), wire_format), dtype=torch.uint8, device=flat.device)
    if wire_format in _ROW_BYTES:
        encode_rows = {"int8": _encode_int8, "int4": _encode_int4}[wire_format]
        for rows, values in zip(_row_slabs(data, wire_format), _slabs(flat), strict=True):
            encode_rows(_blocks(values), rows)
    elif wire_format == "bf16":
        for out, values in zip(_slabs(data.view(torch.bfloat16)), _slabs(flat), strict=True):
            out.copy_(_within_bf16(values.to(torch.float32)))
    else:
        data.view(torch.float32).copy_(flat)
    return data


def decode(data: Tensor, wire_format: str, shape: Sequence[int]) -> Tensor:
    """The values that :func:`encode` made these bytes of, as far as the format keeps them.

    Args:
        data: uint8, one dimension; comes from a peer. Not changed.
        wire_format: As it was encoded.
        shape: Of the tensor that was encoded.

    Returns:
        fp32, of that shape, its own memory. Finite if all that was encoded was finite; bytes made up by a peer may
        give NaN or infinity, which :class:`~hf_diloco.core.merge.MergeAccumulator` refuses.

    Raises:
        MessageError: unknown format, not as many bytes as the shape asks for, or a scale that no encoder makes.
    """
    num_values = math.prod(shape)
    if wire_format not in WIRE_FORMATS:
        raise MessageError(f"unknown wire format {wire_format!r}; known are {', '.join(WIRE_FORMATS)}")
    if data.dtype != torch.uint8 or data.shape != (encoded_size(num_values, wire_format),):
        raise MessageError(
            f"{num_values} values in {wire_format} are {encoded_size(num_values, wire_format)} bytes, "
            f"got shape {tuple(data.shape)} of {data.dtype}"
        )
    values = torch.empty(num_values, dtype=torch.float32, device=data.device)
    if wire_format in _ROW_BYTES:
        decode_rows = {"int8": _decode_int8, "int4": _decode_int4}[wire_format]
        for out, rows in zip(_slabs(values), _row_slabs(data, wire_format), strict=True):
            _write(out, rows, decode_rows)
    else:
        dtype = torch.float32 if wire_format == "fp32" else torch.bfloat16
        aligned = data.is_contiguous() and data.storage_offset() % 4 == 0  # as viewing it in another dtype needs
        raw = data if aligned else data.clone(memory_format=torch.contiguous_format)
        values.copy_(raw.view(dtype))
    return values.reshape(tuple(shape))


def digest(tensor: Tensor) -> str:
    """BLAKE2b of the values as little-endian fp32: 32 hex digits. Equal if and only if the values are, bit for bit."""
    hashed = hashlib.blake2b(digest_size=16)
    for values in _slabs(tensor.detach().reshape(-1)):
        hashed.update(values.to(device="cpu", dtype=torch.float32).contiguous().numpy().astype("<f4", copy=False).data)
    return hashed.hexdigest()


def _slabs(flat: Tensor) -> Iterator[Tensor]:
    return (flat[start : start + _SLAB] for start in range(0, len(flat), _SLAB))


def _row_slabs(data: Tensor, wire_format: str) -> Iterator[Tensor]:
    rows = data.view(-1, _ROW_BYTES[wire_format])
    return (rows[start : start + _SLAB // _BLOCK] for start in range(0, len(rows), _SLAB // _BLOCK))


def _within_bf16(values: Tensor) -> Tensor:
    """Finite values above the largest bf16 made that; they would be rounded to infinity."""
    low, high = torch.aminmax(values)
    if low >= -_BF16_MAX and high <= _BF16_MAX:
        return values
    return torch.where(values.isinf(), values, values.clamp(-_BF16_MAX, _BF16_MAX))


# ----------------------------------------------------------------------------------------- blocks with one scale each


def _blocks(values: Tensor) -> Tensor:
    """fp32, (number of blocks, 128); the last one filled up with zeros."""
    values = values.to(torch.float32)
    if padding := -len(values) % _BLOCK:
        values = torch.nn.functional.pad(values, (0, padding))
    return values.view(-1, _BLOCK)


def _write(out: Tensor, rows: Tensor, decode_rows: Callable[[Tensor, Tensor], None]) -> None:
    """Decode rows into a flat vector, which may end within the last one."""
    if len(out) % _BLOCK == 0:
        decode_rows(rows, out.view(-1, _BLOCK))
        return
    whole = torch.empty(len(rows), _BLOCK, dtype=torch.float32, device=out.device)
    decode_rows(rows, whole)
    out.copy_(whole.view(-1)[: len(out)])


def _largest(blocks: Tensor) -> Tensor:
    """Largest absolute value of each block, (number of blocks, 1)."""
    largest = blocks.abs().amax(dim=1, keepdim=True)
    if not torch.isfinite(largest).all():
        raise ValueError("int8 and int4 cannot carry NaN or infinity; has the training diverged?")
    return largest


def _write_scale(rows: Tensor, scale: Tensor) -> Tensor:
    """Write the scales into the rows as bf16; return them as fp32 divisors, 1 instead of 0."""
    rounded = scale.to(torch.bfloat16)
    rows[:, :_SCALE_BYTES] = rounded.view(torch.uint8)
    divisor = rounded.to(torch.float32)
    return divisor.masked_fill_(divisor == 0, 1.0)


def _read_scale(rows: Tensor, largest: float) -> Tensor:
    scale = rows[:, :_SCALE_BYTES].contiguous().view(torch.bfloat16).to(torch.float32)
    if not ((scale >= 0) & (scale <= largest)).all():
        raise MessageError(f"a block's scale is negative, NaN, or above {largest:.3g}")
    return scale


def _encode_int8(blocks: Tensor, rows: Tensor) -> None:
    step = _write_scale(rows, _largest(blocks).div_(127))
    rows[:, _SCALE_BYTES:] = blocks.div(step).round_().clamp_(-127, 127).to(torch.int8).view(torch.uint8)


def _decode_int8(rows: Tensor, out: Tensor) -> None:
    step = _read_scale(rows, _INT8_MAX_STEP)
    out.copy_(rows[:, _SCALE_BYTES:].view(torch.int8)).mul_(step)


def _encode_int4(blocks: Tensor, rows: Tensor) -> None:
    """Codes: bits 0-2 are 0 for zero, else 7 plus the level's exponent; bit 3 is the sign. The first of a pair is low.

    The nearest power of two is found on the bits of a float: adding half to the mantissa carries into the exponent
    from 1.5 on. Only below the smallest level the nearest is another rule: 2^-7 and more goes up to 2^-6.
    """
    bits = blocks.div(_write_scale(rows, _largest(blocks).clamp_(max=_BF16_MAX))).view(torch.int32)
    exponent = bits.bitwise_right_shift(23).to(torch.uint8)  # biased: 127 for 1; the cast cuts off the sign
    nearest = bits.add(1 << 22).bitwise_right_shift_(23).to(torch.uint8)
    codes = torch.maximum(nearest.clamp_(120, 127).sub_(120), exponent.clamp_(119, 120).sub_(119))
    codes |= bits.bitwise_right_shift_(28).to(torch.uint8) & 8
    pairs = codes.view(torch.int16)
    rows[:, _SCALE_BYTES:] = pairs.bitwise_right_shift(4).bitwise_or_(pairs).to(torch.uint8)


def _int4_pairs() -> Tensor:
    """The two fp32 levels of each byte, as one int64, so that one look-up fetches both."""
    levels = [0.0, *(2.0**exponent for exponent in range(-6, 1))]
    levels += [-level for level in levels]
    pairs = torch.tensor([[levels[byte & 15], levels[byte >> 4]] for byte in range(256)], dtype=torch.float32)
    return pairs.view(torch.int64).view(-1)


_INT4_PAIRS = _int4_pairs()


def _decode_int4(rows: Tensor, out: Tensor) -> None:
    codes = rows[:, _SCALE_BYTES:].to(torch.int32).view(-1)
    levels = _INT4_PAIRS.to(rows.device).index_select(0, codes).view(torch.float32).view(out.shape)
    torch.mul(levels, _read_scale(rows, _BF16_MAX), out=out)
