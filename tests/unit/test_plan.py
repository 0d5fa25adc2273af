import pytest
from hypothesis import given
from hypothesis import strategies as st

from rpfunc import Plan
from rpfunc.errors import PlanError
from rpfunc.plan import Span
from rpfunc.testing import strategies


@given(st.integers(1, 9).flatmap(strategies.plans))
def test_a_plan_prints_and_parses_back(plan):
    assert Plan.parse(str(plan)) == plan


@given(st.data(), st.integers(1, 9))
def test_words_may_stand_in_any_order(data, num_layers):
    plan = data.draw(strategies.plans(num_layers))
    assert Plan.parse(" ".join(data.draw(st.permutations(str(plan).split())))) == plan


@given(st.data(), st.integers(1, 9))
def test_a_drawn_plan_fits_its_model_and_no_other(data, num_layers):
    plan = data.draw(strategies.plans(num_layers))
    plan.check(num_layers)
    assert plan.num_layers == num_layers
    with pytest.raises(PlanError, match=f"the model has {num_layers + 1} layers"):
        plan.check(num_layers + 1)


@given(st.data(), st.integers(1, 9))
def test_a_microbatch_passes_every_layer_forward_once_and_backward_once(data, num_layers):
    plan = data.draw(strategies.plans(num_layers))
    forward, backward = [], []
    for kind, stage in plan.slots:
        layers = list(range(*plan.span(kind, stage)))
        forward += layers if kind in "FX" else []
        backward += layers[::-1] if kind in "XB" else []
    assert forward == list(range(num_layers))
    assert backward == list(range(num_layers))[::-1]


def test_every_plan_is_listed_once():
    plans = strategies.every_plan(4)
    assert len({str(plan) for plan in plans}) == len(plans) == 1 + 1 + 4 + 16
    for plan in plans:
        plan.check(4)


def test_cut_makes_stages_that_start_where_asked():
    assert str(Plan.cut(8, forward=[0, 3, 6], backward=[0, 6])) == "F0:3 F3:6 X6:8 B0:6"


@pytest.mark.parametrize(
    ("text", "num_layers", "message"),
    [
        (
            "F0:2 X3:4 B0:3", 4,
            "plan 'F0:2 X3:4 B0:3': forward leaves out layers 2:3 before 3:4",
        ),
        (
            "F0:3 X3:4 B0:2", 4,
            "plan 'F0:3 X3:4 B0:2': backward leaves out layers 2:3 before 3:4",
        ),
        (
            "F0:2 F1:3 X3:4 B0:3", 4,
            "plan 'F0:2 F1:3 X3:4 B0:3': forward repeats layers 1:2 before 1:3",
        ),
        (
            "F0:3 X2:4 B0:2", 4,
            "plan 'F0:3 X2:4 B0:2': forward repeats layers 2:3 before 2:4",
        ),
        (
            "F0:3 X3:4", 4,
            "plan 'F0:3 X3:4': backward leaves out layers 0:3 before 3:4",
        ),
        (
            "F1:3 X3:4 B0:3", 5,
            "plan 'F1:3 X3:4 B0:3': 3 problems\n"
            "  - forward leaves out layers 0:1 before 1:3\n"
            "  - forward ends at layer 4, the model has 5 layers\n"
            "  - backward ends at layer 4, the model has 5 layers",
        ),
    ],
)  # fmt: skip
def test_gaps_overlaps_and_wrong_lengths_are_refused(text, num_layers, message):
    with pytest.raises(PlanError) as caught:
        Plan.parse(text).check(num_layers)
    assert str(caught.value) == message


def test_empty_stages_are_refused():
    with pytest.raises(PlanError, match="forward has the empty stage 2:2"):
        Plan((Span(0, 2), Span(2, 2)), Span(2, 3), (Span(0, 2),)).check(3)
    with pytest.raises(PlanError, match="has the empty stage 3:3"):
        Plan.parse("F0:3 X3:3 B0:3").check(3)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "plan '': has no stage, needs at least one, as in 'X0:8'"),
        ("X0:2 X2:3", "plan 'X0:2 X2:3': has 2 fused stages (X), at most one can be at the turn"),
        (
            "F0-2 Y1:2",
            "plan 'F0-2 Y1:2': 3 problems\n"
            "  - 'F0-2' is no stage, needs F, X or B and layers, as in 'F0:6'\n"
            "  - 'Y1:2' is no stage, needs F, X or B and layers, as in 'F0:6'\n"
            "  - has no stage, needs at least one, as in 'X0:8'",
        ),
    ],
)
def test_text_that_is_no_plan_is_refused(text, message):
    with pytest.raises(PlanError) as caught:
        Plan.parse(text)
    assert str(caught.value) == message


def test_cuts_that_end_at_two_layers_are_refused():
    with pytest.raises(PlanError) as caught:
        Plan.cut(4, [0, 2], [0, 3])
    assert str(caught.value) == "plan: forward cuts [0, 2] and backward cuts [0, 3] must end at one layer"


@pytest.mark.parametrize(("kind", "stage"), [("F", 1), ("X", 0), ("B", -1), ("Z", 0)])
def test_a_stage_that_does_not_exist_is_refused(kind, stage):
    with pytest.raises(PlanError) as caught:
        Plan.parse("F0:2 X2:3 B0:2").span(kind, stage)
    assert str(caught.value) == (f"plan 'F0:2 X2:3 B0:2': has no stage {stage}{kind}, there are ['0F', '1X', '0B']")
