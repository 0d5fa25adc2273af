"""The exact chunked vector-Jacobian product: forms of layers, and what runs them chunk by chunk."""

from rpfunc.stream.attending import Attending as attending
from rpfunc.stream.attention import attend
from rpfunc.stream.opaque import Opaque as opaque
from rpfunc.stream.rowwise import RowWise as rowwise

__all__ = ["attend", "attending", "opaque", "rowwise"]
