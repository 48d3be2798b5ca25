#!/usr/bin/env bash
# Builds a Debian package of the GlusterFS translator for the GlusterFS version that is installed here:
#   packaging/glusterfs-deb.sh [FOLDER]      where the package is written (default: target)
#   LIBRARY    the libimpresario.so to put into it (default: target/release/libimpresario.so, which `make build` makes)
#   GLUSTERFS  GlusterFS's version (default: that of `glusterfs --version`)
# The package brings its own libimpresario, in a folder that only the translator looks into.
set -euo pipefail
cd "$(dirname "$0")/.."

die() { printf 'glusterfs-deb: %s\n' "$*" >&2; exit 1; }

folder=${1:-target}
library=${LIBRARY:-target/release/libimpresario.so}
command -v dpkg-deb >/dev/null || die "dpkg-deb is missing: apt-get install dpkg"
[[ -f $library ]] || die "$library is missing: run 'make build', or set LIBRARY"
[[ -f /usr/include/glusterfs/xlator.h ]] || die "GlusterFS's headers are missing: apt-get install libglusterfs-dev"
gluster=${GLUSTERFS:-$(glusterfs --version 2>/dev/null | sed -n '1s/^glusterfs \([0-9.]*\).*/\1/p')}
[[ $gluster =~ ^([0-9]+)\.([0-9]+)$ ]] || die "GlusterFS's version is \"$gluster\": set GLUSTERFS, such as 10.3"
next=${BASH_REMATCH[1]}.$((BASH_REMATCH[2] + 1))
version=$(sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml | head -n 1)
machine=$(dpkg --print-architecture)
libdir=/usr/lib/$(cc -print-multiarch)

stage=$(mktemp -d)
trap 'rm -rf "$stage"' EXIT
mkdir -p "$stage/link" "$folder"
ln -s "$(realpath "$library")" "$stage/link/libimpresario.so"
make --no-print-directory -s -C integrations/glusterfs install DESTDIR="$stage/root" BUILD="$stage/build" GLUSTERFS="$gluster" \
  LIBDIR="$libdir" CFLAGS="-O2 -g" IMPRESARIO_CFLAGS="-I$PWD/crates/faces/capi/include" \
  IMPRESARIO_LIBS="-L$stage/link -limpresario -Wl,-rpath,$libdir/impresario"
install -D -m 644 "$library" "$stage/root$libdir/impresario/libimpresario.so.0"
strip --strip-unneeded "$stage/root$libdir/impresario/libimpresario.so.0" "$stage/root$libdir/glusterfs/$gluster/xlator/user/impresario.so"
documents=$stage/root/usr/share/doc/impresario-glusterfs
install -D -m 644 integrations/glusterfs/README.md "$documents/README.md"
install -D -m 644 doc/POLICIES.md "$documents/POLICIES.md"
install -D -m 644 LICENSE "$documents/copyright"

# A translator fits the version that it was built for, and is looked for in that version's folder.
mkdir "$stage/root/DEBIAN"
cat >"$stage/root/DEBIAN/control" <<CONTROL
Package: impresario-glusterfs
Version: $version+gluster$gluster
Architecture: $machine
Maintainer: Impresario <impresario@example.org>
Installed-Size: $(du -sk "$stage/root" | cut -f 1)
Depends: glusterfs-server (>= $gluster), glusterfs-server (<< $next~), libc6, libgcc-s1, libuuid1
Section: admin
Priority: optional
Description: scheduling, limits and shares for GlusterFS bricks
 A translator for the bricks of GlusterFS $gluster: it schedules reads and writes, merges neighbouring requests,
 and limits users, hosts and GlusterFS's own processes. It does nothing until a volume uses it; see
 /usr/share/doc/impresario-glusterfs/README.md.
CONTROL
package=$folder/impresario-glusterfs_$version+gluster${gluster}_$machine.deb
dpkg-deb --root-owner-group --build "$stage/root" "$package" >/dev/null
echo "$package"
