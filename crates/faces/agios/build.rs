//! Gives the shared library its soname. The public library has none, so programs linked against it ask for
//! `libagios.so`, which `make install` provides as a link.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libagios.so.2");
}
