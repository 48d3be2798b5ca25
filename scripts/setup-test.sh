#!/usr/bin/env bash
# Tests setup.sh and toolchain.sh on a PATH that holds base tools only: rustup, its installer, apt-get and the
# network are stand-ins that record how they are called. Prints one line for each case that fails.
set -uo pipefail
cd "$(dirname "$0")/.."
. scripts/toolchain.sh

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
failures=0

base=(bash sh awk cat chmod cp dirname env grep head mkdir mktemp rm sed sha256sum sort tail uname)
present=(c++ valgrind strace pkg-config make git fusermount3 fio getfattr mkfs.btrfs glusterfsd glusterfs ceph-mon ceph-mgr ceph-osd ceph-mds ceph openssl ip rsync nfs-cp sqlite3 zstd xrootd xrdcp getfacl musl-gcc
  mpirun.openmpi mpicc.openmpi mpirun.mpich mpicc.mpich ganesha.nfsd)
headers=(stdio.h nfsc/libnfs.h cephfs/libcephfs.h glusterfs/xlator.h multiarch/urcu.h acl/libacl.h uuid/uuid.h liburing.h)
modules=(numpy h5py/_debian_h5py_mpi dask)
loaders=(lib32/ld-linux.so.2 sbin/diod sbin/rpcbind sbin/munged sbin/setcap lib/multiarch/libmunge.so.2)

# stand_in FILE: a program made of the lines on standard input, which first records its call.
stand_in() {
  mkdir -p "${1%/*}"
  { printf '#!/usr/bin/env bash\necho "%s $*" >>"$CALLS"\n' "${1##*/}"; cat; } >"$1"
  chmod +x "$1"
}

