#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# run.sh [--profile NAME]... [--keep] [pytest arguments]
# run.sh [--profile NAME] --exec COMMAND...    runs a command in a machine that --keep left running
# run.sh [--profile NAME]... --stop            ends the machines that --keep left running (default: all of them)
#
# Runs the node tests inside a virtual machine with a real kernel, a real containerd and several NUMA nodes; one
# machine after another if several profiles are named (default: all). Paths in pytest arguments are relative to
# tests/node/.
#   --keep    leave the machine running and use it again next time
# Variables: NODE_VM_CACHE (layers and logs), NODE_VM_MIRROR (Debian mirror), PYTHON (with pip; default
# .venv/bin/python), ALIGNED_PODS (how many pods test_aligned.py runs; default 12), PATIENCE (factor for all time
# limits; default 1), EXCLUSIVITY (cpuExclusivity of tests that do not set another value; default auto).
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
. "$here/vm/env.sh"
. "$here/vm/debian.sh"
. "$here/vm/machine.sh"
. "$here/vm/build.sh"
. "$here/vm/driver_images.sh"

PATIENCE=${PATIENCE:-1}
PHASES=()
begun=$EPOCHREALTIME
phase() { # phase NAME: records the time since the end of the previous phase
  local now=$EPOCHREALTIME
  PHASES+=("$(awk -v a="$begun" -v b="$now" -v n="${PROFILE:+$PROFILE: }$1" 'BEGIN { printf "%8.1f s  %s", b - a, n }')")
  begun=$now
}

push_source() { # copies the current source code and the machine's description to the guest
  (cd "$ROOT" && tar --exclude=__pycache__ --exclude='*.egg-info' -cf - shared/src services/*/src docs examples tests/node tests/fakes tests/rigs tests/stage) |
    guest 'rm -rf /opt/numa/src && mkdir -p /opt/numa/src && tar -xf - -C /opt/numa/src' || return
  guest 'cat >/opt/numa/profile.env' <<<"NAME=$PROFILE NUMA=$NUMA SOCKETS=$SOCKETS DIES=$DIES CORES=$CORES THREADS=$THREADS MEM_GIB=$MEM_GIB HP2M=$HP2M HP1G=$HP1G"
}

# Starts a server, which ends with this script and whose port is stored in CHART. It runs Helm for the guest, because
# Helm takes only a tenth of a second on the host.
serve_chart() {
  if [ -n "${CHART:-}" ]; then return; fi
  coproc RENDERER { cd "$ROOT" && exec "$PYTHON" -m tests.node.vm.chart 8>&- 9>&-; }
  read -r CHART <&"${RENDERER[0]}"
}

# push_package NAME LIBRARY...: copies a Debian package to /opt/NAME in the guest, together with those of its libraries
# that the guest does not have.
push_package() {
  local dir=$CACHE/$1 deb
  if [ ! -d "$dir" ]; then
    rm -rf "$dir-part"
    (
      private_apt "$dir-part/apt"
      closure "$dir-part/debs" -t "$SUITE" "$1"
      for deb; do dpkg -x "$dir-part/debs/$deb"_*.deb "$dir-part/root"; done
    ) >&2 || return
    mv "$dir-part/root" "$dir"
    rm -rf "$dir-part"
  fi
  tar -C "$dir" --exclude=usr/share -cf - usr | guest "rm -rf /opt/$1 && mkdir /opt/$1 && tar -xf - -C /opt/$1"
}

collect_logs() { # copies the guest's logs after a failure
  local to=$CACHE/logs/$PROFILE
  rm -rf "$to"
  mkdir -p "$to"
  guest 'cd /var/log && journalctl -q -b >journal.txt; tar -cf - journal.txt $([ ! -d numa-node ] || echo numa-node) $(ls -d pods/dra-driver-numa_* 2>/dev/null)' | tar -xf - -C "$to" || true
  cp "$RUN/console.log" "$to/"
  say "logs: $to"
}

run_profile() { # run_profile NAME PYTEST-ARGUMENT...: runs the tests on one machine and returns the status of pytest
  local status=0
  use_profile "$1"; shift
  exec 8>"$RUN/lock"
  flock -n 8 || {
    local taken=$PROFILE
    PROFILE= # the machine belongs to another run, so this script must not end it
    fail "another run uses the machine $taken"
  }
  if ! alive || [ -z "$KEEP" ]; then
    machine_kill
    machine_start "$BASE" "$DISK" on
    machine_wait
    [ -z "$OLDER_RUNTIME" ] || guest /usr/local/sbin/use-older-runtime || fail "the older runtime does not start"
    phase boot
  fi
  push_source || fail "the source could not be copied to the guest"
  phase "copying the source"
  put_driver_images || fail "the driver's images could not be imported"
  phase "images"
  if [[ "$*" == *irqbalance* ]]; then
    push_package irqbalance libglib2.0-0t64 libpcre2-8-0 libatomic1 || fail "irqbalance could not be copied to the guest"
    phase "irqbalance"
  fi
  if [ "$PROFILE" = noise ]; then
    push_package rt-tests || fail "cyclictest could not be copied to the guest"
    phase "cyclictest"
  fi
  serve_chart || fail "the chart cannot be rendered"
  guest "cd /opt/numa/src/tests/node && exec env ALIGNED_PODS=${ALIGNED_PODS:-12} PATIENCE=$PATIENCE EXCLUSIVITY=${EXCLUSIVITY:-auto} CHART=http://10.0.2.2:$CHART python3 -m pytest -o timeout=$((480 * PATIENCE))${1+$(printf ' %q' "$@")}" </dev/null &
  wait $! || status=$? # in the background, so that this script handles signals immediately
  phase tests
  guest 'cat /var/log/numa-node/figures.txt 2>/dev/null' || true
  ((status == 0 || status == 5)) || collect_logs
  [ -n "$KEEP" ] || machine_kill
  PROFILE=
  return "$status"
}

stop() { # stop [PROFILE...]
  local name
  (($#)) || for name in "$NODE_DIR"/vm/profiles/*.env; do set -- "$@" "$(basename "$name" .env)"; done
  for name; do use_profile "$name"; machine_kill; done
}

main() {
  local profiles=() arguments=() status='' last=0 ran='' profile
  KEEP= PROFILE=
  while (($#)); do
    case $1 in
      --profile) profiles+=("$2"); shift 2 ;;
      --keep) KEEP=yes; shift ;;
      --exec) shift; use_profile "${profiles[0]:-default}"; KEEP=yes; guest "$@"; return ;;
      --stop) stop ${profiles[@]+"${profiles[@]}"}; return ;;
      *) arguments+=("$1"); shift ;;
    esac
  done
  ((${#profiles[@]})) || profiles=(default one-gig containerd-1.7)
  trap '[ -n "$KEEP" ] || [ -z "$PROFILE" ] || machine_kill' EXIT
  trap 'exit 130' INT TERM
  [ -x "$PYTHON" ] || fail "$PYTHON does not exist: run make test-node, or set PYTHON to an interpreter with pip and packaging"
  install_tools
  phase "tools"
  build_layers
  for profile in "${profiles[@]}"; do
    run_profile "$profile" ${arguments[@]+"${arguments[@]}"} && ran=yes || last=$?
    ((last == 0 || last == 5)) || status=$last # 5: none of the selected tests is for this machine
  done
  [ -n "$ran$status" ] || status=$last
  printf '%s\n' '' 'time per phase' "${PHASES[@]}"
  return "${status:-0}"
}
main "$@"
