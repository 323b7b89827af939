"""``python -m leyline_lmcache`` is ``leyline``."""

import sys

from leyline_lmcache.cli import main

if __name__ == "__main__":
    sys.exit(main())
