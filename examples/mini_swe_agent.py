"""mini-swe-agent, a real harness from PyPI, with its history kept short.

    pip install mini-swe-agent 'leyline-lmcache[policies]'
    leyline up --name agent
    python examples/mini_swe_agent.py --url http://127.0.0.1:30000 "Find out what this folder is about."

mini-swe-agent keeps its conversation whole. Its model class gets a `Session` instead of LiteLLM, and that is
all. Commands run in --folder, without a sandbox, as mini-swe-agent does by default.

With --pretend, answers without a command get one that looks around: for models too small to act, such as
those that `leyline up` starts without a GPU.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import litellm
import yaml
from minisweagent import package_dir
from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_textbased_model import LitellmTextbasedModel
from openai import OpenAI

from leyline_lmcache.client import Session
from leyline_lmcache.policies import KeepToolResults

FENCE = "```mswea_bash_command"
LOOKS = (
    "ls -la",
    "find . -maxdepth 2 | sort | head -60",
    "du -a . | sort -n | tail -40",
    "wc -c * | tail -60",
)


class SessionModel(LitellmTextbasedModel):
    """mini-swe-agent's text model, which asks a session."""

    def __init__(self, session: Session, *, pretend: bool, **options: Any) -> None:
        super().__init__(cost_tracking="ignore_errors", **options)
        self.session = session
        self.pretend = pretend

    def _query(self, messages: list[dict[str, Any]], **options: Any) -> Any:
        fields = self.config.model_kwargs | options
        answer = self.session.create(model=self.config.model_name, messages=messages, **fields)
        report = self.session.last
        assert report is not None
        turn = self.session.totals.calls
        print(
            f"{turn:>4}  {report.prompt or 0:>6}  {report.cached or 0:>6}  {report.spliced or 0:>7}  "
            f"{report.outcome or 'none'}"
        )
        message = answer.choices[0].message
        if self.pretend and FENCE not in (message.content or ""):
            message.content = f"THOUGHT: let me look.\n\n{FENCE}\n{LOOKS[turn % len(LOOKS)]}\n```"
        return answer


def main() -> None:
    """Let the agent work, and print what each of its turns cost."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("task")
    parser.add_argument("--url", default="http://127.0.0.1:30000", help="of SGLang, or of the gateway")
    parser.add_argument("--model", default="default")
    parser.add_argument("--folder", type=Path, default=Path())
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--max-tokens", type=int, default=512)
    parser.add_argument("--pretend", action="store_true")
    options = parser.parse_args()

    litellm.suppress_debug_info = True  # it does not know the price of a model of one's own
    openai = OpenAI(base_url=f"{options.url}/v1", api_key="none")
    session = Session(openai, policy=KeepToolResults(keep=2, observations=True))
    config = yaml.safe_load((package_dir / "config" / "mini_textbased.yaml").read_text())
    texts = {name: config["model"][name] for name in ("observation_template", "format_error_template")}
    model = SessionModel(
        session,
        pretend=options.pretend,
        model_name=options.model,
        model_kwargs={"temperature": 0, "max_tokens": options.max_tokens},
        **texts,
    )
    agent_texts = {name: config["agent"][name] for name in ("system_template", "instance_template")}
    environment = LocalEnvironment(cwd=str(options.folder.resolve()))
    agent = DefaultAgent(model, environment, step_limit=options.steps, **agent_texts)

    print(f"{'turn':>4}  {'prompt':>6}  {'cached':>6}  {'spliced':>7}  edits")
    ended = agent.run(options.task)
    totals = session.totals
    print(f"{ended.get('exit_status')}: {totals.cached:,} of {totals.prompt:,} prompt tokens were cached")
    print(f"({totals.hit_rate:.0%}), {totals.spliced:,} of them from behind an edit.")


if __name__ == "__main__":
    main()
