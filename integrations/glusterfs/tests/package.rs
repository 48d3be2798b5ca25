//! The Debian package: what it holds, and that its translator finds the library that comes with it.

use std::path::Path;
use std::process::Command;

use crate::support::{self, library, run_within, succeed};

#[test]
fn the_package_holds_the_translator_and_its_library() {
    if !(impresario_testing::require("dpkg-deb") && impresario_testing::require("glusterfs")) {
        return;
    }
    if !Path::new("/usr/include/glusterfs/xlator.h").exists() {
        return impresario_testing::skip("libglusterfs-dev", "/usr/include/glusterfs/xlator.h is missing");
    }
    let folder = tempfile::tempdir().unwrap();
    let recipe = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../packaging/glusterfs-deb.sh");
    let make = || {
        let mut command = Command::new(&recipe);
        command.arg(folder.path());
        command
    };
    let package = succeed(make().env("LIBRARY", library()));
    let deb = |arguments: &[&str]| succeed(Command::new("dpkg-deb").args(arguments));
    let root = folder.path().join("root");
    deb(&["-x", package.trim(), root.to_str().unwrap()]);
    let control = deb(&["-I", package.trim()]);
    assert!(control.contains("Package: impresario-glusterfs\n"), "{control}");
    assert!(control.contains(" Depends: glusterfs-server (>= "), "{control}");

    let find = |name: &str| {
        let found = succeed(Command::new("find").arg(&root).args(["-type", "f", "-name", name]));
        let path = found.strip_suffix('\n').unwrap_or_else(|| panic!("no {name}")).to_string();
        assert!(!path.contains('\n'), "{path}");
        path
    };
    let translator = find("impresario.so");
    assert!(translator.contains("/glusterfs/") && translator.ends_with("/xlator/user/impresario.so"), "{translator}");
    let dynamic = succeed(Command::new("readelf").args(["-d", &translator]));
    let place = find("libimpresario.so.0").strip_prefix(root.to_str().unwrap()).unwrap().to_string();
    let place = place.strip_suffix("/libimpresario.so.0").unwrap().to_string();
    assert!(dynamic.contains(&format!("[{place}]")), "not looked for in {place}: {dynamic}");
    assert!(dynamic.contains("[libimpresario.so.0]"), "{dynamic}");
    let names = succeed(Command::new("nm").args(["-D", "--defined-only", &translator]));
    assert_eq!(names.lines().count(), 1, "one name is enough: {names}");
    assert!(names.contains("xlator_api"), "{names}");

    // Wrong circumstances are named with their remedy.
    for (variable, value, says) in [
        ("LIBRARY", "/nowhere.so", "run 'make build', or set LIBRARY"),
        ("GLUSTERFS", "ten", "set GLUSTERFS, such as 10.3"),
    ] {
        let refused = run_within(make().env("LIBRARY", library()).env(variable, value), support::PATIENCE);
        let said = String::from_utf8_lossy(&refused.stderr).into_owned();
        assert!(!refused.status.success() && said.contains(says), "{said}");
    }
}

#[test]
fn without_the_library_make_says_what_to_install() {
    if !impresario_testing::require("make") {
        return;
    }
    let build = tempfile::tempdir().unwrap();
    let mut make = Command::new("make");
    make.arg("-C").arg(env!("CARGO_MANIFEST_DIR")).arg(format!("BUILD={}", build.path().display()));
    let refused = run_within(make.env("PKG_CONFIG_LIBDIR", "/nowhere"), support::PATIENCE);
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(!refused.status.success() && said.contains("libimpresario is not installed: run 'make build"), "{said}");
}
