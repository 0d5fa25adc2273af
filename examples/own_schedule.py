"""Write a schedule of your own, check it, simulate it, draw it, and run it: the gradient stays the same, bit for bit.

    .venv/bin/python examples/own_schedule.py [picture.png]

The schedule deals the plan's slots to workers like cards, since any worker may run any stage, and orders tasks by
waves: slot i of microbatch m belongs to wave i + m. It has less idle time than 1F1B with the same stages.
"""

import sys

import torch

from rpfunc import Batch, Plan, random, reference, tree, value_and_grad
from rpfunc.errors import ScheduleError
from rpfunc.models import decoder
from rpfunc.objectives import sft
from rpfunc.plan import forward_flops
from rpfunc.plan.classic import classic_partition
from rpfunc.plan.costs import LayerCost, stage_costs
from rpfunc.schedule import Schedule, Task, Workload, draw, gantt, gpipe, one_f_one_b, simulate, validate
from rpfunc.testing import gradient_error

WORKERS, MICROBATCHES, ROWS = 4, 8, 64
FLOPS_PER_S = 20e9  # of one core, for the picture's scale
CONFIG = decoder.DecoderConfig(vocabulary=256, width=64, layers=7, heads=4, kv_heads=2, head_size=16, mlp_width=128)


def waves(work, num_workers):
    """Returns the schedule: slot i goes to worker i mod num_workers, the tasks of a worker by wave."""
    workers = [[] for _ in range(num_workers)]
    places = [(place + m, m, place) for place in range(len(work.slots)) for m in work.all_microbatches]
    for _, m, place in sorted(places):
        kind, stage = work.slots[place]
        workers[place % num_workers].append(Task(stage, kind, m))
    return Schedule(tuple(map(tuple, workers)))


def last_first(work, num_workers):
    """As `waves`, but backward passes begin with the last microbatch, whose activations came last."""
    lines = []
    for tasks in waves(work, num_workers).workers:
        forward = [task for task in tasks if task.kind == "F"]
        backward = sorted(
            (task for task in tasks if task.kind == "B"), key=lambda task: (-task.stage, -task.microbatch)
        )
        lines.append((*forward, *backward))
    return Schedule(tuple(lines))


def check():
    """Prints the schedule of a small workload, and how a wrong one is refused."""
    work = Workload(Plan.symmetric(2, [0, 1]).slots, num_microbatches=3)
    validate(waves(work, 2), work)
    print(f"waves of two stages, three microbatches, two workers:\n{waves(work, 2)}\n")
    try:
        validate(last_first(work, 2), work)
    except ScheduleError as error:
        print(f"with the last microbatch first:\n{error}\n")
    apart = Workload(work.slots, num_microbatches=3, num_blocks=3)
    validate(last_first(apart, 2), apart)
    print("accepted where each microbatch is a gradient block of its own (blocks=3)\n")


def compare(plan, costs, picture):
    """Prints what share of the time workers would be idle, if time goes by FLOPs."""
    work = Workload(plan.slots, MICROBATCHES)
    timelines = {each: simulate(each(work, WORKERS), stage_costs(plan, costs)) for each in (gpipe, one_f_one_b, waves)}
    print(f"plan {plan}, {WORKERS} workers, {MICROBATCHES} microbatches, simulated:")
    for generate, timeline in timelines.items():
        print(f"  {generate.__name__:12} workers are idle {timeline.bubble:.1%} of the time")
    print(f"\n{gantt(timelines[waves])}")
    if picture:
        draw(timelines[waves], picture, "waves, simulated")
        print(f"drawn to {picture}")


def run(model, plan, params, batch):
    """Runs the schedule on threads; compares with plain backpropagation, and with the bits of a run without threads."""
    how = {"plan": plan, "schedule": waves, "workers": WORKERS}
    result, grads = value_and_grad(model, sft(), microbatches=MICROBATCHES, **how)(params, batch)
    loss, wanted = reference.value_and_grad(model, sft())(params, batch)
    print(f"\nrun on {WORKERS} CPU workers: loss {result.loss:.6f}, by plain backpropagation {loss:.6f}")
    print(f"error of the gradient: {gradient_error(grads, wanted):.1e}")
    _, plain = value_and_grad(model, sft(), microbatches=MICROBATCHES)(params, batch)
    same = all(torch.equal(*pair) for pair in zip(tree.leaves(grads), tree.leaves(plain), strict=True))
    print(f"the same bits as one worker without stages: {'yes' if same else 'no'}")


def main(picture=None):
    model, params = decoder.model(CONFIG), decoder.init(CONFIG, random.key(0), torch.float64)
    tokens = (random.uniform(random.key(1), (MICROBATCHES, ROWS)) * CONFIG.vocabulary).long()
    batch = Batch(row={"tokens": tokens, "labels": tokens})
    costs = [LayerCost.of_forward(flops / FLOPS_PER_S) for flops in forward_flops(model, params, sft().prepare(batch))]
    plan = classic_partition(costs, stages=WORKERS)
    check()
    compare(plan, costs, picture)
    run(model, plan, params, batch)


if __name__ == "__main__":
    main(*sys.argv[1:])
