"""The best plan found by looking at every plan: what `partition` must equal, by other means.

A slot is (kind, start, stop); what it costs is added up layer by layer.
"""

from itertools import chain, combinations, product

TIME = {"F": "forward", "X": "fused", "B": "backward"}


def time(layers, kind, start, stop):
    return sum(getattr(layer, TIME[kind]) for layer in layers[start:stop])


def num_bytes(layers, kind, start, stop):
    """What a worker holds whose slots are all like this one: parameters twice, working bytes, two inputs, two outputs.

    And where gradients are made, those twice. Activations count as the largest one at an edge between layers.
    """
    own = layers[start:stop]
    edges = [layers[edge - 1].output_bytes for edge in range(start, stop + 1) if 0 < edge < len(layers)]
    found = max(layer.output_bytes for layer in own) + sum(2 * layer.parameter_bytes for layer in own)
    found += {"F": 2 + 2, "X": 2 + 2, "B": 4 + 2}[kind] * max(edges, default=0)
    return found + (sum(2 * layer.gradient_bytes + layer.residual_bytes for layer in own) if kind in "XB" else 0)


def fits(layers, kind, start, stop, memory):
    """Whether a slot may be: of one layer it always may."""
    return stop - start == 1 or num_bytes(layers, kind, start, stop) <= memory


def slots(plan):
    """Every slot of a plan."""
    fused = [] if plan.fused is None else [plan.fused]
    return [
        (kind, *span) for kind, spans in (("F", plan.forward), ("X", fused), ("B", plan.backward)) for span in spans
    ]


def score(models, plans, workers):
    """(slowest slot * max(slots, workers), slots) of the plans that run together."""
    loads = [time(layers, *slot) for layers, plan in zip(models, plans, strict=True) for slot in slots(plan)]
    return max(loads) * max(len(loads), workers), len(loads)


def best_score(models, workers, trained, memory=float("inf")):
    """The best score of all plans of all models whose slots of several layers fit in memory."""
    options = [slowest_by_number(every(layers, trains, memory)) for layers, trains in zip(models, trained, strict=True)]
    scores = []
    for chosen in product(*options):
        number = sum(number for number, _ in chosen)
        scores.append((max(slowest for _, slowest in chosen) * max(number, workers), number))
    return min(scores)


def slowest_by_number(found):
    """Of plans (number of slots, slowest slot) the best for each number."""
    best = {}
    for number, slowest in found:
        best[number] = min(slowest, best.get(number, slowest))
    return best.items()


def every(layers, trains, memory):
    """(number of slots, slowest slot) of every plan that fits: wherever the turn is, however either side is cut."""
    num_layers = len(layers)
    if not trains:
        yield from groupings(layers, "F", num_layers, memory)
        return
    for turn in range(num_layers):
        if fits(layers, "X", turn, num_layers, memory):
            fused = time(layers, "X", turn, num_layers)
            sides = [list(groupings(layers, kind, turn, memory)) for kind in "FB"]
            for (forward, slowest), (backward, other) in product(*sides):
                yield forward + backward + 1, max(slowest, other, fused)


def groupings(layers, kind, stop, memory):
    """(number of slots, slowest) of every way to cut the layers before `stop`; (0, 0) for none."""
    if stop == 0:
        yield 0, 0
        return
    inner = range(1, stop)
    for cuts in chain.from_iterable(combinations(inner, size) for size in range(stop)):
        groups = list(zip([0, *cuts], [*cuts, stop], strict=True))
        if all(fits(layers, kind, *group, memory) for group in groups):
            yield len(groups), max(time(layers, kind, *group) for group in groups)
