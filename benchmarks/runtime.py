"""The runtime: what dispatch costs, what workers gain, what the asynchronous optimizer hides.

All but the first and last figures are of an 8-layer decoder of width 384 on 16 x 256 bytes, float32. Whatever is
compared takes its turns in one process, and ratios are medians over the turns. `--quick` takes one turn, on 4 x 96.
`--json` prints one JSON object as the last line.

    task_overhead_us   microseconds a task of empty forward stages takes, two workers
    speedup_2          two workers of one intra-op thread against one, asynchronous, as a share of what two threads that
                       know nothing of each other gain in the same turn
    vs_checkpoint      tokens a second against a loop of plain torch with checkpointing on both cores
    vs_plain           the same with residuals kept, against a loop without checkpointing
    async_hidden       time of an iteration with an optimizer half as long as the computation, asynchronous, one worker,
                       over that without one
    makespan_error     the largest |measured / simulated - 1| of five schedules whose stages sleep for a known time
    optimizer_ratio    as in benchmarks/optimizer.py
"""

from __future__ import annotations

import argparse
import json
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any

import torch
from optimizer import measure as measure_optimizer
from torch.utils.checkpoint import checkpoint

from rpfunc import (
    Batch,
    Cpu,
    Layer,
    Model,
    Plan,
    Runtime,
    State,
    apply,
    optim,
    random,
    train_steps,
    tree,
    value_and_grad,
)
from rpfunc.models import decoder
from rpfunc.models.decoder import DecoderConfig
from rpfunc.objectives import sft
from rpfunc.plan import StageCost
from rpfunc.schedule import Workload, gpipe, interleaved, looped_bfs, one_f_one_b, round_robin, simulate
from rpfunc.stream import opaque

CONFIG = DecoderConfig(vocabulary=256, width=384, layers=8, heads=6, kv_heads=6, head_size=64, mlp_width=1024)
MODEL = decoder.model(CONFIG)
PARAMS = decoder.init(CONFIG, random.key(0))
OPTIMIZER = optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(1e-4))
Timed = Callable[[], float]
"""Returns the seconds that one iteration takes."""


def make_batch(examples: int, rows: int) -> Batch:
    tokens = (random.uniform(random.key(1), (examples, rows)) * CONFIG.vocabulary).long()
    return Batch(row={"tokens": tokens, "labels": tokens})


def steps(batch: Batch, workers: Any, optimizer: optim.Transformation = OPTIMIZER, **options: Any) -> Iterator[Any]:
    """Yields after each step of an endless run."""
    state = State.create(tree.map(torch.clone, PARAMS), optimizer)
    options = {"microbatches": 4, "donate": True, "asynchronous": True} | options
    return train_steps(
        state, iter(lambda: batch, None), model=MODEL, objective=sft(), optimizer=optimizer, workers=workers, **options
    )


def seconds(run: Iterator[Any], count: int, warm: int = 2) -> float:
    """Returns the median time between `count` results of a run, and ends it."""
    times = []
    for _ in islice(run, warm + count):
        times.append(time.perf_counter())
    run.close()  # type: ignore[attr-defined]
    return statistics.median(after - before for before, after in zip(times[warm - 1 :], times[warm:], strict=False))


