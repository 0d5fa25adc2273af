"""Streaming against plain autograd and activation checkpointing: peak memory, time, exactness, longest sequence.

A Qwen3-shaped decoder (hidden 512, 4 layers, 8 heads, 4 key-value heads of size 64, MLP 1536, vocabulary 32,000,
float32, batch 1) with the same layers and the same attention kernel everywhere; only the way to the gradient differs.
Peaks are exact live bytes above parameters, less the bytes of all gradients. `--quick` stops at 2,048 tokens.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from rpfunc import Batch, memory, plan, random, tree, value_and_grad
from rpfunc.models import decoder
from rpfunc.models.decoder import DecoderConfig
from rpfunc.objectives import sft

MIB = 2**20
BUDGET = 256 * MIB
CONFIG = DecoderConfig(
    vocabulary=32_000,
    width=512,
    layers=4,
    heads=8,
    kv_heads=4,
    head_size=64,
    mlp_width=1536,
    qk_norm=True,
    tied=False,
    rope_theta=1e6,
)
MODEL = decoder.model(CONFIG)
Gradient = Callable[[dict[str, Any], Batch], Any]


def autograd(params: dict[str, Any], batch: Batch, *, checkpointed: bool) -> Any:
    leaves, structure = tree.flatten(params)
    leaves = [leaf.detach().requires_grad_() for leaf in leaves]
    tracked, x = tree.unflatten(structure, leaves), ()
    *body, head = MODEL.layers
    for layer in body:
        step = partial(layer, tracked, batch=batch)
        # the embedding has nothing to recompute
        x = checkpoint(step, x, use_reentrant=False) if checkpointed and layer.name != "embedding" else step(x)
    targets = sft().prepare(batch).row["targets"].flatten()
    # torch's own loss, as elsewhere; -100 is left out, and no logits are held beside what backward needs
    loss = F.cross_entropy(head(tracked, x, batch).flatten(0, 1), targets)
    return tree.unflatten(structure, torch.autograd.grad(loss, leaves))


def streamed(params: dict[str, Any], batch: Batch, **how: Any) -> Any:
    return value_and_grad(MODEL, sft(), **how)(params, batch)[1]


CUTS: dict[str, Any] = {"chunk": 512, "head_chunk": 100}
WAYS: dict[str, Gradient] = {
    "plain": partial(autograd, checkpointed=False),
    "checkpoint": partial(autograd, checkpointed=True),
    "layer": partial(streamed, **CUTS, keep_attention=1.0),
    "chunk": partial(streamed, **CUTS, order="chunk"),
    "least": partial(streamed, **CUTS),  # layer by layer, nothing kept: for the longest sequence
}
QUICK = ("plain", "checkpoint", "layer")


def make_batch(num_rows: int) -> Batch:
    tokens = (random.uniform(random.key(1), (1, num_rows)) * CONFIG.vocabulary).long()
    return Batch(row={"tokens": tokens, "labels": tokens})


def peak_mib(way: Gradient, params: dict[str, Any], batch: Batch) -> tuple[float, Any]:
    """Returns the peak above gradients, and the gradients."""
    peak = memory.peak(lambda: way(params, batch))
    return (peak.peak_bytes - sum(leaf.nbytes for leaf in tree.leaves(params))) / MIB, peak.result


def seconds(ways: dict[str, Gradient], params: dict[str, Any], batch: Batch, rounds: int) -> dict[str, float]:
    """Returns the median over rounds, in each of which every way takes its turn.

    What a way finds depends a little on the one before: memory that was just given back by the gigabyte is slow to get
    anew.
    """
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            began = time.perf_counter()
            way(params, batch)
            taken[name].append(time.perf_counter() - began)
    return {name: statistics.median(values) for name, values in taken.items()}


def worst_error(found: Any, wanted: Any) -> float:
    """Returns the largest relative error of a parameter's gradient, as in docs/exactness.md."""
    norms = [leaf.norm() for leaf in tree.leaves(wanted)]
    floor = 1e-3 * torch.stack(norms).square().mean().sqrt()
    pairs = zip(tree.leaves(found), tree.leaves(wanted), norms, strict=True)
    return max(float((a.double() - b).norm() / (norm + floor)) for a, b, norm in pairs)


