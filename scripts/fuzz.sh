#!/usr/bin/env bash
# Fuzzes the decoders of frames and traces and the readers of file formats with coverage, each for SECONDS: fuzz.sh
# [SECONDS] (default 60). Stable Rust is enough. The corpus and inputs that crash stay in fuzz/corpus and fuzz/artifacts.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/toolchain.sh
choose_toolchain || { echo "fuzz: no Rust toolchain from $rust_oldest on; run 'make setup'" >&2; exit 1; }

seconds=${1:-60}
command -v c++ >/dev/null || { echo "fuzz: a C++ compiler is needed: apt-get install g++" >&2; exit 1; }

host=$(rustc -vV | sed -n 's/^host: //p')
target_dir=${CARGO_TARGET_DIR:-target}/fuzz
mkdir -p fuzz/corpus/format
IMPRESARIO_FUZZ_SEEDS=$PWD/fuzz/corpus/format cargo test --quiet --locked -p impresario-assist --lib -- --ignored --exact \
  formats::tests::seeds_of_the_fuzzer >/dev/null
# What cargo-fuzz passes to the compiler, without the sanitizers that need a nightly toolchain: safe Rust
# panics where C would read out of bounds.
export RUSTFLAGS="--cfg fuzzing -Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
-Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table \
-Cdebug-assertions -Ccodegen-units=1"
cargo build --release --locked --manifest-path fuzz/Cargo.toml --target "$host" --target-dir "$target_dir"

for program in fuzz/fuzz_targets/*.rs; do
  name=$(basename "$program" .rs)
  mkdir -p "fuzz/corpus/$name" "fuzz/artifacts/$name"
  echo "fuzz: $name for $seconds s"
  "$target_dir/$host/release/$name" "fuzz/corpus/$name" -artifact_prefix="fuzz/artifacts/$name/" \
    -max_total_time="$seconds" -timeout=10 -rss_limit_mb=1024 -print_final_stats=1
done
