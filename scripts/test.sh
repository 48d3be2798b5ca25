#!/usr/bin/env bash
# Lints, builds the documentation and runs every test; ends with one line that sums up all suites. `test.sh set-up` installs
# what is missing before.
#   TEST_TIMEOUT_S      bounds the run of the tests (not their compilation): a test that hangs fails (default 1200)
#   TEST_JOBS           test programs that run at the same time (default: one for each processor)
#   TEST_RETRY          0: what fails is not run once more
#   IMPRESARIO_PYTHON   a Python that tests take if it has the modules that they need (default: those in PATH, the system's)
#   IMPRESARIO_REQUIRE  needs that must be met, as fuse,root: a test that lacks one fails instead of being skipped
set -uo pipefail

# As cargo's runner: keeps how cargo would start a test program in a file of the folder instead of starting it.
if [[ ${1-} == --keep ]]; then
  file=$(mktemp "$2/XXXXXXXX.test")
  shift 2
  { export -p | grep -E '^declare -x (CARGO|LD_LIBRARY_PATH|OUT_DIR)'; printf 'cd %q && exec' "$PWD"; printf ' %q' "$@"; echo; } >"$file"
  exit
fi
# As what cargo starts the compiler with: of a package that is optimised, cargo would optimise its tests as well, which takes
# far longer than most of them run. Those that do compute much are named here.
if [[ -n ${TEST_COMPILER-} ]]; then
  if [[ " $* " == *" --test "* && ! " $* " =~ " --crate-name "(impresario_(assist|engine|foresight|sched|server)|names_simulated|store)" " ]]; then
    set -- "${@/#opt-level=?/opt-level=0}"
  fi
  exec "$@"
fi
# As cargo's rustdoc for examples. With TEST_PAGES makes the pages instead, which tells of links that lead nowhere, from what was
# compiled already; `cargo doc` would check every crate once more. Links to private items are for readers of the source.
# Where no comment has an example, rustdoc would look for one in vain, which takes a good part of a second for each crate. Whatever
# may begin one counts: a fence, an indented line, a block comment, text from a file.
if [[ -n ${TEST_RUSTDOC-} ]]; then
  page=() source='' before=''
  for word; do
    case $before$word in --test | --test-run-directory*) ;; *) page+=("$word") ;; esac
    [[ $word == --test-run-directory ]] && before=$word || before=
    [[ $word != */lib.rs ]] || source=${word%/*}
  done
  if [[ -n $source && -n ${TEST_PAGES-} ]]; then
    exec "$TEST_RUSTDOC" "${page[@]}" -D warnings -A rustdoc::private-intra-doc-links --out-dir "$TEST_PAGES"
  elif [[ -n $source ]]; then
    grep -rqE --include='*.rs' $'```|~~~|//[/!]( {4}|.*\t)|/\\*[*!]|doc *=' "$source"
    # 1: nothing is found; 2: not everything could be read.
    (($? != 1)) || exit 0
  fi
  exec "$TEST_RUSTDOC" "$@"
fi
# As xargs's command: runs one such file, and keeps and prints the program's output in one piece. A process that the
# program leaves behind may hold the output open, so it goes to a file and not through a pipe.
if [[ ${1-} == --run ]]; then
  out=${2%.test}.out
  # What it takes of the processors, its children included, says where the time of a whole run goes.
  TIMEFORMAT='%0R s, %0U + %0S s of the processors'
  program=$(sed -n 's/^cd .* && exec //p' "$2")
  { time timeout --kill-after=30 "$TEST_TIMEOUT_S" bash "$2" >"$out" 2>&1 </dev/null; } 2>"$out.time"
  status=$?
  ((status != 124 && status != 137)) || echo "test: stopped after $TEST_TIMEOUT_S s: a test hangs, or TEST_TIMEOUT_S is too short" >>"$out"
  echo "${program##*/}: exit status $status, $(<"$out.time")" >>"$out"
  flock "${out%/*}" cat "$out"
  exit $((status != 0))
fi

