# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash
# Sourced by every script in this directory: paths, keys of the cached layers, and access to the guest.
# All paths on the host can be changed with variables.
NODE_DIR=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
ROOT=$(cd "$NODE_DIR/../.." && pwd)
PATH=$PATH:/usr/sbin:/sbin # debootstrap and mke2fs are not in every user's PATH

# Directory for layers, logs and pid files (about 2 GiB). If it is kept, the next run is faster.
CACHE=${NODE_VM_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/dra-driver-numa/node-vm}
PYTHON=${PYTHON:-$ROOT/.venv/bin/python}
SUITE=${NODE_VM_SUITE:-trixie} # base system, kernel, Python, containerd 1.7
NEWER=${NODE_VM_NEWER:-sid}    # containerd 2.x, runc, network plugins, QEMU
GUEST_PYTHON=3.13              # version in $SUITE
KEYRING=${NODE_VM_KEYRING:-/usr/share/keyrings/debian-archive-keyring.gpg}

say() { printf 'node-vm: %s\n' "$*" >&2; }
fail() { say "$*"; exit 1; }
as_root() {
  if [ "$(id -u)" = 0 ]; then "$@"
  elif command -v sudo >/dev/null; then sudo --preserve-env=NODE_VM_CACHE,NODE_VM_MIRROR,NODE_VM_SUITE,NODE_VM_NEWER,NODE_VM_KEYRING,PYTHON "$@"
  else fail "this step needs root: run as root or install sudo"; fi
}
digest() { sha256sum | cut -c1-16; }

# --- layers: "base" is everything from Debian, "disk" adds our Python packages and the guest's configuration
base_key() { { echo "$SUITE $NEWER"; cd "$NODE_DIR/vm" && cat base.sh debian.sh images.sh image.py; } | digest; }
requirements() { "$PYTHON" "$NODE_DIR/vm/locks.py" "$GUEST_PYTHON" "$ROOT"/locks/{dra-frontend,nri-backend,test}.txt; }
disk_key() { { base_key; requirements || exit 1; cd "$NODE_DIR" && cat vm/disk.sh vm/build.sh && find guest -type f | sort | xargs tail -n +1; } | digest; }

# --- one running machine per profile
use_profile() { # use_profile NAME: reads the machine's configuration and sets the run directory
  local file=$NODE_DIR/vm/profiles/$1.env
  [ -e "$file" ] || fail "there is no machine profile $1; the profiles are: $(cd "$NODE_DIR/vm/profiles" && echo *.env | sed 's/\.env//g')"
  OLDER_RUNTIME= COUNTED=
  # shellcheck source=/dev/null
  . "$file"
  PROFILE=$1 RUN=$CACHE/run/$1
  mkdir -p "$RUN"
}
alive() { # the pid file may be stale, and the pid may belong to another process
  local pid
  pid=$(cat "$RUN/pid" 2>/dev/null) && grep -qsF "path=$RUN/console.log" "/proc/$pid/cmdline"
}
ssh_options() {
  local port; port=$(cat "$RUN/port")
  SSH_OPTIONS=(-i "$RUN/ssh_key" -p "$port" -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -o LogLevel=ERROR
    -o ConnectTimeout=20 -o ControlMaster=auto -o "ControlPath=$(cat "$RUN/sockets")/ssh" -o ControlPersist=3600)
}
# The locks' file descriptors are closed, because ssh's master process would otherwise hold the locks.
guest() { [ -s "$RUN/port" ] || return 1; ssh_options; ssh "${SSH_OPTIONS[@]}" root@127.0.0.1 "$@" 8>&- 9>&-; }
