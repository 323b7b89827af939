"""Python runs this at start where the folder is on PYTHONPATH, so in every worker a server spawns."""

import leyline_cpu_shim

leyline_cpu_shim.install()
