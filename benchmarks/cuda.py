"""A GPU worker against plain torch: tokens a second, how long computation idles, the longest sequence in 24 GB.

A decoder (width 2,048, 16 heads, 8 key-value heads, MLP 5,632, vocabulary 32,000, bfloat16, sums of gradients in
float32), microbatches of whole sequences of 2,048 tokens. The same layers and kernels everywhere; what differs is where
parameters are and how they get to the GPU:

    checkpoint  all parameters on the GPU, `torch.utils.checkpoint` a layer
    offload     parameters in pinned memory; layer by layer, each is uploaded, computed with all microbatches, and its
                gradient downloaded, one after the other; activations stay on the GPU
    rpfunc      one worker, a stage a layer: parameters and activations in pinned memory, copies beside computation
    rpfunc_2    two workers on the one GPU

Medians of runs that take turns, the first of each left out. `idle` is the share of the time from the first event of a
run to its last in which the worker computes nothing. The longest sequence is extrapolated from the peaks of two lengths
(peaks grow in proportion), then one run close to it shows whether it fits, where that takes less than `--patience`
seconds. Needs a GPU; without one it says so and measures nothing. `--quick`: fewer layers and runs.
"""

from __future__ import annotations

import sys
from pathlib import Path

# torch imports a package called cuda if there is one, and a script's own folder is searched first
if __name__ != "__main__":
    raise ImportError("a script to be run, not the package cuda")
sys.path[:] = [place for place in sys.path if Path(place).resolve() != Path(__file__).resolve().parent]

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from rpfunc import Batch, Cuda, Result, Runtime, random, tree, value_and_grad
from rpfunc.model import Model
from rpfunc.models import decoder
from rpfunc.models.decoder import DecoderConfig
from rpfunc.objectives import sft
from rpfunc.runtime.cuda import missing

ROWS = 2048
BUDGET = 24 * 10**9
MODEST = {"vocabulary": 32_000, "width": 1024, "heads": 8, "kv_heads": 4, "head_size": 128, "mlp_width": 2816}
LARGE = {"vocabulary": 32_000, "width": 2048, "heads": 16, "kv_heads": 8, "head_size": 128, "mlp_width": 5632}
LAYERS_LONG = 2
"""Of the modest decoder, which the longest sequences are found with."""


def parameters(config: DecoderConfig) -> dict[str, Any]:
    """Returns random bfloat16 parameters in pinned memory."""
    with torch.device("meta"):
        shapes = decoder.init(config, random.key(0), torch.bfloat16)
    torch.manual_seed(0)

    def draw(leaf: torch.Tensor) -> torch.Tensor:
        drawn = torch.randn(leaf.shape, device="cuda") * 0.02 if leaf.dim() > 1 else torch.ones(leaf.shape)
        return drawn.to("cpu", torch.bfloat16).pin_memory()

    return dict(tree.map(draw, shapes))


def make_batch(examples: int, rows: int) -> Batch:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(32_000, (examples, rows), generator=generator)
    return Batch(row={"tokens": tokens, "labels": tokens})


def plan_of(layers: int) -> str:
    """Returns a plan with a stage a layer; the embedding goes with the first, and the last and the head are fused."""
    spans = [(0, 2), *((index, index + 1) for index in range(2, layers))]
    forward, backward = (" ".join(f"{kind}{start}:{stop}" for start, stop in spans) for kind in "FB")
    return f"{forward} X{layers}:{layers + 2} {backward}" if layers > 1 else f"X0:{layers + 2}"


def score(head: Callable[..., Any], params: Any, x: Any, batch: Batch, total: float) -> torch.Tensor:
    logits = head(params, x, batch).flatten(0, 1)
    return F.cross_entropy(logits.float(), batch.row["targets"].flatten(), reduction="sum") / total


def checkpointed(model: Model, params: Any, pieces: list[Batch], total: float) -> Any:
    """Gradients of parameters on the GPU, summed in float32."""
    leaves, structure = tree.flatten(params)
    sums: list[torch.Tensor] | None = None
    for batch in pieces:
        tracked = [leaf.detach().requires_grad_() for leaf in leaves]
        own, x = tree.unflatten(structure, tracked), ()
        for layer in model.layers[:-1]:
            step = partial(layer, own, batch=batch)
            x = checkpoint(step, x, use_reentrant=False) if layer.name != "embedding" else step(x)
        found = torch.autograd.grad(score(model.layers[-1], own, x, batch, total), tracked)
        if sums is None:
            sums = [gradient.float() for gradient in found]
        else:
            for place, gradient in zip(sums, found, strict=True):
                place.add_(gradient)
        del found, own, tracked, x
    return tree.unflatten(structure, sums)


