"""Edits on the real stack: SGLang with the plugin, `lmcache server`, Redis. Nothing stands in for them."""
