#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# images.sh [TARGET...]
# images.sh --where     prints the directory that contains the results
#
# Builds targets of the Dockerfile (default: both images) without a container engine: buildah, from Debian packages,
# runs in a chroot. mmdebstrap creates the base image, under the name that the Dockerfile uses, from the mirror that
# this machine's apt uses. Python packages are downloaded by this machine's pip from its configured index and installed
# offline. The addresses of the mirror and the index do not appear in an image. The results of a target are TARGET.tar
# (for docker load or ctr import) and TARGET.cdx.json (its SBOM). A target is rebuilt if one of its sources has changed.
# IMAGES_ARCH=arm64 builds for that architecture; QEMU then emulates the programs that run during the build.
# Variables: IMAGES_CACHE (buildah's storage, wheels, results), NODE_VM_MIRROR (Debian mirror), PYTHON (with pip).
set -euo pipefail
# shellcheck source=/dev/null
. "$(dirname "${BASH_SOURCE[0]}")/../tests/node/vm/env.sh"
# shellcheck source=/dev/null
. "$NODE_DIR/vm/debian.sh"
say() { printf 'images: %s\n' "$*" >&2; }

CACHE=${IMAGES_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/dra-driver-numa/images}
ARCH=${IMAGES_ARCH:-amd64}
case $ARCH in
amd64) MACHINE=x86_64 ;;
arm64) MACHINE=aarch64 CACHE=$CACHE/arm64 ;;
*) fail "IMAGES_ARCH is $ARCH: use amd64 or arm64" ;;
esac
BASE=docker.io/library/debian:$SUITE-slim
TIME=315532800 # modification time of every file in an image: 1980, the earliest time that a wheel can store
OUT=$CACHE/out

