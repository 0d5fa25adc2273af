"""Schedules as values: tasks, generators, validation, timelines."""

from rpfunc.schedule.draw import draw
from rpfunc.schedule.round_robin import round_robin
from rpfunc.schedule.task import Schedule, Task
from rpfunc.schedule.timeline import Event, Timeline
from rpfunc.schedule.validate import validate
from rpfunc.schedule.workload import Workload

__all__ = ["Event", "Schedule", "Task", "Timeline", "Workload", "draw", "round_robin", "validate"]
