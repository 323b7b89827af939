"""``Engine.generate`` in a program of one's own, with pages of 64 tokens (C6)."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from reference.model import Reference
from reference.rules import Edit

from leyline_lmcache.stack import device as devices
from leyline_lmcache.stack.client import Client, Generation
from leyline_lmcache.stack.models import resolve

from .driver import IDENTITY, Twin, agree, edited, envelope, refused, report, spliced, tokens

PAGE = 64


class Engine:
    """The engine of engine_worker.py."""

    def __init__(self, folder: Path) -> None:
        device = devices.detect()
        settings = folder / "leyline.yaml"
        settings.write_text(f"journal_dir: {folder / 'journal'}\n")
        plugins = ["leyline"] + (["leyline_cpu"] if device == "cpu" else [])
        self.log = folder / "engine.log"
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, str(Path(__file__).with_name("engine_worker.py"))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=devices.server_env(
                    device,
                    {"SGLANG_PLUGINS": ",".join(plugins), "LEYLINE_CONFIG": str(settings)},
                ),
            )
        self._call(
            {
                "model_path": str(resolve("mla")),
                "device": device,
                "dtype": "float32",
                "page_size": PAGE,
                "max_total_tokens": 16384,
                "context_length": 4096,
                "mem_fraction_static": 0.5,
                "random_seed": 0,
                "radix_cache_backend": "leyline",
                "log_level": "warning",
            }
        )

    def _call(self, what: dict[str, Any]) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(what) + "\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith("@"):
                return json.loads(line[1:])
        raise AssertionError(self.log.read_text(errors="replace")[-5000:])

    def generate(self, prompt: Sequence[Any], **options: Any) -> Any:
        body = Client.request(list(prompt), **options)
        return self._call(body)

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    devices.detect()
    engine = Engine(tmp_path_factory.mktemp("engine"))
    yield engine
    engine.close()
    log = engine.log.read_text(errors="replace")
    assert "Traceback" not in log, log


@pytest.fixture
def twin(engine: Engine, reference_of: Callable[[str], Reference]) -> Twin:
    def ask(prompt: Sequence[int], **options: Any) -> Generation:
        return Generation.of(engine.generate(prompt, **options))

    return Twin(None, reference_of("mla"), page_size=PAGE, ask=ask)


EDITS: dict[str, list[Edit]] = {
    "on pages": [(320, 512, tokens(64, "e0"))],
    "removed, on pages": [(320, 384, [])],
    "off pages": [(300, 500, tokens(5, "e1"))],
    "removed, off pages": [(300, 301, [])],
    "one token": [(333, 334, [9])],
    "three": [(65, 70, []), (300, 320, tokens(70, "e2")), (600, 600, [4])],
    "two in neighbouring pages": [(100, 101, [4]), (140, 141, [5])],
}


@pytest.mark.parametrize("kind", EDITS)
def test_edits_with_pages_of_64_C6(twin: Twin, kind: str) -> None:
    base = twin.base(tokens(900, ("engine", kind)), 3)
    twin.edit(base, EDITS[kind], tokens(30, "engine t"), 3)


def test_turn_after_turn(twin: Twin) -> None:
    base = twin.base(tokens(700, "engine turns"))
    first = twin.edit(base, [(300, 500, tokens(5, "e3"))], tokens(90, "e4"))
    twin.differs_from_reprefill(first, base)
    second = twin.edit(first, [IDENTITY], tokens(70, "e5"))
    twin.edit(second, [(130, 131, tokens(80, "e6"))], tokens(30, "e7"))


def test_stream(twin: Twin) -> None:
    base = twin.base(tokens(600, "engine stream"))
    twin.edit(base, [(300, 400, tokens(5, "e8"))], tokens(30, "e9"), stream=True)


def test_list_of_prompts(engine: Engine, twin: Twin) -> None:
    """Each with an envelope of its own, or none."""
    bases = [twin.base(tokens(400, ("engine list", number)), 1) for number in range(2)]
    edit: Edit = (100, 200, tokens(5, "e10"))
    prompts = [edited(base.tokens, edit) + tokens(30, "e11") for base in bases]
    other = tokens(200, "engine other")
    answers = engine.generate(
        [prompts[0], other, prompts[1]],
        max_new_tokens=4,
        logprobs=True,
        sampling={"ignore_eos": True},
        kv_hints=[envelope(bases[0].id, edit), None, envelope("nobody", edit)],
    )
    first, second, third = (Generation.of(one) for one in answers)
    spliced(first)
    agree(first, twin.reference.serve(bases[0].context, [edit], prompts[0], 4, page_size=PAGE)[0])
    assert report(second) is None
    agree(second, twin.reference.reprefill(other, 4))
    refused(third, "unknown_base")
    agree(third, twin.reference.reprefill(prompts[1], 4))


def test_a_malformed_envelope_is_an_error(engine: Engine) -> None:
    assert "kv_hints" in engine.generate([5, 6, 7], kv_hints={"actions": 3})["error"]
