"""Schedules as values: tasks, generators, validation, timelines."""

from rpfunc.schedule import bubbles
from rpfunc.schedule.draw import draw
from rpfunc.schedule.gantt import gantt
from rpfunc.schedule.gpipe import gpipe
from rpfunc.schedule.greedy import greedy
from rpfunc.schedule.interleaved import interleaved
from rpfunc.schedule.looped_bfs import looped_bfs
from rpfunc.schedule.one_f_one_b import one_f_one_b
from rpfunc.schedule.report import Report, report
from rpfunc.schedule.round_robin import round_robin
from rpfunc.schedule.simulate import simulate
from rpfunc.schedule.split_dispatch import split_dispatch
from rpfunc.schedule.steady import Steady, steady_state
from rpfunc.schedule.task import Schedule, Task
from rpfunc.schedule.timeline import Event, Timeline
from rpfunc.schedule.torch_csv import dump_csv, load_csv
from rpfunc.schedule.validate import validate
from rpfunc.schedule.workload import Workload
from rpfunc.schedule.zero_bubble import halve, zb_h1, zb_v

__all__ = [
    "Event",
    "Report",
    "Schedule",
    "Steady",
    "Task",
    "Timeline",
    "Workload",
    "bubbles",
    "draw",
    "dump_csv",
    "gantt",
    "gpipe",
    "greedy",
    "halve",
    "interleaved",
    "load_csv",
    "looped_bfs",
    "one_f_one_b",
    "report",
    "round_robin",
    "simulate",
    "split_dispatch",
    "steady_state",
    "validate",
    "zb_h1",
    "zb_v",
]
