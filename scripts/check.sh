#!/usr/bin/env bash
# Format, lint, documentation, licences. Runs all of them and fails if one failed.
set -uo pipefail
cd "$(dirname "$0")/.."

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

step format cargo fmt --version -- cargo fmt --all --check
step lint cargo clippy --version -- cargo clippy --workspace --all-targets --locked --quiet -- -D warnings
# Links to private items are for whoever reads the source.
RUSTDOCFLAGS="-D warnings -A rustdoc::private-intra-doc-links" step documentation cargo --version -- cargo doc --workspace --exclude impresario-preload --lib --no-deps --locked --quiet
if command -v cargo-deny >/dev/null; then
  step licences cargo deny --version -- cargo deny --log-level error check licenses bans sources
fi

if ((${#failed[@]})); then
  printf 'check: failed: %s\n' "${failed[*]}" >&2
  exit 1
fi
