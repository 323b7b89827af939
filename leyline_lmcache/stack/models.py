"""The models a stack can serve by name. Random ones are made on demand and kept in the cache folder."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from leyline_lmcache.stack import device as devices
from leyline_lmcache.stack import recipes
from leyline_lmcache.stack.errors import StackError
from leyline_lmcache.stack.paths import cache_dir, ensure_dir

TRAINED = "tiny-mla"
MODELS_VARIABLE = "LEYLINE_MODELS"
NAMES = (*recipes.RECIPES, TRAINED)


def trained_dir() -> Path:
    """Folder of the trained model: ``tiny_mla`` below the tree's ``models`` or ``LEYLINE_MODELS``.

    Raises:
        StackError: it is not there, as in an installation from a wheel.
    """
    named = os.environ.get(MODELS_VARIABLE)
    folder = (Path(named) if named else Path(__file__).resolve().parents[2] / "models") / "tiny_mla"
    if not (folder / "model" / "config.json").is_file():
        raise StackError(
            f"model {TRAINED}: not found in {folder}; it comes with the source tree, not with the installed "
            f"package: set {MODELS_VARIABLE} to the tree's models folder"
        )
    return folder


def resolve(model: str) -> Path:
    """The folder of a model given by name or by path, made first if need be.

    Raises:
        StackError: no such model, or it could not be made.
    """
    if model in recipes.RECIPES:
        return _generated(model)
    if model == TRAINED:
        return trained_dir() / "model"
    folder = Path(model).expanduser().absolute()
    if not (folder / "config.json").is_file():
        raise StackError(f"model {model}: neither one of {', '.join(NAMES)} nor a folder with a config.json")
    return folder


def _generated(name: str) -> Path:
    # Another recipe is another model: whatever was cached for the old one is left alone.
    key = hashlib.sha256(Path(recipes.__file__).read_bytes()).hexdigest()[:12]
    root = ensure_dir(cache_dir() / "models", "XDG_CACHE_HOME")
    target = root / f"{name}-{key}"
    if target.is_dir():
        return target
    scratch = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=root))
    try:
        made = subprocess.run(
            [sys.executable, "-m", recipes.__name__, name, str(scratch / "model")],
            env=devices.server_env("cpu", {}),
            capture_output=True,
            text=True,
            check=False,
        )
        if made.returncode:
            raise StackError(f"model {name}: could not be made: {made.stderr.strip() or made.stdout.strip()}")
        try:
            (scratch / "model").rename(target)
        except OSError:
            if not target.is_dir():  # else somebody made the same one meanwhile
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target
