"""A GPU that is not there is refused with what was found and what would work; the spec itself asks nothing of CUDA."""

import subprocess
import sys

import pytest
import torch

from rpfunc import Cpu, Cuda, Runtime, value_and_grad
from rpfunc.errors import OptionsError
from rpfunc.runtime.cuda import missing
from rpfunc.testing import exact


@pytest.mark.parametrize(
    ("build", "gpus", "index", "message"),
    [
        (None, 0, 0, "worker: Cuda(index=0): torch {} is built for CPUs alone; a CUDA build is needed; Cpu(), or "
                     "Cpu(link=Link()), which plays a device, works without one"),
        ("12.8", 0, 0, "worker: Cuda(index=0): torch {} finds no GPU; Cpu(), or Cpu(link=Link()), which plays a "
                       "device, works without one"),
        ("12.8", 1, 3, "worker: Cuda(index=3): there is 1 GPU; index 0 to 0 would do"),
        ("12.8", 2, 2, "worker: Cuda(index=2): there are 2 GPUs; index 0 to 1 would do"),
    ],
)  # fmt: skip
def test_a_missing_gpu_is_refused(build, gpus, index, message, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", build)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    with pytest.raises(OptionsError) as caught:
        Runtime([Cpu(), Cuda(index)])
    assert str(caught.value) == message.format(torch.__version__)


@pytest.mark.skipif(missing() is None, reason="there is a GPU")
def test_gradients_are_refused_before_any_work():
    with pytest.raises(OptionsError, match=r"worker: Cuda\(index=0\)"):
        value_and_grad(exact.model(("square", "relu")), exact.linear(), workers=[Cuda()])(
            exact.init(("square", "relu")), exact.batch(2, 3, seed=0)
        )


def test_options_that_cannot_work_are_listed():
    with pytest.raises(OptionsError) as caught:
        Cuda(index=-1, memory_bytes=0)
    assert str(caught.value) == (
        "worker: 2 problems\n  - index is -1, it must be a number from 0"
        "\n  - memory_bytes is 0, it must be at least 1, or None"
    )


def test_a_spec_starts_nothing():
    program = "import torch, rpfunc; rpfunc.Cuda(0, 2**30); assert not torch.cuda.is_initialized()"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=50)
