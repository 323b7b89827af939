"""Where Leyline meets SGLang, LMCache and Redis; installed as ``leyline_lmcache.connector``."""
