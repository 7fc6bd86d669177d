#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# base.sh DIR: creates the layer that contains only Debian packages: root file system, kernel, QEMU, container images.
# Needs root.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
. "$here/env.sh"
. "$here/debian.sh"
dir=$1
mkdir -p "$dir" "$CACHE/debs"
private_apt "$dir/apt"

# --- packages outside the base suite
mkdir -p "$dir/debs"
download() { (cd "$dir/debs" && retry apt-get -q download "$@"); }
download "containerd/$NEWER" "runc/$NEWER" "containernetworking-plugins/$NEWER"
mkdir -p "$dir/older-debs"
(cd "$dir/older-debs" && retry apt-get -q download "containerd/$SUITE" "runc/$SUITE")
kernel=$(apt-cache show "linux-image-cloud-amd64/$SUITE" | sed -n 's/^Depends: \(linux-image-[^ ]*\).*/\1/p' | head -1)
[ -n "$kernel" ] || fail "linux-image-cloud-amd64 of $SUITE names no kernel package"
download "$kernel/$SUITE"
# With QEMU 7.2 (Debian 12), guests with several emulated CPUs panic, because cmpxchg16b is not atomic. With a current
# version they do not panic, and they boot twice as fast. QEMU is unpacked, not installed, and runs with its own dynamic
# loader.
closure "$dir/qemu-debs" -t "$NEWER" "qemu-system-x86/$NEWER"
"$here/images.sh" "$dir"
unset APT_CONFIG
mkdir -p "$dir/qemu"
for deb in "$dir"/qemu-debs/*.deb; do dpkg -x "$deb" "$dir/qemu"; done

# --- root file system
packages=systemd,systemd-sysv,dbus,udev,kmod,iproute2,procps,util-linux,openssh-server,python3,numactl,curl,strace,busybox-static,libseccomp2
bootstrap() {
  rm -rf "$dir/rootfs"
  debootstrap --variant=minbase --include="$packages" --keyring="$KEYRING" --cache-dir="$CACHE/debs" "$SUITE" "$dir/rootfs" "$(debian_mirror)"
}
retry bootstrap
cp "$dir"/debs/{containerd_,runc_}*.deb "$dir/rootfs/var/cache/apt/archives/"
chroot "$dir/rootfs" /bin/sh -euc '
  printf "#!/bin/sh\nexit 101\n" >/usr/sbin/policy-rc.d; chmod +x /usr/sbin/policy-rc.d
  cd /var/cache/apt/archives
  DEBIAN_FRONTEND=noninteractive dpkg -i containerd_*.deb runc_*.deb
  rm -f /usr/sbin/policy-rc.d *.deb
  rm -rf /var/lib/apt/lists/* /usr/share/doc/* /usr/share/man/* /usr/share/locale/*'
# The base suite's runtime is installed next to the newer one, for profiles that use it
# (guest/usr/local/sbin/use-older-runtime).
for deb in "$dir"/older-debs/*.deb; do dpkg -x "$deb" "$dir/rootfs/opt/older-runtime"; done
rm -rf "$dir/rootfs/opt/older-runtime/usr/share"
# The pod network: the plugins that guest/etc/cni/net.d names, and the one for the loopback device.
dpkg --fsys-tarfile "$dir"/debs/containernetworking-plugins_*.deb |
  tar -x -C "$dir/rootfs" ./usr/lib/cni/bridge ./usr/lib/cni/host-local ./usr/lib/cni/loopback
dpkg -x "$dir"/debs/linux-image-*.deb "$dir/rootfs"
version=$(basename "$dir"/rootfs/lib/modules/*)
chroot "$dir/rootfs" depmod "$version"
cp "$dir/rootfs/boot/vmlinuz-$version" "$dir/vmlinuz"

# --- initrd: just enough to mount the disk
initrd=$dir/initrd.d
mkdir -p "$initrd"/{bin,mod,proc,sys,dev,root}
cp "$dir/rootfs/bin/busybox" "$initrd/bin/"
ln -s busybox "$initrd/bin/sh"
for module in virtio_pci virtio_blk ext4; do
  chroot "$dir/rootfs" modprobe -S "$version" --show-depends "$module" 2>/dev/null | sed -n 's/^insmod \([^ ]*\).*/\1/p'
done | awk '!seen[$0]++' | while read -r file; do
  name=$(basename "$file")
  case $name in
    *.xz) name=${name%.xz}; xz -dc "$dir/rootfs$file" >"$initrd/mod/$name" ;;
    *.zst) name=${name%.zst}; zstd -qdc "$dir/rootfs$file" >"$initrd/mod/$name" ;;
    *) cp "$dir/rootfs$file" "$initrd/mod/$name" ;;
  esac
  echo "$name" >>"$initrd/mod/order"
done
cat >"$initrd/init" <<'X'
#!/bin/busybox sh
/bin/busybox --install -s /bin
mount -t proc proc /proc; mount -t sysfs sys /sys; mount -t devtmpfs dev /dev
while read m; do insmod /mod/$m 2>/dev/null; done </mod/order
for i in 1 2 3 4 5 6 7 8 9; do [ -b /dev/vda ] && break; sleep 0.2; done
mount -t ext4 -o rw,noatime /dev/vda /root || exec sh
umount /proc; umount /sys; mount --move /dev /root/dev
exec switch_root /root /lib/systemd/systemd
X
chmod +x "$initrd/init"
(cd "$initrd" && find . | cpio -o -H newc --quiet | gzip -1) >"$dir/initrd.gz"
rm -rf "$initrd" "$dir/apt" "$dir/debs" "$dir/older-debs" "$dir/qemu-debs"
chmod -R a+rX "$dir/qemu" "$dir/images" "$dir/vmlinuz" "$dir/initrd.gz"
chmod a+rx "$dir"