# A machine without cargo, where the packages are there but for curl and gcc.
machine() {
  rm -rf "$folder"/*
  mkdir -p "$folder/bin" "$folder/home"
  : >"$folder/calls"
  local tool
  for tool in "${base[@]}"; do ln -s "$(type -P "$tool")" "$folder/bin/$tool"; done
  for tool in "${present[@]}"; do stand_in "$folder/bin/$tool" </dev/null; done
  for tool in "${headers[@]}"; do stand_in "$folder/include/$tool" </dev/null; done
  for tool in "${modules[@]}"; do stand_in "$folder/lib/python3/dist-packages/$tool" </dev/null; done
  for tool in "${loaders[@]}"; do stand_in "$folder/$tool" </dev/null; done
  stand_in "$folder/bin/sudo" <<<'while [[ $1 == -* ]]; do shift; done; exec "$@"'
  # "Downloads" an installer that makes a rustup without any toolchain.
  stand_in "$folder/offer/curl" <<'CURL'
while [[ $1 != --output ]]; do shift; done
printf '#!/usr/bin/env bash\necho "rustup-init $*" >>"$CALLS"\nmkdir -p "$HOME/.cargo/bin" && cp "$OFFER/rustup" "$OFFER/cargo" "$HOME/.cargo/bin/"\n' >"$2"
CURL
  stand_in "$folder/bin/apt-get" <<'APT'
for word; do [[ $word == curl || $word == gcc ]] && cp "$OFFER/${word/gcc/cc}" "${OFFER%/*}/bin/"; done; true
APT
  stand_in "$folder/offer/cc" </dev/null
  stand_in "$folder/offer/rustup" <<'RUSTUP'
case "$1 ${2-}" in
  "toolchain list") cat "$HOME/toolchains" 2>/dev/null || echo "no installed toolchains" ;;
  "toolchain install") echo "$3-x86_64-unknown-linux-gnu" >>"$HOME/toolchains" ;;
  "show active-toolchain") [[ ! -s $HOME/toolchains ]] || echo "$(head -n 1 "$HOME/toolchains") (default)" ;;
esac
RUSTUP
  # Like rustup's: the version is that of the toolchain chosen, and in the tree the pinned one is downloaded.
  stand_in "$folder/offer/cargo" <<'CARGO'
[[ -n ${RUSTUP_TOOLCHAIN-} ]] || { [[ -e rust-toolchain.toml ]] && echo "download by cargo" >>"$CALLS"; RUSTUP_TOOLCHAIN=$(head -n 1 "$HOME/toolchains"); }
case $RUSTUP_TOOLCHAIN in stable-*) version=1.99.0 ;; *) version=${RUSTUP_TOOLCHAIN%%-*} ;; esac
case $1 in --version) echo "cargo $version (0)" ;; *) echo "$version runs $*" ;; esac
CARGO
}

# on COMMAND...: runs it on that machine; its output is in $said, its exit status in $status.
on() {
  said=$(env -i PATH="$folder/bin${extra:+:$extra}" HOME="$folder/home" CALLS="$folder/calls" OFFER="$folder/offer" \
    SETUP_BELOW="$folder" \
    "$@" 2>&1 </dev/null)
  status=$?
}

# expect CASE CONDITION...: reports the case when the condition fails.
expect() {
  local case=$1
  shift
  "$@" && return
  failures=$((failures + 1))
  printf 'setup-test: %s: failed: %s\n  exit status %s, said:\n%s\n  calls:\n%s\n' "$case" "$*" "$status" "$said" "$(cat "$folder/calls")" >&2
}
called() { grep -q -- "$1" "$folder/calls"; }
not_called() { ! called "$1"; }
says() { [[ $said == *"$1"* ]]; }

extra=
machine
ln -sf "$(type -P true)" "$folder/bin/sha256sum"
on scripts/setup.sh
expect "bare machine" test "$status" -eq 0
expect "bare machine" called "apt-get .* install --no-install-recommends gcc curl"
expect "bare machine" says "setup: Rust is missing"
expect "bare machine" says "setup: installing rustup"
expect "bare machine" called "^rustup-init -y .*--no-modify-path --default-toolchain none"
expect "bare machine" called "rustup toolchain install $rust_pinned .*--component rustfmt --component clippy"
expect "bare machine" says "setup: ready: cargo $rust_pinned"
: >"$folder/calls"
on scripts/cargo build
expect "after set-up, cargo not in PATH" says "$rust_pinned runs build"
on scripts/setup.sh
expect "second set-up" test "$status" -eq 0
expect "second set-up" not_called "apt-get\|curl\|install\|download"

# What only tests need is missing, too.
machine
# gcc only recommends the C library's files, without which it links nothing.
rm "$folder/bin/ceph-mon" "$folder/bin/valgrind" "$folder/bin/strace" "$folder/include/acl/libacl.h" "$folder/include/stdio.h"
ln -sf "$(type -P true)" "$folder/bin/sha256sum"
on scripts/setup.sh build
expect "set-up for building" test "$status" -eq 0
expect "set-up for building" called "apt-get .* install --no-install-recommends gcc libc6-dev curl$"
expect "set-up for building" not_called "ceph-mon\|valgrind\|strace\|libacl1-dev"

# A package brings a service, and one was there before.
machine
rm "$folder/sbin/rpcbind"
cp "$folder"/offer/* "$folder/bin/"
echo stable-x86_64-unknown-linux-gnu >"$folder/home/toolchains"
stand_in "$folder/bin/systemctl" <<'SYSTEMCTL'
[[ $1 == list-unit-files ]] || exit 0
# $HOME/silent: there is no answer before the packages are there.
grep -q "apt-get.* install" "$CALLS" && installed=1 || installed=
[[ -n $installed || ! -e $HOME/silent ]] || exit 1
echo "ssh.service enabled enabled"
[[ -z $installed ]] || echo "rpcbind.socket enabled enabled"
SYSTEMCTL
on scripts/setup.sh
expect "services" test "$status" -eq 0
expect "services" called "apt-get .* install --no-install-recommends rpcbind$"
expect "services" called "^systemctl --quiet disable --now rpcbind.socket$"
: >"$folder/calls"
cp "$folder/bin/systemctl" "$folder/sbin/rpcbind"
on scripts/setup.sh
expect "services, second set-up" not_called "disable"
: >"$folder/calls"
touch "$folder/home/silent"
rm "$folder/sbin/rpcbind"
on scripts/setup.sh
expect "services that were there are not known" called "apt-get .* install --no-install-recommends rpcbind$"
expect "services that were there are not known" not_called "disable"

machine
on scripts/setup.sh
expect "unknown installer" test "$status" -ne 0
expect "unknown installer" says "its SHA-256 differs"
expect "unknown installer" not_called "^rustup-init"

machine
cp "$folder"/offer/cc "$folder/bin/"
stand_in "$folder/bin/cargo" <<<"echo 'cargo $rust_oldest.0 (0)'"
on scripts/setup.sh
expect "cargo without rustup" says "setup: ready: cargo $rust_oldest.0"
expect "cargo without rustup" not_called "apt-get\|curl\|rustup"

machine
cp "$folder"/offer/* "$folder/bin/"
echo stable-x86_64-unknown-linux-gnu >"$folder/home/toolchains"
on scripts/setup.sh
expect "newer toolchain by rustup" says "setup: ready: cargo 1.99.0"
expect "newer toolchain by rustup" not_called "install\|download\|curl"
on scripts/cargo test
expect "newer toolchain by rustup" says "1.99.0 runs test"
expect "newer toolchain by rustup" not_called "download"

machine
cp "$folder"/offer/* "$folder/bin/"
echo 1.60.0-x86_64-unknown-linux-gnu >"$folder/home/toolchains"
on scripts/setup.sh
expect "old toolchain by rustup" says "setup: the installed Rust is version 1.60.0; at least $rust_oldest is needed"
expect "old toolchain by rustup" called "rustup toolchain install $rust_pinned"
expect "old toolchain by rustup" not_called "^curl\|^rustup-init"
expect "old toolchain by rustup" says "setup: ready: cargo $rust_pinned"

machine
cp "$folder"/offer/c* "$folder/bin/"
rm "$folder/bin/cargo"
stand_in "$folder/bin/cargo" <<<"echo 'cargo 1.65.0 (0)'"
ln -sf "$(type -P true)" "$folder/bin/sha256sum"
on scripts/setup.sh
expect "old cargo of the distribution" called "^rustup-init"
expect "old cargo of the distribution" says "setup: ready: cargo $rust_pinned"

((failures == 0))