def offloaded(model: Model, params: Any, pieces: list[Batch], total: float) -> Any:
    """Gradients of parameters on the host: each layer is uploaded, computed and downloaded, one after the other."""
    *body, head = model.layers
    inputs: list[list[Any]] = [[()] * len(pieces)]
    for layer in body:
        own = {name: tree.map(lambda leaf: leaf.to("cuda"), params[name]) for name in layer.subtrees}
        with torch.no_grad():
            inputs.append([layer(own, x, batch) for x, batch in zip(inputs[-1], pieces, strict=True)])
        del own
    cotangents: list[Any] = [None] * len(pieces)
    grads: dict[str, list[torch.Tensor]] = {}
    for layer, given in zip(reversed(model.layers), reversed(inputs), strict=True):
        own = {name: tree.map(lambda leaf: leaf.to("cuda"), params[name]) for name in layer.subtrees}
        leaves, structure = tree.flatten(own)
        sums: list[torch.Tensor] | None = None
        for place, batch in enumerate(pieces):
            tracked = [leaf.detach().requires_grad_() for leaf in leaves]
            selected, x = tree.unflatten(structure, tracked), given[place]
            if isinstance(x, torch.Tensor):
                x = x.detach().requires_grad_()
                tracked.append(x)
            output = score(head, selected, x, batch, total) if layer is head else layer(selected, x, batch)
            found = list(torch.autograd.grad(output, tracked, cotangents[place]))
            cotangents[place] = found.pop() if isinstance(x, torch.Tensor) else None
            given[place] = None
            if sums is None:
                sums = [gradient.float() for gradient in found]
            else:
                for one, other in zip(sums, found, strict=True):
                    one.add_(other)
            del output, found, selected, tracked, x
        assert sums is not None
        grads[layer.name] = [gradient.to("cpu") for gradient in sums]
    return grads


def streamed(model: Model, params: Any, batch: Batch, runtime: Runtime, **how: Any) -> Result:
    return value_and_grad(model, sft(), workers=runtime, **how)(params, batch)[0]


def seconds(function: Callable[[], Any]) -> tuple[float, Any]:
    torch.cuda.synchronize()
    began = time.perf_counter()
    result = function()
    torch.cuda.synchronize()
    return time.perf_counter() - began, result


def free() -> None:
    gc.collect()
    torch.cuda.empty_cache()


def speed(quick: bool) -> dict[str, Any]:
    """Returns tokens a second of each way, ratios, and idle shares."""
    layers, num, size, turns = (4, 4, 2, 2) if quick else (12, 8, 2, 4)
    config = DecoderConfig(**LARGE, layers=layers, tied=False)
    model, params, batch = decoder.model(config), parameters(config), make_batch(num * size, ROWS)
    prepared = sft().prepare(batch)
    total = float(sft().total(prepared))
    pieces = [piece.map(lambda leaf: leaf.cuda()) for piece in prepared.microbatches(num)]
    on_gpu = tree.map(lambda leaf: leaf.cuda(), params)
    how = {"plan": plan_of(layers), "microbatches": num}
    with Runtime([Cuda()]) as one, Runtime([Cuda()] * 2) as two:
        ways: dict[str, Callable[[], Any]] = {
            "checkpoint": lambda: checkpointed(model, on_gpu, pieces, total),
            "offload": lambda: offloaded(model, params, pieces, total),
            "rpfunc": lambda: streamed(model, params, batch, one, **how),
            "rpfunc_2": lambda: streamed(model, params, batch, two, **how),
        }
        taken: dict[str, list[float]] = {name: [] for name in ways}
        idle: list[float] = []
        for turn in range(turns):
            for name, way in ways.items():
                elapsed, result = seconds(way)
                if turn:
                    taken[name].append(elapsed)
                if turn and name == "rpfunc":
                    idle.append(result.timeline.bubble)
                del result
    tokens = num * size * ROWS
    rates = {name: tokens / statistics.median(values) for name, values in taken.items()}
    return {
        "tokens_per_s": {name: round(rate) for name, rate in rates.items()},
        "vs_checkpoint": rates["rpfunc"] / rates["checkpoint"],
        "vs_offload": rates["rpfunc"] / rates["offload"],
        "idle": statistics.median(idle),
        "layers": layers,
        "microbatches": num,
    }


