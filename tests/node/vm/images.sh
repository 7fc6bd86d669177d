#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# images.sh DIR: creates DIR/images/{pause,busybox,python}.tar from Debian packages, without a registry or container
# tools. The images are named localhost/NAME:node-vm. base.sh calls this script while apt uses its private state.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
. "$here/env.sh"
. "$here/debian.sh"
dir=$1
mkdir -p "$dir/images"
closure "$dir/image-debs" -t "$SUITE" busybox-static python3-minimal libpython3-stdlib

python=$dir/image-python
mkdir -p "$python"/{usr/bin,usr/sbin,usr/lib,usr/lib64,tmp,proc,sys,dev,etc,root}
for name in bin sbin lib lib64; do ln -s "usr/$name" "$python/$name"; done
for deb in "$dir"/image-debs/*.deb; do
  case $(basename "$deb") in
    busybox-static_* | libc6_* | libgcc-s1_* | python3* | libpython3* | zlib1g_* | libexpat1_* | libssl3t64_* | libffi8_* | libbz2* | liblzma5_* | libuuid1_*)
      dpkg --fsys-tarfile "$deb" | tar -x -C "$python" --keep-directory-symlink \
        --exclude './usr/share/*' --exclude '*/idlelib/*' --exclude '*/pydoc_data/*' --exclude '*/gconv/*' ;;
  esac
done
[ -e "$python/usr/bin/python3" ] || ln -s "$(cd "$python/usr/bin" && echo python3.*[0-9])" "$python/usr/bin/python3"
# The files in the image get the timestamp 0, so bytecode must not be checked against the time of its source. Without
# bytecode, Python takes 2 s longer to start.
chroot "$python" /usr/bin/python3 -m compileall -q --invalidation-mode unchecked-hash /usr/lib
for name in sh ls cat sleep echo env grep sed head tail id ps true false taskset nproc mkdir rm cp kill dd sort wc cut; do
  [ -e "$python/usr/bin/$name" ] || ln -s busybox "$python/usr/bin/$name"
done
echo 'root:x:0:0:root:/root:/bin/sh' >"$python/etc/passwd"

busybox=$dir/image-busybox
mkdir -p "$busybox"/{bin,tmp,proc,sys,dev,etc}
cp "$python/usr/bin/busybox" "$busybox/bin/"
for name in $("$busybox/bin/busybox" --list); do [ -e "$busybox/bin/$name" ] || ln -s busybox "$busybox/bin/$name"; done
cp "$python/etc/passwd" "$busybox/etc/"

image() { local name=$1; shift; "$PYTHON" "$here/image.py" "localhost/$name:node-vm" "$dir/images/$name.tar" "$@"; }
image pause --entrypoint '/bin/busybox sleep 2147483647' "$busybox/bin/busybox:/bin/busybox"
image busybox "$busybox:/"
image python "$python:/"
rm -rf "$dir/image-debs" "$python" "$busybox"
