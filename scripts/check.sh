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
# test.sh has everything linted while it is compiled and names the file with what was said.
lint() {
  if [[ -n ${CHECK_COMPILED-} ]]; then
    ! grep -E $'^(\e\[[0-9;]*m)*(warning|error)' "$CHECK_COMPILED"
  else
    cargo clippy --workspace --all-targets --locked --quiet -- -D warnings
  fi
}
step lint cargo clippy --version -- lint
# For test.sh with the examples in it, which need all that is compiled; what they say goes to that folder.
documentation() {
  if [[ -n ${CHECK_EXAMPLES-} ]]; then
    TEST_RUSTDOC=$(rustc --print sysroot)/bin/rustdoc TEST_PAGES=$CHECK_EXAMPLES/pages RUSTDOC=$PWD/scripts/test.sh \
      cargo test --workspace --locked --no-fail-fast --doc >"$CHECK_EXAMPLES/doc.out" 2>&1 || { cat "$CHECK_EXAMPLES/doc.out"; false; }
  else
    # Links to private items are for readers of the source.
    RUSTDOCFLAGS="-D warnings -A rustdoc::private-intra-doc-links" \
      cargo doc --workspace --exclude impresario-preload --lib --no-deps --locked --quiet
  fi
}
step documentation cargo --version -- documentation
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
