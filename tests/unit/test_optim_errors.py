"""What optimizers refuse, and the words they use."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy
import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

from rpfunc import optim
from rpfunc.errors import OptimizerError, RpfuncError, TreeError

NUMBERS: dict[str, tuple[Callable[[], Any], str]] = {
    "rate": (lambda: optim.sgd(-0.1), "learning_rate is -0.1; it must be finite and at least 0, for example 0.001"),
    "rate nan": (lambda: optim.adam(float("nan")), "learning_rate is nan"),
    "b1": (lambda: optim.adam(0.1, b1=1.0), r"b1 is 1.0; it must be in \[0, 1\), for example 0.9"),
    "b2": (lambda: optim.adamw(0.1, b2=-0.5), r"b2 is -0.5; it must be in \[0, 1\), for example 0.999"),
    "eps": (lambda: optim.adamw(0.1, eps=-1e-8), "eps is -1e-08; it must be finite and at least 0"),
    "decay": (lambda: optim.adamw(0.1, weight_decay=-1.0), "weight_decay is -1.0; it must be finite and at least 0"),
    "momentum": (lambda: optim.sgd(0.1, momentum=1.5), r"decay is 1.5; it must be in \[0, 1\)"),
    "max_norm": (lambda: optim.clip_by_global_norm(-1.0), "max_norm is -1.0; it must be finite and at least 0"),
    "scale": (lambda: optim.scale(float("inf")), "step_size is inf; it must be finite"),
    "every": (lambda: optim.accumulate(optim.sgd(0.1), 0), "every is 0; it must be at least 1, for example 4"),
    "steps": (lambda: optim.cosine_decay(1.0, 0), "decay_steps is 0; it must be at least 1, for example 100"),
    "warmup": (lambda: optim.warmup_cosine(0.0, 1.0, 10, 10), "decay_steps is 10; it must be at least 11"),
    "boundaries": (
        lambda: optim.join([optim.constant(1.0)] * 3, [5]),
        "join was given 3 schedules and 1 boundaries; needed is one boundary less",
    ),
    "order": (lambda: optim.join([optim.constant(1.0)] * 3, [5, 2]), r"boundaries are \[5, 2\]; they must ascend"),
    "mask": (lambda: optim.masked(optim.sgd(0.1), {"a": 1}), "a mask needs True or False at each leaf: a is 1"),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers(name: str) -> None:
    make, message = NUMBERS[name]
    with pytest.raises(RpfuncError, match=message):
        make()


def test_schedules_are_checked_when_read() -> None:
    params = torch.zeros(1)
    optimizer = optim.sgd(lambda count: -1.0)
    with pytest.raises(OptimizerError, match=r"learning_rate at count 0 is -1\.0"):
        optimizer.update(params, optimizer.init(params), params)
    optimizer = optim.accumulate(optim.sgd(0.1), lambda count: 0)
    with pytest.raises(OptimizerError, match="every at update 0 is 0; it must be at least 1"):
        optimizer.update(params, optimizer.init(params), params)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"a": torch.zeros(1, dtype=torch.int64)}, "parameters: a is torch.int64; a floating-point dtype is needed"),
        ({"a": torch.zeros(1, dtype=torch.complex64)}, "a is torch.complex64"),
        (
            {"a": 1.0, "b": torch.zeros(1).bool()},
            r"2 problems\n  - a is a float; a tensor is needed\n  - b is torch.bool",
        ),
    ],
)
def test_parameters(params: Any, message: str) -> None:
    with pytest.raises(OptimizerError, match=message):
        optim.adamw(0.1).init(params)


@pytest.mark.parametrize(
    ("updates", "message"),
    [
        ({"a": torch.zeros(2)}, "b has a parameter but no update; zeros would do"),
        ({"a": torch.zeros(2), "b": None}, "b has a parameter but no update; zeros would do"),
        ({"a": torch.zeros(2), "b": torch.zeros(3), "c": torch.zeros(1)}, "c has an update but no parameter"),
        ({"a": torch.zeros(2, 1), "b": torch.zeros(3)}, r"a: update has shape \(2, 1\), parameter \(2,\)"),
        ({"a": 1.0, "b": torch.zeros(3)}, "a: update is a float; a tensor is needed"),
    ],
)
@pytest.mark.parametrize("step", [optim.step, optim.step_donated], ids=["pure", "donated"])
def test_updates(updates: Any, message: str, step: Callable[..., Any]) -> None:
    params = {"a": torch.zeros(2), "b": torch.zeros(3)}
    optimizer = optim.adamw(0.1)
    with pytest.raises(OptimizerError, match=message):
        step(optimizer, updates, optimizer.init(params), params)
    with pytest.raises(OptimizerError, match=message):
        optim.apply_updates(params, updates)


def test_containers_differ() -> None:
    with pytest.raises(OptimizerError, match="containers differ"):
        optim.apply_updates([torch.zeros(1)], (torch.zeros(1),))


def test_states_of_something_else() -> None:
    params = {"a": torch.zeros(2)}
    optimizer = optim.adamw(0.1)
    with pytest.raises(OptimizerError, match="optimizer state is a dict; needed is the LeafwiseState"):
        optimizer.update(params, {}, params)
    with pytest.raises(OptimizerError, match="chain of 3 transformations was given 2 states"):
        optimizer.update(params, optim.adam(0.1).init(params), params)
    with pytest.raises(OptimizerError, match="state does not fit the parameters; init makes one that does"):
        optimizer.update(params, optimizer.init({"b": torch.zeros(2)}), params)
    trees = optim.chain(optim.trace(0.5), optim.clip_by_global_norm(1.0))
    with pytest.raises(OptimizerError, match="chain of 2 transformations was given a dict"):
        trees.update(params, {}, params)


def test_masks_that_miss_a_leaf() -> None:
    optimizer = optim.adamw(0.1, mask={"block": {"weight": True}})
    with pytest.raises(TreeError, match=r"the mask says nothing of block\.bias; it has \['block\.weight'\]"):
        optimizer.init({"block": {"bias": torch.zeros(1), "weight": torch.zeros(1)}})


def refusal(params: Any, updates: Any = None) -> str:
    before = [leaf.clone() for leaf in params.values()]
    updates = {name: torch.ones(leaf.shape) for name, leaf in params.items()} if updates is None else updates
    optimizer = optim.sgd(0.1)
    with pytest.raises(OptimizerError) as caught:
        optim.step_donated(optimizer, updates, optimizer.init(params), params)
    assert all(torch.equal(old, new) for old, new in zip(before, params.values(), strict=True))
    return str(caught.value)


def test_donation_of_what_is_not_ours_to_overwrite(tmp_path: Path) -> None:
    path = tmp_path / "params"
    numpy.ones(4, dtype=numpy.float32).tofile(path)
    mapped = torch.from_file(str(path), shared=False, size=4)
    assert f"params.w is mapped from {path}; give a clone" in refusal({"w": mapped})
    safetensors.torch.save_file({"w": torch.ones(4)}, path)
    assert "params.w is mapped from" in refusal(safetensors.torch.load_file(path))
    assert "params.w is expanded" in refusal({"w": torch.ones(1).expand(3)})
    assert "params.w is a module's parameter" in refusal({"w": torch.nn.Parameter(torch.ones(2))})


def test_donation_of_what_numpy_or_another_process_sees() -> None:
    params = {"array": torch.from_numpy(numpy.ones(2)), "seen": torch.ones(2), "shared": torch.ones(2)}
    params["seen"].numpy()
    params["shared"].share_memory_()  # type: ignore[no-untyped-call]
    optimizer = optim.sgd(0.5)
    params, _ = optim.step_donated(optimizer, {name: torch.ones(2) for name in params}, optimizer.init(params), params)
    assert all(leaf.tolist() == [0.5, 0.5] for leaf in params.values())


def test_donation_of_memory_that_leaves_share() -> None:
    whole = torch.ones(6)
    assert "params.a and params.b share memory" in refusal({"a": whole, "b": whole})
    assert "params.a and params.b share memory" in refusal({"a": whole[:4], "b": whole[3:]})
    gradient = torch.ones(6)
    assert "share memory" in refusal({"a": gradient}, {"a": gradient})
    columns = torch.ones(3, 4)
    apart = {"a": whole[:3], "b": whole[3:], "left": columns[:, :2], "right": columns[:, 2:]}
    optimizer = optim.sgd(0.5)
    shared_gradient = torch.ones(3)
    updates = {"a": shared_gradient, "b": shared_gradient, "left": torch.ones(3, 2), "right": torch.ones(3, 2)}
    optim.step_donated(optimizer, updates, optimizer.init(apart), apart)
    assert whole.tolist() == [0.5] * 6
    assert columns.tolist() == [[0.5] * 4] * 3


def test_elementwise_state_needs_the_shape_of_its_parameter() -> None:
    wrong = optim.Leafwise(
        leaf=lambda path, update, state, param, coefficients: (update * state, state),
        init_leaf=lambda path, param: torch.ones(()),
    )
    optimizer, params = optim.from_leafwise(wrong), {"w": torch.ones(2)}
    with pytest.raises(OptimizerError, match=r"w: the state of an elementwise transformation has shapes \[\(\)\]"):
        optim.step_donated(optimizer, {"w": torch.ones(2)}, optimizer.init(params), params)


@given(st.data())
def test_no_overlap_of_donated_leaves_without_gaps_hides_behind_another_leaf(data: st.DataObject) -> None:
    """Against sets of places: slices, and beside them a column of all, which lies around them, and a slice read."""
    whole = torch.zeros(24)
    cuts = data.draw(st.lists(st.tuples(st.integers(0, 23), st.integers(1, 12)), min_size=1, max_size=4), "slices")
    params = {f"p{index}": whole[start : start + length] for index, (start, length) in enumerate(cuts)}
    start = data.draw(st.integers(0, 20), "read")
    updates = {name: torch.ones(leaf.shape) for name, leaf in params.items()}
    read = whole[start : start + 4]
    if data.draw(st.booleans(), "a leaf of its own is read, too"):
        params["r"], updates["r"] = torch.ones(read.shape), read
    places = [set(range(a, min(a + b, 24))) for a, b in cuts]
    pairs = [(i, j) for i in range(len(places)) for j in range(i)]
    shared = any(places[i] & places[j] for i, j in pairs)
    shared = shared or ("r" in params and any(set(range(start, start + len(read))) & each for each in places))
    if data.draw(st.booleans(), "a column around them"):
        params["column"] = whole.view(12, 2)[:, 0]
        updates["column"] = torch.ones(12)
        shared = shared or 0 in set().union(*places)  # else it counts as apart, as interleaved views do
        if not shared:
            return
    optimizer = optim.sgd(0.5)
    with pytest.raises(OptimizerError, match="share memory") if shared else nullcontext():
        optim.step_donated(optimizer, updates, optimizer.init(params), params)
