//! Between the checker and its agents: one request, one answer, over a socket.
//!
//! Frames: the length of the header and of the payload (32 bits each, little endian), the header in postcard, the
//! payload as it is. Both ends are this program, so nothing is versioned; lengths are bounded all the same.

use std::io::{self, Read, Write};

use serde::Serialize;
use serde::de::DeserializeOwned;

/// Largest payload of a frame, bytes.
pub(crate) const PAYLOAD_MAX_BYTES: usize = 4 << 20;
const HEADER_MAX_BYTES: usize = 64 << 10;

/// What an agent is to do. Names are relative to the agent's folder; slots number its open files.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, serde::Deserialize)]
pub(crate) enum Op {
    /// open(2) with these flags, and mode 0666. `direct`: with O_DIRECT.
    Open { slot: u32, name: String, flags: i32, direct: bool },
    /// close(2).
    Close { slot: u32 },
    /// pread(2), repeated until the end of the file where it returns less.
    Read { slot: u32, offset: u64, len: u32 },
    /// One pwrite(2) of the payload; the answer is what it returned.
    Write { slot: u32, offset: u64 },
    /// One write(2) of the payload.
    Append { slot: u32 },
    /// fsync(2), or fdatasync(2).
    Sync { slot: u32, data_only: bool },
    /// ftruncate(2).
    Truncate { slot: u32, len: u64 },
    /// The size by fstat(2).
    Size { slot: u32 },
    /// stat(2): the payload is a [`Found`].
    Stat { name: String },
    /// chmod(2).
    Mode { name: String, mode: u32 },
    /// unlink(2).
    Unlink { name: String },
    /// rename(2).
    Rename { from: String, to: String },
    /// mkdir(2) with mode 0777 whatever the umask.
    MakeFolder { name: String },
    /// rmdir(2).
    RemoveFolder { name: String },
    /// Everything below a folder, and the folder.
    RemoveAll { name: String },
    /// Becomes another user for good. Needs root.
    Become { uid: u32, gid: u32 },
    /// Closes all open files.
    CloseAll,
    /// pread(2) of `len` bytes in a thread that is sent a signal again and again; EINTR is retried.
    Interrupted { slot: u32, offset: u64, len: u32 },
    /// Closes a slot while another thread is in pwrite(2) of the payload; the answer is what pwrite returned, or EBADF
    /// when the close came first.
    CloseDuring { slot: u32, offset: u64 },
    /// Threads that write stamped ranges of `extent` bytes of a file and read them, until the agent is killed. The answer
    /// comes when each has done its first.
    Storm { name: String, threads: u32, extent: u64, run: u64, file: u32, writer: u32 },
}

/// Attributes that checks look at.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, serde::Deserialize)]
pub(crate) struct Found {
    pub size: u64,
    pub uid: u32,
    pub mode: u32,
    pub ino: u64,
}

/// An agent's answer: a number (bytes, size), or an errno; the payload follows it.
pub(crate) type Answer = Result<u64, i32>;

/// Sends one frame.
pub(crate) fn send(to: &mut impl Write, header: &impl Serialize, payload: &[u8]) -> io::Result<()> {
    let header = postcard::to_allocvec(header).map_err(io::Error::other)?;
    let mut frame = Vec::with_capacity(8 + header.len() + payload.len());
    frame.extend((header.len() as u32).to_le_bytes());
    frame.extend((payload.len() as u32).to_le_bytes());
    frame.extend(header);
    frame.extend(payload);
    to.write_all(&frame)
}

/// Receives one frame.
pub(crate) fn receive<T: DeserializeOwned>(from: &mut impl Read) -> io::Result<(T, Vec<u8>)> {
    let mut lengths = [0; 8];
    from.read_exact(&mut lengths)?;
    let [a, b, c, d, e, f, g, h] = lengths;
    let header = u32::from_le_bytes([a, b, c, d]) as usize;
    let payload = u32::from_le_bytes([e, f, g, h]) as usize;
    if header > HEADER_MAX_BYTES || payload > PAYLOAD_MAX_BYTES {
        return Err(io::Error::other(format!("a frame of {header} and {payload} bytes")));
    }
    let mut bytes = vec![0; header + payload];
    from.read_exact(&mut bytes)?;
    let payload = bytes.split_off(header);
    Ok((postcard::from_bytes(&bytes).map_err(io::Error::other)?, payload))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_come_back_and_bad_ones_are_errors() {
        let op = Op::Rename { from: "a".into(), to: "b".into() };
        let mut wire = Vec::new();
        send(&mut wire, &op, b"data").unwrap();
        assert_eq!(receive::<Op>(&mut wire.as_slice()).unwrap(), (op, b"data".to_vec()));
        assert!(receive::<Op>(&mut &wire[..wire.len() - 1]).is_err());
        assert!(receive::<Op>(&mut [0xff; 64].as_slice()).is_err());
        wire[8] = 0xee;
        assert!(receive::<Op>(&mut wire.as_slice()).is_err());
    }
}
