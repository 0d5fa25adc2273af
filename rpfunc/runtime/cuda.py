"""A GPU as a worker: a stream for each channel, and memory that changes hands only when all streams are done with it.

Each verb returns when its stream has ended with what it was given, so events on the host order streams as they order
threads. That settles who may take over memory. torch's allocator gives a freed block to the next who asks on the stream
that it was made on, without a look at other streams. Here whatever crosses streams is freed after a verb that read it
has returned, and each verb has then waited for its stream:

    parameters, sums, inputs   made by an upload, read by compute, let go of after `run`
    outputs, sums              made by compute, read by a download, let go of after `copy`
    what a task makes and drops on its way   never leaves the compute stream

What `allocate` gives comes from a stream on which nothing runs. It may be a stream that others share, since torch hands
out 32 of a kind in turn; so an upload first waits for that one, on the device.

Copies from pinned memory go at the link's full speed. What tasks hand on is pinned; parameters are the caller's, read
in place and not replaced: he may pin them (`tree.map(torch.Tensor.pin_memory, params)`). From other memory, mapped
files too, the driver copies through a buffer of its own, at a fraction of the speed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

import torch
from torch import Tensor

from rpfunc.errors import OptionsError
from rpfunc.runtime.device import URGENT, Lane, pieces_of
from rpfunc.runtime.operations import CHANNELS_OF_WORKER
from rpfunc.runtime.waiting import never

T = TypeVar("T")

PIECE_BYTES = 1 << 25
"""Of parameters and gradients copied at a time: under a millisecond, after which activations may go first."""


class CudaDevice:
    """A GPU, or one of several workers on it.

    memory_bytes  the most that tensors may take on the GPU, of the whole process, once the worker is open; None: all
    """

    def __init__(self, index: int, memory_bytes: int | None = None) -> None:
        self._device, self._memory_bytes = torch.device("cuda", index), memory_bytes
        self._lanes = {"upload": Lane(), "download": Lane()}
        self._streams = {channel: _stream(self._device, urgent=channel in URGENT) for channel in CHANNELS_OF_WORKER}
        self._new_memory = _stream(self._device, urgent=False)
        if memory_bytes is not None:
            torch.cuda.reset_peak_memory_stats(self._device)

    def allocate(self, like: Tensor, dtype: torch.dtype) -> Tensor:  # noqa: D102  (see Device)
        with torch.cuda.stream(self._new_memory):
            buffer = torch.empty_like(like, dtype=dtype, device=self._device)
        self._check_memory()
        return buffer

    def allocate_on_host(self, like: Tensor) -> Tensor:  # noqa: D102
        return torch.empty_like(like, device="cpu", pin_memory=True)

    def copy(  # noqa: D102
        self, target: Tensor, source: Tensor, channel: str, check: Callable[[], None] = never
    ) -> None:
        direction, urgent = channel.rpartition("_")[2], channel in URGENT
        if direction == "upload" and source.device.type != "cpu":
            # another stream may be writing it still, and nothing here would wait for that
            raise OptionsError(
                f"worker: a tensor to be uploaded is on {source.device}; parameters and batches of a Cuda worker have "
                "to be on the cpu, as .cpu() makes them"
            )
        stream = self._streams[channel]
        for place, part in [(target, source)] if urgent else pieces_of(target, source, PIECE_BYTES):
            check()
            with self._lanes[direction].turn(urgent, check), torch.cuda.stream(stream):
                if direction == "upload":
                    stream.wait_stream(self._new_memory)
                place.copy_(part, non_blocking=True)
                stream.synchronize()

    def run(self, function: Callable[[], T]) -> T:  # noqa: D102
        stream = self._streams["compute"]
        with (
            torch.cuda.device(self._device),
            torch.cuda.stream(stream),
            self._device,  # for layers that make tensors and name no device
            torch.autograd.set_multithreading_enabled(False),  # torch's own thread would know neither
        ):
            try:
                result = function()
            finally:
                stream.synchronize()  # a failed task's buffers, too, may be freed after this
        self._check_memory()
        return result

    def release(self, buffers: Iterable[Tensor]) -> None:
        """Does nothing: memory is free once nothing refers to it."""

    def _check_memory(self) -> None:
        peak = torch.cuda.max_memory_allocated(self._device)
        if self._memory_bytes is not None and peak > self._memory_bytes:
            raise torch.OutOfMemoryError(
                f"worker: {peak} bytes were in use on {self._device}, memory_bytes allows {self._memory_bytes}; "
                "smaller stages, microbatches, chunk or head_chunk take less"
            )


def open_cuda(index: int, memory_bytes: int | None) -> CudaDevice:
    """Returns the device. Raises OptionsError, saying what was found and what would work, if there is none such."""
    found = missing(index)
    if found is None and memory_bytes is not None:
        there = torch.cuda.get_device_properties(index).total_memory
        if memory_bytes > there:
            found = f"memory_bytes is {memory_bytes}, and the GPU has {there}; at most that, or None, would do"
    if found is not None:
        raise OptionsError(f"worker: Cuda(index={index}): {found}")
    return CudaDevice(index, memory_bytes)


def missing(index: int = 0) -> str | None:
    """Returns, in words, why there is no GPU of that index and what would work; None if there is one."""
    instead = "Cpu(), or Cpu(link=Link()), which plays a device, works without one"
    if torch.version.cuda is None and torch.version.hip is None:
        return f"torch {torch.__version__} is built for CPUs alone; a CUDA build is needed; {instead}"
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} finds no GPU; {instead}"
    count = torch.cuda.device_count()
    if index >= count:
        return f"there {'is 1 GPU' if count == 1 else f'are {count} GPUs'}; index 0 to {count - 1} would do"
    return None


def _stream(device: torch.device, urgent: bool) -> torch.cuda.Stream:
    return torch.cuda.Stream(device, priority=-1 if urgent else 0)  # type: ignore[no-untyped-call]
