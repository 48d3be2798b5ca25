#!/usr/bin/env bash
# Runs the benchmarks that the documentation quotes, one after the other, and keeps what they print and measure in
# a folder: bench.sh [FOLDER-OF-PROGRAMS [FOLDER]]. BENCH lists which (default: core idle datapath goals); goals take longest.
set -euo pipefail
cd "$(dirname "$0")/.."

programs=${1:-target/release}
folder=${2:-bench-results/$(date +%Y%m%d-%H%M%S)}
for program in impresario impresario-lab; do
  [[ -x $programs/$program ]] || { echo "bench: there is no $programs/$program; run 'make lab'" >&2; exit 1; }
done
mkdir -p "$folder"

{
  "$programs/impresario" --version
  uname -srm
  echo "processors: $(nproc)"
  sed -n 's/^model name[^:]*: //p' /proc/cpuinfo | head -n 1
  sed -n 's/^MemTotal: */memory: /p' /proc/meminfo
} | tee "$folder/machine.txt"

failed=()
for what in ${BENCH:-core idle datapath goals}; do
  command=("$programs/impresario-lab" "$what")
  [[ $what == idle ]] && command=("$programs/impresario" bench idle)
  printf '\n== %s\n' "${command[*]##*/}"
  html=()
  [[ $what == goals ]] && html=(--html "$folder/goals.html")
  # goals exit with 1 when a claim does not hold or stays unresolved: reported at the end; the others still run.
  "${command[@]}" --json "$folder/$what.json" "${html[@]}" </dev/null | tee "$folder/$what.txt" || failed+=("$what")
done

printf '\nbench: results are in %s\n' "$folder"
if ((${#failed[@]})); then
  echo "bench: not reached: ${failed[*]}" >&2
  exit 1
fi