def plain_loop(batch: Batch, *, checkpointed: bool) -> Iterator[Any]:
    """Yields after each step of a loop of plain torch with its fused optimizer."""
    leaves, structure = tree.flatten(PARAMS)
    leaves = [torch.nn.Parameter(leaf.clone()) for leaf in leaves]
    optimizer = torch.optim.AdamW(leaves, lr=1e-4, fused=True)
    objective = sft()
    while True:
        params, x = tree.unflatten(structure, leaves), ()
        prepared = objective.prepare(batch)
        for layer in MODEL.layers:
            step = partial(layer, params, batch=prepared)
            again = checkpointed and layer not in (MODEL.layers[0], MODEL.layers[-1])
            x = checkpoint(step, x, use_reentrant=False) if again else step(x)
        loss = torch.nn.functional.cross_entropy(x.flatten(0, 1), prepared.row["targets"].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(leaves, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item()


def task_overhead_us(num_tasks: int) -> float:
    """Returns the time of a run of empty forward stages over its tasks, in microseconds."""
    empty = Model(tuple(Layer(f"empty{index}", opaque(lambda params, x, batch: x)) for index in range(8)))
    batch = Batch(row={"x": torch.zeros(num_tasks // 8, 1)})
    plan = Plan.parse(" ".join(f"F{index}:{index + 1}" for index in range(8)))
    with Runtime([Cpu(), Cpu()]) as runtime:
        run = apply(empty, plan=plan, workers=runtime, microbatches=num_tasks // 8, schedule=round_robin)

        def once() -> float:
            return run({}, batch)[1].makespan_s

        once()
        return statistics.median(once() for _ in range(7)) / num_tasks * 1e6


def two_apart(batch: Batch, count: int, alone: float) -> float:
    """Returns what two threads gain over one that does the same work alone, each for itself."""
    found: list[float] = []

    def apart() -> None:
        found.append(seconds(steps(batch, [Cpu()], plan=PLAN), count + 1))

    threads = [threading.Thread(target=apart) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return 2 * alone / statistics.mean(found)


PLAN = Plan.parse("F0:7 X7:10 B0:3 B3:5 B5:7")


def speedup_2(batch: Batch, count: int) -> tuple[float, float]:
    """Returns (the gain of two workers over one, the share that this is of two independent threads' gain)."""
    alone = seconds(steps(batch, [Cpu()], plan=PLAN), count)
    gain = alone / seconds(steps(batch, [Cpu()] * 2, plan=PLAN), count, warm=3)
    return gain, gain / two_apart(batch, count, alone)


def against(batch: Batch, count: int, *, checkpointed: bool, **options: Any) -> float:
    """Returns our speed over that of a loop of plain torch."""
    loop = seconds(plain_loop(batch, checkpointed=checkpointed), count)
    return loop / seconds(steps(batch, [Cpu()] * 2, plan=PLAN, **options), count, warm=3)


def slow_optimizer(busy_s: float) -> optim.Transformation:
    """Returns the optimizer, with idle arithmetic that takes so long in the thread that it works in."""
    leafwise = OPTIMIZER.leafwise
    assert leafwise is not None
    scalars = leafwise.scalars

    def slow(*arguments: Any) -> Any:
        end, matrix = time.thread_time() + busy_s, torch.ones(128, 128)
        while time.thread_time() < end:
            matrix = matrix @ matrix / 128
        return scalars(*arguments)

    return replace(OPTIMIZER, leafwise=replace(leafwise, scalars=slow))


def async_hidden(batch: Batch, count: int) -> float:
    """Returns the time of an iteration with an optimizer of half its length over that with next to none."""
    compute = seconds(steps(batch, [Cpu()], optim.sgd(0.0)), count)
    return seconds(steps(batch, [Cpu()], slow_optimizer(compute / 2)), count) / compute


def makespan_error(unit_s: float, repeats: int) -> float:
    """Returns the largest relative error of a simulated makespan."""
    plans = {
        gpipe: Plan.symmetric(4, [0, 2]),
        one_f_one_b: Plan.symmetric(4, [0, 2]),
        interleaved: Plan.symmetric(4, [0, 1, 2, 3]),
        round_robin: Plan.parse("F0:2 F2:3 X3:4 B0:1 B1:2 B2:3"),
        looped_bfs: Plan.symmetric(4, [0, 1, 2, 3]),
    }
    return max(_error(generate, plan, unit_s, repeats) for generate, plan in plans.items())


def _error(generate: Any, plan: Plan, unit_s: float, repeats: int) -> float:
    work = Workload(plan.slots, 4, 4)
    schedule = generate(work, 2)
    # a layer sleeps forward and again when it is taken forward for its backward pass
    costs = {slot: StageCost(unit_s * (plan.span(*slot).stop - plan.span(*slot).start)) for slot in plan.slots}
    batch = Batch(row={"tokens": torch.zeros(4, 2).long(), "labels": torch.zeros(4, 2).long()})

    def sleep(params: Any, x: Any, batch: Batch, seconds: float) -> Any:
        time.sleep(seconds)
        return batch.row["tokens"][..., None] * params if x == () else x * 1.0

    def makespan(runtime: Runtime, seconds: float) -> float:
        form = opaque(partial(sleep, seconds=seconds))
        model = Model(tuple(Layer(f"sleep{index}", form, "scale" if index == 0 else ()) for index in range(4)))
        run = value_and_grad(model, sft(), plan=plan, schedule=schedule, microbatches=4, blocks=4, workers=runtime)
        return run({"scale": torch.ones(2)}, batch)[0].timeline.makespan_s

    with Runtime([Cpu(), Cpu()]) as runtime:
        makespan(runtime, 0.0)  # warms up
        measured = statistics.median(makespan(runtime, unit_s) for _ in range(repeats))
    return abs(measured / simulate(schedule, costs, work=work).makespan_s - 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--only", help="one key")
    arguments = parser.parse_args()
    turns, count, batch = (1, 1, make_batch(4, 96)) if arguments.quick else (3, 4, make_batch(16, 256))
    gains: list[float] = []

    def speedup() -> float:
        gain, share = speedup_2(batch, count)
        gains.append(gain)
        return share

    figures: dict[str, Callable[[], float]] = {
        "task_overhead_us": lambda: task_overhead_us(2000),
        "makespan_error": lambda: makespan_error(0.05 if arguments.quick else 0.1, 1 if arguments.quick else 3),
        "vs_checkpoint": lambda: against(batch, count, checkpointed=True),
        "vs_plain": lambda: against(batch, count, checkpointed=False, recompute=False),
        "async_hidden": lambda: async_hidden(batch, count),
        "speedup_2": speedup,
        "optimizer_ratio": lambda: measure_optimizer(4 if arguments.quick else 100, 5)["optimizer_ratio"],
    }
    found: dict[str, float] = {}
    for name, figure in figures.items():
        if arguments.only in (None, name):
            values = [figure() for _ in range(turns)]
            found[name] = statistics.median(values)
            print(f"{name:20} {found[name]:8.3f}   {' '.join(f'{value:.3f}' for value in values)}", flush=True)
    if gains:
        found["speedup_2_absolute"] = statistics.median(gains)
    if arguments.json:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
