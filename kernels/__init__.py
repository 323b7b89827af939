"""Rotation of cached keys; installed as ``leyline_lmcache.kernels``. Needs torch; triton is optional."""

from .layout import Band, KVLayout, LayoutError, Plane
from .probe import probe_config, probe_model, probe_module
from .rope import Pairing, RopeFault, RopeSpec, UnsupportedRope
from .splice import SlotRangeError, SpliceError, SpliceStats, prepare, splice_rows

__all__ = [
    "Band",
    "KVLayout",
    "LayoutError",
    "Pairing",
    "Plane",
    "RopeFault",
    "RopeSpec",
    "SlotRangeError",
    "SpliceError",
    "SpliceStats",
    "UnsupportedRope",
    "prepare",
    "probe_config",
    "probe_model",
    "probe_module",
    "splice_rows",
]