def longest(quick: bool, patience: float) -> dict[str, Any]:
    """Returns for both ways the extrapolated longest sequence in the budget, and the longest run that was seen to fit.

    Peaks are those of the allocator's live bytes; the run that shows it has the budget as its limit, caches included.
    """
    config = DecoderConfig(**MODEST, layers=LAYERS_LONG, tied=False)
    model, params = decoder.model(config), parameters(config)
    how = {"plan": plan_of(LAYERS_LONG), "chunk": 2048, "head_chunk": 1024}

    def plain(rows: int) -> None:
        prepared = sft().prepare(make_batch(1, rows))
        total = float(sft().total(prepared))
        on_gpu = tree.map(lambda leaf: leaf.cuda(), params)
        checkpointed(model, on_gpu, [prepared.map(lambda leaf: leaf.cuda())], total)

    def ours(rows: int) -> None:
        with Runtime([Cuda()]) as runtime:
            streamed(model, params, make_batch(1, rows), runtime, **how)

    ways: dict[str, Callable[[int], None]] = {"checkpoint": plain, "rpfunc": ours}
    found: dict[str, Any] = {}
    for name, way in ways.items():
        lengths = (4096, 8192) if quick or name == "checkpoint" else (16384, 32768)
        peaks, elapsed = [], 0.0
        for rows in (lengths[0], *lengths):  # the first run warms up
            free()
            torch.cuda.reset_peak_memory_stats()
            elapsed, _ = seconds(partial(way, rows))
            peaks.append(torch.cuda.max_memory_allocated())
        slope = max(1.0, (peaks[2] - peaks[1]) / (lengths[1] - lengths[0]))
        extrapolated = int((BUDGET - peaks[1]) / slope) + lengths[0]
        affordable = int(lengths[1] * max(1.0, patience / elapsed) ** 0.5)  # time grows with the square at most
        tried = min(int(0.9 * extrapolated), affordable) // 2048 * 2048
        fits = None if quick else fits_in(BUDGET, partial(way, tried))
        found[name] = {
            "extrapolated": extrapolated,
            "bytes_a_token": round(slope),
            "tried": tried,
            "fits": fits,
            "seconds_at": {lengths[1]: round(elapsed, 3)},
        }
        print(f"longest, {name}: {found[name]}", flush=True)
    return {
        "max_t": found,
        "max_t_ratio": found["rpfunc"]["extrapolated"] / found["checkpoint"]["extrapolated"],
    }


def fits_in(num_bytes: int, function: Callable[[], None]) -> bool:
    """Returns whether it runs while torch may take so many bytes of the GPU, caches included."""
    there = torch.cuda.get_device_properties(0).total_memory
    free()
    torch.cuda.set_per_process_memory_fraction(min(1.0, num_bytes / there))
    try:
        function()
        torch.cuda.synchronize()
        return True
    except torch.OutOfMemoryError:
        return False
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        free()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument("--quick", action="store_true", help="fewer layers and runs, no run near the budget")
    parser.add_argument("--patience", type=float, default=30.0, help="seconds that a run near the budget may take")
    options = parser.parse_args()
    reason = missing()
    if reason is not None:
        print(f"SKIPPED, nothing was measured: {reason}")
        if options.json:
            print(json.dumps({"skipped": reason}))
        return
    summary: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name(0),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
    }
    # cuDNN's attention is planned anew for each shape, which would be measured too
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
        summary |= speed(options.quick)
        for name, value in summary.items():
            print(f"{name}: {value:.4g}" if isinstance(value, float) else f"{name}: {value}", flush=True)
        summary |= longest(options.quick, options.patience)
    print(f"max_t_ratio: {summary['max_t_ratio']:.4g}")
    if options.json:
        print(json.dumps(summary))


if __name__ == "__main__":
    main()
