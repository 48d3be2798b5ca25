//! Remote procedure calls (RFC 5531): the heads of calls and replies, and who calls.

use crate::xdr::{Garbage, Reader, Writer};

/// Longest credential or verifier, bytes (RFC 5531, 8.2).
const AUTH_MAX_BYTES: usize = 400;
/// Longest name of a machine in AUTH_SYS, bytes (RFC 5531, appendix A).
const MACHINE_MAX_BYTES: usize = 255;
/// Further groups in AUTH_SYS (RFC 5531, appendix A).
pub const GROUPS_MAX: usize = 16;

const CALL: u32 = 0;
const REPLY: u32 = 1;
const AUTH_NONE: u32 = 0;
const AUTH_SYS: u32 = 1;
const RPC_VERSION: u32 = 2;

/// Who a call says that it is from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Credential {
    /// Nobody in particular.
    None,
    /// A user of the client's machine, which is believed.
    Sys {
        /// User.
        uid: u32,
        /// Group.
        gid: u32,
        /// Further groups, at most [`GROUPS_MAX`].
        groups: Vec<u32>,
    },
    /// Of a flavor that is not spoken here.
    Unknown,
    /// Of a known flavor, but its bytes make no sense.
    Bad,
}

/// The head of a call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CallHead {
    /// The client's number for it.
    pub xid: u32,
    /// Version of the call protocol; only 2 is known.
    pub rpc_version: u32,
    /// Program.
    pub program: u32,
    /// Version of the program.
    pub version: u32,
    /// Procedure.
    pub procedure: u32,
    /// Who calls.
    pub credential: Credential,
}

/// Why a call was not carried out, or that it was.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Acceptance {
    /// It was; its results follow.
    Success,
    /// There is no such program here.
    NoProgram,
    /// There is, in these versions.
    NoVersion(u32, u32),
    /// The program has no such procedure.
    NoProcedure,
    /// Its arguments make no sense.
    BadArguments,
    /// The server cannot.
    SystemError,
    /// Another version of the call protocol.
    NoRpcVersion,
    /// The credential makes no sense.
    BadCredential,
    /// The flavor of the credential is too weak or not known.
    WeakCredential,
}

impl CallHead {
    /// Reads the head of a record. What is not even a call is garbage: nothing can be answered to it.
    pub fn read(reader: &mut Reader<'_>) -> Result<CallHead, Garbage> {
        let xid = reader.u32()?;
        if reader.u32()? != CALL {
            return Err(Garbage);
        }
        let rpc_version = reader.u32()?;
        let (program, version, procedure) = (reader.u32()?, reader.u32()?, reader.u32()?);
        let flavor = reader.u32()?;
        let mut body = Reader::new(reader.opaque(AUTH_MAX_BYTES)?);
        let credential = match flavor {
            AUTH_NONE => Credential::None,
            AUTH_SYS => sys(&mut body).unwrap_or(Credential::Bad),
            _ => Credential::Unknown,
        };
        reader.u32()?; // flavor of the verifier
        reader.opaque(AUTH_MAX_BYTES)?;
        Ok(CallHead { xid, rpc_version, program, version, procedure, credential })
    }

    /// Writes the head of a call.
    pub fn write(&self, out: &mut Writer) {
        out.u32(self.xid).u32(CALL).u32(self.rpc_version).u32(self.program).u32(self.version).u32(self.procedure);
        if let Credential::Sys { uid, gid, groups } = &self.credential {
            let mut body = Writer::default();
            body.u32(0).opaque(b"impresario").u32(*uid).u32(*gid).u32(groups.len() as u32);
            groups.iter().for_each(|group| {
                body.u32(*group);
            });
            out.u32(AUTH_SYS).opaque(&body.into_bytes());
        } else {
            out.u32(AUTH_NONE).u32(0);
        }
        out.u32(AUTH_NONE).u32(0);
    }
}

fn sys(body: &mut Reader<'_>) -> Result<Credential, Garbage> {
    body.u32()?; // an arbitrary number
    body.opaque(MACHINE_MAX_BYTES)?;
    let (uid, gid, count) = (body.u32()?, body.u32()?, body.u32()? as usize);
    if count > GROUPS_MAX {
        return Err(Garbage);
    }
    let groups = (0..count).map(|_| body.u32()).collect::<Result<_, _>>()?;
    Ok(Credential::Sys { uid, gid, groups })
}

