"""The ``leyline`` command."""
