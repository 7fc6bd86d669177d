# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash
# Sourced: creates the cached layers that do not exist yet. Each layer is created under a temporary name, and renamed
# when it is complete.

install_tools() { # installs the tools that a fresh machine does not have
  local missing=()
  command -v debootstrap >/dev/null || missing+=(debootstrap)
  command -v mke2fs >/dev/null || missing+=(e2fsprogs)
  command -v cpio >/dev/null || missing+=(cpio)
  command -v zstd >/dev/null || missing+=(zstd)
  command -v xz >/dev/null || missing+=(xz-utils)
  command -v ssh-keygen >/dev/null || missing+=(openssh-client)
  [ -e "$KEYRING" ] || missing+=(debian-archive-keyring)
  ((${#missing[@]})) || return 0
  command -v apt-get >/dev/null || fail "needs ${missing[*]}: install them (this machine has no apt-get)"
  retry as_root apt-get -q -o Acquire::Retries=5 update
  retry as_root env DEBIAN_FRONTEND=noninteractive apt-get -y -q -o Acquire::Retries=5 --no-install-recommends install "${missing[@]}"
}

# install_site DIR: downloads the locked Python packages as wheels for the guest's Python, and unpacks them into DIR.
install_site() {
  local platforms=() glibc
  for glibc in $(seq 5 41); do platforms+=(--platform "manylinux_2_${glibc}_x86_64"); done
  requirements >"$1.txt"
  retry "$PYTHON" -m pip install -q --disable-pip-version-check --no-compile --no-deps --require-hashes --only-binary=:all: \
    --implementation cp --python-version "$GUEST_PYTHON" --abi "cp${GUEST_PYTHON/./}" --abi abi3 --abi none \
    "${platforms[@]}" --platform manylinux2014_x86_64 --platform manylinux1_x86_64 --target "$1" -r "$1.txt"
}

# warm_up BASE DISK: boots once to import the container images, so that later runs have few or none to import.
warm_up() {
  say "first boot, importing container images"
  (
    use_profile default
    RUN=$CACHE/run/warm-up
    mkdir -p "$RUN"
    machine_kill
    trap machine_kill EXIT
    machine_start "$1" "$2" off
    machine_wait
    guest 'set -e; for name in pause busybox python; do ctr -n k8s.io images import --no-unpack=false /opt/images/$name.tar >/dev/null; done
      rm -r /opt/images'
    put_driver_images || fail "the driver's images could not be imported"
    guest 'journalctl -q --rotate; journalctl -q --vacuum-time=1s; fstrim / || true'
    machine_stop
  )
}

build_layers() { # sets BASE and DISK
  local base disk part
  base=base-$(base_key) disk=disk-$(disk_key)
  BASE=$CACHE/$base DISK=$CACHE/$disk/disk.img
  mkdir -p "$CACHE"
  exec 9>"$CACHE/lock"
  flock 9
  if [ ! -d "$BASE" ]; then
    say "building the base layer (Debian $SUITE, containerd and QEMU of $NEWER)"
    as_root rm -rf "$CACHE"/base-*
    as_root "$NODE_DIR/vm/base.sh" "$CACHE/base-part" >"$CACHE/base.log" 2>&1 || { tail -n 30 "$CACHE/base.log" >&2; fail "base layer failed: $CACHE/base.log"; }
    as_root mv "$CACHE/base-part" "$BASE"
    phase "base layer"
  fi
  if [ ! -d "$CACHE/$disk" ]; then
    say "building the disk image"
    part=$CACHE/disk-part
    as_root rm -rf "$CACHE"/disk-* "$CACHE/site"
    install_site "$CACHE/site" >"$CACHE/site.log" 2>&1 || { tail -n 30 "$CACHE/site.log" >&2; fail "Python packages failed: $CACHE/site.log"; }
    phase "Python packages"
    as_root "$NODE_DIR/vm/disk.sh" "$BASE" "$CACHE/site" "$part" >"$CACHE/disk.log" 2>&1 || { tail -n 30 "$CACHE/disk.log" >&2; fail "disk image failed: $CACHE/disk.log"; }
    phase "disk image"
    warm_up "$BASE" "$part/disk.img"
    mv "$part" "$CACHE/$disk"
    rm -rf "$CACHE/site" "$CACHE/site.txt"
    phase "first boot"
  fi
  flock -u 9
}
