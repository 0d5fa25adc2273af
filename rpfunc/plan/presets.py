"""Machines by name: how many workers, what they compute, and how bytes get to them."""

from __future__ import annotations

import math
import re
from typing import NamedTuple

from rpfunc.checks import is_real, shown
from rpfunc.errors import PlanError
from rpfunc.plan.hardware import Hardware


class Accelerator(NamedTuple):
    """One worker, from its data sheet.

    flops_per_s      dense products of 16-bit numbers, summed in 32 bits
    memory_bytes     1 GB counted as 10^9 bytes, which leaves a driver's context its room
    link_bytes_per_s to the host in each direction, both at once: PCIe 4 x16 32 GB/s, PCIe 5 x16 64 GB/s
    """

    name: str
    flops_per_s: float
    memory_bytes: float
    link_bytes_per_s: float


ACCELERATORS = (
    Accelerator("4090", 165.2e12, 24e9, 32e9),
    Accelerator("a800", 312e12, 80e9, 32e9),
    Accelerator("a100-40gb", 312e12, 40e9, 32e9),
    Accelerator("a100-80gb", 312e12, 80e9, 32e9),
    Accelerator("h100", 989e12, 80e9, 64e9),
    Accelerator("h200", 989e12, 141e9, 64e9),
)
"""Sources: NVIDIA's Ada architecture paper, appendix A (RTX 4090); data sheets of the A100, which the A800 equals but
for NVLink, and of the H100 and H200 (SXM, half of what they state with sparsity)."""


class Machine(NamedTuple):
    """Workers alike: how many, their links and memory, and the rate at which each really computes."""

    num_workers: int
    hardware: Hardware
    flops_per_s: float


def machine(text: str, *, efficiency: float = 0.75) -> Machine:
    """Returns the machine that a text such as "8x4090" names; "h200" alone is one worker. Times are in seconds.

    efficiency  share of the data sheet's rate that a decoder's layers reach. The default is what RoundPipe's 8,881
                tokens/s of Qwen3-1.7B on one RTX 4090 come to (arXiv 2604.27085), recomputation counted as work.
    The host's own bandwidth is not limited (see `Hardware.host_upload`). Raises PlanError listing the names.

    >>> machine("8x4090").num_workers
    8
    """
    match = re.fullmatch(r"(?:([0-9]{1,9})x)?(.+)", text.strip().lower())
    number, name = (match[1] or "1", match[2]) if match else ("1", text)
    found = next((accelerator for accelerator in ACCELERATORS if accelerator.name == name), None)
    problems = []
    if found is None:
        names = ", ".join(accelerator.name for accelerator in ACCELERATORS)
        problems.append(f"there is no {name!r}, there are {names}; a number may stand before, as in '8x4090'")
    if int(number) < 1:
        problems.append(f"has {number} workers, it must be at least 1")
    if not (is_real(efficiency) and 0 < efficiency <= 1):
        problems.append(f"efficiency is {shown(efficiency)}, it must be above 0 and at most 1")
    if problems or found is None:
        raise PlanError.listing(f"machine {text!r}", problems)
    link = found.link_bytes_per_s
    hardware = Hardware(upload=link, download=link, memory_bytes=found.memory_bytes)
    return Machine(int(number), hardware, efficiency * found.flops_per_s)


def adam_update_s(num_parameters: int, *, host_bytes_per_s: float = 100e9) -> float:
    """Returns the seconds that Adam takes on the host, bound by its memory: 28 bytes a parameter / bandwidth.

    Reads a gradient of 2 bytes, and reads and writes parameter and two moments of 4 bytes each; writes a copy of 2
    bytes for the workers. The default bandwidth gives 9.2 s for 32.8e9 parameters, where RoundPipe reports 9.6 s.

    >>> round(adam_update_s(32_762_123_264), 1)
    9.2
    """
    if not (0 < host_bytes_per_s < math.inf and 0 <= num_parameters < math.inf):
        raise PlanError(
            f"adam_update_s: {num_parameters} parameters at {host_bytes_per_s} bytes/s; needs a number of at "
            "least 0 and a rate above 0, both finite"
        )
    return 28 * num_parameters / host_bytes_per_s
