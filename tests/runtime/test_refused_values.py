"""Whatever kind of value an option is given, it works or is refused in words that name the option."""

from fractions import Fraction
from types import MappingProxyType

import numpy as np
import pytest
import torch

from rpfunc import Batch, Layer, Model, Plan, State, apply, logprobs, optim, train_steps, tree, value, value_and_grad
from rpfunc.errors import BatchError, ModelError, OptionsError, TreeError
from rpfunc.objectives import sft
from rpfunc.schedule import greedy, round_robin
from rpfunc.stream import rowwise
from rpfunc.testing import exact

PARAMS, BATCH, MODEL = exact.init(), exact.batch(4, 3), exact.model()
OPTIMIZER = optim.sgd(0.125)
LABELLED = Batch(row={"labels": torch.tensor([[0, 1, 2], [2, 1, 0]])})
HEAD = Model((Layer("head", rowwise(lambda p, x, batch: p[batch.row["labels"]]), "p"),))
TABLE = {"p": torch.eye(3)}


def run(**options):
    params, batch, total = options.pop("params", PARAMS), options.pop("batch", BATCH), options.pop("total", None)
    return value_and_grad(MODEL, exact.linear(), **options)(params, batch, total)


def steps(**options):
    state = State.create(options.pop("params", PARAMS), OPTIMIZER)
    given = {"model": MODEL, "objective": exact.linear(), "optimizer": OPTIMIZER, **options}
    return list(train_steps(state, [BATCH, BATCH], **given))


FUNCTIONS = {
    "value_and_grad": run,
    "train_steps": steps,
    "apply": lambda **options: apply(MODEL, **options)(PARAMS, BATCH),
    "value": lambda **options: value(MODEL, exact.linear(), **options)(PARAMS, BATCH),
    "logprobs": lambda **options: logprobs(HEAD, TABLE, LABELLED, **options),
}
RUNS = ("value_and_grad", "train_steps")
TAKEN_BY = {
    "microbatches": tuple(FUNCTIONS),
    "chunk": tuple(FUNCTIONS),
    "head_chunk": (*RUNS, "value"),
    "order": (*RUNS, "apply", "value"),
    "compute_dtype": (*RUNS, "apply", "value"),
    "workers": (*RUNS, "apply"),
    "blocks": RUNS,
    "keep_attention": RUNS,
    "recompute": RUNS,
    "asynchronous": ("train_steps",),
    "donate": ("train_steps",),
    "nonfinite": ("train_steps",),
}
ROWS = "it must be at least 1 row (or None for whole rows)"
FLAG = "it must be True or False"
TENSOR, ARRAY = torch.tensor([1, 2]), np.array([1, 2])
REFUSED = [
    *[("microbatches", v, "it must be a whole number") for v in (True, False, None, "2", 2.0, TENSOR, ARRAY)],
    ("microbatches", 10**30, f"it must be at most {10**18}"),
    *[("chunk", v, ROWS) for v in (True, False, "2", 2.0, TENSOR, ARRAY, 0)],
    *[("head_chunk", v, ROWS) for v in (True, False, "2", 2.0, TENSOR, ARRAY, -1)],
    *[("blocks", v, "it must be 1 to microbatches, which is 1") for v in (True, False, None, "1", 1.0, TENSOR, ARRAY)],
    *[
        ("keep_attention", v, "it must be a share of the rows, 0 to 1")
        for v in (True, False, None, "1", 1.5, float("nan"), 1j, TENSOR, ARRAY)
    ],
    *[("order", v, "it must be 'layer' or 'chunk'") for v in (True, None, "rows", TENSOR, ARRAY)],
    *[
        ("recompute", v, "it must be 'stage' (True), 'layer' or 'none' (False)")
        for v in (1, 0, None, "all", TENSOR, ARRAY)
    ],
    *[("asynchronous", v, FLAG) for v in (-1, 0, 1, 2, None, "yes", 1.0, TENSOR, ARRAY, torch.tensor(True))],
    *[("donate", v, FLAG) for v in (0, 1, None, "x", TENSOR, ARRAY)],
    *[("nonfinite", v, "it must be 'skip' or 'raise'") for v in (True, None, "rasie", TENSOR, ARRAY)],
]


def text_of(given):
    return str(given) if isinstance(given, int | float) else repr(given)[:60]


