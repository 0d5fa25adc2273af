"""Schedules of the five models that RoundPipe is measured on: bubbles in the cost model and with transfers, speed.

8 workers. In the cost model a transformer layer's forward takes 1, its backward with recomputation 3, the head what it
takes relative to a layer at 2,048 rows; only computation takes time. With transfers: RTX 4090 at 75% of its data
sheet's rate, PCIe 4 (32 GB/s each way), 24 GB, sequences of 2,048 rows, and as many of them in a microbatch as the
roofline asks for; the optimizer takes no time. `--quick` leaves out
transfers and the largest simulation.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from rpfunc.plan import Plan, partition
from rpfunc.plan.compare import compare
from rpfunc.plan.costs import LayerCost, StageCost, stage_costs
from rpfunc.plan.decoders import DECODERS, DecoderShape, decoder_costs, unit_costs
from rpfunc.plan.hardware import COMPUTE_ONLY, Hardware
from rpfunc.plan.presets import machine
from rpfunc.plan.roofline import decoder_roofline
from rpfunc.plan.search import search
from rpfunc.schedule import Workload, round_robin, simulate

WORKERS = 8
MACHINE = "8x4090"
BASELINES = ("gpipe", "one_f_one_b", "interleaved", "looped_bfs")
ZERO_BUBBLE = ("zb_h1", "zb_v")
DEALT = ("round_robin", "split_dispatch")
NAMES = (*BASELINES, *ZERO_BUBBLE, *DEALT)


def with_transfers(shape: DecoderShape, microbatches: int) -> tuple[list[LayerCost], Hardware, int]:
    """Returns costs and hardware, and how many sequences a microbatch has: the roofline's for a run, shared evenly."""
    found = machine(MACHINE)
    sequences = max(1, math.ceil(decoder_roofline(shape, found).run / microbatches))
    layers = decoder_costs(shape, 2048, sequences, flops_per_s=found.flops_per_s)
    return layers, found.hardware, sequences


def measure(shape: DecoderShape, layers: Sequence[LayerCost], hardware: Hardware, microbatches: int) -> dict[str, Any]:
    row: dict[str, Any] = {"model": shape.name, "microbatches": microbatches}
    found = {each.name: each for each in compare(layers, WORKERS, microbatches, hardware, NAMES)}
    for name in DEALT:
        row |= {f"async_{name}": max(0.0, found[name].steady_bubble), f"plan_{name}": str(found[name].plan)}
    # differences of equal sums may lie just below 0
    bubbles = {name: max(0.0, each.report.bubble) for name, each in found.items()}
    row |= {f"sync_{name}": bubble for name, bubble in bubbles.items()}
    best = min(bubbles[name] for name in BASELINES if name in bubbles)
    row |= {f"reduction_{name}": 1 - bubbles[name] / best for name in DEALT}
    return row


def median_ms(function: Callable[[], Any], rounds: int = 9) -> float:
    taken = []
    for _ in range(rounds):
        began = time.perf_counter()
        function()
        taken.append((time.perf_counter() - began) * 1e3)
    return statistics.median(taken)


def simulation_s(num_layers: int, microbatches: int) -> float:
    """Returns the seconds of one simulation with transfers of a decoder with so many layers, on 8 workers.

    A backward slot has one layer, a forward slot three: about 8,000 tasks for 94 layers and 64 microbatches.
    """
    shape = replace(DECODERS[1], layers=num_layers - 2)
    layers, hardware, _ = with_transfers(shape, microbatches)
    turn = num_layers - 1
    plan = Plan.cut(num_layers, [*range(0, turn, 3), turn], range(num_layers))
    work, costs = Workload(plan.slots, microbatches), stage_costs(plan, layers)
    schedule = round_robin(work, WORKERS)
    return median_ms(lambda: simulate(schedule, costs, hardware, work), 5) / 1e3


def large_simulation_s(size: int = 1024, microbatches: int = 1030) -> float:
    """Returns the seconds of one simulation of `size` slots on as many workers, computation alone."""
    slots = [("F", stage) for stage in range(size // 2)] + [("X", size // 2)]
    slots += [("B", stage) for stage in reversed(range(size - len(slots)))]
    work, costs = Workload(slots, microbatches), dict.fromkeys(slots, StageCost(1.0))
    schedule = round_robin(work, size)
    began = time.perf_counter()
    simulate(schedule, costs, COMPUTE_ONLY, work)
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument("--quick", action="store_true", help="leave out what takes long")
    options = parser.parse_args()
    rows = []
    for shape in DECODERS:
        for microbatches in (9, 16):
            rows.append(
                {"costs": "model", "sequences": 1} | measure(shape, unit_costs(shape), COMPUTE_ONLY, microbatches)
            )
            show(rows[-1])
            if not options.quick:
                layers, hardware, sequences = with_transfers(shape, microbatches)
                # the same times without transfers, to see what those cost
                free = replace(COMPUTE_ONLY, memory_bytes=hardware.memory_bytes)
                for name, given in ((MACHINE, hardware), (f"{MACHINE}, free transfers", free)):
                    rows.append({"costs": name, "sequences": sequences} | measure(shape, layers, given, microbatches))
                    show(rows[-1])
    model = [row for row in rows if row["costs"] == "model"]
    layers = unit_costs(DECODERS[-1])[1:-1]
    summary: dict[str, Any] = {
        "async_bubble_9": max(row["async_split_dispatch"] for row in model if row["microbatches"] == 9),
        "async_bubble_16": max(row["async_split_dispatch"] for row in model if row["microbatches"] == 16),
        "sync_reduction_min": min(row["reduction_split_dispatch"] for row in model if row["microbatches"] == 16),
        "sync_reduction_min_round_robin": min(
            row["reduction_round_robin"] for row in model if row["microbatches"] == 16
        ),
        "plan_ms_94": median_ms(lambda: partition(layers, WORKERS)),
        "plan_ms_1000": median_ms(lambda: partition([1.0] * 999 + [2.6], WORKERS), 3),
        "search_s_94": median_ms(lambda: search(layers, WORKERS, 16, least_slots=WORKERS), 1) / 1e3,
        "simulate_s_94": simulation_s(94, 64),
    }
    if not options.quick:
        summary["simulate_s_1024"] = large_simulation_s()
    for name, value in summary.items():
        print(f"{name}: {value:.4g}")
    if options.json:
        print(json.dumps({**summary, "rows": rows}))


def show(row: dict[str, Any]) -> None:
    cells = [f"{name.removeprefix('sync_')} {row[name]:.1%}" for name in row if name.startswith("sync_")]
    print(
        f"{row['model']}, {row['microbatches']} microbatches of {row['sequences']}, {row['costs']}: asynchronous "
        f"round_robin {row['async_round_robin']:.2%}, split_dispatch {row['async_split_dispatch']:.2%}; "
        f"synchronous {', '.join(cells)}",
        flush=True,
    )


if __name__ == "__main__":
    main()
