"""The ``leyline`` command: one module per sub-command, imported only when it is called."""

from leyline_lmcache.cli.app import main

__all__ = ["main"]
