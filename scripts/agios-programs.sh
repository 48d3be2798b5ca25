#!/usr/bin/env bash
# Builds programs that were written for AGIOS against our agios.h, from sources that are there, and runs them. It fetches
# nothing. doc/EMBEDDING.md, "Programs written for AGIOS".
#
#   agios-programs.sh forge FOLDER      FORGE (github.com/jeanbez/forge; needs mpicc, mpirun, GSL): built, and run with a
#                                       shared file that is written and read back with validation
#   agios-programs.sh gekkofs FOLDER    GekkoFS's forwarding mode (github.com/jeanbez/gekko-fwd, branch forwarding or
#                                       io-forwarding-mode): its scheduler's unit is built and used as its daemon does, by
#                                       scripts/agios-gekkofs.cc and with its configuration
#   agios-programs.sh gekkofs-daemon FOLDER  a build of that with AGIOS (its gkfwd_daemon and libgkfwd_intercept.so are somewhere in
#                                       the folder; LD_LIBRARY_PATH for what else it needs): the daemon is run on loopback, and
#                                       files are written and read back by programs with its client
#   agios-programs.sh public FOLDER     the public library's own test program (github.com/francielizanon/agios): built, and
#                                       run with each algorithm
#
# The library is that of `make build`; AGIOS_LIBRARY names another folder with a libagios.so.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)

