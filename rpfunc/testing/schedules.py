"""Hypothesis strategies for what the runtime must be able to run: any plan, any valid schedule. Needs `test`."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st

from rpfunc.plan import Plan
from rpfunc.schedule import Schedule, Task, Workload


@st.composite
def unfused_plans(draw: st.DrawFn, num_layers: int) -> Plan:
    """Draws any plan without a fused stage: forward cuts, backward cuts."""
    inner = st.sets(st.integers(1, num_layers - 1)) if num_layers > 1 else st.just(set[int]())
    forward, backward = (Plan.symmetric(num_layers, [0, *sorted(draw(inner))]).forward for _ in range(2))
    return Plan(forward, None, backward)


@st.composite
def runnable_schedules(draw: st.DrawFn, work: Workload, num_workers: int) -> Schedule:
    """Draws any schedule that does the work: all that `validate` accepts, and nothing else.

    Some backward passes are halved, whatever `work.halved` says; a random topological order of all tasks is dealt to
    some of the workers, at random. Every valid schedule is such a deal, since its workers' orders and the dependencies
    together have no circle.
    """
    random = draw(st.randoms(use_true_random=True))
    share = draw(st.sampled_from([0.0, 0.5, 1.0]), label="share of halved backward passes")
    passes = [(stage, m) for kind, stage in work.slots if kind == "B" for m in work.all_microbatches]
    work = replace(work, halved=frozenset(each for each in passes if random.random() < share))
    workers: list[list[Task]] = [[] for _ in range(num_workers)]
    busy = random.sample(workers, random.randint(1, num_workers))
    needed = {task: set(work.dependencies(task)) for task in work.tasks}
    while needed:
        task = random.choice([task for task, missing in needed.items() if not missing])
        del needed[task]
        for missing in needed.values():
            missing.discard(task)
        random.choice(busy).append(task)
    return Schedule(tuple(map(tuple, workers)))
