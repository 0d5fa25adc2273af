"""Schedules as values: tasks, generators, validation, timelines."""

from rpfunc.schedule import bubbles
from rpfunc.schedule.draw import draw
from rpfunc.schedule.gpipe import gpipe
from rpfunc.schedule.greedy import greedy
from rpfunc.schedule.interleaved import interleaved
from rpfunc.schedule.looped_bfs import looped_bfs
from rpfunc.schedule.one_f_one_b import one_f_one_b
from rpfunc.schedule.round_robin import round_robin
from rpfunc.schedule.simulate import simulate
from rpfunc.schedule.split_dispatch import split_dispatch
from rpfunc.schedule.task import Schedule, Task
from rpfunc.schedule.timeline import Event, Timeline
from rpfunc.schedule.torch_csv import dump_csv, load_csv
from rpfunc.schedule.validate import validate
from rpfunc.schedule.workload import Workload
from rpfunc.schedule.zero_bubble import halve, zb_h1, zb_v

__all__ = [
    "Event",
    "Schedule",
    "Task",
    "Timeline",
    "Workload",
    "bubbles",
    "draw",
    "dump_csv",
    "gpipe",
    "greedy",
    "halve",
    "interleaved",
    "load_csv",
    "looped_bfs",
    "one_f_one_b",
    "round_robin",
    "simulate",
    "split_dispatch",
    "validate",
    "zb_h1",
    "zb_v",
]
