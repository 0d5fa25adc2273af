"""Ways to choose a plan that are nearly right: the check by every plan must refuse each."""

import random

import pytest
from oracle import every_partition as oracle

from rpfunc.plan import LayerCost, Plan, partition
from rpfunc.testing import strategies


def chooses(key, plans=strategies.every_plan, memory=oracle.num_bytes):
    """A function that looks for the plan with the least key(loads, workers) among those that fit."""

    def choose(layers, workers, limit):
        def fits(plan):
            return all(memory(layers, *slot) <= limit for slot in oracle.slots(plan))

        def score(plan):
            loads = [oracle.time(layers, *slot) for slot in oracle.slots(plan)]
            return key(loads, workers), len(loads)

        return min(filter(fits, plans(len(layers))), key=score)

    return choose


def rule(loads, workers):
    return max(loads) * max(len(loads), workers)


def without_next_parameters(layers, kind, start, stop):
    return oracle.num_bytes(layers, kind, start, stop) - sum(layer.parameter_bytes for layer in layers[start:stop])


def without_gradients(layers, kind, start, stop):
    found = oracle.num_bytes(layers, kind, start, stop)
    return found - (0 if kind == "F" else sum(layer.gradient_bytes for layer in layers[start:stop]))


def sum_of_outputs(layers, kind, start, stop):
    outputs = [layer.output_bytes for layer in layers[start:stop]]
    return oracle.num_bytes(layers, kind, start, stop) + sum(outputs) - max(outputs)


def last_layer_fused(num_layers):
    return [plan for plan in strategies.every_plan(num_layers) if plan.fused.start == num_layers - 1]


def cut_alike(num_layers):
    return [plan for plan in strategies.every_plan(num_layers) if plan.forward == plan.backward]


def by_forward_times(layers, workers, limit):
    return partition([layer.forward for layer in layers], workers)


RIGHT = {"the rule": chooses(rule), "partition": lambda layers, workers, limit: partition(layers, workers, None, limit)}
WRONG = {
    "slowest slot": chooses(lambda loads, workers: max(loads)),
    "slowest slot * slots": chooses(lambda loads, workers: max(loads) * len(loads)),
    "slowest slot * workers": chooses(lambda loads, workers: max(loads) * workers),
    "rounds of workers": chooses(lambda loads, workers: max(loads) * -(-len(loads) // workers)),
    "sum of slots": chooses(lambda loads, workers: sum(loads)),
    "last layer fused": chooses(rule, last_layer_fused),
    "forward and backward cut alike": chooses(rule, cut_alike),
    "everything fused": lambda layers, workers, limit: Plan.single(len(layers)),
    "backward as three forwards": by_forward_times,
    "parameters once": chooses(rule, memory=without_next_parameters),
    "no gradients": chooses(rule, memory=without_gradients),
    "outputs add up": chooses(rule, memory=sum_of_outputs),
    "no memory": lambda layers, workers, limit: partition(layers, workers),
}


def is_refused(choose):
    """Whether the check refuses it on one of 150 instances of five layers."""
    draw = random.Random(0)
    for _ in range(150):
        layers = [LayerCost(*(draw.randint(0, 9) for _ in range(9))) for _ in range(5)]
        workers, memory = draw.randint(1, 8), draw.choice([60, 90, float("inf")])
        try:
            plan = choose(layers, workers, memory)
        except ValueError:  # nothing fits
            continue
        if max(oracle.num_bytes(layers, *slot) for slot in oracle.slots(plan)) > memory:
            return True
        if oracle.score([layers], [plan], workers) != oracle.best_score([layers], workers, [True], memory):
            return True
    return False


@pytest.mark.parametrize("name", RIGHT)
def test_what_is_right_passes(name):
    assert not is_refused(RIGHT[name])


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_refused(name):
    assert is_refused(WRONG[name])
