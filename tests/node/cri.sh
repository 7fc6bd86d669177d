#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Generates tests/node/_pb from cri.proto; "--check" compares it with newly generated code instead.
# Because of the mapped include path, the generated modules import each other from tests.node._pb.
set -eu
cd "$(dirname "$0")/../.."
out=.
if [ "${1:-}" = --check ]; then out=$(mktemp -d); trap 'rm -rf "$out"' EXIT; fi
"${PYTHON:-.venv/bin/python}" -m grpc_tools.protoc -I tests/node/_pb=tests/node \
  --python_out="$out" --pyi_out="$out" --grpc_python_out="$out" tests/node/_pb/cri.proto
# The generated base class for servers has methods that raise NotImplementedError; the added comment explains why.
sed -i "s/^ *raise NotImplementedError('Method not implemented!')$/&  # overridden by servers/" "$out/tests/node/_pb/cri_pb2_grpc.py"
[ "$out" = . ] || diff -r -x __pycache__ -x __init__.py tests/node/_pb "$out/tests/node/_pb"
