"""What must come before what, said by layers, apart from the rule by which rpfunc waits."""


def violations(order, plan):
    """The pairs (early, late) of tasks in which `late` needs `early` and began before that ended.

    order: {(stage, kind, microbatch): (start, end)}.
    """
    return [
        (early, late)
        for late, (start, _) in order.items()
        for early, (_, end) in order.items()
        if needs(plan, late, early) and start < end
    ]


def needs(plan, late, early):
    (stage, kind, microbatch), (early_stage, early_kind, early_microbatch) = late, early
    span, early_span = plan.span(kind, stage), plan.span(early_kind, early_stage)
    if early_microbatch != microbatch:  # gradients are summed in microbatch order
        return kind in "XB" and (early_stage, early_kind) == (stage, kind) and early_microbatch == microbatch - 1
    made_input = kind in "FX" and early_kind == "F" and early_span.stop == span.start
    kept_inputs = kind == "B" and early_kind == "F" and early_span.start < span.stop
    cotangent = kind == "B" and early_kind in "XB" and early_span.start == span.stop
    return made_input or kept_inputs or cotangent
