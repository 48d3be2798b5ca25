//! Writes small files and replaces them atomically.

use std::io::{self, IoSlice};

use crate::filesystem::FileSystem;

/// Replaces the file `name` at the top of a directory through `name_new`; after a power failure it is the old one or the
/// new one, complete. Returns the new one, open.
pub(crate) fn replace_file<F: FileSystem>(fs: &F, name: &str, name_new: &str, bytes: &[u8]) -> io::Result<F::File> {
    let file = fs.open(name_new, true)?;
    let written = fs.set_len(&file, 0).and_then(|()| write_all(fs, &file, 0, bytes));
    written.inspect_err(|_| {
        let _ = fs.unlink(name_new); // it may have taken the last of the space
    })?;
    fs.sync(&file)?;
    fs.rename(name_new, name)?;
    fs.sync_dir("")?;
    Ok(file)
}

/// Writes all bytes at an offset.
pub(crate) fn write_all<F: FileSystem>(fs: &F, file: &F::File, offset: u64, bytes: &[u8]) -> io::Result<()> {
    let mut done = 0;
    while done < bytes.len() {
        match fs.write(file, offset + done as u64, &[IoSlice::new(&bytes[done..])])? {
            0 => return Err(io::ErrorKind::WriteZero.into()),
            len => done += len,
        }
    }
    Ok(())
}

/// More than any of our own files has, bytes: what is longer is damaged, and is not taken into memory.
const FILE_MAX_BYTES: u64 = 64 << 20;

/// The content of one of our own files; `None` if there is none.
pub(crate) fn read_all<F: FileSystem>(fs: &F, name: &str) -> io::Result<Option<Vec<u8>>> {
    let file = match fs.open(name, false) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        opened => opened?,
    };
    let size = fs.stat(&file)?.size;
    if size > FILE_MAX_BYTES {
        let why =
            format!("the file `{name}` is damaged: it has {size} bytes, and should have {FILE_MAX_BYTES} at most");
        return Err(io::Error::new(io::ErrorKind::InvalidData, why));
    }
    let mut bytes = vec![0; size as usize];
    let mut done = 0;
    while done < bytes.len() {
        match fs.read(&file, done as u64, &mut [io::IoSliceMut::new(&mut bytes[done..])])? {
            0 => break,
            len => done += len,
        }
    }
    bytes.truncate(done);
    Ok(Some(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Forgetful;

    #[test]
    fn a_file_that_is_longer_than_any_of_ours_is_damaged() {
        let fs = Forgetful::new(2 * FILE_MAX_BYTES);
        let file = replace_file(&fs, "notes", "notes.new", b"text").unwrap();
        assert_eq!(read_all(&fs, "notes").unwrap().unwrap(), b"text");
        assert!(read_all(&fs, "none").unwrap().is_none());
        fs.set_len(&file, FILE_MAX_BYTES + 1).unwrap();
        let error = read_all(&fs, "notes").unwrap_err();
        assert!(error.to_string().starts_with("the file `notes` is damaged"), "{error}");
    }
}
