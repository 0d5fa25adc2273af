import math

import pytest

from rpfunc.errors import PlanError
from rpfunc.plan import COMPUTE_ONLY, Hardware, adam_update_s, machine
from rpfunc.plan.presets import ACCELERATORS


def test_computation_alone_is_the_default():
    assert Hardware() == COMPUTE_ONLY
    assert not COMPUTE_ONLY.transfers_cost


@pytest.mark.parametrize("part", ["upload", "download", "host_upload", "host_download", "latency"])
def test_any_finite_rate_costs(part):
    assert Hardware(**{part: 1.0}).transfers_cost


def test_every_number_that_cannot_be_is_named():
    with pytest.raises(PlanError) as caught:
        Hardware(upload=0, latency=math.inf, prefetch=0, update=-1, memory_bytes=-5)
    assert str(caught.value) == (
        "hardware: 5 problems\n"
        "  - upload is 0, it must be above 0\n"
        "  - memory_bytes is -5, it must be above 0\n"
        "  - latency is inf, it must be at least 0 and finite\n"
        "  - update is -1, it must be at least 0 and finite\n"
        "  - prefetch is 0, it must be at least 1"
    )


@pytest.mark.parametrize(
    ("text", "num_workers", "teraflops", "gigabytes", "link"),
    [
        ("8x4090", 8, 165.2, 24, 32),
        ("2xA800", 2, 312, 80, 32),
        ("a100-40gb", 1, 312, 40, 32),
        ("a100-80gb", 1, 312, 80, 32),
        ("1xh100", 1, 989, 80, 64),
        (" 16xH200 ", 16, 989, 141, 64),
    ],
)
def test_a_machine_is_what_its_name_says(text, num_workers, teraflops, gigabytes, link):
    found = machine(text, efficiency=1.0)
    assert found.num_workers == num_workers
    assert found.flops_per_s == teraflops * 1e12
    assert found.hardware == Hardware(upload=link * 1e9, download=link * 1e9, memory_bytes=gigabytes * 1e9)


@pytest.mark.parametrize("accelerator", ACCELERATORS, ids=lambda accelerator: accelerator.name)
def test_efficiency_scales_computation_alone(accelerator):
    whole, half = (machine(accelerator.name, efficiency=efficiency) for efficiency in (1.0, 0.5))
    assert half == whole._replace(flops_per_s=whole.flops_per_s / 2)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "8x5090",
            "machine '8x5090': there is no '5090', there are 4090, a800, a100-40gb, a100-80gb, h100, h200; "
            "a number may stand before, as in '8x4090'",
        ),
        ("0xh100", "machine '0xh100': has 0 workers, it must be at least 1"),
        (
            "",
            "machine '': there is no '', there are 4090, a800, a100-40gb, a100-80gb, h100, h200; "
            "a number may stand before, as in '8x4090'",
        ),
    ],
)
def test_a_machine_that_does_not_exist_is_refused(text, message):
    with pytest.raises(PlanError) as caught:
        machine(text)
    assert str(caught.value) == message


@pytest.mark.parametrize("efficiency", [0, 1.5, math.nan])
def test_an_efficiency_that_cannot_be_is_refused(efficiency):
    with pytest.raises(PlanError) as caught:
        machine("h100", efficiency=efficiency)
    assert str(caught.value) == f"machine 'h100': efficiency is {efficiency}, it must be above 0 and at most 1"


def test_an_update_takes_twenty_eight_bytes_a_parameter():
    assert adam_update_s(10**9, host_bytes_per_s=7e9) == 4.0


@pytest.mark.parametrize("text", ["9" * 5000 + "x4090", "0x4090", "x4090"])
def test_counts_of_machines_that_no_one_has_are_refused(text):
    with pytest.raises(PlanError):
        machine(text)


@pytest.mark.parametrize(("parameters", "rate"), [(1, 0), (1, float("nan")), (float("inf"), 1e9), (-1, 1e9)])
def test_an_update_takes_a_finite_time(parameters, rate):
    with pytest.raises(PlanError, match="adam_update_s"):
        adam_update_s(parameters, host_bytes_per_s=rate)
