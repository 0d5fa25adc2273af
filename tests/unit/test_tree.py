from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rpfunc import tree
from rpfunc.errors import TreeError

TREES = st.recursive(
    st.integers() | st.none(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text("abc", max_size=2), inner, max_size=3)
    ),
    max_leaves=8,
)


class Pair(NamedTuple):
    left: int
    right: int


@given(TREES)
def test_unflatten_undoes_flatten(anything):
    leaves, structure = tree.flatten(anything)
    assert tree.unflatten(structure, leaves) == anything


@given(TREES)
def test_there_is_one_path_for_each_leaf(anything):
    assert len(tree.paths(anything)) == len(tree.leaves(anything))


@given(TREES)
def test_a_tree_has_its_own_structure(anything):
    assert tree.same_structure(anything, tree.map(lambda leaf: 0, anything))


def test_dicts_of_another_insertion_order_are_the_same_tree():
    assert tree.leaves({"b": 2, "a": 1}) == tree.leaves({"a": 1, "b": 2})


def test_none_is_an_empty_subtree():
    assert tree.leaves({"a": None, "b": 1}) == [1]


def test_named_tuples_keep_their_type():
    assert tree.map(lambda leaf: leaf + 1, Pair(1, 2)) == Pair(2, 3)


def test_paths_name_keys_and_places():
    assert tree.paths({"block": [1, {"up": 2}], "norm": 3}) == ["block.0", "block.1.up", "norm"]


def test_map_over_trees_of_two_structures_says_so():
    with pytest.raises(TreeError, match="trees differ in structure"):
        tree.map(lambda a, b: a, {"x": 1}, {"y": 1})


def test_map_passes_the_functions_own_error_on():
    def fail(left, right):
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine") as caught:
        tree.map(fail, {"x": 1}, {"x": 2})
    assert not isinstance(caught.value, TreeError)


def test_add_and_zeros_are_leafwise():
    ones = {"a": torch.ones(2), "b": [torch.ones(1, dtype=torch.float64)]}
    assert tree.add(ones, ones)["a"].tolist() == [2.0, 2.0]
    assert tree.zeros_like(ones)["b"][0].dtype == torch.float64
    assert tree.zeros_like(ones)["a"].tolist() == [0.0, 0.0]


def test_mismatches_name_every_leaf():
    found = {"a": torch.zeros(2), "b": torch.zeros(1), "extra": torch.zeros(1)}
    wanted = {"a": torch.zeros(3), "b": torch.zeros(1, dtype=torch.float64), "lost": torch.zeros(1)}
    assert tree.mismatches(found, wanted, ("file", "model")) == [
        "lost is missing",
        "extra is unexpected",
        "a: file (2,) torch.float32, model (3,) torch.float32",
        "b: file (1,) torch.float32, model (1,) torch.float64",
    ]


def test_equal_trees_have_no_mismatch():
    assert tree.mismatches({"a": torch.zeros(2)}, {"a": torch.ones(2)}) == []
