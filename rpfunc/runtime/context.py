"""What torch keeps for each thread and a caller may have set: taken over by the threads that work for him."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import NamedTuple

import torch


class CallersContext(NamedTuple):
    """Autocast of each device type (enabled, dtype) and the default device. Grad mode is off where tasks run, whose
    gradients come from `torch.func.vjp` alone, and where steps are made.
    """

    autocast: tuple[tuple[str, bool, torch.dtype], ...]
    device: torch.device

    @classmethod
    def here(cls) -> CallersContext:
        """Returns the calling thread's."""
        kinds = ("cpu", "cuda")
        autocast = [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds]
        return cls(tuple(autocast), torch.get_default_device())

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Holds it in the calling thread for the length of the block."""
        (cpu, cpu_on, cpu_dtype), (cuda, cuda_on, cuda_dtype) = self.autocast
        with (
            torch.no_grad(),
            # casts are not kept: the caller's own context, which may enclose many steps, would hold them through all
            torch.autocast(cpu, dtype=cpu_dtype, enabled=cpu_on, cache_enabled=False),
            torch.autocast(cuda, dtype=cuda_dtype, enabled=cuda_on and torch.cuda.is_available(), cache_enabled=False),
            nullcontext() if self.device == torch.device("cpu") else self.device,  # a mode that all operations pass
        ):
            yield