cd "$(dirname "$0")/.."
. scripts/toolchain.sh
export CARGO_TERM_COLOR=${CARGO_TERM_COLOR:-never} CARGO_INCREMENTAL=${CARGO_INCREMENTAL:-0}
# Unless RUSTC_WRAPPER names another program, such as one that keeps what it made. What is compiled is taken for the same as
# without. `compile build --lib` makes what `compile test` runs, and the library for other programs as well, which Cargo does not
# build for tests: on its own it would take features of its own, with which other crates are compiled once more.
compile() {
  TEST_COMPILER=1 RUSTC_WRAPPER=${RUSTC_WRAPPER-$PWD/scripts/test.sh} cargo "$1" --workspace --locked --tests --examples "${@:2}" </dev/null
}
# The linter is a compiler that says more: where it compiles the tests, all is linted for a third of what a pass of its own takes.
# It leaves out what only rustc adds to unoptimised code, traps for null and misaligned pointers; a plain `cargo test` has them.
# Whatever tests build has to be compiled with it too, or crates are compiled twice.
linted=
choose_compiler() {
  choose_toolchain || return
  local driver
  driver=$(rustc --print sysroot)/bin/clippy-driver
  [[ -n ${RUSTC_WORKSPACE_WRAPPER-} || ! -x $driver ]] || { export RUSTC_WORKSPACE_WRAPPER=$driver; linted=1; }
}
# Packages are mostly waited for, and compiling needs a linker and none of the others: it begins meanwhile. What it says is said
# again, or does not matter, where it goes on.
early=
if [[ ${1-} == set-up ]]; then
  if choose_compiler && command -v cc >/dev/null; then
    set -m
    compile build --lib >/dev/null 2>&1 &
    early=$!
    set +m
    trap 'kill -- "-$early" 2>/dev/null' EXIT
  fi
  scripts/setup.sh || exit 1
fi
[[ -n $linted ]] || choose_compiler || { echo "test: no Rust toolchain from $rust_oldest on; run 'make setup'" >&2; exit 1; }

export TEST_TIMEOUT_S=${TEST_TIMEOUT_S:-1200}
# How long random simulations run; a plain `cargo test` takes a few seconds.
export IMPRESARIO_SIM_FUZZ_S=${IMPRESARIO_SIM_FUZZ_S:-8}
# A short name: sockets lie below it, whose paths may have 107 bytes.
folder=$(mktemp -d "${TMPDIR:-/tmp}/test.XXXXXX")
checks=
# What a test left mounted there is not looked through, and may hang.
cleanup() {
  [[ -z $early$checks ]] || kill -- ${early:+"-$early"} ${checks:+"-$checks"} 2>/dev/null
  rm -rf --one-file-system "$folder" 2>/dev/null &
  for _ in {1..600}; do kill -0 $! 2>/dev/null && sleep 0.1 || break; done
  [[ ! -e $folder ]] || echo "test: $folder could not be removed: a test may have left something mounted there" >&2
}
trap cleanup EXIT
# Tests make their folders here. Flag T: ext4 then takes those folders for unrelated and puts each where few files are. Next to
# what other tests have just removed, a new file costs up to half a millisecond of a processor: without a journal, ext4 steps
# over each inode that was freed in the last minutes. A test that mounts a cluster took five times the system time.
export TMPDIR=$folder/t
mkdir -m 1777 "$TMPDIR" && chmod 711 "$folder"
chattr +T "$TMPDIR" 2>/dev/null
export IMPRESARIO_SKIPPED=$folder/skipped
: >"$IMPRESARIO_SKIPPED"

# Cargo runs test programs one after the other, and many tests mostly wait for servers: here as many programs run at a time as
# there are processors, each with twice as many tests.
export RUST_TEST_THREADS=${RUST_TEST_THREADS:-$((2 * $(nproc)))}
host=$(rustc -vV | sed -n 's/^host: //p')
compile build --lib 2>&1 | tee "$folder/compiled" || exit 1
[[ -z $early ]] || wait "$early"
early=
compile test --config "target.$host.runner = ['$PWD/scripts/test.sh', '--keep', '$folder']" 2>&1 | tee -a "$folder/compiled" || exit 1
# What some tests build themselves otherwise.
export IMPRESARIO_TEST_LIBRARY_IS_BUILT=1
# Tests wait a lot: the checks, and then the examples of the documentation, take what they leave of the processors, and no more.
# A group of processes (set -m), so that all end if this is ended; not a session, within which alone nice counts where the
# kernel groups tasks by session.
set -m
{
  env ${linted:+CHECK_COMPILED="$folder/compiled"} CHECK_PAGES="$folder/pages" nice -n 19 scripts/check.sh >"$folder/check" 2>&1
  echo $? >"$folder/check.status"
  TEST_RUSTDOC=$(rustc --print sysroot)/bin/rustdoc RUSTDOC=$PWD/scripts/test.sh \
    exec nice -n 19 timeout --kill-after=30 "$TEST_TIMEOUT_S" cargo test --workspace --locked --doc >"$folder/doc.out" 2>&1
} </dev/null &
checks=$!
set +m
# Long ones first, so that none is left over at the end. Random simulations take what others leave of the processors for a
# fixed time: they run beside programs that mostly wait.
first=(cli mounted sim server impresario_server lab names_simulated backend glusterfs impresario_assist assist impresario_foresight preload impresario_sched capi
  library impresario_lab conformance front store impresario_client)
