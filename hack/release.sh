#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# release.sh                    builds all artifacts of a release in dist/ from the committed sources
# release.sh --check            builds them twice from scratch and compares the digests; does not change dist/
# release.sh --without-images   omits the images and their SBOMs, which require root and take minutes to build
#
# The artifacts are the images for each architecture (as archives for docker load or ctr import) and the chart, each
# with an SBOM, the manifests, the kubectl plugin (with REPOSITORY also its manifest for krew), the SLSA provenance of
# these files, and SHA256SUMS with the digests of all files. Builds from the same commit and the same state of Debian's
# archive are identical.
# Variables: ARCHITECTURES (default "amd64 arm64"), DIST, REPOSITORY and REGISTRY (hack/chart_release.py), BUILDER
# (hack/provenance.py), and those of hack/images.sh.
set -euo pipefail
cd "$(dirname "$0")/.."
DIST=$(realpath -m "${DIST:-dist}")
PYTHON=${PYTHON:-$PWD/.venv/bin/python}
HELM=${HELM:-$PWD/.venv/bin/helm}
TIME=315532800 # modification time of every file in an archive, as in the images
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

chart() { # chart VERSION: builds the chart, its SBOM and the manifests
  local dir; dir=$(mktemp -d)
  "$PYTHON" -m hack.chart_release prepare "$dir/source"
  "$HELM" package "$dir/source/dra-driver-numa" --destination "$dir" >/dev/null
  # The archive from "helm package" contains the time of the build, so it is unpacked and packed again.
  tar -C "$dir" --touch -xzf "$dir/dra-driver-numa-$1.tgz"
  tar -C "$dir" --sort=name --mtime="@$TIME" --owner=0 --group=0 --numeric-owner --mode=u=rwX,go=rX --format=ustar \
    -c dra-driver-numa | gzip -9n >"$DIST/dra-driver-numa-$1.tgz"
  "$PYTHON" -m hack.chart_release sbom "$DIST/dra-driver-numa-$1.tgz" >"$DIST/dra-driver-numa-$1.cdx.json"
  CHART=$dir/source/dra-driver-numa hack/manifests.sh >"$DIST/dra-driver-numa-$1.yaml"
  rm -r "$dir"
}

provenance() { # provenance VERSION: writes the provenance of all other files
  local file; file=$(mktemp)
  "$PYTHON" -m hack.provenance "$DIST" "$(git rev-parse HEAD)" >"$file"
  mv "$file" "$DIST/dra-driver-numa-$1.provenance.json"
  chmod 644 "$DIST/dra-driver-numa-$1.provenance.json"
}

make_release() { # make_release [--without-images]
  local version; version=$("$PYTHON" hack/version.py)
  rm -rf "$DIST"
  mkdir -p "$DIST"
  [ "${1:-}" = --without-images ] || images "$version"
  chart "$version"
  "$PYTHON" -m hack.plugin "$DIST" "${REPOSITORY:-}"
  provenance "$version"
  (cd "$DIST" && LC_ALL=C && sha256sum -- * >SHA256SUMS)
}

compare() {
  local dir run; dir=$(mktemp -d)
  for run in 1 2; do
    DIST=$dir/$run IMAGES_CACHE=$dir/cache "$0"
    rm -rf "$dir/cache"
  done
  diff "$dir/1/SHA256SUMS" "$dir/2/SHA256SUMS" || { say "the two builds in $dir differ"; exit 1; }
  cat "$dir/1/SHA256SUMS"
  rm -rf "$dir"
  say "both builds are identical"
}

[ -z "$(git status --porcelain)" ] || { say "a release is built from a clean checkout: commit or remove what git status shows"; exit 1; }
case ${1:-} in
--check) compare ;;
*) make_release "$@" ;;
esac
