"""Workers and links are refused at once, in words, if no run could work with them."""

import math

import numpy as np
import pytest
import torch

from rpfunc import Cpu, Cuda, Link, Runtime, value_and_grad
from rpfunc.errors import OptionsError
from rpfunc.testing import assert_equal_bits, exact

NO_NUMBERS = ["x", None, True, False, [1.0], torch.tensor(1.0), 1j, math.nan, -math.inf, ...]
NO_COUNTS = ["x", True, False, [1], torch.tensor(1), 1j, math.nan, math.inf, 1.5, ...]


def refused(make, subject, name, **options):
    with pytest.raises(OptionsError, match=f"^{subject}: {name} is .*, (it must be|needs) ") as caught:
        make(**{name: options["value"]})
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize("name", ["upload", "download"])
@pytest.mark.parametrize("value", [*NO_NUMBERS, 0, -1, 1e-300, 0.5])
def test_rates_that_are_none(name, value):
    refused(Link, "link", name, value=value)


@pytest.mark.parametrize("value", [*NO_NUMBERS, -1e-9, math.inf, 1e300, 10**400, 3601])
def test_latencies_that_are_none(value):
    refused(Link, "link", "latency_s", value=value)


@pytest.mark.parametrize("value", [*NO_COUNTS, None, 0, -3, 10**19])
def test_pieces_that_are_none(value):
    refused(Link, "link", "piece_bytes", value=value)


@pytest.mark.parametrize("value", NO_COUNTS)
def test_seeds_that_are_none(value):
    refused(Link, "link", "disorder", value=value)


@pytest.mark.parametrize("value", [*NO_COUNTS, None, 0, -1, 10**9, pytest.param(10**5000, id="thousands of digits")])
def test_thread_counts_that_are_none(value):
    refused(Cpu, "worker", "threads", value=value)


@pytest.mark.parametrize("kind", [Cpu, Cuda])
@pytest.mark.parametrize("value", [*NO_COUNTS, 0, -1])
def test_memories_that_are_none(kind, value):
    refused(kind, "worker", "memory_bytes", value=value)


@pytest.mark.parametrize("value", [*NO_COUNTS, None, -1])
def test_indices_that_are_none(value):
    refused(Cuda, "worker", "index", value=value)


@pytest.mark.parametrize("value", ["x", 3, Link, {"upload": 1.0}])
def test_links_that_are_none(value):
    refused(Cpu, "worker", "link", value=value)


@pytest.mark.parametrize("value", [5, None, "ab", Cpu(), {Cpu()}, iter([Cpu()])])
def test_lists_of_workers_that_are_none(value):
    refused(Runtime, "runtime", "workers", value=value)


@pytest.mark.parametrize("value", ["x", 1, None])
def test_a_record_that_is_no_boolean(value):
    refused(Runtime, "runtime", "record", value=value)


def test_all_faults_are_told_at_once():
    with pytest.raises(OptionsError) as caught:
        Link(upload="x", download=1e-300, latency_s=None, piece_bytes=True, disorder=1.5)
    assert str(caught.value) == (
        "link: 5 problems"
        "\n  - upload is 'x', it must be at least 1 byte a second, or math.inf"
        "\n  - download is 1e-300, it must be at least 1 byte a second, or math.inf"
        "\n  - latency_s is None, it must be 0 to 3600 seconds"
        "\n  - piece_bytes is True, it must be a number of bytes from 1"
        "\n  - disorder is 1.5, it must be a whole number, a seed, or None"
    )
    with pytest.raises(OptionsError) as caught:
        Cpu(threads=True, link="x", memory_bytes="x")
    assert str(caught.value) == (
        "worker: 3 problems"
        "\n  - threads is True, it must be at least 1"
        "\n  - link is 'x', needs a Link or None"
        "\n  - memory_bytes is 'x', it must be at least 1 byte, or None"
    )


@pytest.mark.parametrize(
    "link",
    [
        Link(upload=math.inf, download=10**9, latency_s=0, piece_bytes=1, disorder=0),
        Link(np.float32(1e9), np.int64(10**9), np.float64(1e-4), np.int32(64), np.int64(-3)),
    ],
)
def test_numbers_of_all_kinds_work(link):
    function = value_and_grad(exact.model(), exact.linear(), workers=[Cpu(np.int64(1), link, np.int64(1 << 30))])
    result, grads = function(exact.init(), exact.batch(2, 3))
    wanted = value_and_grad(exact.model(), exact.linear())(exact.init(), exact.batch(2, 3))
    assert_equal_bits({"loss": result.loss, **grads}, {"loss": wanted[0].loss, **wanted[1]})
