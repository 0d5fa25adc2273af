"""Rotary positions: each pair of a head's numbers turns by an angle that grows with the row (arXiv 2104.09864)."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor


class Rope(NamedTuple):
    """How fast each pair (i, i + size/2) of a head turns."""

    frequencies: tuple[float, ...]
    """Radians a row, for each of the size/2 pairs."""
    amplitude: float = 1.0
    """What queries and keys are multiplied by as well."""
    dtype: torch.dtype = torch.float64
    """In which angles are computed."""


def rotary(theta: float, size: int) -> Rope:
    """Returns frequencies theta^(-2i/size), with angles in float64."""
    half = size // 2
    return Rope(tuple((theta ** (-torch.arange(half, dtype=torch.float64) / half)).tolist()))


def rotate(
    x: Float[Tensor, "batch rows heads size"], positions: Int[Tensor, "examples rows"], rope: Rope
) -> Float[Tensor, "batch rows heads size"]:
    """Returns x with each pair (i, i + size/2) of a row at position t turned by the angle t * frequencies[i].

    One example's positions serve all, or each has its own.
    """
    half = x.shape[-1] // 2
    # made on the host and copied without a wait: a tensor made elsewhere would wait for all that is under way there
    frequencies = torch.tensor(rope.frequencies, device="cpu", dtype=rope.dtype).to(x.device, non_blocking=True)
    angles = positions[..., None, None].to(rope.dtype) * frequencies
    cos, sin = angles.cos(), angles.sin()
    if rope.amplitude != 1.0:
        cos, sin = cos * rope.amplitude, sin * rope.amplitude
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    left, right = x[..., :half], x[..., half:]
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)


def pretrained(theta: float, size: int) -> Rope:
    """Returns frequencies theta^(-2i/size) with all in float32: the angles that published weights were trained with.

    At row 10,000 they differ from the exact ones by up to a thousandth of a radian.
    """
    exponents = torch.arange(0, size, 2, dtype=torch.float32) / size
    return Rope(tuple((1.0 / theta**exponents).tolist()), dtype=torch.float32)


def linear(rope: Rope, factor: float) -> Rope:
    """Returns the rope with rows `factor` times as close together (position interpolation, arXiv 2306.15595)."""
    return rope._replace(frequencies=tuple((_frequencies(rope) / factor).tolist()))


def llama3(rope: Rope, factor: float, low: float, high: float, rows: int) -> Rope:
    """Returns the rope whose slow pairs are slowed by `factor`: those that turn less than `low` times in `rows` rows.

    Pairs that turn more than `high` times stay; between, the factor is interpolated. Source: Llama 3.1's model card.
    """
    frequencies = _frequencies(rope)
    turns = rows / (2 * math.pi / frequencies)
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return rope._replace(frequencies=tuple((frequencies * ((1 - kept) / factor + kept)).tolist()))


def yarn(
    rope: Rope,
    theta: float,
    factor: float,
    rows: int,
    *,
    fast: float = 32.0,
    slow: float = 1.0,
    truncate: bool = True,
    amplitude: float | None = None,
) -> Rope:
    """Returns the rope whose slow pairs are slowed by `factor` (YaRN, arXiv 2309.00071, section 3.2 and 3.4).

    rows       that the weights were first trained for
    fast, slow pairs that turn more than `fast` times in them stay, those below `slow` are slowed, with a ramp over the
               pairs between; `truncate` rounds where it begins and ends to whole pairs
    amplitude  None: 0.1 ln(factor) + 1
    """
    frequencies, size = _frequencies(rope), 2 * len(rope.frequencies)

    def pair(turns: float) -> float:
        return size * math.log(rows / (turns * 2 * math.pi)) / (2 * math.log(theta))

    begin, end = pair(fast), pair(slow)
    if truncate:
        begin, end = float(math.floor(begin)), float(math.ceil(end))
    begin, end = max(begin, 0.0), min(end, size - 1.0)
    width = end - begin if end != begin else 0.001
    slowed = ((torch.arange(size // 2, dtype=rope.dtype) - begin) / width).clamp(0.0, 1.0)
    if amplitude is None:
        amplitude = 1.0 if factor <= 1.0 else 0.1 * math.log(factor) + 1.0
    return rope._replace(
        frequencies=tuple((frequencies * (slowed / factor + (1 - slowed))).tolist()), amplitude=amplitude
    )


def _frequencies(rope: Rope) -> Tensor:
    return torch.tensor(rope.frequencies, dtype=rope.dtype)
