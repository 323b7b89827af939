#!/usr/bin/env bash
# Build the environment that demo, tests, checks and benchmarks run in, or find the one built before. Progress goes to
# stderr; the path of the environment's Python is the last line of stdout.
#
# Two layers, both outside the tree: the locked dependencies (large, shared by every checkout with the same locks) and
# a small environment per checkout that adds this package in editable form. A layer is used only once its stamp is
# written, which is the last step of building it, so an interrupted build is never taken for a whole one.
#
#   LEYLINE_VENV   put both layers into this folder instead of ${XDG_CACHE_HOME:-~/.cache}/leyline
#   PYTHON         the Python (3.11 or newer) to build with
#   LEYLINE_TORCH  another torch requirement than requirements/torch.lock, for instance "torch==2.13.0"
#
# Options: --no-redis (do not look for redis-server), --quiet (say nothing when there is nothing to do)
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
quiet= want_redis=1
for arg in "$@"; do
  case $arg in
    --quiet) quiet=1 ;;
    --no-redis) want_redis= ;;
    *) echo "env: unknown option $arg (known: --quiet, --no-redis)" >&2; exit 2 ;;
  esac
done

say() { printf 'env: %s\n' "$*" >&2; }
die() { say "$*"; exit 1; }
digest() { sha256sum | cut -c1-12; }

# The first usable interpreter; a name on PATH may be a shim that only prints an error.
find_python() {
  local candidate found
  for candidate in ${PYTHON:-python3.11 python3 python3.12 python3.13}; do
    found=$(command -v "$candidate") || continue
    "$found" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null || continue
    # Resolve shims and environments, so that the environment does not depend on the caller's.
    "$found" -c 'import os, sys; print(os.path.realpath(sys.executable))' && return
  done
  return 1
}

python=$(find_python) || die "needs Python 3.11, 3.12 or 3.13, none found${PYTHON:+ as PYTHON=$PYTHON}: apt-get install python3 python3-pip, or set PYTHON"
torch=${LEYLINE_TORCH:-$(grep -v '^#' "$root/requirements/torch.lock")}

deps_key=$( { cat "$root"/requirements/{engine,dev}.lock; echo "$torch"; "$python" -c 'import sys; print(sys.version)'; echo "layout 1 $python"; } | digest)
tree_key=$( { cat "$root/pyproject.toml" "$root/setup.py"; echo "$deps_key $root"; } | digest)

