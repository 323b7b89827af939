"""The real stack on one machine: Redis, ``lmcache server`` and SGLang, with or without the plugin.

with Stack(StackSpec(model="gqa", page_size=16)) as stack:
    stack.client().generate("hello")
"""

from leyline_lmcache.stack.client import Client, Generation, PoolUsage, RequestError
from leyline_lmcache.stack.errors import StackError
from leyline_lmcache.stack.spec import StackSpec
from leyline_lmcache.stack.stack import Progress, Stack

__all__ = [
    "Client",
    "Generation",
    "PoolUsage",
    "Progress",
    "RequestError",
    "Stack",
    "StackError",
    "StackSpec",
]
