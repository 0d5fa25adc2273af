"""The exact chunked vector-Jacobian product: forms of layers, and what runs them chunk by chunk."""

from rpfunc.stream.attending import Attending, attending
from rpfunc.stream.attention import attend
from rpfunc.stream.opaque import Opaque, opaque
from rpfunc.stream.rowwise import RowWise, rowwise

__all__ = ["Attending", "Opaque", "RowWise", "attend", "attending", "opaque", "rowwise"]
