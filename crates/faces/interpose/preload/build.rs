//! Lets `libimpresario_assist.so` start in programs whose C library is older than this machine's, down to glibc 2.17:
//! a library that asks for a newer version keeps the program from starting.
//!
//! Since glibc 2.34 threads and the loader's functions are in `libc.so.6` with new versions. Here they are linked from
//! `libdl.so.2` and `libpthread.so.0`, where old systems have them and new ones have libraries that lead to
//! `libc.so.6`. To link, empty libraries of these names define them without versions: the loader then takes the version
//! that there is. So it is with the functions that Rust's library does without where they are missing.
//! Others that programs could not link by name before glibc 2.33 (`stat64` and its relatives) are hooks of this library.

#![allow(clippy::print_stdout, reason = "this is how a build script speaks with cargo")]

use std::env;
use std::error::Error;
use std::path::Path;

/// Libraries of old systems, and what is linked from each.
const LIBRARIES: &[(&str, &str, &[&str])] = &[
    ("dl", "libdl.so.2", &["dlopen", "dlsym", "dlclose", "dlerror", "dladdr"]),
    (
        "pthread",
        "libpthread.so.0",
        &[
            "pthread_create",
            "pthread_join",
            "pthread_detach",
            "pthread_sigmask",
            "pthread_attr_setstacksize",
            "pthread_attr_setguardsize",
            "pthread_getattr_np",
            "pthread_key_create",
            "pthread_key_delete",
            "pthread_getspecific",
            "pthread_setspecific",
            // Newer, and only used where they are.
            "gettid",
            "statx",
            "__cxa_thread_atexit_impl",
        ],
    ),
];

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo:rerun-if-changed=build.rs");
    let target = |what: &str| env::var(format!("CARGO_CFG_TARGET_{what}")).unwrap_or_default();
    if target("OS") != "linux" || target("ENV") != "gnu" || target("POINTER_WIDTH") != "64" {
        return Ok(());
    }
    let out = env::var("OUT_DIR")?;
    let compiler = cc::Build::new().cargo_warnings(false).try_get_compiler()?;
    for (name, soname, functions) in LIBRARIES {
        let source = Path::new(&out).join(format!("{name}.c"));
        std::fs::write(&source, functions.iter().map(|f| format!("void {f}(void) {{}}\n")).collect::<String>())?;
        let mut command = compiler.to_command();
        command.args(["-shared", "-fPIC", "-nostdlib", "-fno-builtin", "-w", "-o"]);
        command.arg(Path::new(&out).join(format!("lib{name}.so"))).arg(format!("-Wl,-soname,{soname}")).arg(&source);
        let status = command.status()?;
        if !status.success() {
            return Err(format!("{command:?} failed: {status}").into());
        }
    }
    // Before the C library's own in the order of searching.
    println!("cargo:rustc-link-search=native={out}");
    println!("cargo:rustc-cdylib-link-arg=-Wl,--as-needed");
    Ok(())
}