def measure(num_rows: int, quick: bool) -> Iterator[dict[str, Any]]:
    """Yields each way's figures; quick: of three ways, timed once, and plain autograd not at all."""
    exact, names = num_rows <= 8192, [*QUICK] if quick else [*WAYS]
    params, batch = decoder.init(CONFIG, random.key(0)), make_batch(num_rows)
    wanted = WAYS["plain"](tree.map(torch.Tensor.double, params), batch) if exact else None
    peaks, errors = {}, {}
    for name in names:  # these runs warm up, too
        peaks[name], found = peak_mib(WAYS[name], params, batch)
        errors[name] = worst_error(found, wanted) if exact else None
    timed = {name: WAYS[name] for name in names if not quick or name != "plain"}
    times = seconds(timed, params, batch, rounds=3 if exact and not quick else 1)
    for name in names:
        yield {
            "way": name,
            "rows": num_rows,
            "peak_mib": round(peaks[name], 1),
            "seconds": round(times[name], 3) if name in times else None,
            "error": errors[name],
        }


def longest(way: str, params: dict[str, Any], guess: int, step: int) -> int:
    """Returns the longest sequence, to `step` rows, whose really measured peak is within the budget, from a guess."""

    def fits(num_rows: int) -> bool:
        return peak_mib(WAYS[way], params, make_batch(num_rows))[0] * MIB <= BUDGET

    while not fits(guess):
        guess -= step
    while fits(guess + step):
        guess += step
    return guess


def longest_sequences() -> dict[str, int]:
    params = decoder.init(CONFIG, random.key(0))
    grads = sum(leaf.nbytes for leaf in tree.leaves(params))

    def predicted(num_rows: int) -> int:
        return plan.memory(MODEL, sft(), params, make_batch(num_rows), **CUTS)

    guess = plan.max_sequence(predicted, BUDGET + grads, granularity=512)
    return {"checkpoint": longest("checkpoint", params, 832, 16), "least": longest("least", params, guess, 512)}


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullFormatter

    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for name in dict.fromkeys(row["way"] for row in rows):
        own = [row for row in rows if row["way"] == name]
        lengths = [row["rows"] for row in own]
        left.plot(lengths, [row["seconds"] / row["rows"] * 1e3 for row in own], marker="o", label=name)
        right.plot(lengths, [row["peak_mib"] for row in own], marker="o", label=name)
    left.set_ylabel("ms per token, forward and backward")
    left.set_ylim(bottom=0)
    right.set_ylabel("peak above gradients (MiB)")
    right.set_yscale("log")
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_xticks(
            sorted({row["rows"] for row in rows}), [f"{n:,}" for n in sorted({row["rows"] for row in rows})]
        )
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.set_xlabel("tokens in the sequence")
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument("--quick", action="store_true", help="2,048 tokens only, one round of two ways")
    parser.add_argument("--up-to", type=int, default=16384, help="the longest sequence (at least 8192)")
    parser.add_argument("--plot", type=Path, help="write time and memory over length as a PNG")
    options = parser.parse_args()
    lengths = [2048] if options.quick else [rows for rows in (2048, 4096, 8192, 16384) if rows <= options.up_to]
    rows: list[dict[str, Any]] = []
    for num_rows in lengths:
        for row in measure(num_rows, options.quick):
            rows.append(row)
            print("{way:>10} T={rows:<6} {peak_mib:9.1f} MiB {seconds} s  error {error}".format(**row), flush=True)
    judged = 2048 if options.quick else 8192
    at = {row["way"]: row for row in rows if row["rows"] == judged}
    summary: dict[str, Any] = {
        "rows_judged": judged,
        "peak_ratio": at["layer"]["peak_mib"] / at["checkpoint"]["peak_mib"],
        "peak_mib": at["layer"]["peak_mib"],
        "time_ratio": at["layer"]["seconds"] / at["checkpoint"]["seconds"],
        "error_ratio": at["layer"]["error"] / at["plain"]["error"],
    }
    if not options.quick:
        found = longest_sequences()
        print(f"longest in {BUDGET // MIB} MiB above gradients: {found}", flush=True)
        summary |= {"max_t_ratio": found["least"] / found["checkpoint"], "max_t": found}
    if options.plot:
        draw(rows, options.plot)
    for name, value in summary.items():
        print(f"{name}: {value:.4g}" if isinstance(value, float) else f"{name}: {value}")
    if options.json:
        print(json.dumps({**summary, "rows": rows}))


if __name__ == "__main__":
    main()
