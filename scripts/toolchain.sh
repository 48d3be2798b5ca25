# Chooses the Rust toolchain; the other scripts source this file. An installed toolchain that is new enough is used as
# it is: rust-toolchain.toml alone would make rustup download the pinned one beside it.

# What rust-toolchain.toml pins, and the oldest version that compiles the tree.
rust_pinned=$(sed -n 's/^channel *= *"\(.*\)"/\1/p' rust-toolchain.toml)
rust_oldest=$(sed -n 's/^rust-version *= *"\(.*\)"/\1/p' Cargo.toml | head -n 1)
# The version of the cargo that choose_toolchain looked at last, "" when there is none.
rust_found=

# Puts a cargo that is new enough first in PATH and chooses rustup's toolchain for it: the pinned one where it is
# installed, else the user's default. Fails when no cargo is new enough.
choose_toolchain() {
  local cargo rustup toolchain
  for cargo in "$(command -v cargo)" "${CARGO_HOME:-${HOME:-/root}/.cargo}/bin/cargo"; do
    [[ -x $cargo ]] || continue
    rustup=${cargo%/*}/rustup toolchain=${RUSTUP_TOOLCHAIN:-}
    if [[ -z $toolchain && -x $rustup ]]; then
      # Asked from /, where no rust-toolchain.toml makes rustup download anything.
      if (cd / && "$rustup" toolchain list) 2>/dev/null | grep -q "^$rust_pinned-"; then
        toolchain=$rust_pinned
      else
        toolchain=$( (cd / && "$rustup" show active-toolchain) 2>/dev/null | awk 'NR == 1 { print $1 }')
      fi
      [[ -n $toolchain ]] || continue
    fi
    rust_found=$( (cd / && env ${toolchain:+RUSTUP_TOOLCHAIN="$toolchain"} "$cargo" --version) 2>/dev/null | awk '{ print $2 }')
    [[ -n $rust_found ]] || continue
    if printf '%s\n%s\n' "$rust_oldest" "${rust_found%%-*}" | sort -C -V; then
      [[ $(command -v cargo) == "$cargo" ]] || export PATH="${cargo%/*}:$PATH"
      [[ -z $toolchain ]] || export RUSTUP_TOOLCHAIN=$toolchain
      return 0
    fi
  done
  return 1
}
