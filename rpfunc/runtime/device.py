"""Workers with memory of their own, behind a few verbs; how a CPU plays one, with links that take time or misbehave."""

from __future__ import annotations

import math
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from rpfunc.checks import MOST_COUNT, is_count, is_real, shown
from rpfunc.errors import OptionsError
from rpfunc.runtime.waiting import never, sleep_until, wait_until

T = TypeVar("T")

URGENT = ("activation_upload", "activation_download")
"""Channels whose copies go before those of the other channel in their direction."""

LONGEST_LATENCY_S = 3600
"""Of a link: a longer one is a mistake."""


class Device(Protocol):
    """What a worker with its own memory can do. Each verb returns when it is done; channels call from their threads.

    One thread a channel, and every wait for others in events on the host: a device needs no events of its own.
    """

    def allocate(self, like: Tensor, dtype: torch.dtype) -> Tensor:
        """Returns a buffer on the device, of the shape and strides of `like`."""

    def allocate_on_host(self, like: Tensor) -> Tensor:
        """Returns a buffer on the host that the device copies to fast."""

    def copy(self, target: Tensor, source: Tensor, channel: str, check: Callable[[], None] = never) -> None:
        """Copies between host and device. Calls `check` at least each moment, and ends by what it raises, if it does.

        It raises once nobody needs the copy any more.
        """

    def run(self, function: Callable[[], T]) -> T:
        """Returns function(), computed on the device."""

    def release(self, buffers: Iterable[Tensor]) -> None:
        """Is told that nothing will read these buffers any more."""


@dataclass(frozen=True)
class Link:
    """The way between the host and a CPU worker that plays a device with memory of its own. It is full duplex.

    upload, download  bytes a second, at least 1; infinite: as fast as memory copies
    latency_s         added to each copy
    piece_bytes       of parameters and gradients, copied at a time: between pieces, activations go first
    disorder          a seed: copies end late, their parts in any order, and buffers hold NaN before and after their
                      time, so that a wait that is missing shows in the results; None: none of this
    """

    upload: float = math.inf
    download: float = math.inf
    latency_s: float = 0.0
    piece_bytes: int = 1 << 24
    disorder: int | None = None

    def __post_init__(self) -> None:
        problems = [
            f"{name} is {shown(rate)}, it must be at least 1 byte a second, or math.inf"
            for name, rate in (("upload", self.upload), ("download", self.download))
            if not (_is_number(rate) and rate >= 1)
        ]
        if not (_is_number(self.latency_s) and 0 <= self.latency_s <= LONGEST_LATENCY_S):
            problems.append(f"latency_s is {shown(self.latency_s)}, it must be 0 to {LONGEST_LATENCY_S:g} seconds")
        if not is_count(self.piece_bytes) or not 1 <= self.piece_bytes <= MOST_COUNT:
            problems.append(f"piece_bytes is {shown(self.piece_bytes)}, it must be a number of bytes from 1")
        if self.disorder is not None and not is_count(self.disorder):
            problems.append(f"disorder is {shown(self.disorder)}, it must be a whole number, a seed, or None")
        if problems:
            raise OptionsError.listing("link", problems)


def _is_number(value: object) -> bool:
    return is_real(value) and not isinstance(value, bool)


class Lane:
    """One direction of a link: one copy at a time, urgent ones first."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._busy = False
        self._urgent = 0

    @contextmanager
    def turn(self, urgent: bool, check: Callable[[], None] = never) -> Iterator[None]:
        """Holds the lane for one piece. Ends the wait for it by what `check` raises, if it does."""
        holds = False
        try:
            with self._changed:
                self._urgent += urgent
                wait_until(self._changed, lambda: not self._busy and (urgent or not self._urgent), check)
                self._busy = holds = True
            yield
        finally:
            with self._changed:
                self._busy &= not holds
                self._urgent -= urgent
                self._changed.notify_all()


class LinkedCpu:
    """A CPU worker whose memory is apart from the host's, for all that rpfunc can tell."""

    def __init__(self, link: Link, index: int) -> None:
        self._link, self._lanes = link, {"upload": Lane(), "download": Lane()}
        self._index = index
        self._random: dict[str, random.Random] = {}

    def allocate(self, like: Tensor, dtype: torch.dtype) -> Tensor:  # noqa: D102
        return self._spoil(torch.empty_like(like, dtype=dtype))

    def allocate_on_host(self, like: Tensor) -> Tensor:  # noqa: D102
        return self._spoil(torch.empty_like(like))

    def copy(  # noqa: D102  (see Device)
        self, target: Tensor, source: Tensor, channel: str, check: Callable[[], None] = never
    ) -> None:
        direction = channel.rpartition("_")[2]
        lane, rate = self._lanes[direction], getattr(self._link, direction)
        urgent = channel in URGENT
        pieces = [(target, source)] if urgent else list(pieces_of(target, source, int(self._link.piece_bytes)))
        self._dawdle(channel, pieces)
        for place, part in pieces:
            with lane.turn(urgent, check):
                end_s = time.perf_counter() + source.element_size() * part.numel() / rate
                place.copy_(part)
                sleep_until(end_s, check)
        sleep_until(time.perf_counter() + self._link.latency_s, check)

    def run(self, function: Callable[[], T]) -> T:  # noqa: D102  (see Device)
        self._dawdle("compute", [])
        return function()

    def release(self, buffers: Iterable[Tensor]) -> None:  # noqa: D102
        for buffer in buffers:
            self._spoil(buffer)

    def _dawdle(self, channel: str, pieces: list[tuple[Tensor, Tensor]]) -> None:
        """In disorder: takes a while, and shuffles the pieces."""
        if self._link.disorder is not None:
            # a generator of each channel's own: what it draws does not depend on when other channels draw
            draws = self._random.setdefault(channel, random.Random(f"{self._link.disorder} {self._index} {channel}"))
            time.sleep(draws.choice((0.0, 0.1, 1.0)) * LONGEST_DELAY_S)
            draws.shuffle(pieces)

    def _spoil(self, buffer: Tensor) -> Tensor:
        if self._link.disorder is not None:
            if buffer.is_floating_point() or buffer.is_complex():
                buffer.fill_(math.nan)
            elif buffer.dtype != torch.bool:
                buffer.fill_(torch.iinfo(buffer.dtype).max)
        return buffer


LONGEST_DELAY_S = 0.003
"""Of a copy or a task in disorder, before it begins."""


def pieces_of(target: Tensor, source: Tensor, piece_bytes: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields parts of both that belong together, of about so many bytes."""
    if not (target.is_contiguous() and source.is_contiguous()):
        yield target, source
        return
    numel = max(1, piece_bytes // source.element_size())
    yield from zip(torch.split(target.view(-1), numel), torch.split(source.view(-1), numel), strict=True)
