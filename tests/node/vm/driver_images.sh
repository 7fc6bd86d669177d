# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash
# Sourced: imports the driver's two images, as hack/images.sh builds them, into the guest's containerd.

# Imports only the layers that the guest does not have, because unpacking takes minutes on an emulated processor.
put_driver_images() {
  local image archives
  "$ROOT/hack/images.sh" >&2 || return
  archives=$("$ROOT/hack/images.sh" --where)
  for image in dra-frontend nri-backend; do
    guest 'ctr -n k8s.io images ls && ctr -n k8s.io content ls -q' >"$RUN/content.txt" || return
    (cd "$ROOT" && "$PYTHON" -m tests.node.vm.lacking "$archives/$image.tar" "$RUN/content.txt" "$RUN/image.tar") || return
    [ ! -s "$RUN/image.tar" ] || guest 'ctr -n k8s.io images import --no-unpack=false - >/dev/null' <"$RUN/image.tar" || return
    rm -f "$RUN/image.tar"
  done
}
