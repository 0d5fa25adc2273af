"""Everything that knows threads and time: workers, dispatch of a schedule, gradients, training state."""

from rpfunc.runtime.apply import apply
from rpfunc.runtime.device import Link
from rpfunc.runtime.session import Result
from rpfunc.runtime.state import State
from rpfunc.runtime.value_and_grad import Workers, value_and_grad
from rpfunc.runtime.workers import Cpu, Cuda, Runtime

__all__ = ["Cpu", "Cuda", "Link", "Result", "Runtime", "State", "Workers", "apply", "value_and_grad"]
