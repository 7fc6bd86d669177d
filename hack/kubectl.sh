#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Prints the path of a kubectl whose exec uses WebSockets (1.31 and later): $KUBECTL, the one on PATH, or Debian's,
# which is downloaded and unpacked into the cache of the node tests.
set -euo pipefail
here=$(cd "$(dirname "$0")/../tests/node/vm" && pwd)
# shellcheck source=/dev/null
. "$here/env.sh"
# shellcheck source=/dev/null
. "$here/debian.sh"

fits() { # fits PROGRAM: succeeds if the program is kubectl 1.31 or later
  local minor
  minor=$("$1" version --client -o json 2>/dev/null | sed -n 's/.*"minor": "\([0-9]*\).*/\1/p' | head -1)
  [ "${minor:-0}" -ge 31 ]
}

kubectl=$CACHE/kubectl/usr/bin/kubectl
for found in ${KUBECTL:-} "$(command -v kubectl || true)" "$kubectl"; do
  if [ -x "$found" ] && fits "$found"; then echo "$found"; exit; fi
done
say "fetching kubectl from Debian $SUITE"
part=$CACHE/kubectl-part
rm -rf "$part" "$CACHE/kubectl"
mkdir -p "$part"
(
  private_apt "$part/apt"
  cd "$part"
  retry apt-get -q -t "$SUITE" download kubectl
  dpkg -x kubectl_*.deb "$part/root"
) >&2
mv "$part/root" "$CACHE/kubectl"
rm -rf "$part"
fits "$kubectl" || fail "Debian $SUITE has no kubectl 1.31 or later"
echo "$kubectl"
