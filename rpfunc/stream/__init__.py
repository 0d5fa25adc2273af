"""The exact chunked vector-Jacobian product: forms of layers, and what runs them chunk by chunk."""

from rpfunc.stream.attending import Attending, attending
from rpfunc.stream.attention import attend
from rpfunc.stream.bidirectional import Bidirectional
from rpfunc.stream.form import Stepping
from rpfunc.stream.opaque import Opaque, opaque
from rpfunc.stream.recurrent import Recurrent, recurrent
from rpfunc.stream.rowwise import RowWise, rowwise

__all__ = [
    "Attending",
    "Bidirectional",
    "Opaque",
    "Recurrent",
    "RowWise",
    "Stepping",
    "attend",
    "attending",
    "opaque",
    "recurrent",
    "rowwise",
]
