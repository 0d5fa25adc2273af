"""Schedules as values: tasks, generators, validation, timelines."""

from rpfunc.schedule.dependencies import dependencies
from rpfunc.schedule.draw import draw
from rpfunc.schedule.round_robin import round_robin
from rpfunc.schedule.task import Schedule, Task
from rpfunc.schedule.timeline import Event, Timeline
from rpfunc.schedule.validate import validate

__all__ = ["Event", "Schedule", "Task", "Timeline", "dependencies", "draw", "round_robin", "validate"]
