#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# rootfs.sh DIRECTORY PACKAGE...: copies the files of installed Debian packages, for the root of the final images.
# Also copies their licences and their entries in dpkg's database, so that scanners and the SBOM find them.
set -eu
root=$1; shift
mkdir -p "$root"/etc "$root"/root "$root"/run "$root"/var/lib/dpkg
dpkg -L "$@" | sort -u | grep -vE '/(man|lintian|bug|gconv|idlelib|pydoc_data|turtledemo|ensurepip|test|config-3[^/]*)(/|$)' |
  grep -vE '^/usr/share/doc/.*/(changelog|README|NEWS|NOTICE|FAQ|NameSpace|examples)' | tar -c --no-recursion -T - | tar -x -C "$root"
status=$root/var/lib/dpkg/status
[ ! -s "$status" ] || echo >>"$status"
dpkg-query -s "$@" >>"$status"
