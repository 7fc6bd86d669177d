#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# rootfs.sh DIRECTORY PACKAGE...: copies the files of installed Debian packages to DIRECTORY, which becomes / in the
# final images. Also copies licences and the entries in dpkg's database, so that scanners and the SBOM find the packages.
set -eu
root=$1; shift
mkdir -p "$root"/etc "$root"/root "$root"/run "$root"/var/lib/dpkg
dpkg -L "$@" | sort -u | grep -vE '/(man|lintian|bug|gconv|idlelib|pydoc_data|turtledemo|ensurepip|test|config-3[^/]*)(/|$)' |
  grep -vE '^/usr/share/doc/.*/(changelog|README|NEWS|NOTICE|FAQ|NameSpace|examples)' | tar -c --no-recursion -T - | tar -x -C "$root"
status=$root/var/lib/dpkg/status
[ ! -s "$status" ] || echo >>"$status"
dpkg-query -s "$@" >>"$status"
