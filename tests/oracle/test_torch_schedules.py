"""Schedules and their CSV files against torch.distributed.pipelining's own; no process group is needed."""

import csv
import io
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.pipelining import schedules as torch_schedules

from rpfunc import Plan
from rpfunc.errors import ScheduleError
from rpfunc.plan.costs import StageCost
from rpfunc.schedule import (
    Schedule,
    Task,
    Workload,
    dump_csv,
    gpipe,
    interleaved,
    load_csv,
    looped_bfs,
    one_f_one_b,
    simulate,
    validate,
    zb_h1,
    zb_v,
)

workers, microbatches, chunks = st.integers(1, 6), st.integers(1, 14), st.integers(1, 3)


def stage(index, num_stages, num_workers):
    """Returns what torch's schedules read of a stage before anything runs."""
    return SimpleNamespace(
        stage_index=index,
        num_stages=num_stages,
        group_size=num_workers,
        group_rank=0,
        is_first=index == 0,
        is_last=index == num_stages - 1,
        submod=None,
    )


def torch_schedule(name, num_stages, num_workers, num_microbatches):
    """Returns torch's schedule of that name, as worker 0 makes it for all workers."""
    kind = torch_schedules.get_schedule_class(name)
    if issubclass(kind, torch_schedules.PipelineScheduleSingle):
        return kind(stage(0, num_stages, num_workers), num_microbatches)
    local = range(num_stages // num_workers)
    return kind([stage(index * num_workers, num_stages, num_workers) for index in local], num_microbatches)


def tasks_of(order):
    """Returns torch's order in our notation, without bubbles and what is no computation."""
    actions = [[action for action in order[rank] if action is not None] for rank in sorted(order)]
    return Schedule(
        tuple(
            tuple(
                Task(action.stage_index, action.computation_type.value, action.microbatch_index)
                for action in row
                if action.computation_type.value in ("F", "B", "I", "W")
            )
            for row in actions
        )
    )


def work_of(num_stages, num_microbatches, **options):
    return Workload(Plan.symmetric(num_stages, range(num_stages)).slots, num_microbatches, **options)


@given(workers, microbatches)
def test_gpipe(num_workers, num_microbatches):
    theirs = torch_schedule("GPipe", num_workers, num_workers, num_microbatches)
    assert gpipe(work_of(num_workers, num_microbatches), num_workers) == tasks_of(theirs.pipeline_order)


@given(workers, microbatches)
def test_one_f_one_b(num_workers, num_microbatches):
    """Torch refuses fewer microbatches than stages, for which ours works too.

    Torch's table counts the last worker's forward passes from 1 (2.13; what it runs is counted from 0).
    """
    num_microbatches += num_workers - 1
    theirs = torch_schedule("1F1B", num_workers, num_workers, num_microbatches)
    *others, last = tasks_of(theirs.pipeline_order).workers
    first = min(task.microbatch for task in last if task.kind == "F")
    last = tuple(task._replace(microbatch=task.microbatch - first) if task.kind == "F" else task for task in last)
    assert one_f_one_b(work_of(num_workers, num_microbatches), num_workers) == Schedule((*others, last))


@given(workers, microbatches, chunks)
def test_interleaved(num_workers, num_microbatches, chunks):
    """Torch refuses groups of different sizes, for which ours works too."""
    num_stages = chunks * num_workers
    ours = interleaved(work_of(num_stages, num_microbatches), num_workers)
    if num_microbatches % max(1, num_microbatches // num_workers):
        with pytest.raises(ValueError, match="multiple of the number of rounds"):
            torch_schedule("Interleaved1F1B", num_stages, num_workers, num_microbatches)
    else:
        theirs = torch_schedule("Interleaved1F1B", num_stages, num_workers, num_microbatches)
        assert ours == tasks_of(theirs.pipeline_order)


@given(workers, microbatches, chunks)
def test_looped_bfs(num_workers, num_microbatches, chunks):
    """Torch goes backward from the last microbatch to the first; here gradients are summed in microbatch order.

    Its order is one of ours where nothing is summed across microbatches: in as many gradient blocks. It takes as long.
    """
    num_stages = chunks * num_workers
    ours = looped_bfs(work_of(num_stages, num_microbatches), num_workers)
    theirs = tasks_of(torch_schedule("LoopedBFS", num_stages, num_workers, num_microbatches).pipeline_order)
    last = num_microbatches - 1
    turned = [
        [task._replace(microbatch=last - task.microbatch) if task.kind == "B" else task for task in row]
        for row in ours.workers
    ]
    assert theirs == Schedule(tuple(map(tuple, turned)))
    blocks = work_of(num_stages, num_microbatches, num_blocks=num_microbatches)
    validate(theirs, blocks)
    assert makespan(ours, blocks) == makespan(theirs, blocks)
    if num_microbatches > 1:
        with pytest.raises(ScheduleError, match="microbatch order"):
            validate(theirs, work_of(num_stages, num_microbatches))


def makespan(schedule, work):
    """Returns how long a schedule takes with F, I and W of one unit each."""
    costs = {(kind, stage): StageCost(2 if kind == "B" else 1) for _, stage in work.slots for kind in "FBIW"}
    return simulate(schedule, costs, work=work).makespan_s


@given(workers, microbatches)
def test_zb_h1_is_torchs_interleaved_zero_bubble_with_one_stage_a_worker(num_workers, num_microbatches):
    """Torch refuses the same counts as with interleaved 1F1B."""
    if num_microbatches > num_workers:
        num_microbatches *= num_workers
    theirs = torch_schedule("InterleavedZeroBubble", num_workers, num_workers, num_microbatches)
    assert zb_h1(work_of(num_workers, num_microbatches), num_workers) == tasks_of(theirs.pipeline_order)


@given(workers, microbatches)
def test_zb_v(num_workers, num_microbatches):
    theirs = torch_schedule("ZBVZeroBubble", 2 * num_workers, num_workers, num_microbatches)
    assert zb_v(work_of(2 * num_workers, num_microbatches), num_workers) == tasks_of(theirs.pipeline_order)


@pytest.mark.parametrize("layout", ["compute_only", "compute_comms"])
@pytest.mark.parametrize("name", ["Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble"])
def test_torchs_files_load(name, layout, tmp_path):
    theirs = torch_schedule(name, 8, 4, 8)
    theirs._dump_csv(tmp_path / "schedule.csv", format=layout)
    loaded = load_csv(tmp_path / "schedule.csv")
    assert loaded == tasks_of(theirs.pipeline_order)
    assert load_csv((tmp_path / "schedule.csv").read_text()) == loaded


def test_torchs_overlapped_actions_load_as_two_tasks(tmp_path):
    theirs = torch_schedule("DualPipeV", 8, 4, 10)
    theirs._dump_csv(tmp_path / "schedule.csv", format="compute_only")
    loaded = load_csv(tmp_path / "schedule.csv")
    assert "OVERLAP_F_B" in (tmp_path / "schedule.csv").read_text()
    work = Workload.of(loaded)
    assert (work.slots, work.num_microbatches) == (work_of(8, 10).slots, 10)
    validate(loaded, work, bound=True)


@given(workers, st.integers(1, 3), st.integers(1, 3))
def test_torch_reads_our_files(num_workers, groups, chunks):
    num_stages, num_microbatches = chunks * num_workers, groups * num_workers
    ours = interleaved(work_of(num_stages, num_microbatches), num_workers)
    actions = {
        rank: [torch_schedules._Action.from_str(cell) for cell in row]
        for rank, row in enumerate(csv.reader(io.StringIO(dump_csv(ours))))
    }
    assert tasks_of(actions) == ours
    theirs = torch_schedule("Interleaved1F1B", num_stages, num_workers, num_microbatches)
    theirs._prepare_schedule_with_comms(actions)  # refuses what it cannot run, as when torch loads a file
