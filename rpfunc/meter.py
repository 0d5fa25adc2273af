"""Following what tensors live: how many bytes now, and how many at most."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.storage import UntypedStorage
from torch.utils._python_dispatch import TorchDispatchMode

from rpfunc import tree
from rpfunc.errors import MemoryLimitError


class Meter:
    """The bytes of the storages that it follows; threads may share it.

    limit_bytes  the most that may live; None: any. Beyond it `follow` raises MemoryLimitError
    live_bytes   of storages that live now
    peak_bytes   the most that lived at one time
    """

    def __init__(self, limit_bytes: int | None = None, name: str = "memory") -> None:
        self.limit_bytes, self._name = limit_bytes, name
        self.live_bytes = self.peak_bytes = 0
        self._followed: dict[int, weakref.finalize[..., Any]] = {}
        # a storage may end in the middle of any line, in the thread that holds this
        self._lock = threading.RLock()

    def follow(self, storages: Iterable[UntypedStorage]) -> None:
        """Counts those storages that are not followed already, for as long as they live."""
        with self._lock:
            for storage in storages:
                if id(storage) not in self._followed:
                    finalizer = weakref.finalize(storage, self._release, id(storage), storage.nbytes())
                    finalizer.atexit = False
                    self._followed[id(storage)] = finalizer
                    self.live_bytes += storage.nbytes()
            if self.limit_bytes is not None and self.live_bytes > self.limit_bytes:
                gc.collect()  # an error that nobody holds any more may: its traceback and frames hold each other
            self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        if self.limit_bytes is not None and self.live_bytes > self.limit_bytes:
            raise MemoryLimitError(
                f"{self._name}: {self.live_bytes:,} bytes live at once, its memory_bytes is {self.limit_bytes:,}"
            )

    def hand_over(self, kept: Iterable[UntypedStorage] = ()) -> None:
        """Counts no more what lives now, but for `kept`: somebody else holds it."""
        with self._lock:
            own = {id(storage) for storage in kept}
            for key in self._followed.keys() - own:
                followed = self._followed.pop(key).detach()
                if followed is not None:
                    _, _, (_, num_bytes), _ = followed
                    self.live_bytes -= num_bytes

    def _release(self, key: int, num_bytes: int) -> None:
        with self._lock:
            del self._followed[key]
            self.live_bytes -= num_bytes


class Following(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A context in which a meter follows each storage that this thread's operations make, beside their operands'.

    What a kernel uses inside itself is not seen. Slows small operations down by some 10 us each.
    """

    def __init__(self, meter: Meter) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._meter = meter

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.prim.device.default and hasattr(args[0], "fake_device"):
            return args[0].fake_device  # more than half of all calls on tensors without data
        known = {id(storage) for storage in storages((args, kwargs or {}))}
        result = function(*args, **(kwargs or {}))
        self._meter.follow(storage for storage in storages(result) if id(storage) not in known)
        return result


def storages(structured: Any) -> list[UntypedStorage]:
    """Returns the storage of each tensor of a pytree."""
    return [leaf.untyped_storage() for leaf in tree.leaves(structured) if isinstance(leaf, Tensor)]
