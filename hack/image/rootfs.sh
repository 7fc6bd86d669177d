#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# rootfs.sh DIRECTORY PACKAGE...: makes the root of the final images from files of installed Debian packages.
# Their licences and their entries in dpkg's database stay, so that scanners and the SBOM see them.
set -eu
root=$1; shift
mkdir -p "$root"/etc "$root"/root "$root"/run "$root"/var/lib/dpkg
dpkg -L "$@" | sort -u | grep -vE '/(man|lintian|bug|gconv|idlelib|pydoc_data|turtledemo|ensurepip|test|config-3[^/]*)(/|$)' |
  grep -vE '^/usr/share/doc/.*/(changelog|README|NEWS|NOTICE|FAQ|NameSpace|examples)' | tar -c --no-recursion -T - | tar -x -C "$root"
dpkg-query -s "$@" >"$root/var/lib/dpkg/status"
cp /etc/passwd /etc/group /etc/nsswitch.conf "$root/etc/"
ldconfig -r "$root"
# The image's files get other times than these: byte code must not be checked against them.
python3 -m compileall -q -s "$root" --invalidation-mode unchecked-hash "$root"/usr/lib/python3*
