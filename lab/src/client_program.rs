//! C programs that load file servers through those servers' own client libraries.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};
use impresario_workload::kernel_disk::tool;

const SHARED: &str = include_str!("client_program/program.h");

/// A client library: the macro of the sources that selects it, its name for the linker, and the packages that it comes in.
pub struct Library {
    define: &'static str,
    name: &'static str,
    packages: &'static str,
}

/// None: plain calls on mounted files.
pub const POSIX: Library = Library { define: "POSIX", name: "", packages: "" };
/// libnfs, a client of NFS.
pub const LIBNFS: Library = Library { define: "NFS", name: "nfs", packages: "libnfs-dev" };
/// libgfapi, a client of GlusterFS.
pub const LIBGFAPI: Library = Library { define: "GLUSTER", name: "gfapi", packages: "libglusterfs-dev" };

/// Builds a program in a folder.
pub fn build(folder: &Path, name: &str, source: &str, library: &Library) -> Result<PathBuf> {
    let (path, program) = (folder.join(format!("{name}.c")), folder.join(name));
    std::fs::write(folder.join("program.h"), SHARED)?;
    std::fs::write(&path, source)?;
    let mut cc = Command::new("cc");
    cc.args(["-O2", "-pthread", "-D", library.define, "-o"]).arg(&program).arg(&path);
    if !library.name.is_empty() {
        cc.arg(format!("-l{}", library.name));
    }
    tool(&mut cc).with_context(|| format!("building the program {name} (packages gcc {})", library.packages))?;
    Ok(program)
}
