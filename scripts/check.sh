#!/usr/bin/env bash
# Set-up, format, lint, documentation, licences. Runs all of them and fails if one failed.
set -uo pipefail
cd "$(dirname "$0")/.."
. scripts/toolchain.sh
choose_toolchain || { echo "check: no Rust toolchain from $rust_oldest on; run 'make setup'" >&2; exit 1; }

failed=()
step() { # step NAME PROBE... -- COMMAND...
  local name=$1 probe=()
  shift
  while [[ $1 != -- ]]; do probe+=("$1"); shift; done
  shift
  if ! "${probe[@]}" >/dev/null 2>&1; then
    printf 'check: %-14s skipped: "%s" is not installed\n' "$name" "${probe[*]:0:2}"
    return
  fi
  local started=$SECONDS
  if "$@"; then
    printf 'check: %-14s ok (%d s)\n' "$name" $((SECONDS - started))
  else
    printf 'check: %-14s FAILED\n' "$name"
    failed+=("$name")
  fi
}

step set-up true -- scripts/setup-test.sh
step format cargo fmt --version -- cargo fmt --all --check
# test.sh has everything linted while it is compiled and names the file with what was said. Cargo sums up what it said of a crate.
lint() {
  if [[ -n ${CHECK_COMPILED-} ]]; then
    ! grep -E 'generated [0-9]+ warnings?' "$CHECK_COMPILED"
  else
    cargo clippy --workspace --all-targets --locked --quiet -- -D warnings
  fi
}
step lint cargo clippy --version -- lint
# test.sh names a folder: pages are made from what it has compiled.
documentation() {
  if [[ -n ${CHECK_PAGES-} ]]; then
    TEST_PAGES=$CHECK_PAGES TEST_RUSTDOC=$(rustc --print sysroot)/bin/rustdoc RUSTDOC=$PWD/scripts/test.sh \
      cargo test --workspace --locked --no-fail-fast --quiet --doc
    return
  fi
  # Links to private items are for readers of the source.
  local -x RUSTDOCFLAGS="-D warnings -A rustdoc::private-intra-doc-links"
  # With what `cargo clippy` gives to cargo, crates that lint has just checked count as checked; without, cargo would check each
  # once more.
  local driver
  driver=$(rustc --print sysroot)/bin/clippy-driver
  if [[ " $* " != *" lint "* && -x $driver ]]; then
    local -x RUSTC_WORKSPACE_WRAPPER=$driver CLIPPY_ARGS=-D__CLIPPY_HACKERY__warnings__CLIPPY_HACKERY__
  fi
  cargo doc --workspace --exclude impresario-preload --lib --no-deps --locked --quiet
}
step documentation cargo --version -- documentation "${failed[@]}"
# The fuzzers are a workspace of their own, which nothing else builds.
fuzzers() { cargo metadata --locked --format-version 1 --manifest-path fuzz/Cargo.toml >/dev/null; }
step fuzzers cargo --version -- fuzzers
if command -v cargo-deny >/dev/null; then
  step licences cargo deny --version -- cargo deny --log-level error check licenses bans sources
fi

if ((${#failed[@]})); then
  printf 'check: failed: %s\n' "${failed[*]}" >&2
  exit 1
fi
