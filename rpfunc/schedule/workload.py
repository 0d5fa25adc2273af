"""Workloads: the tasks that a schedule has to get done, and what each of them waits for."""

from __future__ import annotations

from collections.abc import Collection, Sequence, Set
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from rpfunc.checks import count_problems, is_whole, shown
from rpfunc.errors import ScheduleError
from rpfunc.schedule.task import Schedule, Task

MOST_TASKS = 10**7
"""What lists of tasks hold: more is a mistake, which would fill the memory before it is noticed."""

Slot = tuple[str, int]
"""(kind, stage): F, X or B; a B slot may be done in two tasks, I and W."""


@dataclass(frozen=True)
class Workload:
    """Every slot for every microbatch of some iterations: the one set of rules that all who handle schedules share.

    slots             (kind, stage) in the order in which a microbatch passes them, as in `Plan.slots`
    num_microbatches  of one iteration; numbers run on, so iteration i has microbatches i*M to (i+1)*M - 1
    num_blocks        gradient blocks, contiguous runs of an iteration's microbatches, sizes differing by at most one,
                      larger first: a stage's gradients are summed in order inside a block, and blocks are independent
    num_iterations    iterations that follow each other
    staleness         0: the forward passes of iteration i wait for the update of iteration i-1; 1: of iteration i-2
    halved            backward passes (stage, microbatch) that are done in two tasks, I and W, instead of one, B

    Raises ScheduleError listing what cannot be.

    >>> from rpfunc import Plan
    >>> work = Workload(Plan.parse("F0:2 X2:3 B0:2").slots, num_microbatches=2)
    >>> print(*work.tasks)
    0F0 0F1 1X0 1X1 0B0 0B1
    >>> print(*work.dependencies(Task.parse("0B1")))
    1X1 0B0
    """

    slots: Sequence[Slot]
    num_microbatches: int
    num_blocks: int = 1
    num_iterations: int = 1
    staleness: int = 0
    halved: frozenset[tuple[int, int]] = field(default=frozenset(), repr=False)

    def __post_init__(self) -> None:
        counts = {name: getattr(self, name) for name in ("num_microbatches", "num_blocks", "num_iterations")}
        problems = count_problems(counts)
        if not problems and self.num_blocks > self.num_microbatches:
            problems.append(
                f"num_blocks is {self.num_blocks}, there are {self.num_microbatches} microbatches to divide"
            )
        if self.staleness not in (0, 1):
            problems.append(f"staleness is {shown(self.staleness)}, it must be 0 or 1")
        problems += _slot_problems(self.slots)
        if not (isinstance(self.halved, Set) and all(map(_is_pair, self.halved))):
            problems.append(f"halved is {shown(self.halved)}, it must be a set of (stage, microbatch)")
        if problems:
            raise ScheduleError.listing("workload", problems)

    @classmethod
    def of(cls, schedule: Schedule) -> Workload:
        """Returns the workload of one iteration that a complete schedule does; its stages and microbatches say which.

        >>> Workload.of(Schedule.parse("0F0 0I0 0W0")).slots
        [('F', 0), ('B', 0)]
        """
        kinds: dict[str, set[int]] = {"F": set(), "X": set(), "B": set()}
        for stage, kind, _ in schedule.tasks:
            kinds["B" if kind in "IW" else kind].add(stage)
        slots = [("F", stage) for stage in sorted(kinds["F"])] + [("X", stage) for stage in sorted(kinds["X"])]
        slots += [("B", stage) for stage in sorted(kinds["B"], reverse=True)]
        num_microbatches = 1 + max((task.microbatch for task in schedule.tasks), default=0)
        halved = frozenset((stage, m) for stage, kind, m in schedule.tasks if kind in "IW")
        return cls(slots, num_microbatches, halved=halved)

    @property
    def all_microbatches(self) -> range:
        """The microbatches of all iterations."""
        return range(self.num_microbatches * self.num_iterations)

    @property
    def num_tasks(self) -> int:
        """How many tasks there are, which are not made for it."""
        backward, microbatches = {stage for kind, stage in self.slots if kind == "B"}, self.all_microbatches
        in_two = sum(stage in backward and m in microbatches for stage, m in self.halved)
        return len(self.slots) * microbatches.stop + in_two

    @property
    def tasks(self) -> list[Task]:
        """Every task, slot by slot. Raises ScheduleError for more than can be meant."""
        self.check_size("workload")
        return [
            Task(stage, part, m)
            for kind, stage in self.slots
            for m in self.all_microbatches
            for part in (("I", "W") if kind == "B" and (stage, m) in self.halved else (kind,))
        ]

    @cached_property
    def block_starts(self) -> tuple[int, ...]:
        """The first microbatch of each block of an iteration. Raises ScheduleError for more than can be meant."""
        problems = count_problems({"num_blocks": self.num_blocks}, most=MOST_TASKS)
        if problems:
            raise ScheduleError.listing("workload", problems)
        size, larger = self._block_size
        return tuple(block * size + min(block, larger) for block in range(self.num_blocks))

    def check_size(self, subject: str, problems: Sequence[str] = ()) -> None:
        """Raises ScheduleError for more tasks than can be meant, listing other problems with it."""
        problems = [*problems, *count_problems({"the number of the workload's tasks": self.num_tasks}, most=MOST_TASKS)]
        if problems:
            raise ScheduleError.listing(subject, problems)

    def iteration(self, task: Task) -> int:
        """Returns the iteration that a task belongs to."""
        return task.microbatch // self.num_microbatches

    def dependencies(self, task: Task) -> list[Task]:
        """Returns the tasks that must have ended before `task` may start; it must be one of this workload's.

        A task needs its microbatch's slot before; a backward task that is the one that hands it its cotangent. W needs
        its I. Tasks that write gradients follow the same stage's task of the microbatch before in their block, since
        sums run in microbatch order (so that no schedule changes a bit). The first of a block follows the last of the
        same block in the iteration before: the sum goes into the same buffer, which the optimizer takes as soon as it
        is complete, whether or not the update before has ended. Without staleness that follows from the update that
        the iteration awaits; with it, only where each slot goes to one worker in turn and there are no fewer slots than
        workers, as in `round_robin`: of what lies between, something stands behind the slot on its own worker.
        """
        stage, kind, m = task
        if kind == "W":
            needed = [Task(stage, "I", m)]
        else:
            before = self._before.get(("B" if kind == "I" else kind, stage))
            needed = [] if before is None else [Task(before[1], self._part(before, m, "I"), m)]
        if kind in "XBW" and (summed := self._summed_before(m)) >= 0:
            slot = ("X" if kind == "X" else "B", stage)
            needed.append(Task(stage, self._part(slot, summed, "W"), summed))
        return needed

    def awaited_update(self, task: Task) -> int | None:
        """Returns the iteration whose update must have ended before `task` reads parameters; None for none.

        An iteration's tasks all read one version, and its first slot is what waits for it.
        """
        iteration = self.iteration(task) - 1 - self.staleness
        slot = ("B" if task.kind == "I" else task.kind, task.stage)  # W follows its I
        return iteration if iteration >= 0 and slot == self.slots[0] else None

    def _summed_before(self, m: int) -> int:
        """Returns the microbatch whose gradients go into the same buffer before those of m; below 0 for none."""
        size, larger = self._block_size
        place = m % self.num_microbatches
        if place < larger * (size + 1):
            size, inside = size + 1, place % (size + 1)
        else:
            inside = (place - larger) % size
        return m - 1 if inside else m - self.num_microbatches + size - 1

    @cached_property
    def _block_size(self) -> tuple[int, int]:
        """The microbatches of a block, and how many blocks have one more."""
        return divmod(self.num_microbatches, self.num_blocks)

    @cached_property
    def _before(self) -> dict[Slot, Slot]:
        return dict(zip(self.slots[1:], self.slots[:-1], strict=True))

    def _part(self, slot: Slot, m: int, part: str) -> str:
        """Returns the kind of the task that does `part` (I or W) of a slot for microbatch m."""
        return part if slot[0] == "B" and (slot[1], m) in self.halved else slot[0]


def _slot_problems(slots: Any) -> list[str]:
    """Returns what keeps `slots` from being (kind, stage), each once."""
    if not isinstance(slots, Collection) or isinstance(slots, str):
        return [f"slots is {shown(slots)}, it must be a sequence of (kind, stage)"]
    problems = [] if slots else ["has no slot, needs at least one"]
    seen = set()
    for place, slot in enumerate(slots):
        if not (_is_pair(slot) and slot[0] in ("F", "X", "B") and is_whole(slot[1]) and slot[1] >= 0):
            problems.append(f"slot {place} is {shown(slot)}, it must be a kind, F, X or B, and a stage from 0 on")
        elif slot in seen:
            problems.append(f"slot {place} is {shown(slot)}, which is there already")
        else:
            seen.add(slot)
    problems += [
        f"stage {stage} is both forward and fused, it can be one of them"
        for stage in sorted(stage for kind, stage in seen if kind == "X" and ("F", stage) in seen)
    ]
    return problems


def _is_pair(entry: Any) -> bool:
    return isinstance(entry, tuple) and len(entry) == 2
