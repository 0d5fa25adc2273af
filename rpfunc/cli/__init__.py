"""The command line."""

from rpfunc.cli.app import main

__all__ = ["main"]
