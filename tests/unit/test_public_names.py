import rpfunc
from rpfunc import objectives, plan, schedule, stream, testing


def test_public_names_are_importable_and_documented():
    for module in (rpfunc, objectives, plan, schedule, stream, testing):
        for name in module.__all__:
            assert getattr(module, name).__doc__, name


def test_the_core_names_stay():
    assert {
        "Batch", "Cpu", "Layer", "Model", "Plan", "Result", "Runtime", "objectives", "plan", "random", "reference",
        "schedule", "stream", "tree", "value_and_grad",
    } <= set(rpfunc.__all__)  # fmt: skip
    assert set(stream.__all__) >= {"attend", "attending", "opaque", "rowwise"}
    assert set(schedule.__all__) >= {"Event", "Schedule", "Task", "Timeline", "draw", "round_robin", "validate"}