@pytest.mark.parametrize(
    ("function", "option", "given", "needed"),
    [
        pytest.param(function, option, given, needed, id=f"{function}-{option}-{text_of(given)}")
        for option, given, needed in REFUSED
        for function in TAKEN_BY[option]
    ],
)
def test_a_value_of_another_kind_is_refused_in_words(function, option, given, needed):
    with pytest.raises(OptionsError) as caught:
        FUNCTIONS[function](**{option: given})
    assert f"{option} is {text_of(given)}, {needed}" in str(caught.value)


@pytest.mark.parametrize("given", [True, 2.0, "2", b"2", {}, TENSOR, ARRAY, 0, -1, 10**6, 10**30])
@pytest.mark.parametrize("function", TAKEN_BY["workers"])
def test_what_is_no_number_of_workers_is_refused(function, given):
    with pytest.raises(OptionsError, match=r"^(workers: found|runtime: .* is no worker)"):
        FUNCTIONS[function](workers=given)


@pytest.mark.parametrize("option", ["microbatches", "chunk", "head_chunk", "workers", "blocks"])
@pytest.mark.parametrize("kind", [np.int64, np.uint8])
def test_numpys_whole_numbers_are_whole_numbers(option, kind):
    options = {"microbatches": 2, "chunk": 2}
    wanted, found = (run(**{**options, option: number}) for number in (2, kind(2)))
    assert all(map(torch.equal, tree.leaves(found[1]), tree.leaves(wanted[1])))
    found, wanted = (steps(**{**options, option: number})[-1][0] for number in (2, kind(2)))
    assert all(map(torch.equal, tree.leaves(found.params), tree.leaves(wanted.params)))


def test_all_that_cannot_work_is_told_at_once():
    with pytest.raises(OptionsError) as caught:
        value_and_grad(
            MODEL, sft, microbatches=True, blocks=True, chunk=False, order="rows", recompute=2,
            compute_dtype=torch.int8, frozen=lambda: True, schedule=lambda: 1,
        )  # fmt: skip
    assert str(caught.value) == (
        "options: 9 problems\n"
        "  - microbatches is True, it must be a whole number\n"
        "  - chunk is False, it must be at least 1 row (or None for whole rows)\n"
        "  - order is 'rows', it must be 'layer' or 'chunk'\n"
        "  - objective is a function, needs Objective (a function such as sft must be called)\n"
        "  - blocks is True, it must be a whole number\n"
        "  - recompute is 2, it must be 'stage' (True), 'layer' or 'none' (False)\n"
        "  - compute_dtype is torch.int8, needs a floating-point dtype or None: torch.float16, torch.bfloat16, "
        "torch.float32, torch.float64\n"
        "  - frozen cannot be called with (path, leaf): too many positional arguments; needs a function "
        "(path, leaf) -> bool\n"
        "  - schedule cannot be called with (work, num_workers): too many positional arguments; needs a function "
        "(work, num_workers) -> Schedule"
    )


DTYPES = sorted({found for found in vars(torch).values() if isinstance(found, torch.dtype)}, key=str)
COMPUTED = {torch.float16, torch.bfloat16, torch.float32, torch.float64}


@pytest.mark.parametrize("dtype", [*DTYPES, "float32", torch.tensor(1.0), float, np.float32, ARRAY])
@pytest.mark.parametrize("function", TAKEN_BY["compute_dtype"])
def test_a_dtype_has_arithmetic_or_is_refused(function, dtype):
    if isinstance(dtype, torch.dtype) and dtype in COMPUTED:
        FUNCTIONS[function](compute_dtype=dtype)
        return
    with pytest.raises(OptionsError, match=r"options: compute_dtype is .*, needs a floating-point dtype or None: "):
        FUNCTIONS[function](compute_dtype=dtype)


@pytest.mark.parametrize(
    "total",
    ["x", True, [1.0], (), 1j, 10**400, np.ones(2), torch.tensor(True), torch.tensor(1j), object(), None.__class__],
)
def test_a_total_of_another_kind_is_refused(total):
    with pytest.raises(BatchError) as caught:
        run(total=total)
    try:
        shown = repr(total)[:60]
    except ValueError:
        shown = "a number of thousands of digits"
    shown = str(total) if isinstance(total, bool) else shown
    assert str(caught.value) == (
        f"batch: total is {shown}, needs one number, as objective.total(objective.prepare(batch)) gives"
    )


