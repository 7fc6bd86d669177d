# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash
# Sourced: functions that start and end an emulated (TCG) machine with several NUMA nodes, SMT and hugepages. They are
# called after use_profile.

machine_arguments() { # sets MACHINE (QEMU arguments) and CMDLINE from the profile
  local cpus=$((SOCKETS * DIES * CORES * THREADS)) node other distance first pages_2m='' pages_1g=''
  local per=$((cpus / NUMA)) mib=$((MEM_GIB * 1024 / NUMA))
  MACHINE=(-smp "$cpus,sockets=$SOCKETS,dies=$DIES,cores=$CORES,threads=$THREADS" -m "${MEM_GIB}G")
  for ((node = 0; node < NUMA; node++)); do
    first=$((node * per))
    MACHINE+=(-object "memory-backend-ram,id=m$node,size=${mib}M"
      -numa "node,nodeid=$node,memdev=m$node,cpus=$first-$((first + per - 1))")
    pages_2m+="${pages_2m:+,}$node:$HP2M" pages_1g+="${pages_1g:+,}$node:$HP1G"
  done
  for ((node = 0; node < NUMA; node++)); do # QEMU requires that all nodes are declared first
    for ((other = 0; other < NUMA; other++)); do
      distance=$((node / (NUMA / SOCKETS) == other / (NUMA / SOCKETS) ? 12 : 21))
      ((node == other)) || MACHINE+=(-numa "dist,src=$node,dst=$other,val=$distance")
    done
  done
  CMDLINE="console=ttyS0 quiet net.ifnames=0 mitigations=off tsc=reliable clocksource=tsc no_timer_check nokaslr panic=-1"
  CMDLINE+=" apparmor=0 audit=0 nowatchdog random.trust_cpu=on transparent_hugepage=madvise"
  CMDLINE+=" hugepagesz=1G hugepages=$pages_1g hugepagesz=2M hugepages=$pages_2m"
}

machine_start() { # machine_start BASE DISK on|off (on: the guest's writes are discarded)
  local base=$1 disk=$2 snapshot=$3 lib=$1/qemu/usr/lib/x86_64-linux-gnu
  local clock=(-accel tcg,thread=multi,tb-size=1024)
  [ -z "$COUNTED" ] || clock=(-accel tcg,thread=single,tb-size=1024 -icount shift=1,sleep=off) # 2 ns per instruction
  machine_arguments
  # The path is short, because names of sockets are limited to 107 bytes.
  [ -s "$RUN/sockets" ] && [ -d "$(cat "$RUN/sockets")" ] || mktemp -d /tmp/node-vm.XXXXXX >"$RUN/sockets"
  "$PYTHON" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])' >"$RUN/port"
  install -m 600 "$(dirname "$disk")/ssh_key" "$RUN/ssh_key"
  # The CPU has only the features that Debian's amd64 packages and PyPI's wheels may use, because each additional
  # feature slows down the emulation.
  QEMU_MODULE_DIR=$lib/qemu TMPDIR=$RUN setsid nohup "$lib/ld-linux-x86-64.so.2" --library-path "$lib" "$base/qemu/usr/bin/qemu-system-x86_64" \
    -L "$base/qemu/usr/share/seabios" -L "$base/qemu/usr/share/qemu" \
    -nodefaults -no-user-config -display none -no-reboot -machine q35,hpet=off,vmport=off,smm=off \
    "${clock[@]}" -cpu Westmere-v1,+pdpe1gb,+rdtscp "${MACHINE[@]}" \
    -kernel "$base/vmlinuz" -initrd "$base/initrd.gz" -append "$CMDLINE" \
    -drive "file=$disk,format=raw,if=none,id=d0,cache=unsafe,discard=unmap,aio=threads,snapshot=$snapshot" -device virtio-blk-pci,drive=d0 \
    -netdev "user,id=n0,hostfwd=tcp:127.0.0.1:$(cat "$RUN/port")-:22" -device virtio-net-pci,netdev=n0,romfile= -device virtio-rng-pci \
    -chardev "file,id=c0,path=$RUN/console.log" -serial chardev:c0 >"$RUN/qemu.log" 2>&1 </dev/null 8>&- 9>&- &
  echo $! >"$RUN/pid"
}

machine_wait() { # waits until ssh responds and systemd has started all units
  local begin=$SECONDS
  until alive || ((SECONDS - begin > 10)); do sleep 0.1; done # on a busy host the new process may not be QEMU yet
  until guest true 2>/dev/null; do
    alive || { tail -n 20 "$RUN/qemu.log" "$RUN/console.log" >&2; fail "the machine ended before ssh responded"; }
    ((SECONDS - begin < 300 * PATIENCE)) || { tail -n 20 "$RUN/console.log" >&2; fail "no ssh after $((300 * PATIENCE)) s"; }
    sleep 0.5
  done
  guest systemctl is-system-running --wait >/dev/null || { guest systemctl --failed --no-legend >&2; fail "units failed in the guest"; }
}

machine_stop() { # powers the machine off, so that the file system on its disk is consistent
  local n
  guest 'sync; systemctl poweroff' 2>/dev/null || true
  for n in $(seq 120); do alive || break; sleep 0.5; done
  machine_kill
}

machine_kill() { # ends QEMU by its pid and removes the run files; sufficient if the changes to the disk are discarded
  local n
  [ -s "$RUN/pid" ] || return 0
  ssh_options; ssh "${SSH_OPTIONS[@]}" -O exit root@127.0.0.1 2>/dev/null || true
  if alive; then kill "$(cat "$RUN/pid")"; fi
  for n in $(seq 50); do alive || break; sleep 0.1; done
  if alive; then kill -9 "$(cat "$RUN/pid")"; fi
  rm -rf "$(cat "$RUN/sockets")" "$RUN"/{pid,port,sockets,ssh_key}
}
