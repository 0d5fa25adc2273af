"""AdamW with clipping: a donated step of rpfunc against torch's fused kernel and `clip_grad_norm_`, on the CPU.

Both are timed in turn, so that other work on the machine meets both. Prints seconds a step (the least of several) for
both; their ratio, of the least and as the median over the turns; and the growth of the process's peak memory during
donated steps. `--quick` takes 4 million parameters instead of 100 million. `--json` prints one JSON object as the last
line.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from rpfunc import optim

MAX_NORM = 1.0  # far below the norm of the gradients, so that both sides do scale them


def seconds(function: Callable[[], Any]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measure(num_matrices: int, repeats: int) -> dict[str, float]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(1000, 1000)] * num_matrices + [(1000,)] * num_matrices
    params = {f"{index:03d}": torch.randn(shape, generator=generator) for index, shape in enumerate(shapes)}
    gradients = {name: torch.randn(param.shape, generator=generator) for name, param in params.items()}

    optimizer = optim.chain(optim.clip_by_global_norm(MAX_NORM), optim.adamw(1e-4))
    state = optimizer.init(params)

    torch_params = [torch.nn.Parameter(param) for param in params.values()]
    fused = torch.optim.AdamW(torch_params, lr=1e-4, fused=True)

    def donated_step() -> None:
        optim.step_donated(optimizer, gradients, state, params)

    def torch_step() -> None:
        torch.nn.utils.clip_grad_norm_(torch_params, MAX_NORM)
        fused.step()

    peak = peak_bytes()
    donated_step()
    peak = peak_bytes() - peak
    for param, gradient in zip(torch_params, gradients.values(), strict=True):
        param.grad = gradient.clone()  # torch clips in place; ours are to stay as large as they are
    torch_step()
    turns = [(seconds(donated_step), seconds(torch_step)) for _ in range(repeats)]
    donated_s, torch_s = (min(times) for times in zip(*turns, strict=True))
    return {
        "num_parameters": sum(param.numel() for param in params.values()),
        "threads": torch.get_num_threads(),
        "donated_s": donated_s,
        "pure_s": min(seconds(lambda: optim.step(optimizer, gradients, state, params)) for _ in range(2)),
        "torch_fused_s": torch_s,
        "optimizer_ratio": donated_s / torch_s,
        "optimizer_ratio_median": statistics.median(ours / theirs for ours, theirs in turns),
        "donated_peak_growth_bytes": peak,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="4 million parameters instead of 100 million")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    arguments = parser.parse_args()
    result = measure(4 if arguments.quick else 100, 15)
    for name, value in result.items():
        print(f"{name:>26}  {value:.4g}")
    if arguments.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
