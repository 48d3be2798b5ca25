//! Where the preloaded library is, and `impresario assist library`: a folder of it that suits programs of all kinds.

use std::ffi::OsString;
use std::io::{self, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result};
use impresario_interpose::{Machine, empty_library};

use crate::front::command_file;
use crate::{print, usage};

/// Name of the library's file.
const LIBRARY: &str = "libimpresario_assist.so";
/// Environment variable with the path of the library, or of a folder made by `assist library`.
const LIBRARY_VARIABLE: &str = "IMPRESARIO_ASSIST_LIBRARY";
/// Where `make install` makes the folder, below the directory of libraries.
const FOLDER: &str = "impresario/preload";

/// In `LD_PRELOAD`, glibc's loader replaces this by the processor's name; others take it literally, find no such folder
/// and go on without a word.
const PLATFORM: &str = "$PLATFORM";
/// The processor's names of programs of 64 bits, as glibc and the kernel (`AT_PLATFORM`) have them: the library.
const PLATFORMS: &[&str] = if cfg!(target_arch = "x86_64") { &["x86_64", "haswell", "xeon_phi"] } else { &["aarch64"] };
/// Those of programs of 32 bits: an empty library.
const PLATFORMS_32: &[&str] =
    if cfg!(target_arch = "x86_64") { &["i686", "i586", "i486", "i386"] } else { &["v8l", "v7l"] };
const MACHINE_32: Machine = if cfg!(target_arch = "x86_64") { Machine::I386 } else { Machine::Arm };

/// Lay out the preloaded library for programs of all kinds, for LD_PRELOAD in the environment of whole jobs
///
/// A program does not start with the library of another kind, or complains. In this folder each finds its own: programs of
/// 64 bits with the GNU C library the library, those of 32 bits an empty one, and programs with musl nothing. Prints the
/// word for LD_PRELOAD. It contains a dollar sign for the loader: quote it in shells. Running programs keep the library
/// that they have; `make install` makes this folder in lib/impresario/preload.
#[derive(clap::Args)]
#[command(after_long_help = "Examples:
  impresario assist library /opt/impresario/preload
  export LD_PRELOAD=\"$(impresario assist library)\"")]
pub struct Args {
    /// The folder, made if it is not there [default: print the word that `assist run` uses]
    folder: Option<PathBuf>,
}

pub fn run(args: Args) -> Result<ExitCode> {
    let library = match args.folder {
        Some(folder) => {
            let folder = std::path::absolute(folder)?;
            if folder.as_os_str().as_bytes().iter().any(|byte| matches!(byte, b' ' | b':' | b'$')) {
                return Err(usage(format!(
                    "{} has a space, a colon or a dollar sign in its path, which mean something else in LD_PRELOAD; choose \
                     another folder",
                    folder.display()
                )));
            }
            let from = find()?.file();
            lay_out(&from, &folder)
                .with_context(|| format!("laying out {} in {}", from.display(), folder.display()))?;
            Library::Folder(folder)
        }
        None => find()?,
    };
    print([library.to_preload().as_bytes(), b"\n"].concat())
}

/// The library, as it is preloaded.
pub enum Library {
    /// A file, for programs of its own kind.
    File(PathBuf),
    /// A folder made by [`lay_out`].
    Folder(PathBuf),
}

impl Library {
    /// What stands there: a file, or a folder made by [`lay_out`].
    fn at(place: &Path) -> io::Result<Library> {
        let place = place.canonicalize()?;
        if !place.is_dir() {
            return Ok(Library::File(place));
        }
        let folder = Library::Folder(place);
        folder.file().metadata()?;
        Ok(folder)
    }

    /// The word for `LD_PRELOAD`.
    pub fn to_preload(&self) -> OsString {
        match self {
            Library::File(file) => file.clone().into_os_string(),
            Library::Folder(folder) => folder.join(PLATFORM).join(LIBRARY).into_os_string(),
        }
    }

    /// Whether programs of every kind start with it, as without.
    pub fn is_for_all(&self) -> bool {
        matches!(self, Library::Folder(_))
    }

    /// The file of the library itself.
    pub fn file(&self) -> PathBuf {
        match self {
            Library::File(file) => file.clone(),
            Library::Folder(folder) => folder.join(PLATFORMS[0]).join(LIBRARY),
        }
    }
}

/// Finds the library beside this program, or where `make install` puts it.
pub fn find() -> Result<Library> {
    if let Some(path) = std::env::var_os(LIBRARY_VARIABLE).filter(|path| !path.is_empty()) {
        let path = PathBuf::from(path);
        return Library::at(&path).with_context(|| {
            format!(
                "{LIBRARY_VARIABLE} names {}, which is no library and no folder of `assist library`",
                path.display()
            )
        });
    }
    let program = command_file().context("finding this program's own file")?;
    let beside = program.parent().unwrap_or(Path::new("/"));
    let lib = beside.join("../lib");
    let places = [beside.join(LIBRARY), lib.join(FOLDER), lib.join(LIBRARY), lib.join("impresario").join(LIBRARY)];
    places.iter().find_map(|place| Library::at(place).ok()).ok_or_else(|| {
        let looked = places.iter().map(|p| p.display().to_string()).collect::<Vec<_>>().join(", ");
        anyhow::anyhow!(
            "{LIBRARY} was not found ({looked}): build it with `make build`, install it with `make install`, or name it in \
             {LIBRARY_VARIABLE}"
        )
    })
}

/// Makes the folder, or brings it up to date.
fn lay_out(library: &Path, folder: &Path) -> io::Result<()> {
    let library = std::fs::read(library)?;
    for (platforms, bytes) in [(PLATFORMS, &library), (PLATFORMS_32, &empty_library(MACHINE_32))] {
        let own = folder.join(platforms[0]);
        std::fs::create_dir_all(&own)?;
        // In its place at once: programs may be starting with the old one, or running with it.
        let mut file = tempfile::NamedTempFile::new_in(&own)?;
        file.write_all(bytes)?;
        file.as_file().set_permissions(PermissionsExt::from_mode(0o755))?;
        file.persist(own.join(LIBRARY))?;
        for other in &platforms[1..] {
            let link = folder.join(other);
            if link.read_link().is_ok_and(|to| to == Path::new(platforms[0])) {
                continue;
            }
            symlink(platforms[0], &link)?;
        }
    }
    Ok(())
}
