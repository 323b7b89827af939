"""The engine side: SGLang plugin, LMCache server module, tiers, Redis store.

Everything that touches the internals of SGLang or LMCache lives in this package, behind the version check of
:mod:`.versions`; the contract test imports every symbol that is relied on.

==================  =====================================================================================
``plugin``          entry point: registers the ``leyline`` radix-cache backend and the request hooks
``versions``        the releases this package was written against
``settings``        configuration of the plugin
``hints``           the directive envelope as SGLang carries it
``fills``           main process: the short internal requests that prefill replacements
``cache``           scheduler process: the radix-cache subclass, thin overrides only
``gpu_tier``        what the overrides do: decide, splice, remember
``splicer``         one splice, from sources to the published path
``plans``           one request's plan (pure arithmetic)
``records``         base records: what past responses left in the cache
``lineage``         tags that keep edited KV apart from exact KV
``sources``         where the KV that a view needs lies now
``slots``           the tree and allocator calls: match, lock, take over, insert
``runtime``         what is supported, decided once at start
``report``          journal, counters, and the per-request report
==================  =====================================================================================
"""
