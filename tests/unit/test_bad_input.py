"""What comes in by hand and means nothing is refused, in words, before any work starts: function by function."""

import math
from pathlib import Path

import pytest

from rpfunc import Plan
from rpfunc.errors import PlanError, RpfuncError, ScheduleError
from rpfunc.plan import (
    Hardware,
    LayerCost,
    StageCost,
    load_costs,
    lower_bound,
    max_sequence,
    partition,
    roofline,
    rule_time,
    uniform_costs,
)
from rpfunc.plan.compare import compare
from rpfunc.plan.decoders import DecoderShape
from rpfunc.plan.search import search
from rpfunc.schedule import (
    Schedule,
    Workload,
    bubbles,
    gpipe,
    greedy,
    halve,
    interleaved,
    load_csv,
    looped_bfs,
    one_f_one_b,
    round_robin,
    simulate,
    split_dispatch,
    steady_state,
    validate,
    zb_h1,
    zb_v,
)

SLOTS = [("F", 0), ("B", 0)]
WORK = Workload(SLOTS, 2)
COSTS = {(kind, 0): StageCost(1) for kind in "FBIW"}
LAYERS = [LayerCost.of_forward(1.0)] * 3
NO_SIZE = [math.nan, -1, -0.5, math.inf, -math.inf, 1e300, 5e-324, 10**400, "1", None]
NO_COUNT = [0, -3, 2.5, math.nan, math.inf, 10**30, "2"]


@pytest.mark.parametrize("number", NO_SIZE, ids=lambda number: f"{number!r:.20}")
@pytest.mark.parametrize("field", StageCost._fields)
def test_a_stage_costs_a_number(field, number):
    with pytest.raises(PlanError, match=f"cost of a stage: {field} is .*, it must be"):
        StageCost(**{"time": 1, field: number})
    with pytest.raises(PlanError, match=f"cost of a stage: {field} is .*, it must be"):
        StageCost(1)._replace(**{field: number})


@pytest.mark.parametrize("number", NO_SIZE, ids=lambda number: f"{number!r:.20}")
def test_a_layer_costs_a_number(number):
    with pytest.raises(PlanError, match=r"cost: output_bytes is .*, it must be"):
        LayerCost.of_forward(1.0, output_bytes=number)
    for refuse in (partition, lambda costs, workers: lower_bound(costs, workers)):
        with pytest.raises(PlanError, match=r"costs: layer 1 costs .*, it must be"):
            refuse([1.0, number], 2)


@pytest.mark.parametrize("number", [*NO_SIZE[:3], 0, -math.inf, "fast", 1e300, 1e-300], ids=repr)
@pytest.mark.parametrize("rate", ["upload", "download", "host_upload", "host_download", "memory_bytes"])
def test_hardware_has_rates(rate, number):
    with pytest.raises(PlanError, match=f"hardware: {rate} is .*, it must be"):
        Hardware(**{rate: number})


@pytest.mark.parametrize("number", NO_SIZE, ids=lambda number: f"{number!r:.20}")
@pytest.mark.parametrize("wait", ["latency", "update"])
def test_hardware_waits_for_some_time(wait, number):
    with pytest.raises(PlanError, match=f"hardware: {wait} is .*, it must be"):
        Hardware(**{wait: number})


