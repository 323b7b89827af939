"""A plain agent loop whose history is edited every turn.

    leyline up --name loop
    python examples/loop.py --url http://127.0.0.1:30000

The agent lists folders with a tool and keeps all outputs; the policy sends the two latest. Any model that
SGLang serves will do: where it calls no tools (those that `leyline up` starts without a GPU do not), the loop
makes up the calls, so that there is something to see.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from openai import OpenAI

from leyline_lmcache.client import Session
from leyline_lmcache.policies import KeepToolResults

TOOL = {
    "type": "function",
    "function": {
        "name": "list_folder",
        "description": "Names of the files in a folder.",
        "parameters": {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]},
    },
}


def list_folder(path: str) -> str:
    """The agent's one tool."""
    try:
        return "\n".join(sorted(entry.name for entry in Path(path).iterdir())[:40])
    except OSError as error:
        return f"Error: {error.strerror}"


def main() -> None:
    """Hold the conversation, and print what each turn cost."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:30000", help="of SGLang, or of the gateway")
    parser.add_argument("--model", default="default")
    parser.add_argument("--root", type=Path, default=Path("/usr/lib"), help="where the agent looks around")
    parser.add_argument("--turns", type=int, default=8)
    options = parser.parse_args()

    openai = OpenAI(base_url=f"{options.url}/v1", api_key="none")
    session = Session(openai, policy=KeepToolResults(keep=2))

    messages: list[Any] = [
        {"role": "user", "content": f"Look around in {options.root} and tell me what is there."}
    ]
    folders = [str(path) for path in sorted(options.root.iterdir()) if path.is_dir()][: options.turns]
    print(f"{'turn':>4}  {'prompt':>6}  {'cached':>6}  {'spliced':>7}  edits")
    for turn, folder in enumerate(folders):
        answer = session.chat.completions.create(
            model=options.model, messages=messages, tools=[TOOL], max_tokens=16, temperature=0
        )
        report = session.last
        assert report is not None
        edits = report.outcome or "none"
        print(
            f"{turn:>4}  {report.prompt or 0:>6}  {report.cached or 0:>6}  {report.spliced or 0:>7}  {edits}"
        )

        message = answer.choices[0].message
        if message.tool_calls:
            messages.append(message)
            calls = [(call.id, call.function.arguments) for call in message.tool_calls]
        else:
            calls = [(f"call-{turn}", json.dumps({"path": folder}))]
            function = {"name": "list_folder", "arguments": calls[0][1]}
            made_up = {"id": calls[0][0], "type": "function", "function": function}
            messages.append({"role": "assistant", "content": message.content, "tool_calls": [made_up]})
        for call_id, arguments in calls:
            output = list_folder(str(json.loads(arguments).get("path", folder)))
            messages.append({"role": "tool", "tool_call_id": call_id, "content": output})

    totals = session.totals
    print(
        f"{totals.cached:,} of {totals.prompt:,} prompt tokens came from the cache ({totals.hit_rate:.0%}),"
    )
    print(f"{totals.spliced:,} of them from behind an edit; {totals.removed:,} characters were not sent.")


if __name__ == "__main__":
    main()
