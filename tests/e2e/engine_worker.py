"""An SGLang engine in a process of its own: JSON lines in, JSON lines out.

Run by test_engine.py. The first line holds the engine's arguments, every other one those of a call of
``Engine.generate``. Lines of ours start with ``@``; SGLang prints what it likes.
"""

from __future__ import annotations

import json
import sys
from typing import Any


def say(what: Any) -> None:
    sys.stdout.write("@" + json.dumps(what, default=str) + "\n")
    sys.stdout.flush()


def main() -> None:
    import sglang

    engine = sglang.Engine(**json.loads(sys.stdin.readline()))
    try:
        say("ready")
        for line in sys.stdin:
            call = json.loads(line)
            try:
                if call.get("stream"):
                    say(list(engine.generate(**call))[-1])
                else:
                    say(engine.generate(**call))
            except ValueError as error:
                say({"error": str(error)})
    finally:
        engine.shutdown()


if __name__ == "__main__":
    main()
