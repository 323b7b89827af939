"""Write the table of results in README.md from benchmarks/results; figures are never typed by hand.

python scripts/readme_results.py [--check]

A row whose file or figure is not there is left out. With --check nothing is written; the status is 1 if the
table is not what the files say.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
BEGIN, END = "<!-- results: python scripts/readme_results.py -->", "<!-- end of results -->"

# Benchmark, value (figures of its summary in braces), what it is, what is aimed at.
ROWS = (
    ("contract", "{splice_equals_full} of {cases}", "cases in which splice answers like full context", "all"),
    ("contract", "{reprefill_equals_full} of {cases}", "cases in which re-prefill does", "none"),
    ("edit_latency", "{edited_over_hit_2k}", "edited request over a full prefix hit, 2 k tokens", ""),
    ("edit_latency", "{edited_over_hit_8k}", "the same, 8 k tokens", "1.1"),
    ("edit_latency", "{edited_over_reprefill_2k}", "edited request over re-prefill, 2 k tokens", ""),
    ("edit_latency", "{edited_over_reprefill_8k}", "the same, 8 k tokens", ""),
    (
        "contract_tiers",
        "{splice_equals_full_from_tiers} of {fact_kept_from_tiers}",
        "the same with the KV in L1, in Redis, on another node",
        "all",
    ),
    ("tiers", "{reused_fraction_l1:.0%}", "of an edited prompt loaded from L1", "85%"),
    ("tiers", "{reused_fraction_redis:.0%}", "from Redis", "85%"),
    ("tiers", "{reused_fraction_other_node:.0%}", "on another node", "85%"),
    ("tiers", "{rotated_over_plain_load:.2f}", "load with rotation over the same load without", "1.05"),
    ("tiers", "{bytes_stored_over_vanilla:.2f}", "KV stored in 20 edited turns, over vanilla LMCache", ""),
    ("tiers", "{recovery_s_daemon:.2g}", "s until a restarted `lmcache server` serves edits", ""),
    ("tiers", "{recovery_s_redis:.2g}", "s until a restarted Redis does", ""),
    ("core", "{compose_plan_ms}", "ms to apply and plan 32 edits of 128 k tokens", "1"),
    ("core", "{growth_16x_tokens}", "time of that at 16 times the tokens over time at one", "about 1"),
    ("diff", "{ms_128k_50_edits}", "ms to find 50 edits in a session of 128 k tokens", "50"),
    (
        "replay",
        "{gain_points_swe_agent:+.1f}",
        "points of hit rate over SGLang alone, agents whose old tool outputs are stubbed",
        "+10",
    ),
    (
        "replay",
        "{fraction_of_ceiling_swe_agent:.1%}",
        "of its ceiling there (longest common runs with an earlier prompt)",
        "99%",
    ),
    ("replay", "{gain_points_magagent:+.1f}", "points, a team of agents that rewrites its history", ""),
    ("replay", "{gain_points_miniswe:+.1f}", "points, an agent that goes back to earlier prompts", ""),
    ("kernel", "{fraction_of_copy_bandwidth}", "splice over a plain copy of as many bytes", "0.5, GPU 0.85"),
)


def table() -> str:
    """The table as Markdown, from the files there are."""
    lines = ["| benchmark | figure | value | aim | measured on |", "|---|---|---|---|---|"]
    for name, shown, what, aim in ROWS:
        file = ROOT / "benchmarks" / "results" / f"{name}.json"
        found: dict[str, Any] = json.loads(file.read_text()) if file.is_file() else {}
        summary = {key: figure for key, figure in found.get("summary", {}).items() if figure is not None}
        try:
            value = shown.format_map(summary)
        except KeyError:
            continue
        environment = found.get("environment", {})
        machine = environment.get("gpu") or f"{environment.get('cpu_count', '?')} CPU cores"
        lines.append(f"| `{name}` | {what} | {value} | {aim} | {machine} |")
    return "\n".join(lines)


def main() -> int:
    """Rewrite (or check) what stands between the two marks."""
    text = README.read_text()
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        print(f"README.md: expected the marks {BEGIN} and {END}", file=sys.stderr)
        return 1
    wanted = f"{before}{BEGIN}\n{table()}\n{END}{after}"
    if "--check" in sys.argv[1:]:
        if wanted != text:
            print("README.md: the table is not what benchmarks/results says", file=sys.stderr)
        return int(wanted != text)
    README.write_text(wanted)
    return 0


if __name__ == "__main__":
    sys.exit(main())
