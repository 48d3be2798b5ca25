#!/usr/bin/env bash
# Makes a Debian 12 machine able to build, test and mount: installs the packages that are missing and
# checks the Rust toolchain. Does nothing, quickly, when all is there.
set -euo pipefail
cd "$(dirname "$0")/.."

say() { printf 'setup: %s\n' "$*"; }
die() { printf 'setup: %s\n' "$*" >&2; exit 1; }

# What is needed, as "command:package:what for".
needs=(
  "cc:gcc:linking"
  "c++:g++:the tests of the C headers"
  "valgrind:valgrind:the tests of the C libraries"
  "pkg-config:pkg-config:the tests of the C libraries"
  "make:make:the tests of the C libraries"
  "git:git:the source"
  "fusermount3:fuse3:mounting as a plain user"
  "fio:fio:the tests that run fio on the mount"
  "getfattr:attr:the tests of extended attributes"
)

missing=()
for need in "${needs[@]}"; do
  IFS=: read -r command package purpose <<<"$need"
  if ! command -v "$command" >/dev/null; then
    say "$package is missing (needed for $purpose)"
    missing+=("$package")
  fi
done

if ((${#missing[@]})); then
  command -v apt-get >/dev/null ||
    die "apt-get is not here; install by hand what gives you: ${missing[*]} (the names are Debian's)"
  as_root=()
  if ((EUID != 0)); then
    command -v sudo >/dev/null ||
      die "installing ${missing[*]} needs root: run as root 'apt-get install -y ${missing[*]}', then this again"
    as_root=(sudo)
    # Without a terminal nobody can type a password: fail now rather than wait for one.
    [[ -t 0 ]] || as_root=(sudo -n)
  fi
  # An apt-get that runs already holds a lock: wait for it, but not for ever.
  apt=("${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=120 -q -y)
  say "installing: ${missing[*]}"
  "${apt[@]}" update ||
    die "the package lists could not be fetched; check the network and /etc/apt, or install by hand: ${missing[*]}"
  "${apt[@]}" install --no-install-recommends "${missing[@]}" ||
    die "installing failed; install by hand: ${missing[*]}"
fi

command -v cargo >/dev/null ||
  die "cargo is not in PATH; install Rust from https://rustup.rs, then open a new shell"
wanted=$(sed -n 's/^rust-version *= *"\(.*\)"/\1/p' Cargo.toml | head -n 1)
found=$(cargo --version | awk '{print $2}')
if [[ $(printf '%s\n%s\n' "$wanted" "${found%%-*}" | sort -V | head -n 1) != "$wanted" ]]; then
  die "cargo is version $found; at least $wanted is needed: run 'rustup update stable'"
fi

# The linters are parts of the toolchain that minimal installations leave out.
for part in rustfmt clippy; do
  case $part in rustfmt) probe=(cargo fmt --version) ;; clippy) probe=(cargo clippy --version) ;; esac
  if ! "${probe[@]}" >/dev/null 2>&1; then
    if command -v rustup >/dev/null && rustup component add "$part" >/dev/null 2>&1; then
      say "added $part to the Rust toolchain"
    else
      say "note: $part is not installed; what it checks is skipped (rustup component add $part)"
    fi
  fi
done

if [[ ! -e /dev/fuse ]]; then
  say "note: /dev/fuse is not here; mounting, and the tests that mount, are skipped (modprobe fuse)"
fi
say "ready: cargo $found"
