//! Gives the shared library its soname: programs ask the loader for `libimpresario.so.0`.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libimpresario.so.0");
}
