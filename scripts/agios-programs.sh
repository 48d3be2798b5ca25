#!/usr/bin/env bash
# Builds programs that were written for AGIOS against our agios.h, from sources that are there, and runs them. It fetches
# nothing. doc/EMBEDDING.md, "Programs written for AGIOS".
#
#   agios-programs.sh forge FOLDER      FORGE (github.com/jeanbez/forge; needs mpicc, mpirun, GSL): built, and run with a
#                                       shared file that is written and read back with validation
#   agios-programs.sh gekkofs FOLDER    GekkoFS's forwarding mode (github.com/jeanbez/gekko-fwd, branch forwarding or
#                                       io-forwarding-mode): its scheduler's unit is built and used as its daemon does, by
#                                       scripts/agios-gekkofs.cc and with its configuration. The daemon itself needs libraries
#                                       that Debian lacks (Mercury, Margo, Argobots)
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

case $what in forge | gekkofs | public) "$what" ;; *) usage ;; esac
