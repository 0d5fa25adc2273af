"""What tasks run on: how fast workers compute, and how bytes get to them."""

from __future__ import annotations

import math
from dataclasses import dataclass

from rpfunc.checks import count_problems, rate_problems, size_problems
from rpfunc.errors import PlanError


@dataclass(frozen=True)
class Hardware:
    """Workers and their links to the host. Times have the unit of the costs, seconds in the presets.

    upload, download    bytes a unit of time, from and to the host, of each worker; both at once (full duplex)
    latency             added to each transfer; the link is free meanwhile
    host_upload, host_download
                        bytes a unit of time that all workers share, in equal parts among those that transfer
    prefetch            microbatches whose inputs may be uploaded ahead of the one that is computed
    prefetch_runs       runs (a stage's microbatches that follow each other on a worker) whose parameters may be
                        uploaded ahead of the one that is computed
    update              of the optimizer on the host for one iteration
    memory_bytes        of each worker

    Infinite rates cost nothing: the default is computation alone. Numbers are as `LayerCost` has them. Raises PlanError
    listing what cannot be.
    """

    upload: float = math.inf
    download: float = math.inf
    latency: float = 0.0
    host_upload: float = math.inf
    host_download: float = math.inf
    prefetch: int = 1
    prefetch_runs: int = 1
    update: float = 0.0
    memory_bytes: float = math.inf

    def __post_init__(self) -> None:
        def named(*names: str) -> dict[str, object]:
            return {name: getattr(self, name) for name in names}

        problems = rate_problems(named("upload", "download", "host_upload", "host_download", "memory_bytes"))
        problems += size_problems(named("latency", "update"))
        problems += count_problems(named("prefetch", "prefetch_runs"))
        if problems:
            raise PlanError.listing("hardware", problems)

    @property
    def transfers_cost(self) -> bool:
        """Whether any transfer takes time."""
        rates = (self.upload, self.download, self.host_upload, self.host_download)
        return min(rates) < math.inf or self.latency > 0


COMPUTE_ONLY = Hardware()
"""Transfers and updates take no time."""
