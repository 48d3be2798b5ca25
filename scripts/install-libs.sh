#!/usr/bin/env bash
# Installs or removes the C libraries with headers, pkg-config files and manual pages:
# install-libs.sh install|uninstall BUILT DESTDIR PREFIX LIBDIR LIBRARY…   (VERSION in the environment)
set -euo pipefail
cd "$(dirname "$0")/.."

action=$1 built=$2 dest=$3 prefix=$4 lib=$5
shift 5
folder_of() { case $1 in impresario) echo crates/faces/capi ;; *) echo "crates/faces/$1" ;; esac; }

# The first number of a soname: of libagios the version of AGIOS's interface.
so_of() { case $1 in impresario) echo 0 ;; agios) echo 2 ;; agios1) echo 1 ;; agios3) echo 3 ;; esac; }

# Libraries for programs that are linked already have neither header nor archive.
is_linked_against() { [[ $1 != agios[13] ]]; }

# Each page goes under all the names that it documents: the first is the file, the others are links.
names_of() { # names_of PAGE
  sed -n '/^\.Sh NAME/,/^\.Nd/s/^\.Nm \([A-Za-z0-9_.]*\).*/\1/p' "$1"
}

put() { # put MODE FROM TO
  install -D -m "$1" "$2" "$dest$3"
}

for name in "$@"; do
  folder=$(folder_of "$name")
  so=$(so_of "$name")
  if ! is_linked_against "$name"; then
    if [[ $action == install ]]; then
      put 755 "$built/lib$name.so" "$lib/libagios.so.$so"
    else
      rm -f "$dest$lib/libagios.so.$so"
    fi
  elif [[ $action == install ]]; then
    put 755 "$built/lib$name.so" "$lib/lib$name.so.$so.$VERSION"
    ln -sf "lib$name.so.$so.$VERSION" "$dest$lib/lib$name.so.$so"
    ln -sf "lib$name.so.$so" "$dest$lib/lib$name.so"
    put 644 "$built/lib$name.a" "$lib/lib$name.a"
    put 644 "$folder/include/$name.h" "$prefix/include/$name.h"
    install -d "$dest$lib/pkgconfig"
    sed "s|@PREFIX@|$prefix|; s|@LIBDIR@|$lib|; s|@VERSION@|$VERSION|" "$folder/$name.pc.in" >"$dest$lib/pkgconfig/$name.pc"
  else
    rm -f "$dest$lib/lib$name.so"{,".$so",".$so.$VERSION"} "$dest$lib/lib$name.a" "$dest$lib/pkgconfig/$name.pc" \
      "$dest$prefix/include/$name.h"
  fi
done

# Programs find a new soname in a folder of the system only when the loader's list has it.
if [[ -z $dest && $(id -u) == 0 ]] && command -v ldconfig >/dev/null; then
  ldconfig || echo "ldconfig failed: run it before you start programs with the libraries in $lib" >&2
fi

for page in doc/man/*.[135]; do
  section=${page##*.}
  folder=$prefix/share/man/man$section
  if [[ $action == install ]]; then
    put 644 "$page" "$folder/$(basename "$page")"
  else
    rm -f "$dest$folder/$(basename "$page")"
  fi
  for name in $(names_of "$page"); do
    [[ $name.$section == "$(basename "$page")" ]] && continue
    if [[ $action == install ]]; then
      ln -sf "$(basename "$page")" "$dest$folder/$name.$section"
    else
      rm -f "$dest$folder/$name.$section"
    fi
  done
done