if [ -n "${LEYLINE_VENV:-}" ]; then
  case $LEYLINE_VENV in /*) venv=$LEYLINE_VENV ;; *) venv=$PWD/$LEYLINE_VENV ;; esac
  deps=$venv/deps home=$venv
else
  home=${XDG_CACHE_HOME:-${HOME:?env: set HOME, XDG_CACHE_HOME or LEYLINE_VENV}/.cache}/leyline
  deps=$home/deps-$deps_key
  venv=$home/venv-$deps_key-$(printf '%s' "$root" | digest)
fi
stamp=.leyline-stamp

is_complete() { [ "$(cat "$1/$stamp" 2>/dev/null)" = "$2" ] && "$1/bin/python" -c '' 2>/dev/null; }

# Only ever removes what this script made: every layer is marked before anything else is put into it.
check_ours() {
  if [ -e "$1" ] && [ ! -e "$1/.leyline-env" ] && [ -n "$(ls -A "$1" 2>/dev/null)" ]; then
    die "$1 exists and was not made by this script: choose another LEYLINE_VENV, or remove it"
  fi
}
fresh() {
  check_ours "$1"
  rm -rf "$1"
  mkdir -p "$1" || die "cannot create $1: set LEYLINE_VENV or XDG_CACHE_HOME to a folder you may write to"
  touch "$1/.leyline-env"
}

# A venv has a pip of its own only where Python came with ensurepip (Debian splits it off into python3-venv); elsewhere
# the outer pip installs into it.
make_venv() {
  "$python" -m venv --without-pip "$1" >>"$log" 2>&1 \
    || die "$python cannot make virtual environments: apt-get install python3-venv (details in $log)"
  touch "$1/.leyline-env"
}
pip_into() {
  local target=$1; shift
  "${pip[@]}" --python "$target/bin/python" --no-input --disable-pip-version-check "$@" >>"$log" 2>&1
}
find_pip() {
  if "$python" -m pip --version >/dev/null 2>&1; then pip=("$python" -m pip); return; fi
  if "$python" -m ensurepip --version >/dev/null 2>&1; then
    "$python" -m venv "$home/pip" >>"$log" 2>&1 && pip=("$home/pip/bin/python" -m pip) && return
  fi
  die "$python has neither pip nor ensurepip: apt-get install python3-pip (or python3-venv)"
}
explain() {  # the line of the log that says most
  local line
  line=$(grep -E '^(ERROR|error|.*[Nn]o space left)' "$log" | tail -n 1) || line=$(tail -n 1 "$log")
  printf '%s' "$line"
}

build_deps() {
  fresh "$deps"
  say "installing SGLang, LMCache, torch and tools into $deps (about 3 GB, one to five minutes)"
  make_venv "$deps"
  pip_into "$deps" install --no-deps -r "$root/requirements/engine.lock" -r "$root/requirements/dev.lock" \
    || die "the locked packages could not be installed: $(explain) (details in $log)"
  if ! pip_into "$deps" install --no-deps "$torch"; then
    say "no $torch from pip as it is configured; trying PyTorch's index of CPU builds"
    pip_into "$deps" install --no-deps --index-url https://download.pytorch.org/whl/cpu "$torch" \
      || die "$torch could not be installed, neither from pip as configured nor from PyTorch's CPU index: $(explain) (details in $log; LEYLINE_TORCH names another one)"
  fi
  "$deps/bin/python" -c 'import torch' >>"$log" 2>&1 || die "torch was installed but cannot be imported: $(explain) (details in $log)"
  echo "$deps_key" >"$deps/$stamp"
}

build_tree() {
  local site scratch
  if [ "$venv" = "$home" ]; then  # the layers share a folder: keep the dependencies
    rm -rf "${venv:?}"/{"$stamp",bin,include,lib,lib64,pyvenv.cfg}
  else
    fresh "$venv"
  fi
  make_venv "$venv"
  site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  echo "import site; site.addsitedir('$("$deps/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')')" \
    >"$site/leyline-deps.pth"
  pip_into "$venv" install --no-deps --no-build-isolation --editable "$root" \
    || die "this package could not be installed: $(explain) (details in $log)"
  ln -sf "$deps/bin/ruff" "$venv/bin/ruff"
  echo "$tree_key" >"$venv/$stamp"
}

ensure_redis() {
  command -v redis-server >/dev/null && return
  local sudo=
  if [ "$(id -u)" != 0 ]; then
    if command -v sudo >/dev/null && sudo -n true 2>/dev/null; then sudo='sudo -n'; else sudo=none; fi
  fi
  if [ "$sudo" != none ] && command -v apt-get >/dev/null; then
    say "installing redis-server with apt-get"
    # policy-rc.d semantics differ between images; a server started by the package would only hold a port.
    if { $sudo apt-get update && $sudo env DEBIAN_FRONTEND=noninteractive RUNLEVEL=1 \
         apt-get install -y --no-install-recommends redis-server; } >>"$log" 2>&1; then
      command -v redis-server >/dev/null && return
    fi
    say "apt-get could not install redis-server (details in $log)"
  fi
  say "no redis-server on PATH: install one (apt-get install redis-server) before you start the stack"
}

if ! { is_complete "$deps" "$deps_key" && is_complete "$venv" "$tree_key"; }; then
  command -v flock >/dev/null || die "needs flock: apt-get install util-linux"
  [ "$venv" != "$home" ] || check_ours "$home"
  mkdir -p "$home" 2>/dev/null && [ -w "$home" ] \
    || die "cannot write to $home: set LEYLINE_VENV or XDG_CACHE_HOME to a folder you may write to"
  log=$home/env.log
  exec 9>>"$home/.leyline-env"
  if ! flock -n 9; then
    say "another build is running, waiting for it"
    flock 9
  fi
  is_complete "$deps" "$deps_key" || { : >"$log"; find_pip; build_deps; }
  is_complete "$venv" "$tree_key" || { find_pip; build_tree; }
  exec 9>&-
elif [ -z "$quiet" ]; then
  say "up to date: $venv"
fi
log=$home/env.log
[ -z "$want_redis" ] || ensure_redis
echo "$venv/bin/python"
