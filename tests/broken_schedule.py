"""How schedules with faults are written down, and what `validate` has to say about each."""

from typing import Any, NamedTuple

from rpfunc import Plan
from rpfunc.schedule import Schedule, Workload

ONE = "F0:1 B0:1"
TWO = "F0:1 F1:2 B0:1 B1:2"
TURN = "F0:2 X2:3 B0:1 B1:2"


class Broken(NamedTuple):
    name: str
    schedule: Schedule
    work: Workload
    options: dict[str, Any]
    message: str


def work(plan, num_microbatches, **options):
    return Workload(Plan.parse(plan).slots, num_microbatches, **options)


def broken(name, text, work, *message, **options):
    return Broken(name, Schedule.parse(text), work, options, "\n".join(message))