in_order() {
  local name
  { for name in "${first[@]}"; do grep -lE "/$name-[0-9a-f]+" "$folder"/*.test; done; ls "$folder"/*.test; } | awk '!seen[$0]++'
}
in_order | xargs -d '\n' -n 1 -P "${TEST_JOBS:-$(nproc)}" scripts/test.sh --run
tests=$?
wait "$checks"
documents=$? checks=
check=$(cat "$folder/check.status") || check=1
cat "$folder/check" "$folder/doc.out"
((documents == 0)) || echo "test: examples of the documentation: exit status $documents (124 or 137: stopped after $TEST_TIMEOUT_S s)"
# Each suite closes with "test result: ok. 12 passed; 0 failed; 1 ignored; ...", after those of test programs that its tests ran.
summed() {
  awk -v what="^$1" '/^test result:/ { for (i = 2; i <= NF; i++) if ($i ~ what) n[FILENAME] = $(i-1) + (FILENAME ~ /doc.out$/ ? n[FILENAME] : 0) }
    END { for (file in n) sum += n[file]; print sum + 0 }' /dev/null "${@:2}"
}
# What failed runs once more, alone: a test that fails by chance is told apart from one that always fails. It is reported
# with its first output kept above, and is a fault to be mended, of the test or of what it tests.
unsteady=
if ((tests != 0 && ${TEST_RETRY:-1})); then
  mapfile -t again < <(grep -lE ': exit status [1-9]' "$folder"/*.out)
  tests=0
  # More than a few do not fail by chance.
  ((${#again[@]} > 0 && ${#again[@]} <= 6 && $(summed failed "${again[@]}") <= 8)) || { again=() tests=1; }
  for out in "${again[@]}"; do
    unsteady+=$(grep -hE '^test .* FAILED$|: exit status [1-9]' "$out" | sed 's/^/test: unsteady: failed at first: /')$'\n'
    # Of a program that came to its end those of its tests that failed.
    names=$(sed -nE 's/^test ([^ ]+) .*FAILED$/\1/p' "$out" | tr '\n' ' ')
    test=${out%.out}
    mv "$out" "$test.first"
    sed "\$ s/\$/${names:+ --exact $names}/" "$test.test" >"$test.again.test"
    scripts/test.sh --run "$test.again.test" || tests=1
  done
fi

shopt -s nullglob
# What failed at first was run again.
passed=$(summed passed "$folder"/*.out "$folder"/*.first) ignored=$(summed ignored "$folder"/*.out "$folder"/*.first)
failed=$(summed failed "$folder"/*.out)
# The harness takes a skipped test for passed; each has left a line "program, test, need: why".
skipped=$(cut -f 1,2 "$IMPRESARIO_SKIPPED" | sort -u | wc -l)

printf '\n'
((check == 0)) || echo "test: the checks failed; their lines begin with \"check:\""
((tests == 0 && documents == 0)) || grep -hE '^test .* FAILED$|: exit status [1-9]' "$folder"/*.out | sed 's/^/test: /'
printf '%s' "$unsteady"
((ignored == 0)) || echo "test: $ignored tests are for \`make soak\` or parts of other tests and were not run"
((skipped == 0)) || cut -f 3 "$IMPRESARIO_SKIPPED" | sort | uniq -c | sed 's/^ *\([0-9]*\)/test: skipped, \1 times,/'
echo "$((passed - skipped)) passed, $failed failed, $skipped skipped"
((check == 0 && tests == 0 && documents == 0 && failed == 0 && passed > 0))
