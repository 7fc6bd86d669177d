#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# disk.sh BASE SITE DIR: creates DIR/disk.img and DIR/ssh_key: the base layer, the Python packages of SITE and the
# guest's configuration. Needs root. Afterwards run.sh boots the image once to import the container images.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
. "$here/env.sh"
base=$1 site=$2 dir=$3
tree=$dir/tree
mkdir -p "$dir"
cp -a --reflink=auto "$base/rootfs" "$tree"

# --- Python packages: found by the guest's own interpreter, compiled here at native speed
mkdir -p "$tree/opt/numa/src"
cp -a --no-preserve=ownership "$site" "$tree/opt/numa/site"
chroot "$tree" python3 -m compileall -q /opt/numa/site
for path in site src/shared/src src/services/dra-frontend/src src/services/nri-backend/src; do echo "/opt/numa/$path"; done \
  >"$tree/usr/lib/python3/dist-packages/numa.pth"

# --- configuration
cp -a --no-preserve=ownership "$NODE_DIR/guest/." "$tree/"
mkdir -p "$tree/opt/images"
cp "$base"/images/*.tar "$tree/opt/images/"
echo numa-node >"$tree/etc/hostname"
echo '127.0.0.1 localhost numa-node' >"$tree/etc/hosts"
echo 'nameserver 10.0.2.3' >"$tree/etc/resolv.conf"
rm -f "$dir/ssh_key" "$dir/ssh_key.pub"
ssh-keygen -q -t ed25519 -N '' -C numa-node -f "$dir/ssh_key"
home=$tree/root
install -d -m 700 "$home/.ssh"
install -m 600 "$dir/ssh_key.pub" "$home/.ssh/authorized_keys"
chroot "$tree" /bin/sh -euc '
  passwd -d root >/dev/null
  systemctl -q enable net ssh containerd
  # every unit slows down an emulated boot; devtmpfs is sufficient without udev
  systemctl -q mask systemd-udevd systemd-udevd-control.socket systemd-udevd-kernel.socket systemd-udev-trigger systemd-udev-settle \
    systemd-timesyncd systemd-networkd-wait-online systemd-journal-flush systemd-update-utmp systemd-random-seed systemd-pcrphase \
    systemd-firstboot systemd-machine-id-commit systemd-hwdb-update systemd-logind systemd-binfmt systemd-repart \
    systemd-tpm2-setup systemd-tpm2-setup-early getty@tty1 serial-getty@ttyS0 ldconfig kmod-static-nodes \
    sys-kernel-debug.mount sys-kernel-tracing.mount sys-kernel-config.mount sys-fs-fuse-connections.mount dev-mqueue.mount \
    e2scrub_reap.service e2scrub_all.timer apt-daily.timer apt-daily-upgrade.timer fstrim.timer dpkg-db-backup.timer man-db.timer
  systemctl -q set-default multi-user.target
  systemd-machine-id-setup >/dev/null 2>&1' || fail "the guest could not be configured"

truncate -s 6G "$dir/disk.img"
mke2fs -q -t ext4 -O ^metadata_csum -E lazy_itable_init=1,lazy_journal_init=1 -L node -d "$tree" "$dir/disk.img"
rm -rf "$tree"
chown -R "${SUDO_UID:-0}:${SUDO_GID:-0}" "$dir"