GENERATORS = {
    "gpipe": gpipe,
    "one_f_one_b": one_f_one_b,
    "interleaved": interleaved,
    "looped_bfs": looped_bfs,
    "zb_h1": zb_h1,
    "zb_v": zb_v,
    "round_robin": round_robin,
    "split_dispatch": lambda work, workers: split_dispatch(work, workers, {}),
    "greedy": lambda work, workers: greedy(work, workers, COSTS),
}
COUNTED = {
    **{f"workers of {name}": lambda n, make=make: make(WORK, n) for name, make in GENERATORS.items()},
    "prefetch": lambda n: Hardware(prefetch=n),
    "prefetch_runs": lambda n: Hardware(prefetch_runs=n),
    "microbatches": lambda n: Workload(SLOTS, n),
    "blocks": lambda n: Workload(SLOTS, 2, num_blocks=n),
    "iterations": lambda n: Workload(SLOTS, 2, num_iterations=n),
    "round_size": lambda n: round_robin(WORK, 1, round_size=n),
    "in_flight": lambda n: validate(Schedule.parse("0F0 0F1 0B0 0B1"), WORK, in_flight=n),
    "bubble of gpipe": lambda n: bubbles.gpipe(n, 3),
    "bubble of round_robin": lambda n: bubbles.round_robin(2, n, 4),
    "rounds of a bubble": lambda n: bubbles.round_robin(1, 8, 4, round_size=n),
    "bubble of zb_v": lambda n: bubbles.zb_v(n, 8),
    "workers of partition": lambda n: partition(LAYERS, n),
    "microbatches of partition": lambda n: partition(LAYERS, 2, n),
    "workers of rule_time": lambda n: rule_time(Plan.single(3), LAYERS, n),
    "blocks of lower_bound": lambda n: lower_bound(LAYERS, 2, 4, num_blocks=n),
    "workers of search": lambda n: search(LAYERS, n, 4),
    "microbatches of search": lambda n: search(LAYERS, 2, n),
    "slots of search": lambda n: search(LAYERS, 2, 4, least_slots=n),
    "workers of roofline": lambda n: roofline(LAYERS, Hardware(upload=1.0), n),
    "granularity": lambda n: max_sequence(lambda rows: rows, 900, granularity=n),
    "largest": lambda n: max_sequence(lambda rows: rows, 900, largest=n),
}


@pytest.mark.parametrize("number", NO_COUNT, ids=repr)
@pytest.mark.parametrize("name", COUNTED)
def test_a_count_is_a_whole_number_of_at_least_one(name, number):
    with pytest.raises((PlanError, ScheduleError)):
        COUNTED[name](number)


@pytest.mark.parametrize("make", GENERATORS.values(), ids=GENERATORS)
def test_a_schedule_that_fits_no_memory_is_not_begun(make):
    with pytest.raises(
        ScheduleError, match="the number of the workload's tasks is 2000000000000000, it must be at most"
    ):
        make(Workload(SLOTS, 10**15), 1)


def many_stages(generator, num_workers):
    return generator(Workload(Plan.symmetric(6000, range(6000)).slots, 1), num_workers)


@pytest.mark.parametrize(("make", "num_workers"), [(zb_h1, 6000), (zb_v, 3000), (interleaved, 3000), (gpipe, 6000)])
def test_many_stages_take_no_longer_than_their_tasks(make, num_workers):
    """The steps of a pipeline that is full are not counted out where there are no microbatches to fill it."""
    assert len(many_stages(make, num_workers).tasks) == (18_000 if make in (zb_h1, zb_v) else 12_000)


TOO_MANY = {
    "halves": lambda n: halve(Workload(SLOTS, n)),
    "tasks": lambda n: Workload(SLOTS, n).tasks,
    "starts of blocks": lambda n: Workload(SLOTS, n, num_blocks=n).block_starts,
    "ways": lambda n: split_dispatch(Workload(SLOTS, n, num_blocks=n), 2, [2, 2]),
    "iterations": lambda n: round_robin(Workload(SLOTS, 1, num_iterations=n), 2),
    "iterations without end": lambda n: steady_state(lambda work: round_robin(work, 2), Workload(SLOTS, n), COSTS),
    "layers of a decoder": lambda n: DecoderShape("deep", n, 8, 2, 2, 4, 8, 100),
    "layers of a search": lambda n: search([1.0] * 2001, 2, 2),
    "workers of a search": lambda n: search([1.0] * 9, n, 2),
    "workers of a comparison": lambda n: list(compare(LAYERS, n, 2)),
    "microbatches of a comparison": lambda n: list(compare(LAYERS, 2, n)),
}


@pytest.mark.parametrize("number", [10**8, 10**15, 2**63])
@pytest.mark.parametrize("name", TOO_MANY)
def test_more_than_can_be_meant_is_refused_before_it_is_made(name, number):
    with pytest.raises((PlanError, ScheduleError), match=r"it must be at most \d"):
        TOO_MANY[name](number)


def test_blocks_are_not_made_to_know_where_they_start():
    work = Workload(SLOTS, 10**15, num_blocks=10**14)
    assert [str(task) for task in work.dependencies(Schedule.parse("0B20").tasks[0])] == ["0F20"]
    assert [str(task) for task in work.dependencies(Schedule.parse("0B21").tasks[0])] == ["0F21", "0B20"]