install_tools() {
  local missing=()
  command -v buildah >/dev/null || missing+=(buildah)
  command -v mmdebstrap >/dev/null || missing+=(mmdebstrap)
  [ -e "$KEYRING" ] || missing+=(debian-archive-keyring)
  ((${#missing[@]})) || return 0
  command -v apt-get >/dev/null || fail "needs ${missing[*]}: install them (this machine has no apt-get)"
  retry apt-get -q -o Acquire::Retries=5 update
  retry env DEBIAN_FRONTEND=noninteractive apt-get -y -q -o Acquire::Retries=5 --no-install-recommends install "${missing[@]}"
}

install_emulator() {
  [ "$(uname -m)" != "$MACHINE" ] || return 0
  [ ! -e "/proc/sys/fs/binfmt_misc/qemu-$MACHINE" ] || return 0
  say "installing QEMU for $MACHINE"
  retry env DEBIAN_FRONTEND=noninteractive apt-get -y -q -o Acquire::Retries=5 --no-install-recommends install \
    qemu-user-static binfmt-support arch-test
  [ -e "/proc/sys/fs/binfmt_misc/qemu-$MACHINE" ] ||
    fail "the kernel cannot run $MACHINE programs: mount binfmt_misc, then run update-binfmts --enable qemu-$MACHINE"
}

private() { # private COMMAND...: runs a command in a private mount namespace, which ends with the command
  BUILDAH_ISOLATION=chroot TMPDIR=$CACHE/tmp unshare --mount --propagation private "$@"
}
storage() { printf -- '--root %s/storage --runroot %s/run' "$CACHE" "$CACHE"; }
# shellcheck disable=SC2046 # a list of words
engine() { private buildah $(storage) "$@"; }

make_base() {
  local mirror container
  mirror=$(debian_mirror)
  mkdir -p "$CACHE"/apt/{apt.conf.d,preferences.d,sources.list.d,trusted.gpg.d,auth.conf.d}
  echo "deb [signed-by=$KEYRING] $mirror $SUITE main" >"$CACHE/apt/sources.list"
  ! engine inspect --type image "$BASE" >/dev/null 2>&1 || return 0
  say "building $BASE from Debian packages"
  retry mmdebstrap --quiet --mode=root --variant=minbase --architectures="$ARCH" --keyring="$KEYRING" "$SUITE" "$CACHE/base.tar" "$mirror"
  container=$(engine from --arch "$ARCH" scratch)
  engine add --quiet "$container" "$CACHE/base.tar" / >/dev/null
  engine commit --quiet --rm --timestamp "$TIME" "$container" "$BASE" >/dev/null
  rm "$CACHE/base.tar"
}

fetch() { # fetch COMMAND REQUIREMENTS ARGUMENT...: runs pip's COMMAND for the image's Python; needs hashes and wheels
  local command=$1 requirements=$2 platforms=() glibc
  shift 2
  for glibc in $(seq 5 41); do platforms+=(--platform "manylinux_2_${glibc}_$MACHINE"); done
  retry "$PYTHON" -m pip "$command" -q --disable-pip-version-check --no-deps --require-hashes --only-binary=:all: \
    --implementation cp --python-version "$GUEST_PYTHON" --abi "cp${GUEST_PYTHON/./}" --abi abi3 --abi none \
    "${platforms[@]}" --platform "manylinux2014_$MACHINE" --platform "manylinux1_$MACHINE" -r "$requirements" "$@"
}

fetch_wheels() {
  local locks=("$ROOT"/locks/{dra-frontend,nri-backend,build}.txt)
  local key; key=$(cat "${locks[@]}" | digest)
  [ "$(cat "$CACHE/wheels/key" 2>/dev/null)" != "$key" ] || return 0
  say "fetching Python packages"
  "$PYTHON" "$NODE_DIR/vm/locks.py" "$GUEST_PYTHON" "${locks[@]}" >"$CACHE/wheels.txt"
  mkdir -p "$CACHE/wheels"
  fetch download "$CACHE/wheels.txt" -d "$CACHE/wheels"
  printf '[global]\nno-index = true\nfind-links = /wheels\n' >"$CACHE/pip.conf"
  echo "$key" >"$CACHE/wheels/key"
}

sources() { # sources TARGET: lists the source files of the target
  local of=(services/nri-backend/src tests/fakes tests/stage tests/demo services/dra-frontend locks/dra-frontend.txt)
  [ ! -d "$ROOT/services/$1" ] || of=("services/$1" "locks/$1.txt")
  cd "$ROOT" && find Dockerfile .dockerignore hack/image hack/images.sh locks/build.txt shared "${of[@]}" \
    -type f ! -path '*/__pycache__/*' ! -path '*.egg-info/*' -print0 | LC_ALL=C sort -z
}

build() { # build TARGET
  local target=$1 key container
  key=$( (cd "$ROOT" && sources "$target" | xargs -0 sha256sum && echo "$VERSION") | digest)
  [ "$(cat "$OUT/$target.key" 2>/dev/null)" != "$key" ] || return 0
  say "building $target $VERSION"
  engine bud --arch "$ARCH" --layers --pull-never --quiet --timestamp "$TIME" -v "$CACHE/apt:/etc/apt:ro" -v "$CACHE/wheels:/wheels:ro" \
    --secret "id=pip,src=$CACHE/pip.conf" --build-arg "BASE=$BASE" --build-arg "VERSION=$VERSION" \
    --target "$target" -t "localhost/$target:$VERSION" "$ROOT" >"$CACHE/$target.log" 2>&1 ||
    { tail -n 30 "$CACHE/$target.log" >&2; fail "$target failed: $CACHE/$target.log"; }
  rm -f "$OUT/$target.tar"
  # The layers are not compressed, because unpacking compressed layers takes minutes on an emulated processor.
  # Registries compress layers anyway.
  engine push --quiet "localhost/$target:$VERSION" "docker-archive:$OUT/$target.tar:localhost/$target:$VERSION" 2>>"$CACHE/$target.log"
  container=$(engine from "localhost/$target:$VERSION")
  # shellcheck disable=SC2016 # for the inner shell
  private sh -c '"$1" "$2" "$(buildah $3 mount "$4")" "$5" "$6"' sh "$PYTHON" "$ROOT/hack/image/sbom.py" "$(storage)" "$container" \
    "$target" "$VERSION" >"$OUT/$target.cdx.json"
  engine rm "$container" >/dev/null
  echo "$key" >"$OUT/$target.key"
}

prepare() { # prepares everything that a build needs
  [ -x "$PYTHON" ] || fail "$PYTHON does not exist: run make images, or set PYTHON to an interpreter with pip and packaging"
  VERSION=$("$PYTHON" "$ROOT/hack/version.py")
  mkdir -p "$CACHE"/{tmp,run} "$OUT"
  exec 9>"$CACHE/lock"
  flock 9
  install_tools >&2
  install_emulator >&2
  make_base
  fetch_wheels
}

main() {
  local targets=("$@") target
  if [ "${1:-}" = --where ]; then echo "$OUT"; return; fi
  if [ "$(id -u)" != 0 ]; then
    command -v sudo >/dev/null || fail "needs root: run as root or install sudo"
    exec sudo --preserve-env=PATH,NODE_VM_MIRROR,IMAGES_ARCH IMAGES_CACHE="${CACHE%/arm64}" PYTHON="$PYTHON" "$0" "$@"
  fi
  ((${#targets[@]})) || targets=(dra-frontend nri-backend)
  prepare
  for target in "${targets[@]}"; do build "$target"; done
  (cd "$OUT" && du -h --apparent-size "${targets[@]/%/.tar}")
}
[ "${BASH_SOURCE[0]}" != "$0" ] || main "$@"
