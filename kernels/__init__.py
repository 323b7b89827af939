"""Rotation of cached keys; installed as ``leyline_lmcache.kernels``."""
