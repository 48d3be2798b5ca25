#!/usr/bin/env bash
# Makes a Debian 12 machine able to build, test and mount: installs the packages that are missing, and a Rust
# toolchain where none is new enough. Does nothing, quickly, when all is there. `setup.sh build` leaves out what only
# tests and measurements need.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/toolchain.sh

say() { printf 'setup: %s\n' "$*"; }
die() { printf 'setup: %s\n' "$*" >&2; exit 1; }

# What is needed, as "command:package:what for"; instead of a command a file below /usr, which may be a pattern.
below=${SETUP_BELOW:-/usr}
needs=(
  "cc:gcc:linking"
  "include/stdio.h:libc6-dev:linking"
  "c++:g++:the tests of the C headers"
  "valgrind:valgrind:the tests of the C libraries"
  "strace:strace:the tests of programs on a cluster"
  "pkg-config:pkg-config:the tests of the C libraries"
  "make:make:the tests of the C libraries"
  "git:git:the source"
  "fusermount3:fuse3:mounting as a plain user"
  "fio:fio:the tests that run fio on the mount"
  "getfattr:attr:the tests of extended attributes"
  "getfacl:acl:the tests of access control lists"
  "sbin/setcap:libcap2-bin:the tests of capabilities of files"
  "mkfs.btrfs:btrfs-progs:the tests of power failures"
  "glusterfsd:glusterfs-server:the tests of the GlusterFS translator, and of folders of GlusterFS behind I/O nodes"
  "glusterfs:glusterfs-client:the tests of the GlusterFS translator, and of folders of GlusterFS behind I/O nodes"
  "include/glusterfs/xlator.h:libglusterfs-dev:building the GlusterFS translator"
  "include/*/urcu.h:liburcu-dev:building the GlusterFS translator"
  "include/acl/libacl.h:libacl1-dev:building the GlusterFS translator"
  "include/uuid/uuid.h:uuid-dev:building the GlusterFS translator"
  "ceph-mon:ceph-mon:the tests of CephFS behind I/O nodes"
  "ceph-mgr:ceph-mgr:the tests of CephFS behind I/O nodes"
  "ceph-osd:ceph-osd:the tests of CephFS behind I/O nodes"
  "ceph-mds:ceph-mds:the tests of CephFS behind I/O nodes"
  "ceph:ceph-common:the tests of CephFS behind I/O nodes"
  "include/cephfs/libcephfs.h:libcephfs-dev:the tests of CephFS behind I/O nodes"
  "openssl:openssl:the tests of certificates and of the GlusterFS translator"
  "sbin/munged:munge:the tests of users that prove who they are"
  "lib/*/libmunge.so.2:libmunge2:the tests of users that prove who they are"
  "ip:iproute2:the tests of keys and of the GlusterFS translator"
  "rsync:rsync:the tests of hard links"
  "nfs-cp:libnfs-utils:the tests of the NFS server"
  "include/nfsc/libnfs.h:libnfs-dev:measuring NFS servers"
  "sbin/diod:diod:the tests of the comparison with other servers"
  "ganesha.nfsd:nfs-ganesha-vfs:the tests of the comparison with other servers"
  "sbin/rpcbind:rpcbind:the tests of the comparison with other servers"
  "lib/python3/dist-packages/numpy:python3-numpy:the programs that guided I/O is measured with"
  "lib/python3/dist-packages/h5py:python3-h5py:the programs that guided I/O is measured with"
  "mpirun.openmpi:openmpi-bin:the tests of MPI-IO"
  "mpicc.openmpi:libopenmpi-dev:the tests of MPI-IO"
  "mpirun.mpich:mpich:the tests of MPI-IO"
  "mpicc.mpich:libmpich-dev:the tests of MPI-IO"
  "lib/python3/dist-packages/h5py/_debian_h5py_mpi:python3-h5py-mpi:the tests of parallel HDF5"
  "include/liburing.h:liburing-dev:the tests of guided I/O with io_uring"
  "sqlite3:sqlite3:the programs that guided I/O is measured with"
  "zstd:zstd:the programs that guided I/O is measured with"
  "lib/python3/dist-packages/dask:python3-dask:the tests of guided I/O with Dask"
  "xrootd:xrootd-server:the tests of guided I/O with XRootD"
  "xrdcp:xrootd-client:the tests of guided I/O with XRootD"
)
if [[ $(uname -m) == x86_64 ]]; then
  needs+=(
    "musl-gcc:musl-tools:the tests of guided I/O with programs of another C library"
    "lib32/ld-linux.so.2:libc6-i386:the tests of guided I/O with programs of 32 bits"
  )
fi
choose_toolchain || needs+=("curl:curl:downloading the Rust toolchain" ":ca-certificates:downloading the Rust toolchain")

