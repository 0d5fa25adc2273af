"""The type checker that the import hook applies: beartype, ints where floats are asked for, as PEP 484 has it."""

from beartype import BeartypeConf, beartype
from beartype.roar import BeartypeDecorHintException

_checked = beartype(conf=BeartypeConf(is_pep484_tower=True))


def check(function):
    try:
        return _checked(function)
    except BeartypeDecorHintException:  # a hint that cannot be checked at run time (Self, a Protocol)
        return function
