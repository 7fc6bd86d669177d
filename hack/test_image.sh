#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# test_image.sh [ARGUMENT...]
#
# Runs the unit, hostile and fuzz tests with the interpreter and the installed packages of the frontend's image. This
# image also contains the backend's packages, and OpenSSL, which pytest's plugins need. The tests run in a private mount
# namespace with the image as the root file system and this tree in /src. pytest and other packages that the image lacks
# come after the image's own packages in the module search path, so they cannot replace any of them.
# ARGUMENTs are passed to pytest.
# Variables: those of images.sh, and JOBS (number of pytest workers; by default two more than the number of CPUs,
# because the hostile tests mostly wait).
set -euo pipefail
# shellcheck source=hack/images.sh
. "$(dirname "${BASH_SOURCE[0]}")/images.sh"
say() { printf 'test-image: %s\n' "$*" >&2; }
SITE=$CACHE/test-site

fetch_site() { # downloads and unpacks the packages of locks/test.txt
  local key; key=$( (cat "$ROOT/locks/test.txt"; echo "$GUEST_PYTHON all") | digest)
  [ "$(cat "$SITE/key" 2>/dev/null)" != "$key" ] || return 0
  say "fetching pytest for Python $GUEST_PYTHON"
  rm -rf "$SITE"
  "$PYTHON" "$NODE_DIR/vm/locks.py" --all "$GUEST_PYTHON" "$ROOT/locks/test.txt" >"$CACHE/test-site.txt"
  # forbiddenfruit, a dependency of blockbuster, has no wheel. It is pure Python, so it is installed from its source.
  grep -v '^forbiddenfruit' "$CACHE/test-site.txt" >"$CACHE/test-wheels.txt"
  grep '^forbiddenfruit' "$CACHE/test-site.txt" >"$CACHE/test-sources.txt"
  fetch install "$CACHE/test-wheels.txt" --no-compile --target "$SITE"
  retry "$PYTHON" -m pip install -q --disable-pip-version-check --no-deps --require-hashes --no-build-isolation \
    --no-compile --target "$SITE" -r "$CACHE/test-sources.txt"
  echo "$key" >"$SITE/key"
}

# Script for the private mount namespace: mounts the tree, the site and the kernel's file systems below the image's root
# directory, changes the root to it, and runs pytest.
# shellcheck disable=SC2016
INSIDE='set -e
root=$1 tree=$2 site=$3
shift 3
mkdir -p "$root/src" "$root/test-site" "$root/proc" "$root/sys" "$root/dev" "$root/tmp" "$root/run"
mount --bind "$tree" "$root/src"
mount --bind "$site" "$root/test-site"
mount --rbind /proc "$root/proc"
mount --rbind /sys "$root/sys"
mount --rbind /dev "$root/dev"
mount -t tmpfs tmpfs "$root/tmp"
echo /test-site >"$(echo "$root"/opt/app/lib/python3.*/site-packages)/zz-test-site.pth"
cd "$root/src"
exec env -i HOME=/tmp LANG=C.UTF-8 PATH=/opt/app/bin:/usr/bin PYTHONDONTWRITEBYTECODE=1 ${PATIENCE:+PATIENCE=$PATIENCE} \
  PYTHONPATH=/src/services/nri-backend/src "$(command -v chroot)" "$root" /opt/app/bin/python -c "
import os, sys
os.chdir(\"/src\")
os.execv(sys.executable, [sys.executable, \"-m\", \"pytest\", *sys.argv[1:]])" "$@"'

run_in() { # run_in CONTAINER ARGUMENT...
  # shellcheck disable=SC2016 # for the inner shell
  private sh -c 'storage=$1 container=$2 inside=$3; shift 3
    exec sh -c "$inside" sh "$(buildah $storage mount "$container")" "$@"' \
    sh "$(storage)" "$1" "$INSIDE" "$ROOT" "$SITE" "${@:2}"
}

test_images() {
  if [ "$(id -u)" != 0 ]; then
    command -v sudo >/dev/null || fail "needs root: run as root or install sudo"
    exec sudo --preserve-env=PATH,NODE_VM_MIRROR,PATIENCE,JOBS IMAGES_CACHE="$CACHE" PYTHON="$PYTHON" "$0" "$@"
  fi
  [ -z "${IMAGES_ARCH:-}" ] || fail "IMAGES_ARCH is set: these tests run on this machine's own processor"
  prepare
  fetch_site
  build dra-frontend
  local container status=0
  container=$(engine from "localhost/dra-frontend:$VERSION")
  flock -u 9
  # Excluded tests: test_library.py needs the whole Kubernetes client, but the image contains only the part that the
  # frontend imports. The image also lacks a shell, which the tests of the runtime page use; unshare(1), with which a
  # test of the preflight mounts a directory read-only; and /etc/hosts, which the cookie test needs to resolve names.
  run_in "$container" -q -n "${JOBS:-$(($(nproc) + 2))}" --dist loadgroup tests/unit tests/hostile tests/fuzz \
    --ignore tests/unit/dra_frontend/api_server/test_library.py \
    --ignore tests/unit/nri_backend/setup/test_runtime_page.py \
    --deselect tests/unit/dra_frontend/node/test_preflight.py::test_a_directory_that_is_mounted_read_only_is_named \
    --deselect tests/unit/dra_frontend/api_server/test_client.py::test_a_cookie_is_not_sent_back "$@" || status=$?
  engine rm "$container" >/dev/null
  exit "$status"
}
test_images "$@"