/// Begins the reply to the call `xid`: the results follow where it was carried out.
pub fn reply(xid: u32, acceptance: Acceptance, out: &mut Writer) {
    const ACCEPTED: u32 = 0;
    const DENIED: u32 = 1;
    out.u32(xid).u32(REPLY);
    let accepted = |out: &mut Writer, status: u32| {
        out.u32(ACCEPTED).u32(AUTH_NONE).u32(0).u32(status);
    };
    match acceptance {
        Acceptance::Success => accepted(out, 0),
        Acceptance::NoProgram => accepted(out, 1),
        Acceptance::NoVersion(least, most) => {
            accepted(out, 2);
            out.u32(least).u32(most);
        }
        Acceptance::NoProcedure => accepted(out, 3),
        Acceptance::BadArguments => accepted(out, 4),
        Acceptance::SystemError => accepted(out, 5),
        Acceptance::NoRpcVersion => {
            out.u32(DENIED).u32(0).u32(RPC_VERSION).u32(RPC_VERSION);
        }
        Acceptance::BadCredential => {
            out.u32(DENIED).u32(1).u32(1);
        }
        Acceptance::WeakCredential => {
            out.u32(DENIED).u32(1).u32(5);
        }
    }
}

/// Reads the head of a reply: the call's number and what became of it.
pub fn read_reply(reader: &mut Reader<'_>) -> Result<(u32, Acceptance), Garbage> {
    let xid = reader.u32()?;
    if reader.u32()? != REPLY {
        return Err(Garbage);
    }
    if reader.u32()? != 0 {
        return match reader.u32()? {
            0 => Ok((xid, Acceptance::NoRpcVersion)),
            _ => Ok((xid, if reader.u32()? == 1 { Acceptance::BadCredential } else { Acceptance::WeakCredential })),
        };
    }
    reader.u32()?;
    reader.opaque(AUTH_MAX_BYTES)?;
    let acceptance = match reader.u32()? {
        0 => Acceptance::Success,
        1 => Acceptance::NoProgram,
        2 => Acceptance::NoVersion(reader.u32()?, reader.u32()?),
        3 => Acceptance::NoProcedure,
        4 => Acceptance::BadArguments,
        _ => Acceptance::SystemError,
    };
    Ok((xid, acceptance))
}

impl CallHead {
    /// Why such a call is refused before anyone looks at its program.
    pub fn refusal(&self) -> Option<Acceptance> {
        match self.credential {
            _ if self.rpc_version != RPC_VERSION => Some(Acceptance::NoRpcVersion),
            Credential::Bad => Some(Acceptance::BadCredential),
            Credential::Unknown => Some(Acceptance::WeakCredential),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn head(groups: Vec<u32>) -> CallHead {
        CallHead {
            xid: 7,
            rpc_version: 2,
            program: 100_003,
            version: 3,
            procedure: 6,
            credential: Credential::Sys { uid: 1000, gid: 100, groups },
        }
    }

    #[test]
    fn heads_of_calls_round_trip_with_their_groups() {
        for groups in [vec![], vec![4, 24], (0..16).collect()] {
            let mut out = Writer::default();
            head(groups.clone()).write(&mut out);
            out.u32(99);
            let bytes = out.into_bytes();
            let mut reader = Reader::new(&bytes);
            let read = CallHead::read(&mut reader).unwrap();
            assert_eq!((read.refusal(), &read), (None, &head(groups)));
            assert_eq!(reader.u32(), Ok(99));
        }
    }

    /// A credential of a length that is allowed whose inside is wrong spoils its own call only: that is told.
    #[test]
    fn a_credential_that_makes_no_sense_is_told_so() {
        let mut out = Writer::default();
        head((0..17).collect()).write(&mut out);
        let read = CallHead::read(&mut Reader::new(&out.into_bytes())).unwrap();
        assert_eq!(read.refusal(), Some(Acceptance::BadCredential));
        let gss = CallHead { credential: Credential::Unknown, ..head(vec![]) };
        assert_eq!(gss.refusal(), Some(Acceptance::WeakCredential));
        assert_eq!(CallHead { rpc_version: 3, ..gss }.refusal(), Some(Acceptance::NoRpcVersion));
    }

    #[test]
    fn replies_round_trip() {
        use Acceptance::*;
        for acceptance in [
            Success,
            NoProgram,
            NoVersion(3, 3),
            NoProcedure,
            BadArguments,
            SystemError,
            NoRpcVersion,
            BadCredential,
            WeakCredential,
        ] {
            let mut out = Writer::default();
            reply(5, acceptance, &mut out);
            assert_eq!(read_reply(&mut Reader::new(&out.into_bytes())), Ok((5, acceptance)));
        }
    }

    proptest! {
        #[test]
        fn any_bytes_are_a_head_or_refused(bytes in proptest::collection::vec(any::<u8>(), 0..600)) {
            let _ = CallHead::read(&mut Reader::new(&bytes));
            let _ = read_reply(&mut Reader::new(&bytes));
            let mut call = vec![0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 2, 0, 1, 0x86, 0xa3, 0, 0, 0, 3, 0, 0, 0, 1, 0, 0, 0, 1];
            call.extend(bytes);
            let _ = CallHead::read(&mut Reader::new(&call));
        }
    }
}
