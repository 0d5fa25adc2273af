"""Explicit random keys and counter-based draws.

A draw is a pure function of a key and of where in the data it stands (example, row, feature). So no cut of a
batch into microbatches or chunks, no recomputation and no order of work changes what is drawn.

The bits are SplitMix64's output function (Steele, Lea and Flood 2014, "Fast splittable pseudorandom number
generators", figure 15) applied to the key and each index in turn. Good for initialisation, dropout and sampling;
not for cryptography.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from rpfunc.batch import Batch
from rpfunc.checks import is_count, plain_number, shown
from rpfunc.errors import OptionsError

BLOCK = 1 << 15
"""Numbers drawn at a time: what lies between stays in a core's cache."""

_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15
_FIRST = 0xBF58476D1CE4E5B9
_SECOND = 0x94D049BB133111EB


class Key(NamedTuple):
    """A random key: 64 bits, a plain value. Using one key twice draws the same numbers twice."""

    value: int


def key(seed: int) -> Key:
    """Returns the key of `seed`, any integer. Raises OptionsError for what is none."""
    seed = plain_number(seed)
    if not is_count(seed):
        raise OptionsError(f"key: seed is {shown(seed)}, it must be a whole number")
    return Key(_mix(seed & _MASK))


def fold_in(key: Key, data: int | str) -> Key:
    """Returns a key that depends on `key` and on `data`: a step number, a layer's name.

    Raises OptionsError for data that is neither.

    >>> fold_in(key(0), "block0") == fold_in(key(0), "block1")
    False
    """
    number = plain_number(data)
    if isinstance(number, str):
        number = int.from_bytes(hashlib.blake2b(number.encode(), digest_size=8).digest())
    if not is_count(number):
        raise OptionsError(f"fold_in: data is {shown(data)}, it must be a whole number or a text")
    # _FIRST, where draws have _GAMMA: what is folded in is never an index that is drawn at
    return Key(_mix((key.value ^ _mix((number + _FIRST) & _MASK)) & _MASK))


def split(key: Key, num: int = 2) -> tuple[Key, ...]:
    """Returns `num` keys that are independent of each other and of `key`."""
    return tuple(fold_in(key, index) for index in range(num))


def bits(key: Key, *indices: Tensor) -> Tensor:
    """Returns 64 random bits for each place of the broadcast integer `indices`, as int64.

    Indices that come first are hashed at their own, smaller size: give (B, 1, 1), then (1, T, 1), then (D,).
    """
    state = torch.full((), _signed(key.value), device=indices[0].device if indices else None)
    for index in indices:
        state = _mix_tensor(state ^ _mix_tensor(index.long() + _signed(_GAMMA)))
    return state


def uniform(key: Key, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    """Returns numbers drawn uniformly from [0, 1), on the CPU."""
    return _drawn(key, shape, dtype, lambda bits: _to_unit(bits, dtype))


def normal(key: Key, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    """Returns standard normal numbers, by inverting the distribution function in float64, on the CPU."""

    def invert(bits: Tensor) -> Tensor:
        drawn: Tensor = torch.special.ndtri(_inside_unit(bits))
        return drawn

    return _drawn(key, shape, dtype, invert)


def categorical(key: Key, logits: Tensor) -> Tensor:
    """Returns for each row of `logits` (..., V) an index drawn from softmax(logits), by the Gumbel-max trick."""
    gumbel = -torch.log(-torch.log(_drawn(key, tuple(logits.shape), torch.float64, _inside_unit)))
    return torch.argmax(logits.double() + gumbel.to(logits.device), dim=-1)


def dropout(x: Tensor, rate: float, key: Key, batch: Batch) -> Tensor:
    """Returns x (B, T, ...) with each element zeroed with probability `rate` and the rest scaled by 1 / (1 - rate).

    Drawn by absolute example, absolute row and feature: chunks, microbatches and recomputation see one mask.
    """
    if not 0.0 <= rate < 1.0:
        raise OptionsError(f"dropout: rate is {rate}, it must be at least 0 and below 1")
    if rate == 0.0:
        return x
    num_examples, num_rows = x.shape[:2]
    features = torch.arange(x[0, 0].numel(), device=x.device).reshape(x.shape[2:])
    lift = (1,) * (x.dim() - 2)
    first, row = batch.first_example, batch.first_row
    examples = torch.arange(first, first + num_examples, device=x.device).reshape(-1, 1, *lift)
    rows = torch.arange(row, row + num_rows, device=x.device).reshape(1, -1, *lift)
    kept = _to_unit(bits(key, examples, rows, features), torch.float32) >= rate
    return torch.where(kept, x / (1.0 - rate), torch.zeros((), dtype=x.dtype, device=x.device))


def _drawn(key: Key, shape: tuple[int, ...], dtype: torch.dtype, convert: Callable[[Tensor], Tensor]) -> Tensor:
    """Returns what `convert` makes of the bits of each place, a block of places at a time: steps between are many."""
    drawn = torch.empty(math.prod(shape), dtype=dtype)
    for start in range(0, len(drawn), BLOCK):
        block = drawn[start : start + BLOCK]
        block.copy_(convert(bits(key, torch.arange(start, start + len(block)))))
    return drawn.reshape(shape)


def _signed(value: int) -> int:
    """Returns the int64 that has the bits of the unsigned `value`."""
    return value - (1 << 64) if value >= 1 << 63 else value


def _mix(value: int) -> int:
    value = ((value ^ (value >> 30)) * _FIRST) & _MASK
    value = ((value ^ (value >> 27)) * _SECOND) & _MASK
    return value ^ (value >> 31)


def _mix_tensor(value: Tensor) -> Tensor:
    # torch has no unsigned shift: the arithmetic one is masked. Products wrap modulo 2^64.
    value = (value ^ ((value >> 30) & (_MASK >> 30))) * _signed(_FIRST)
    value = (value ^ ((value >> 27) & (_MASK >> 27))) * _signed(_SECOND)
    return value ^ ((value >> 31) & (_MASK >> 31))


def _inside_unit(bits: Tensor) -> Tensor:
    """Returns float64 numbers above 0 and below 1, whose quantiles and logarithms are finite."""
    return (_to_unit(bits, torch.float64) + 2.0**-54).clamp_(max=1 - 2.0**-53)


def _to_unit(bits: Tensor, dtype: torch.dtype) -> Tensor:
    # As many leading bits as the significand holds, so that no draw rounds up to 1.
    precision = 1 - round(math.log2(torch.finfo(dtype).eps))
    unit = ((bits >> (64 - precision)) & ((1 << precision) - 1)).to(torch.float64) * 2.0**-precision
    return unit.to(dtype)