missing=()
for need in "${needs[@]}"; do
  IFS=: read -r command package purpose <<<"$need"
  [[ ${1-} != build || ! $purpose =~ ^(the (tests|programs)|measuring|building\ the\ GlusterFS) ]] || continue
  if [[ $command == */* ]]; then
    ! compgen -G "$below/$command" >/dev/null || continue
  elif [[ -n $command ]]; then
    ! command -v "$command" >/dev/null || continue
  else
    [[ ! -e /etc/ssl/certs/ca-certificates.crt ]] || continue
  fi
  [[ " ${missing[*]-} " != *" $package "* ]] || continue
  say "$package is missing (needed for $purpose)"
  missing+=("$package")
done

if ((${#missing[@]})); then
  command -v apt-get >/dev/null ||
    die "apt-get is not here; install by hand what gives you: ${missing[*]} (the names are Debian's)"
  as_root=()
  if ((EUID != 0)); then
    command -v sudo >/dev/null ||
      die "installing ${missing[*]} needs root: run as root 'apt-get install -y ${missing[*]}', then this again"
    as_root=(sudo)
    # Without a terminal no password can be typed: fail now rather than wait for one.
    [[ -t 0 ]] || as_root=(sudo -n)
  fi
  # An apt-get that runs already holds a lock: wait for it, but not for ever.
  apt=("${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=120 -q -y)
  say "installing: ${missing[*]}"
  # Debian starts the services that it installs, now and at every boot. The tests start servers of their own, and a machine that
  # only runs tests has to serve nobody.
  enabled() { "${as_root[@]}" systemctl list-unit-files --state=enabled --no-legend 2>/dev/null | awk '{ print $1 }'; }
  # Unless it is known which were there before, none is touched: the machine's own would be stopped.
  before=$(enabled) || before=
  "${apt[@]}" update ||
    die "the package lists could not be fetched; check the network and /etc/apt, or install by hand: ${missing[*]}"
  installed=0
  "${apt[@]}" install --no-install-recommends "${missing[@]}" || installed=$?
  if [[ -n $before ]]; then
    mapfile -t services < <(enabled | grep -vxF -e "$before")
    if ((${#services[@]})); then
      "${as_root[@]}" systemctl --quiet disable --now "${services[@]}" &&
        say "not started, now and at boot: ${services[*]} (systemctl enable --now NAME starts one)" ||
        say "note: these were started by their packages: ${services[*]}"
    fi
  fi
  ((installed == 0)) || die "installing failed; install by hand: ${missing[*]}"
fi

# rustup's installer, one version with its SHA-256 for each architecture.
rustup_version=1.28.2
rustup_sums=(
  "x86_64:20a06e644b0d9bd2fbdbfd52d42540bdde820ea7df86e92e533c073da0cdd43c"
  "aarch64:e3853c5a252fca15252d07cb23a1bdd9377a8c6f3efa01531109281ae47f841c"
)

install_rustup() {
  local machine sum=
  machine=$(uname -m)
  for pair in "${rustup_sums[@]}"; do [[ ${pair%%:*} != "$machine" ]] || sum=${pair#*:}; done
  [[ -n $sum ]] || die "no Rust installer is known for $machine; install Rust $rust_oldest or newer from https://rustup.rs"
  local url="${RUSTUP_UPDATE_ROOT:-https://static.rust-lang.org/rustup}/archive/$rustup_version/$machine-unknown-linux-gnu/rustup-init"
  say "installing rustup $rustup_version in ${CARGO_HOME:-$HOME/.cargo}, from $url"
  local folder
  folder=$(mktemp -d)
  # shellcheck disable=SC2064 # the folder of now
  trap "rm -rf '$folder'" EXIT
  curl --fail --silent --show-error --location --retry 3 --output "$folder/rustup-init" "$url" ||
    die "rustup could not be fetched from $url; install Rust $rust_oldest or newer by hand (https://rustup.rs)"
  sha256sum --check --status <<<"$sum  $folder/rustup-init" ||
    die "the installer from $url is not the known one (its SHA-256 differs); nothing was run"
  chmod +x "$folder/rustup-init"
  # The shell's start files stay as they are: the scripts here find the folder by themselves.
  RUSTUP_INIT_SKIP_PATH_CHECK=yes "$folder/rustup-init" -y --quiet --no-modify-path --default-toolchain none ||
    die "rustup-init failed; install Rust $rust_oldest or newer by hand (https://rustup.rs)"
  rm -rf "$folder"
}

if ! choose_toolchain; then
  if [[ -n $rust_found ]]; then
    say "the installed Rust is version $rust_found; at least $rust_oldest is needed"
  else
    say "Rust is missing (needed for building)"
  fi
  [[ -z ${RUSTUP_TOOLCHAIN:-} ]] || die "RUSTUP_TOOLCHAIN=$RUSTUP_TOOLCHAIN cannot be used; unset it or choose another"
  home=${CARGO_HOME:-$HOME/.cargo}
  rustup=$(command -v rustup) || rustup=$home/bin/rustup
  [[ -x $rustup ]] || install_rustup
  say "installing Rust $rust_pinned by rustup"
  "$rustup" toolchain install "$rust_pinned" --profile minimal --component rustfmt --component clippy --no-self-update ||
    die "Rust $rust_pinned could not be installed; check the network, or install Rust $rust_oldest or newer by hand"
  choose_toolchain || die "Rust $rust_pinned was installed but does not run"
  say "for cargo in a shell of yours: . $home/env"
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
say "ready: cargo $rust_found"
