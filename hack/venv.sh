#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# venv.sh DIRECTORY "LOCK..." "PACKAGE..."
# Creates a virtual environment from locks, whose hashes pip verifies, and installs packages of this tree in editable
# mode. Only Python is required. If Debian's separate package for venv is missing, it is installed (as root or with
# sudo).
set -eu
cd "$(dirname "$0")/.."
dir=$1 locks=$2 packages=$3
python=${PYTHON:-python3}

say() { echo "venv: $*" >&2; }
least=$(sed -n 's/^requires-python = ">=\([0-9.]*\)"$/\1/p' shared/pyproject.toml)
found=$("$python" -c 'import platform; print(platform.python_version())' 2>/dev/null) || found=
if ! "$python" -c "import sys; sys.exit(sys.version_info < ($(echo "$least" | tr . ,)))" 2>/dev/null; then
  say "needs Python $least or later, but $python is ${found:+Python }${found:-missing or broken}"
  say "set PYTHON to such an interpreter, for example: make test PYTHON=/usr/bin/python3.11"
  exit 1
fi
if ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
  command -v apt-get >/dev/null || { say "$python lacks the venv module; install it with your package manager"; exit 1; }
  root=; [ "$(id -u)" = 0 ] || root=sudo
  say "installing python3-venv"
  $root apt-get -q -y update >/dev/null
  $root env DEBIAN_FRONTEND=noninteractive apt-get -q -y install python3-venv >/dev/null
fi
rm -rf "$dir"
"$python" -m venv "$dir"
requirements=
for lock in $locks; do requirements="$requirements -r $lock"; done
export PIP_DISABLE_PIP_VERSION_CHECK=1
# shellcheck disable=SC2086 # lists of words
"$dir/bin/python" -m pip install -q --require-hashes $requirements
editable=
for package in $packages; do editable="$editable -e ./$package"; done
# shellcheck disable=SC2086
[ -z "$editable" ] || "$dir/bin/python" -m pip install -q --no-build-isolation --no-deps $editable
touch "$dir/.done"