@pytest.mark.parametrize("total", [4, 4.0, Fraction(4), np.float32(4), np.int64(4), torch.tensor(4)])
def test_a_total_is_any_number(total):
    wanted = run(total=torch.tensor(4.0, dtype=torch.float64))
    assert torch.equal(run(total=total)[0].loss, wanted[0].loss)


SIGNATURES = {
    "none": (lambda: 1, "too many positional arguments"),
    "one": (lambda one: 1, "too many positional arguments"),
    "three": (lambda one, two, three: 1, "missing a required argument: 'three'"),
    "by name": (lambda one, two, *, named: 1, "missing a required argument: 'named'"),
}


@pytest.mark.parametrize("name", SIGNATURES)
@pytest.mark.parametrize(
    ("option", "functions", "parameters", "returned"),
    [
        ("schedule", (*RUNS, "apply"), "work, num_workers", "Schedule"),
        ("frozen", RUNS, "path, leaf", "bool"),
    ],
)
def test_a_function_that_takes_other_arguments_is_refused_before_any_work(
    option, functions, parameters, returned, name
):
    given, why = SIGNATURES[name]
    for function in functions:
        with pytest.raises(OptionsError) as caught:
            FUNCTIONS[function](**{option: given})
        assert str(caught.value) == (
            f"options: {option} cannot be called with ({parameters}): {why}; "
            f"needs a function ({parameters}) -> {returned}"
        )


def test_a_generator_that_needs_costs_says_so():
    with pytest.raises(OptionsError, match=r"schedule cannot be called with .* missing a required argument: 'costs'"):
        run(schedule=greedy)


@pytest.mark.parametrize("function", [*RUNS, "apply"])
@pytest.mark.parametrize("returned", [None, 1, "0X0", [], (), round_robin])
def test_a_schedule_function_that_returns_something_else_is_refused(function, returned):
    with pytest.raises(OptionsError) as caught:
        FUNCTIONS[function](schedule=lambda work, num_workers: returned)
    assert str(caught.value) == (
        f"schedule: the function returned a {type(returned).__name__}, it must return a Schedule"
    )


class BrokenError(Exception):
    """What no code but this test's raises."""


def broken(*arguments):
    raise BrokenError


@pytest.mark.parametrize("function", [*RUNS, "apply"])
@pytest.mark.parametrize(("workers", "on"), [(None, "1 worker"), (2, "2 workers")])
def test_an_error_in_a_schedule_function_names_the_option(function, workers, on):
    with pytest.raises(BrokenError) as caught:
        FUNCTIONS[function](
            schedule=broken, workers=workers, microbatches=2, **({} if function == "apply" else {"plan": "X0:4"})
        )
    assert caught.value.__notes__ == [f"rpfunc: in the function given as schedule, for 2 microbatches on {on}"]


@pytest.mark.parametrize("function", RUNS)
def test_an_error_in_frozen_names_the_option(function):
    with pytest.raises(BrokenError) as caught:
        FUNCTIONS[function](frozen=broken)
    assert caught.value.__notes__ == ["rpfunc: in the function given as frozen"]
    with pytest.raises(BrokenError) as caught:
        State.create(PARAMS, OPTIMIZER, broken)
    assert caught.value.__notes__ == ["rpfunc: in the function given as frozen"]


@pytest.mark.parametrize(
    ("frozen", "message"),
    [
        (lambda path, leaf: "yes", "frozen: the mask gives 'yes' for embedding, needs True or False"),
        (lambda path, leaf: 1, "frozen: the mask gives 1 for embedding, needs True or False"),
        ("embedding", "frozen: a mask needs True or False at each leaf: the mask is 'embedding'"),
        (1, "frozen: a mask needs True or False at each leaf: the mask is 1"),
        ({"embedding": 1}, "frozen: a mask needs True or False at each leaf: embedding is 1"),
        ({"nope": True}, "frozen: mask: the tree has nothing at 'nope'"),
    ],
)
def test_a_mask_of_something_else_than_booleans_names_the_option(frozen, message):
    params, model = {"embedding": PARAMS["embedding"]}, Model((MODEL.layers[0],))
    for call in (
        lambda: value_and_grad(model, exact.linear(), frozen=frozen)(params, BATCH),
        lambda: State.create(params, OPTIMIZER, frozen),
        lambda: list(
            train_steps(
                State.create(params, OPTIMIZER), [BATCH], model=model, objective=exact.linear(), optimizer=OPTIMIZER,
                frozen=frozen,
            )
        ),
    ):  # fmt: skip
        with pytest.raises(TreeError) as caught:
            call()
        assert str(caught.value) == message


