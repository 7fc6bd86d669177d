#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# release.sh                    makes everything that a release has in dist/, from what is committed
# release.sh --check            makes it twice, from nothing, and compares the digests; dist/ is left alone
# release.sh --without-images   leaves out the images and their SBOMs, which need root and minutes
#
# Images by architecture (docker load, ctr import) with an SBOM each, the chart, the manifests, the kubectl plugin (with
# REPOSITORY=ADDRESS also its manifest for krew), and SHA256SUMS of all. The same commit and the same Debian archive
# give the same bytes.
# Variables: ARCHITECTURES (default "amd64 arm64"), DIST, and those of hack/images.sh.
set -euo pipefail
cd "$(dirname "$0")/.."
DIST=$(realpath -m "${DIST:-dist}")
PYTHON=${PYTHON:-$PWD/.venv/bin/python}
HELM=${HELM:-$PWD/.venv/bin/helm}
TIME=315532800 # of every file in an archive, as in the images
export PYTHON HELM
umask 022

say() { printf 'release: %s\n' "$*" >&2; }

images() { # images VERSION
  local arch image out
  for arch in ${ARCHITECTURES:-amd64 arm64}; do
    say "images for $arch"
    IMAGES_ARCH=$arch hack/images.sh >&2
    out=$(IMAGES_ARCH=$arch hack/images.sh --where)
    for image in dra-frontend nri-backend; do
      cp "$out/$image.tar" "$DIST/$image-$1-$arch.tar"
      cp "$out/$image.cdx.json" "$DIST/$image-$1-$arch.cdx.json"
    done
  done
}

chart() { # chart VERSION: what "helm package" makes has the time of day in it
  local dir; dir=$(mktemp -d)
  "$HELM" package charts/dra-driver-numa --destination "$dir" >/dev/null
  tar -C "$dir" --touch -xzf "$dir/dra-driver-numa-$1.tgz"
  tar -C "$dir" --sort=name --mtime="@$TIME" --owner=0 --group=0 --numeric-owner --mode=u=rwX,go=rX --format=ustar \
    -c dra-driver-numa | gzip -9n >"$DIST/dra-driver-numa-$1.tgz"
  rm -r "$dir"
}

make_release() { # make_release [--without-images]
  local version; version=$("$PYTHON" hack/version.py)
  rm -rf "$DIST"
  mkdir -p "$DIST"
  [ "${1:-}" = --without-images ] || images "$version"
  chart "$version"
  hack/manifests.sh >"$DIST/dra-driver-numa-$version.yaml"
  "$PYTHON" -m hack.plugin "$DIST" "${REPOSITORY:-}"
  (cd "$DIST" && LC_ALL=C && sha256sum -- * >SHA256SUMS)
}

compare() {
  local dir run; dir=$(mktemp -d)
  for run in 1 2; do
    DIST=$dir/$run IMAGES_CACHE=$dir/cache "$0"
    rm -rf "$dir/cache"
  done
  diff "$dir/1/SHA256SUMS" "$dir/2/SHA256SUMS" || { say "the two differ, in $dir"; exit 1; }
  cat "$dir/1/SHA256SUMS"
  rm -rf "$dir"
  say "twice the same"
}

[ -z "$(git status --porcelain)" ] || { say "a release is made from a clean checkout: commit, or remove what git status shows"; exit 1; }
case ${1:-} in
--check) compare ;;
*) make_release "$@" ;;
esac
