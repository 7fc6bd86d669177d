#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Regenerates tests/node/_pb from cri.proto. The mapped include path makes the modules import themselves as tests.node._pb.
set -eu
cd "$(dirname "$0")/../.."
out=${1:-.}
mkdir -p "$out"
"${PYTHON:-.venv/bin/python}" -m grpc_tools.protoc -I tests/node/_pb=tests/node \
  --python_out="$out" --pyi_out="$out" --grpc_python_out="$out" tests/node/_pb/cri.proto