@pytest.mark.parametrize("params", [None, 5, "embedding", [1], torch.ones(2), lambda: 1])
def test_parameters_that_are_no_mapping_are_refused(params):
    kind = type(params).__name__
    for call in (
        lambda: run(params=params),
        lambda: apply(MODEL)(params, BATCH),
        lambda: value(MODEL, exact.linear())(params, BATCH),
        lambda: logprobs(HEAD, params, LABELLED),
        lambda: list(
            train_steps(
                State(params, ()), [BATCH], model=MODEL, objective=exact.linear(), optimizer=OPTIMIZER
            )
        ),
    ):  # fmt: skip
        with pytest.raises(ModelError) as caught:
            call()
        assert str(caught.value) == f"model: params is a {kind}, needs a dict of subtrees by name"
    with pytest.raises(ModelError) as caught:
        State.create(params, OPTIMIZER)
    assert str(caught.value) == f"state: params is a {kind}, needs a dict of subtrees by name"


def test_parameters_by_odd_names_are_named():
    with pytest.raises(ModelError) as caught:
        run(params={**PARAMS, 1: torch.ones(1), (2, 3): torch.ones(1)})
    assert str(caught.value) == (
        "model: 2 problems\n"
        "  - no layer reads subtree (2, 3) of params\n"
        "  - no layer reads subtree 1 of params"
    )  # fmt: skip


@pytest.mark.parametrize("workers", [None, 2])
def test_any_mapping_holds_parameters(workers):
    given = MappingProxyType(PARAMS)
    wanted, found = run(workers=workers), run(workers=workers, params=given)
    assert all(map(torch.equal, tree.leaves(found[1]), tree.leaves(wanted[1])))
    assert len(steps(workers=workers, params=given)) == 2
    assert torch.equal(apply(MODEL, workers=workers)(given, BATCH)[0], apply(MODEL)(PARAMS, BATCH)[0])


def test_a_state_without_an_optimizer_is_refused():
    with pytest.raises(OptionsError, match=r"state: optimizer is a function, needs one of rpfunc\.optim"):
        State.create(PARAMS, optim.sgd)


@pytest.mark.parametrize("model", [None, 5, "model", lambda: 1])
@pytest.mark.parametrize("plan", [None, "F0:4"])
def test_apply_to_what_is_no_model_is_refused(model, plan):
    with pytest.raises(OptionsError, match=r"options: model is a \w+, needs Model"):
        apply(model, plan=plan)


def test_apply_takes_a_schedule_without_tasks_at_its_word():
    with pytest.raises(ValueError, match="schedule: has 0 microbatches"):
        apply(MODEL, schedule="")(PARAMS, BATCH)


@pytest.mark.parametrize("part", ["row", "example", "group", "constant"])
@pytest.mark.parametrize("given", [None, 5, torch.ones(2, 3), [torch.ones(2, 3)]])
def test_a_batch_is_made_of_named_leaves(part, given):
    with pytest.raises(BatchError) as caught:
        Batch(**{part: given})
    assert str(caught.value) == f"batch: {part} is a {type(given).__name__}, needs a dict of leaves by name"


@pytest.mark.parametrize("number", [True, None, "2", 2.0, 0])
def test_a_group_and_a_microbatch_are_counted(number):
    with pytest.raises(BatchError, match=r"batch: group_size is .*, it must be "):
        Batch(row=BATCH.row, group_size=number)
    with pytest.raises(BatchError, match=r"batch: cannot cut 4 groups into .* microbatches"):
        BATCH.microbatches(number)


@pytest.mark.parametrize("plan", [ARRAY, TENSOR, ["F0:4"], 5])
@pytest.mark.parametrize("function", [*RUNS, "apply"])
def test_what_is_no_plan_is_refused(function, plan):
    with pytest.raises(OptionsError, match=r"options: plan is a \w+, needs a Plan, its text, or None"):
        FUNCTIONS[function](plan=plan)


def test_a_plan_as_value_stays_what_it_is():
    assert torch.equal(run(plan=Plan.parse("X0:4"))[0].loss, run()[0].loss)
