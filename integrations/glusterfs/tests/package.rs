//! The Debian package: what it holds, and that its translator finds the library that comes with it.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::support::{self, Machine, Place, Volume, apart, library, run_within, succeed};
use impresario_testing::skip;

/// The recipe, which writes the package into a folder and prints its name.
fn recipe(folder: &Path) -> Command {
    let mut command = Command::new(Path::new(env!("CARGO_MANIFEST_DIR")).join("../../packaging/glusterfs-deb.sh"));
    command.arg(folder);
    command
}

#[test]
fn the_package_holds_the_translator_and_its_library() {
    if !(impresario_testing::require("dpkg-deb") && impresario_testing::require("glusterfs")) {
        return;
    }
    if !Path::new("/usr/include/glusterfs/xlator.h").exists() {
        return impresario_testing::skip("libglusterfs-dev", "/usr/include/glusterfs/xlator.h is missing");
    }
    let folder = tempfile::tempdir().unwrap();
    let make = || recipe(folder.path());
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
fn a_brick_runs_the_installed_package() {
    if impresario_testing::require("dpkg") && impresario_testing::require("dpkg-deb") {
        apart("package::inside_installed");
    }
}

/// dpkg installs the package into a folder, which is laid over the machine's own as if it had been installed there.
#[test]
#[ignore = "run by another test as a process"]
fn inside_installed() {
    let machine = Machine::new();
    let (built, root) = (machine.path("built"), machine.path("root"));
    fs::create_dir(&built).unwrap();
    fs::create_dir_all(root.join("var/lib/dpkg/info")).unwrap();
    fs::create_dir(root.join("var/lib/dpkg/updates")).unwrap();
    fs::write(root.join("var/lib/dpkg/status"), "").unwrap();
    let package = succeed(recipe(&built).env("LIBRARY", library()));
    // What it depends on is outside of the folder.
    succeed(Command::new("dpkg").arg("--root").arg(&root).args(["--force-depends", "--install", package.trim()]));
    let list = fs::read_to_string(root.join("var/lib/dpkg/info/impresario-glusterfs.list")).unwrap();
    let installed = |name: &str| {
        let line = list.lines().find(|line| line.ends_with(name)).unwrap_or_else(|| panic!("no {name} in {list}"));
        PathBuf::from(line)
    };
    let (library, translator) = (installed("/libimpresario.so.0"), installed("/xlator/user/impresario.so"));
    let libraries = library.parent().unwrap().parent().unwrap();
    let over = root.join(libraries.strip_prefix("/").unwrap());
    let folders = format!("lowerdir={}:{}", over.display(), libraries.display());
    let mut mount = Command::new("mount");
    mount.args(["-t", "overlay", "-o", &folders, "none"]).arg(libraries);
    let mounted = run_within(&mut mount, support::PATIENCE);
    if !mounted.status.success() {
        return skip("overlay", String::from_utf8_lossy(&mounted.stderr));
    }
    let mut volume = Volume::start(&machine, "packaged", 1, Place::Above, &[]);
    let mount = volume.mount_uncached();
    fs::write(mount.path.join("file"), [7; 300_000]).unwrap();
    assert_eq!(fs::read(mount.path.join("file")).unwrap(), [7; 300_000]);
    assert!(volume.sum("requests") > 1 && volume.sum("write_bytes") == 300_000);
    // The brick has the package's files, and no other library of that name.
    let maps = fs::read_to_string(format!("/proc/{}/maps", volume.bricks[0].process.0.id())).unwrap();
    let mut ours: Vec<&Path> =
        maps.lines().filter_map(|line| line.find('/').map(|at| Path::new(&line[at..]))).collect();
    ours.retain(|path| path.file_name().is_some_and(|name| name.to_string_lossy().contains("impresario")));
    ours.sort_unstable();
    ours.dedup();
    assert_eq!(ours, [translator.as_path(), &library], "{maps}");
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
