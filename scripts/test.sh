#!/usr/bin/env bash
# Lints, builds the documentation and runs every test; ends with one line that sums up all suites.
# TEST_TIMEOUT_S (default 1200) bounds the run of the tests (not their compilation), so that a test that hangs fails.
set -uo pipefail
cd "$(dirname "$0")/.."

export CARGO_TERM_COLOR=${CARGO_TERM_COLOR:-never} CARGO_INCREMENTAL=${CARGO_INCREMENTAL:-0}
# Random simulations take so many seconds; a plain `cargo test` takes a few.
export IMPRESARIO_SIM_FUZZ_S=${IMPRESARIO_SIM_FUZZ_S:-120}
log=$(mktemp)
trap 'rm -f "$log"' EXIT

scripts/check.sh
check=$?

cargo test --workspace --locked --no-run --quiet </dev/null || exit 1
timeout --kill-after=30 "${TEST_TIMEOUT_S:-1200}" \
  cargo test --workspace --locked --no-fail-fast 2>&1 </dev/null | tee "$log"
tests=${PIPESTATUS[0]}
((tests == 124 || tests == 137)) && echo "test: stopped after ${TEST_TIMEOUT_S:-1200} s: a test hangs, or TEST_TIMEOUT_S is too short"

# Each suite closes with "test result: ok. 12 passed; 0 failed; 1 ignored; ...".
read -r passed failed ignored < <(awk '/^test result:/ {
  for (i = 2; i <= NF; i++) { if ($i ~ /^passed/) p += $(i-1); if ($i ~ /^failed/) f += $(i-1); if ($i ~ /^ignored/) g += $(i-1) }
} END { print p + 0, f + 0, g + 0 }' "$log")

((check == 0)) || echo "test: the checks before the tests failed; their lines begin with \"check:\""
((tests == 0)) || echo "test: cargo test failed (exit status $tests)"
((ignored == 0)) || echo "test: $ignored tests are for \`make soak\` and were not run"
echo "$passed passed, $failed failed"
((check == 0 && tests == 0 && failed == 0 && passed > 0))