usage() { sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' "$0" >&2; exit 2; }
[[ $# == 2 ]] || usage
what=$1
source=$(cd "$2" && pwd)
library=${AGIOS_LIBRARY:-$root/target/release}
[[ -e $library/libagios.so ]] || { echo "there is no $library/libagios.so: run make build, or set AGIOS_LIBRARY" >&2; exit 1; }

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
# The library under the name that programs ask for, and nothing else of that folder.
ln -s "$(cd "$library" && pwd)/libagios.so" "$work/libagios.so"
ln -s libagios.so "$work/libagios.so.2"
flags=(-I "$root/crates/faces/agios/include")
link=(-L "$work" -lagios -lpthread -lm "-Wl,-rpath,$work")

need() { command -v "$1" >/dev/null || { echo "$1 is missing: install $2" >&2; exit 1; }; }

config() { # config ALGORITHM FILE
  printf '%s %s\n' 16384 16384 >"$work/wfq.conf"
  printf 'library_options:\n{\n default_algorithm = "%s";\n twins_window_duration = 1000;\n wfq_conf = "%s";\n};\n' \
    "$1" "$work/wfq.conf" >"$2"
}

forge() {
  need mpicc libopenmpi-dev
  need mpirun openmpi-bin
  local sources=()
  for file in main scheduler cJSON log fwd_list pqueue utils thpool server/listener server/handler server/dispatcher \
    handler/read handler/write dispatcher/posix; do
    sources+=("$source/src/$file.c")
  done
  # Its header defines variables. The configuration's path is fixed in forge.h. The branch development is for version 2.
  local api=2
  ! grep -q 'agios_init(&' "$source/src/scheduler.c" || api=1
  cp -r "$source/include" "$work/include"
  sed -i "s|\"/tmp/agios.conf\"|\"$work/agios.conf\"|" "$work/include/forge.h"
  mpicc -O2 -w -fcommon -DAGIOS_API=$api -D_FILE_OFFSET_BITS=64 "${flags[@]}" -I "$work/include" "${sources[@]}" \
    -o "$work/forge" -lgsl -lgslcblas "${link[@]}"
  echo "FORGE is built for version $api of AGIOS"
  mkdir "$work/data"
  pattern() { # pattern OPERATION
    printf '{"repetitions":1,"patterns":[{"path":"%s/data/f","operation":"%s","number_of_files":"shared","spatiality":"strided","total_size":8388608,"request_size":32768,"validation":1,"direct_io":0,"stone_wall":0}]}' "$work" "$1"
  }
  printf '{"forwarders":1,"handlers":2,"dispatchers":4,"phases":[%s,%s,%s,%s]}\n' \
    "$(pattern open)" "$(pattern write)" "$(pattern read)" "$(pattern close)" >"$work/run.json"
  for algorithm in TO SJF MLF aIOLi TO-agg SRTF EXCLUSIVE_TIME_WINDOW TW NOOP DYN_TREE; do
    config "$algorithm" "$work/agios.conf"
    rm -rf "$work/out" "$work/data/f"* && mkdir "$work/out"
    if (cd "$work" && timeout 60 mpirun --allow-run-as-root --oversubscribe -np 3 "$work/forge" run.json out >log 2>&1) &&
      ! grep -i 'error\|mismatch\|invalid\|agios:' "$work/log" && [[ $(stat -c %s "$work/data/f"*) == 8388608 ]]; then
      echo "$algorithm: ran"
    else
      echo "$algorithm: failed" && tail -n 20 "$work/log" && exit 1
    fi
  done
}

gekkofs() {
  need c++ g++
  local api=3 shipped header=$source/include/daemon/scheduler/agios.hpp
  ! grep -q 'struct client' "$header" || api=1
  shipped=$(find "$source" -name agios.conf | head -n 1)
  c++ -std=c++14 -w -DAGIOS_API=$api "${flags[@]}" -I "$source/include" "$source/src/daemon/scheduler/agios.cpp" \
    "$root/scripts/agios-gekkofs.cc" -o "$work/gekkofs" "${link[@]}"
  echo "GekkoFS's scheduler is built for version $api of AGIOS"
  for algorithm in TO SJF MLF aIOLi TO-agg SRTF NOOP DYN_TREE; do
    sed "s/^\([[:space:]]*default_algorithm\) *=.*/\1 = \"$algorithm\";/" "$shipped" >"$work/agios.conf"
    grep -q "default_algorithm = \"$algorithm\"" "$work/agios.conf"
    if (cd "$work" && timeout 60 "$work/gekkofs" "$work/agios.conf" >log 2>&1) && ! grep . "$work/log"; then
      echo "$algorithm: ran"
    else
      echo "$algorithm: failed" && tail -n 20 "$work/log" && exit 1
    fi
  done
}

gekkofs_daemon() {
  local daemon client
  daemon=$(find "$source" -name gkfwd_daemon -type f | head -n 1)
  client=$(find "$source" -name 'libgkfwd_intercept.so' | head -n 1)
  [[ -n $daemon && -n $client ]] || { echo "$source has no gkfwd_daemon or no libgkfwd_intercept.so" >&2; exit 1; }
  export LD_LIBRARY_PATH=$work${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
  nm -D "$daemon" | grep 'U agios_v3_add_request' >/dev/null ||
    { echo "$daemon was built without AGIOS, or without -DAGIOS_API=3" >&2; exit 1; }
  # The path of its configuration is fixed. Another's is not touched.
  (set -C && : >/tmp/agios.conf) 2>/dev/null || { echo "/tmp/agios.conf is there: move it away" >&2; exit 1; }
  id=
  trap '[[ -z $id ]] || kill "$id" || true; rm -rf "$work" /tmp/agios.conf' EXIT
  head -c 3000000 /dev/urandom >"$work/in"
  with_client() { LIBGKFS_HOSTS_FILE=$work/hosts LIBGKFS_LOG=none LD_PRELOAD=$client timeout 60 "$@"; }
  for algorithm in TO SJF MLF aIOLi TO-agg SRTF NOOP DYN_TREE; do
    config "$algorithm" /tmp/agios.conf
    rm -rf "$work"/{root,mnt,hosts,log,out.*} && mkdir "$work"/{root,mnt}
    GKFS_DAEMON_LOG_PATH=$work/log GKFS_LOG_LEVEL=debug timeout 600 "$daemon" -r "$work/root" -m "$work/mnt" \
      -H "$work/hosts" -l 127.0.0.1 >"$work/said" 2>&1 &
    id=$!
    for _ in {1..300}; do [[ -s $work/hosts ]] || sleep 0.1; done
    local copies=() copy ran=1
    for n in 1 2 3 4; do
      { with_client dd if="$work/in" of="$work/mnt/$n" bs=$((n * 16))k status=none &&
        with_client dd if="$work/mnt/$n" of="$work/out.$n" bs=100000 status=none && cmp "$work/in" "$work/out.$n"; } &
      copies+=($!)
    done
    for copy in "${copies[@]}"; do wait "$copy" || ran=0; done
    kill "$id" && wait "$id" || ran=0
    id=
    local sent unblocked
    sent=$(grep -c 'was sent to AGIOS' "$work/log") && unblocked=$(grep -c 'was unblocked' "$work/log") || ran=0
    if ((ran)) && [[ $sent == "$unblocked" ]] && ! grep . "$work/said"; then
      echo "$algorithm: ran, $sent requests"
    else
      echo "$algorithm: failed" && tail -n 20 "$work/log" "$work/said" && exit 1
    fi
  done
}

public() {
  # It reads the algorithm's name from the public library's inside: this is all that it needs of it.
  mkdir "$work/include"
  printf '%s\n' '#pragma once' '#include <stdint.h>' \
    'static int32_t config_agios_default_algorithm;' \
    'static inline const char *get_algorithm_name_from_index(int32_t index) { (void)index; return "agios"; }' \
    >"$work/include/scheduling_algorithms.h"
  sed 's/^extern int32_t config_agios_default_algorithm;//' "$source/test/agios_test.c" >"$work/agios_test.c"
  cc -O2 -w "${flags[@]}" -I "$work/include" "$work/agios_test.c" -o "$work/agios_test" "${link[@]}"
  for algorithm in TO SJF MLF aIOLi TO-agg SW WFQ TWINS NOOP; do
    config "$algorithm" "$work/agios.conf"
    if (cd "$work" && AGIOS_CONF=agios.conf timeout 60 "$work/agios_test" 4 2 500 2 50 4096 1000 1000 1 >log 2>&1) && ! grep PANIC "$work/log"; then
      echo "$algorithm: ran"
    else
      echo "$algorithm: failed" && tail -n 20 "$work/log" && exit 1
    fi
  done
}

case $what in forge | gekkofs | gekkofs-daemon | public) "${what/-/_}" ;; *) usage ;; esac
