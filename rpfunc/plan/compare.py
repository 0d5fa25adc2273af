"""Schedules side by side: each with the plan that suits it, on one model and one machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import NamedTuple

from rpfunc.errors import OptionsError
from rpfunc.plan.contiguous import Candidate, Pipeline, fastest_plans
from rpfunc.plan.costs import LayerCost, StageCosts, stage_costs
from rpfunc.plan.deal import Deal
from rpfunc.plan.filling import ROUNDING
from rpfunc.plan.hardware import COMPUTE_ONLY, Hardware
from rpfunc.plan.plan import Plan
from rpfunc.plan.search import Found, Space
from rpfunc.schedule.gpipe import gpipe
from rpfunc.schedule.greedy import greedy
from rpfunc.schedule.interleaved import interleaved
from rpfunc.schedule.looped_bfs import looped_bfs
from rpfunc.schedule.one_f_one_b import one_f_one_b
from rpfunc.schedule.report import Report, report
from rpfunc.schedule.simulate import simulate
from rpfunc.schedule.task import Schedule
from rpfunc.schedule.timeline import Timeline
from rpfunc.schedule.workload import Workload
from rpfunc.schedule.zero_bubble import halve, zb_h1, zb_v

Generator = Callable[[Workload, int], Schedule]

RESIDENT = ("gpipe", "one_f_one_b", "interleaved", "zb_h1", "zb_v")
"""Schedules whose stages stay on their worker, with all that it has."""

DEALT = ("round_robin", "split_dispatch", "greedy")
"""Schedules that may join iterations, one update late: any worker runs any stage."""

SCHEDULES = (*RESIDENT, "looped_bfs", *DEALT)


class Compared(NamedTuple):
    """One schedule with its plan.

    deal              the plan, and to how many workers each slot is dealt: to one in all but split_dispatch
    bubble, report    of one iteration alone, the workers drained at its end
    steady_bubble     of iterations that follow each other without end, one update late; None for classic pipelines and
                      greedy
    steady_time       of one of those
    steady_deal       the deal of those
    """

    name: str
    deal: Deal
    work: Workload
    costs: StageCosts
    schedule: Schedule
    timeline: Timeline
    report: Report
    steady_bubble: float | None
    steady_time: float | None
    steady_deal: Deal | None

    @property
    def plan(self) -> Plan:
        """The deal's plan."""
        return self.deal.plan


def compare(
    layers: Sequence[LayerCost],
    workers: int,
    microbatches: int,
    hardware: Hardware = COMPUTE_ONLY,
    names: Sequence[str] = SCHEDULES,
) -> Iterator[Compared]:
    """Yields each schedule, with the best plan that is known for it, simulated.

    Classic pipelines have the fastest contiguous partition that `fastest_plans` finds among those that fit the
    hardware's memory; of all if none of them fits. Interleaved and looped ones have as many stages a worker, up to 12,
    as is fastest, looped ones also a stage for each layer. Dealt ones have the plan that `search` finds for one
    iteration, with at least as many slots as workers (greedy that of split_dispatch), and for their steady state the
    one that it finds for joined iterations. Raises OptionsError for unknown names, and what `search` raises.
    """
    unknown = [name for name in names if name not in SCHEDULES]
    if unknown:
        raise OptionsError(f"schedule: there is no {', '.join(unknown)}, there are {', '.join(SCHEDULES)}")
    # those that are dealt have plans and some of the searches in common
    search = cache(Space(layers, workers, microbatches, hardware, least_slots=workers).search)
    for name in names:
        if name in DEALT:
            yield _dealt(name, layers, workers, microbatches, hardware, search)
        else:
            counts = _stage_counts(name, workers, len(layers))
            yield from [_classic(name, layers, workers, microbatches, hardware, counts)] if counts else []


def _stage_counts(name: str, workers: int, num_layers: int) -> list[int]:
    rounds = {"interleaved": range(2, 13), "looped_bfs": range(1, 13), "zb_v": [2]}.get(name, [1])
    counts = [workers * times for times in rounds if workers * times <= num_layers]
    # the last moves whole layers, which takes the least memory
    return sorted({*counts, num_layers}) if name == "looped_bfs" and counts else counts


def _classic(
    name: str, layers: Sequence[LayerCost], workers: int, microbatches: int, hardware: Hardware, counts: Sequence[int]
) -> Compared:
    generators: dict[str, Generator] = {
        "gpipe": gpipe,
        "one_f_one_b": one_f_one_b,
        "interleaved": interleaved,
        "looped_bfs": looped_bfs,
        "zb_h1": zb_h1,
        "zb_v": zb_v,
    }

    def generate(work: Workload, num_workers: int) -> tuple[Schedule, Workload]:
        schedule = generators[name](work, num_workers)
        return schedule, halve(work) if name in ("zb_h1", "zb_v") else work

    pipelines = [
        Pipeline(generate, count, workers, microbatches, hardware, resident=name in RESIDENT) for count in counts
    ]

    def best(found: Sequence[Candidate], allowed: Callable[[Compared], bool]) -> Compared | None:
        chosen = None
        for over, time, plan in found:
            if chosen is not None and (over or time >= chosen.report.makespan * (1 - ROUNDING)):
                break  # transfers that wait for each other only make it longer
            schedule, work = generate(Workload(plan.slots, microbatches), workers)
            row = _simulated(name, Deal(plan, (1,) * len(plan.slots)), work, schedule, layers, hardware)
            if allowed(row) and (chosen is None or row.report.makespan < chosen.report.makespan):
                chosen = row
        return chosen

    fastest = best(fastest_plans(layers, pipelines), lambda row: True)
    assert fastest is not None
    if not fastest.report.over_memory or _never_fits(name, layers, workers, hardware.memory_bytes):
        return fastest
    limited = fastest_plans(layers, pipelines, hardware.memory_bytes)
    return best(limited, lambda row: not row.report.over_memory) or fastest


def _never_fits(name: str, layers: Sequence[LayerCost], workers: int, memory: float) -> bool:
    """Returns whether parameters and gradients alone are too many for any plan."""
    sizes = [layer.parameter_bytes + layer.gradient_bytes for layer in layers]
    return max(sizes) > memory or (name in RESIDENT and sum(sizes) > workers * memory)


def _dealt(
    name: str,
    layers: Sequence[LayerCost],
    workers: int,
    microbatches: int,
    hardware: Hardware,
    search: Callable[..., Found],
) -> Compared:
    split = name != "round_robin"
    once = search(split=split).deal
    work = once.workload(microbatches)
    costs = stage_costs(once.plan, layers)
    schedule = greedy(work, workers, costs) if name == "greedy" else once.schedule(work, workers)
    row = _simulated(name, once, work, schedule, layers, hardware)
    if name == "greedy":
        return row
    joined = search(staleness=1, joined=True, split=split)
    slots = stage_costs(joined.deal.plan, layers)
    busy = microbatches * sum(slots[slot].time for slot in joined.deal.plan.slots)
    bubble = 1 - busy / (workers * joined.time) if joined.time else 0.0
    return row._replace(steady_bubble=bubble, steady_time=joined.time, steady_deal=joined.deal)


def _simulated(
    name: str, deal: Deal, work: Workload, schedule: Schedule, layers: Sequence[LayerCost], hardware: Hardware
) -> Compared:
    costs = stage_costs(deal.plan, layers)
    timeline = simulate(schedule, costs, hardware, work, resident=name in RESIDENT)
    found = report(timeline, schedule, costs, hardware, work)
    return Compared(name, deal, work, costs, schedule, timeline, found, None, None, None)
