# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash
# Sourced: finds the Debian mirror, and sets up a private apt state, so that the host's own apt is not changed.

retry() { # retry COMMAND...: retries a command, because mirrors fail now and then
  local n
  for n in 1 2 3; do "$@" && return; say "attempt $n failed: $*"; sleep $((n * 5)); done
  fail "failed repeatedly: $*"
}

# Prints the mirror that this machine's apt uses (one-line .list, deb822 .sources, or a mirror list), else debootstrap's
# own default.
debian_mirror() {
  local found
  if [ -n "${NODE_VM_MIRROR:-}" ]; then echo "${NODE_VM_MIRROR%/}"; return; fi
  found=$({ cat /etc/apt/sources.list /etc/apt/sources.list.d/*.list /etc/apt/sources.list.d/*.sources /etc/apt/mirrors/* 2>/dev/null || true; } |
    sed 's/#.*//' | grep -oE 'https?://[^ ]*/debian/?([[:space:]]|$)' | tr -d '[:blank:]' | head -1)
  [ -n "$found" ] || found=$(sed -n 's/^DEF_MIRROR="\(http[^"]*\)"$/\1/p' "$(command -v debootstrap)" | head -1)
  [ -n "$found" ] || fail "no Debian mirror in this machine's apt configuration: set NODE_VM_MIRROR to the address of one"
  echo "${found%/}"
}

private_apt() { # private_apt DIR: makes apt-get use the state in DIR from now on
  local dir=$1 suite mirror
  mkdir -p "$dir"/{lists/partial,cache/archives/partial,empty.d}
  mirror=$(debian_mirror)
  for suite in "$SUITE" "$NEWER"; do echo "deb [signed-by=$KEYRING arch=amd64] $mirror $suite main"; done >"$dir/sources.list"
  cat >"$dir/apt.conf" <<X
Dir::State "$dir"; Dir::State::Lists "$dir/lists"; Dir::State::status "/dev/null";
Dir::Cache "$dir/cache"; Dir::Etc::sourcelist "$dir/sources.list"; Dir::Etc::sourceparts "$dir/empty.d";
Dir::Etc::preferencesparts "$dir/empty.d"; Acquire::Retries "5"; APT::Sandbox::User "root";
APT::Architectures { "amd64"; }; Acquire::Languages "none";
X
  export APT_CONFIG=$dir/apt.conf
  retry apt-get -q update
}
closure() { # closure DIR PACKAGE...: downloads packages and their dependencies into DIR
  local dir=$1; shift
  mkdir -p "$dir/partial"
  retry apt-get -y -q -d --no-install-recommends -o "Dir::Cache::archives=$dir" install "$@"
}
