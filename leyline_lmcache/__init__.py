"""Leyline: semantic edits of a context as operations on KV that is already cached."""

__version__ = "0.1.0"
