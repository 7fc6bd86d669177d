#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Compiles each lock from its inputs, with hashes and without the addresses of indexes or links. With --check, compares
# the results with the existing locks instead of replacing them.
set -eu
cd "$(dirname "$0")/.."
uv=${UV:-uv}
dir=locks
if [ "${1:-}" = --check ]; then dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT; cp locks/*.txt "$dir/"; fi
lock() {
  out=$1; shift
  "$uv" pip compile -q --universal --python-version 3.11.2 --generate-hashes --no-emit-index-url --no-emit-find-links \
    --no-annotate --no-header --no-emit-package numa-contract "$@" -o "$dir/$out"
}
printf 'numa-contract @ file://%s/shared\n' "$PWD" >"${TMPDIR:-/tmp}/numa-contract.$$.in"
o="${TMPDIR:-/tmp}/numa-contract.$$.in"
lock dev.txt locks/dev.in shared/pyproject.toml services/dra-frontend/pyproject.toml services/nri-backend/pyproject.toml --override "$o"
lock dra-frontend.txt -c "$dir/dev.txt" services/dra-frontend/pyproject.toml --override "$o"
lock nri-backend.txt -c "$dir/dev.txt" services/nri-backend/pyproject.toml --override "$o"
lock test.txt -c "$dir/dev.txt" locks/test.in
lock build.txt -c "$dir/dev.txt" locks/build.in
lock docs.txt -c "$dir/dev.txt" locks/docs.in
rm -f "$o"
if [ "$dir" != locks ]; then for f in locks/*.txt; do diff -u "$f" "$dir/$(basename "$f")"; done; fi
