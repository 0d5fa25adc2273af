"""Ways to choose a plan that are nearly right: the check by every plan must refuse each."""

import random

import pytest
from oracle import every_partition as oracle

from rpfunc.plan import Ahead, LayerCost, Plan, partition
from rpfunc.plan.held import SlotRoom
from rpfunc.plan.rule import best_plans
from rpfunc.testing import strategies


def chooses(key, plans=strategies.every_plan, memory=oracle.num_bytes):
    """A function that looks for the plan with the least key(loads, workers) among those that fit."""

    def choose(layers, workers, limit):
        def fits(plan):
            slots = oracle.slots(plan)
            return all(stop - start == 1 or memory(layers, kind, start, stop) <= limit for kind, start, stop in slots)

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
    return found - (0 if kind == "F" else sum(2 * layer.gradient_bytes for layer in layers[start:stop]))


def without_last_gradients(layers, kind, start, stop):
    found = oracle.num_bytes(layers, kind, start, stop)
    return found - (0 if kind == "F" else sum(layer.gradient_bytes for layer in layers[start:stop]))


def without_activations_on_their_way(layers, kind, start, stop):
    own = layers[start:stop]
    found = max(layer.output_bytes for layer in own) + sum(2 * layer.parameter_bytes for layer in own)
    return found + (0 if kind == "F" else sum(2 * layer.gradient_bytes + layer.residual_bytes for layer in own))


def sum_of_outputs(layers, kind, start, stop):
    outputs = [layer.output_bytes for layer in layers[start:stop]]
    return oracle.num_bytes(layers, kind, start, stop) + sum(outputs) - max(outputs)


def last_layer_fused(num_layers):
    return [plan for plan in strategies.every_plan(num_layers) if plan.fused.start == num_layers - 1]


def cut_alike(num_layers):
    return [plan for plan in strategies.every_plan(num_layers) if plan.forward == plan.backward]


def by_forward_times(layers, workers, limit):
    return partition([layer.forward for layer in layers], workers)


def by_the_library(layers, workers, limit):
    rooms = {kind: SlotRoom(kind, layers, Ahead()) for kind in "FXB"}
    return best_plans([layers], [True], workers, [rooms], limit)[0]


RIGHT = {"the rule": chooses(rule), "best_plans": by_the_library}
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
    "gradients once": chooses(rule, memory=without_last_gradients),
    "no activations on their way": chooses(rule, memory=without_activations_on_their_way),
    "outputs add up": chooses(rule, memory=sum_of_outputs),
    "no memory": lambda layers, workers, limit: partition(layers, workers),
}


def is_refused(choose):
    """Whether the check refuses it on one of 150 instances of five layers."""
    draw = random.Random(0)
    for _ in range(150):
        layers = [LayerCost(*(draw.randint(0, 9) for _ in range(9))) for _ in range(5)]
        workers, memory = draw.randint(1, 8), draw.choice([100, 150, float("inf")])
        plan = choose(layers, workers, memory)
        if not all(oracle.fits(layers, *slot, memory) for slot in oracle.slots(plan)):
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
