//! Telling the portmapper of this machine (RFC 1833, version 2) where NFS and MOUNT are, for clients that are not told a port.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use crate::protocol::{MOUNT_PROGRAM, NFS_PROGRAM, VERSION};
use crate::rpc::{Acceptance, CallHead, Credential, read_reply};
use crate::xdr::{Reader, Writer};

const PROGRAM: u32 = 100_000;
const PROGRAM_VERSION: u32 = 2;
const SET: u32 = 1;
const UNSET: u32 = 2;
const TCP: u32 = 6;
/// It is on this machine: it answers at once or not at all.
const PATIENCE: Duration = Duration::from_secs(2);
/// Longest reply, bytes.
const REPLY_MAX_BYTES: usize = 1024;

/// What the portmapper was told; taken back when dropped.
#[derive(Debug)]
pub struct Registered {
    portmapper: SocketAddr,
    port: u16,
    programs: Vec<u32>,
}

impl Registered {
    /// Tells the portmapper at an address. An error is one line with the remedy.
    pub fn new(portmapper: SocketAddr, port: u16) -> Result<Registered, String> {
        let mut registered = Registered { portmapper, port, programs: Vec::new() };
        for program in [NFS_PROGRAM, MOUNT_PROGRAM] {
            let remedy = "start rpcbind, or serve without registration and name the port to clients";
            match call(portmapper, SET, program, port) {
                Ok(true) => registered.programs.push(program),
                Ok(false) => {
                    let why = "another server is registered for it, or this process may not register";
                    return Err(format!("the portmapper refuses program {program}: {why}; {remedy}"));
                }
                Err(error) => {
                    return Err(format!("the portmapper at {portmapper} does not answer ({error}); {remedy}"));
                }
            }
        }
        Ok(registered)
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        for program in self.programs.drain(..) {
            if let Err(error) = call(self.portmapper, UNSET, program, self.port) {
                tracing::warn!(%error, program, "the portmapper still has this server; `rpcinfo -d {program} 3` removes it");
            }
        }
    }
}

fn call(portmapper: SocketAddr, procedure: u32, program: u32, port: u16) -> io::Result<bool> {
    let mut socket = TcpStream::connect_timeout(&portmapper, PATIENCE)?;
    socket.set_read_timeout(Some(PATIENCE))?;
    socket.set_write_timeout(Some(PATIENCE))?;
    let mut out = Writer::default();
    out.u32(0);
    let head = CallHead {
        xid: program,
        rpc_version: 2,
        program: PROGRAM,
        version: PROGRAM_VERSION,
        procedure,
        credential: Credential::None,
    };
    head.write(&mut out);
    out.u32(program).u32(VERSION).u32(TCP).u32(port.into());
    let mut bytes = out.into_bytes();
    let mark = (bytes.len() - 4) as u32 | 1 << 31;
    bytes[..4].copy_from_slice(&mark.to_be_bytes());
    socket.write_all(&bytes)?;
    let mut mark = [0; 4];
    socket.read_exact(&mut mark)?;
    let len = (u32::from_be_bytes(mark) & 0x7fff_ffff) as usize;
    let nonsense = || io::Error::new(io::ErrorKind::InvalidData, "its reply makes no sense");
    if len > REPLY_MAX_BYTES {
        return Err(nonsense());
    }
    let mut reply = vec![0; len];
    socket.read_exact(&mut reply)?;
    let mut reader = Reader::new(&reply);
    match read_reply(&mut reader) {
        Ok((_, Acceptance::Success)) => reader.bool().map_err(|_| nonsense()),
        _ => Err(nonsense()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;
    use std::sync::mpsc;

    /// A portmapper that accepts what it is told, `good` times.
    fn portmapper(good: usize) -> (SocketAddr, mpsc::Receiver<(u32, Vec<u32>)>) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let (tell, told) = mpsc::channel();
        std::thread::spawn(move || {
            for (n, socket) in listener.incoming().enumerate() {
                let mut socket = socket.unwrap();
                let mut mark = [0; 4];
                socket.read_exact(&mut mark).unwrap();
                let mut record = vec![0; (u32::from_be_bytes(mark) & 0x7fff_ffff) as usize];
                socket.read_exact(&mut record).unwrap();
                let mut reader = Reader::new(&record);
                let head = CallHead::read(&mut reader).unwrap();
                assert_eq!((head.program, head.version), (PROGRAM, PROGRAM_VERSION));
                let args = (0..4).map(|_| reader.u32().unwrap()).collect();
                let mut out = Writer::default();
                out.u32(0);
                crate::rpc::reply(head.xid, Acceptance::Success, &mut out);
                out.bool(n < good);
                let mut bytes = out.into_bytes();
                let mark = (bytes.len() - 4) as u32 | 1 << 31;
                bytes[..4].copy_from_slice(&mark.to_be_bytes());
                socket.write_all(&bytes).unwrap();
                if tell.send((head.procedure, args)).is_err() {
                    return;
                }
            }
        });
        (address, told)
    }

    #[test]
    fn both_programs_are_told_and_taken_back() {
        let (address, told) = portmapper(usize::MAX);
        drop(Registered::new(address, 2049).unwrap());
        let told: Vec<_> = (0..4).map(|_| told.recv_timeout(Duration::from_secs(10)).unwrap()).collect();
        let of = |procedure, program| (procedure, vec![program, 3, TCP, 2049]);
        assert_eq!(
            told,
            [of(SET, NFS_PROGRAM), of(SET, MOUNT_PROGRAM), of(UNSET, NFS_PROGRAM), of(UNSET, MOUNT_PROGRAM)]
        );
    }

    #[test]
    fn a_refusal_takes_back_what_was_told() {
        let (address, told) = portmapper(1);
        assert!(Registered::new(address, 2049).unwrap_err().contains("refuses program 100005"));
        let procedures: Vec<u32> = (0..3).map(|_| told.recv_timeout(Duration::from_secs(10)).unwrap().0).collect();
        assert_eq!(procedures, [SET, SET, UNSET]);
        let nobody = impresario_testing::free_address().parse().unwrap();
        assert!(Registered::new(nobody, 2049).unwrap_err().contains("rpcbind"));
    }
}