SAID = {
    "a slot twice": (
        lambda: Workload([("F", 0), ("B", 0), ("F", 0)], 1),
        "workload: slot 2 is ('F', 0), which is there already",
    ),
    "no kind, no stage, no pair": (
        lambda: Workload([("Z", 0), ("F", -1), ("F", 0.5), "F0", ("I", 0)], 0, staleness=2),
        "workload: 7 problems\n"
        "  - num_microbatches is 0, it must be at least 1\n"
        "  - staleness is 2, it must be 0 or 1\n"
        "  - slot 0 is ('Z', 0), it must be a kind, F, X or B, and a stage from 0 on\n"
        "  - slot 1 is ('F', -1), it must be a kind, F, X or B, and a stage from 0 on\n"
        "  - slot 2 is ('F', 0.5), it must be a kind, F, X or B, and a stage from 0 on\n"
        "  - slot 3 is 'F0', it must be a kind, F, X or B, and a stage from 0 on\n"
        "  - slot 4 is ('I', 0), it must be a kind, F, X or B, and a stage from 0 on",
    ),
    "slots of text": (
        lambda: Workload("F0", 1),
        "workload: slots is 'F0', it must be a sequence of (kind, stage)",
    ),
    "halved of numbers": (
        lambda: Workload(SLOTS, 1, halved=frozenset([0])),
        "workload: halved is frozenset({0}), it must be a set of (stage, microbatch)",
    ),
    "costs that are numbers": (
        lambda: simulate(Schedule.parse("0F0 0B0"), {("F", 0): 1.0, ("B", 0): StageCost(1)}),
        "costs: ('F', 0) is 1.0, it must be a StageCost",
    ),
    "costs of greedy that are numbers": (
        lambda: greedy(WORK, 1, {("F", 0): 1.0}),
        "greedy: 2 problems\n  - costs lack 0B\n  - cost of ('F', 0) is 1.0, it must be a StageCost",
    ),
    "a plan of very long numbers": (
        lambda: Plan.parse("F0:" + "9" * 5000),
        f"plan 'F0:{'9' * 56}: 2 problems\n"
        f"  - 'F0:{'9' * 56} is no stage, needs F, X or B and layers, as in 'F0:6'\n"
        "  - has no stage, needs at least one, as in 'X0:8'",
    ),
    "digits of another script in a plan": (
        lambda: Plan.parse("F\u0660:2"),
        "plan 'F\u0660:2': 2 problems\n"
        "  - 'F\u0660:2' is no stage, needs F, X or B and layers, as in 'F0:6'\n"
        "  - has no stage, needs at least one, as in 'X0:8'",
    ),
    "ways that are one number": (
        lambda: split_dispatch(WORK, 1, 2),
        "split_dispatch: ways is 2, it must be numbers, or a mapping from slots to them",
    ),
    "ways by halves": (
        lambda: split_dispatch(WORK, 1, [1.5, 1]),
        "split_dispatch: slot 0F in 1.5 ways, it must be 1 to 2, the number of microbatches",
    ),
    "ways of what are no slots": (
        lambda: split_dispatch(WORK, 1, {3: 1, "X": 1, ("F", 0): 1}),
        "split_dispatch: 2 problems\n"
        "  - ways has 'X', which is no slot, they are such as ('F', 0)\n"
        "  - ways has 3, which is no slot, they are such as ('F', 0)",
    ),
    "a name that no file has": (
        lambda: load_csv(Path("a\0b")),
        "torch CSV: 'a\\x00b' is no name of a file: embedded null byte",
    ),
    "costs that have no order": (
        lambda: partition({3.0, 1.0, 2.0}, 2),
        "costs: is of type set, needs a sequence of one cost a layer",
    ),
    "costs by name": (
        lambda: partition({5: 1, 6: 2}, 2),
        "costs: is of type dict, needs a sequence of one cost a layer",
    ),
    "uniform costs beyond all numbers": (
        lambda: uniform_costs(Plan.parse("X0:1"), 10**400, -1),
        f"uniform_costs: 2 problems\n  - forward is {10**59}, it must be 0 or from 1e-100 to 1e+100\n"
        "  - backward is -1, it must be at least 0 and finite",
    ),
    "a start between workers": (
        lambda: round_robin(WORK, 2, start=0.5),
        "start is 0.5, it must be a whole number",
    ),
    "rounds of a bubble that the generator refuses": (
        lambda: bubbles.round_robin(4, 8, 12, round_size=2),
        "bubbles: round_size is 2, fewer than the 4 workers, which would wait for each other; round_size=4 would do",
    ),
    "a path for rows": (
        lambda: load_csv("runs/schedule"),
        "torch CSV: 'runs/schedule' looks like a file; for its rows give a pathlib.Path",
    ),
    "a file name for rows": (
        lambda: load_csv("schedule.csv"),
        "torch CSV: 'schedule.csv' looks like a file; for its rows give a pathlib.Path",
    ),
    "a file of rows that is not there": (
        lambda: load_csv(Path("/nowhere/rows.csv")),
        "torch CSV: cannot read /nowhere/rows.csv: No such file or directory",
    ),
    "long numbers in rows": (
        lambda: load_csv("0F0,0F" + "1" * 30),
        f"schedule: row 1, cell 2: '0F{'1' * 30}' is no action of torch.distributed.pipelining, "
        "needs one such as 2F0 or 3SEND_F1",
    ),
    "costs that are not there": (
        lambda: load_costs("/nowhere/costs.json"),
        "costs in /nowhere/costs.json: cannot read it: No such file or directory",
    ),
    "memory that is no number": (
        lambda: partition(LAYERS, 2, memory=math.nan),
        "partition: memory is nan, it must be at least 0 and finite",
    ),
    "memory that is nearly enough": (
        lambda: partition([LayerCost(0.7, 0.7, 2.3, 0.1, 1.1, 0.7, 0.1, 0.7, 0.7)], 1, 1, 2.1),
        "partition: memory is 2.1 bytes a worker, 3 would do: layer 0 alone takes 2.1999999999999997 "
        "(with the next slot's parameters, the last one's gradients, and activations)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SAID)
def test_what_means_nothing_is_refused_in_words(name):
    refuse, message = SAID[name]
    with pytest.raises(RpfuncError) as caught:
        refuse()
    assert str(caught.value) == message


def test_every_layer_of_a_file_is_named(tmp_path):
    path = tmp_path / "costs.json"
    times = '"forward": {}, "backward": 3, "fused": 3, "input_gradient": 2, "weight_gradient": 1'
    path.write_text("[" + ", ".join("{" + times.format(forward) + "}" for forward in (1, -1, 1e200)) + "]")
    with pytest.raises(PlanError) as caught:
        load_costs(path)
    assert str(caught.value) == (
        f"costs in {path}: 2 problems\n"
        "  - layer 1: forward is -1.0, it must be at least 0 and finite\n"
        "  - layer 2: forward is 1e+200, it must be 0 or from 1e-100 to 1e+100"
    )


@pytest.mark.parametrize("text", ["", "{}", "[1]", "[{}", "[{\xff}]"])
def test_a_file_that_is_no_list_of_layers_is_refused(tmp_path, text):
    path = tmp_path / "costs.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(PlanError, match=r"costs in .*; needs a list of layers, each an object of numbers"):
        load_costs(path)


def test_a_file_of_rows_in_no_text_is_refused(tmp_path):
    (tmp_path / "rows.csv").write_bytes(b"\xff\xfe0F0")
    with pytest.raises(ScheduleError, match="is no UTF-8 text"):
        load_csv(tmp_path / "rows.csv")


def test_more_may_be_uploaded_ahead_than_there_is():
    hardware = Hardware(upload=1, prefetch=10**18, prefetch_runs=10**18)
    costs = {("F", 0): StageCost(1, 2, input_bytes=3), ("B", 0): StageCost(1)}
    assert simulate(Schedule.parse("0F0 0B0"), costs, hardware).makespan_s == 7


def test_a_plan_without_stages_has_no_layers():
    assert Plan((), None, ()).num_layers == 0
    assert uniform_costs(Plan((), None, ())) == {}


@pytest.mark.parametrize(("asked", "found"), [(900, 896), (127, None), (10**6, 1024)])
def test_the_longest_sequence_is_a_multiple_of_the_granularity(asked, found):
    if found is None:
        with pytest.raises(PlanError, match="no sequence fits"):
            max_sequence(lambda rows: rows, asked, largest=1100)
    else:
        assert max_sequence(lambda rows: rows, asked, largest=1100) == found
