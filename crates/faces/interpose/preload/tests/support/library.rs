//! The library under test; the end-to-end tests of the command line use this file too.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

/// `libimpresario_assist.so`, built for this profile. Cargo does not build shared libraries for tests by itself.
/// With `IMPRESARIO_TEST_LIBRARY_IS_BUILT` it has been built already: Cargo may be busy with something else then.
pub fn library() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| {
        let exe = std::env::current_exe().unwrap();
        let profile = exe.parent().unwrap().parent().unwrap();
        if std::env::var_os("IMPRESARIO_TEST_LIBRARY_IS_BUILT").is_none() {
            let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or("cargo".into()));
            cargo.args(["build", "--quiet", "--locked", "-p", "impresario-preload", "--target-dir"]);
            cargo.arg(profile.parent().unwrap()).current_dir(env!("CARGO_MANIFEST_DIR"));
            if profile.ends_with("release") {
                cargo.arg("--release");
            }
            let built = cargo.output().unwrap();
            assert!(built.status.success(), "{cargo:?}: {}", String::from_utf8_lossy(&built.stderr));
        }
        let library = profile.join("libimpresario_assist.so");
        assert!(library.exists(), "{} was not built", library.display());
        library
    })
}
