//! Both ends of a connection, and what is between them.

use std::io::{IoSlice, IoSliceMut, Read, Write};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use impresario_config::{Address, Protect};
use impresario_transport::{
    Access, Certificates, FrameReader, Guest, HandshakeError, HelloError, Host, Keyring, Membership, Pace, Stream,
    TransportError, receive_hello, say_hello, send_frame,
};
use impresario_wire::{
    Answer, ClusterId, Hello, Kind, Limits, PROTOCOL_VERSION, Role, Welcome, Who, decode_body, frame,
};

pub const LIMITS: Limits = Limits::of_server(1 << 20);
pub const TICK: Duration = Duration::from_millis(500);
pub const PACE: Pace = Pace { stall: Duration::from_secs(20), frame: Duration::from_secs(60) };

pub fn soon() -> Instant {
    Instant::now() + Duration::from_secs(20)
}

pub fn greet(stream: &Stream, reader: &mut FrameReader, access: &Access) -> Result<Welcome, HandshakeError> {
    let hello = Hello {
        version: PROTOCOL_VERSION,
        who: Who::default(),
        role: Role::Data,
        name: "test".into(),
        cluster: ClusterId(0),
        credential: vec![],
    };
    let address = Address::Tcp { host: "127.0.0.1".into(), port: 2 };
    say_hello(stream, reader, &hello, ("data.0", &address), access, &Membership::default(), &LIMITS, soon())
}

/// A server: the hand-shake, a welcome or a refusal; then it echoes each frame's payload.
pub fn serve(
    stream: Stream,
    keys: Option<(&Keyring, Protect)>,
    certificates: Option<&Certificates>,
) -> Result<Guest, String> {
    let mut reader = FrameReader::new(1000);
    let membership = Membership::default();
    let host = Host { name: "data.0", role: Role::Data, membership: &membership, keys, certificates };
    let (id, _, guest) = match receive_hello(&stream, &mut reader, host, &LIMITS, soon()) {
        Ok(received) => received,
        Err(HelloError::Broken(error)) => return Err(error.to_string()),
        Err(HelloError::Refused(id, fault)) => {
            let head = frame::encode(Kind::Answer, id, &Answer::Fault(fault.clone()), 0).unwrap();
            send_frame(&stream, &head, &[], soon()).unwrap();
            return Err(fault.message);
        }
    };
    let welcome = Welcome {
        version: PROTOCOL_VERSION,
        name: "data.0".into(),
        incarnation: 1,
        max_payload_bytes: 1 << 20,
        cluster: ClusterId(0),
        store: 0,
        number: None,
        keys: Default::default(),
    };
    send_frame(&stream, &frame::encode(Kind::Welcome, id, &welcome, 0).unwrap(), &[], soon()).unwrap();
    loop {
        let (header, _) = match reader.next_frame_paced(&stream, &LIMITS, &PACE) {
            Ok((header, body)) => (header, body.len()),
            Err(TransportError::Closed) => return Ok(guest),
            Err(error) => return Err(error.to_string()),
        };
        let mut payload = vec![0; header.payload_len as usize];
        if header.id == 99 {
            reader.skip_payload_paced(&stream, payload.len(), &PACE).map_err(|e| e.to_string())?;
        } else {
            reader.read_payload_paced(&stream, &mut payload, &PACE).map_err(|e| e.to_string())?;
        }
        let (a, b) = payload.split_at(payload.len() / 3);
        let head = frame::encode(Kind::Answer, header.id, &Answer::Data, header.payload_len).unwrap();
        send_frame(&stream, &head, &[IoSlice::new(a), IoSlice::new(b)], soon()).map_err(|e| e.to_string())?;
    }
}

pub fn pair() -> (Stream, Stream) {
    let (ours, theirs) = UnixStream::pair().unwrap();
    (Stream::from_unix(ours, TICK).unwrap(), Stream::from_unix(theirs, TICK).unwrap())
}

/// Sends a payload and receives it back as clients do: partly with the head, the rest into pieces.
pub fn echo(stream: &Stream, reader: &mut FrameReader, id: u64, payload: &[u8]) -> Result<Vec<u8>, TransportError> {
    let body = Answer::Written(payload.len() as u32);
    let head = frame::encode(Kind::Answer, id, &body, payload.len() as u32).unwrap();
    send_frame(stream, &head, &[IoSlice::new(payload)], soon())?;
    let (header, body) = reader.next_frame(stream, &LIMITS, soon())?;
    let (answer, len): (Answer, usize) = (decode_body(body)?, header.payload_len as usize);
    if let Answer::Fault(fault) = answer {
        return Err(TransportError::Farewell(fault));
    }
    let mut back = vec![0; len];
    let held = reader.take_payload(len);
    let mut at = held.len();
    back[..at].copy_from_slice(held);
    while at < len {
        let rest = &mut back[at..];
        let middle = rest.len() / 2;
        let (a, b) = rest.split_at_mut(middle);
        match reader.receive_payload(stream, &mut [IoSliceMut::new(a), IoSliceMut::new(b)], soon()) {
            Ok(got) => at += got,
            Err(TransportError::TimedOut) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(back)
}

/// A client that greets and sends a payload to `serve` while at most one byte on the way there (`true`) or back is changed, that
/// at this place: what comes back, and what the server says.
pub fn flipped<R: Send>(
    flip: Option<(bool, usize)>,
    access: &Access,
    payload: &[u8],
    serve: impl FnOnce(Stream) -> R + Send,
) -> (Result<Vec<u8>, String>, R) {
    let (ours, middle_a) = UnixStream::pair().unwrap();
    let (middle_b, theirs) = UnixStream::pair().unwrap();
    let flipper = |way: bool| {
        move |at: usize, bytes: &mut [u8]| {
            if let Some((flipped, place)) = flip
                && flipped == way
                && (at..at + bytes.len()).contains(&place)
            {
                bytes[place - at] ^= 4;
            }
        }
    };
    between(middle_a.try_clone().unwrap(), middle_b.try_clone().unwrap(), flipper(true));
    between(middle_b, middle_a, flipper(false));
    std::thread::scope(|scope| {
        let theirs = Stream::from_unix(theirs, TICK).unwrap();
        let server = scope.spawn(move || serve(theirs));
        let here = Stream::from_unix(ours, TICK).unwrap();
        let mut reader = FrameReader::default();
        let met = greet(&here, &mut reader, access).map_err(|error| error.to_string());
        let back = met.and_then(|_| echo(&here, &mut reader, 1, payload).map_err(|error| error.to_string()));
        here.shut_down();
        (back, server.join().unwrap())
    })
}

/// Forwards bytes, changed by `alter` from the first on.
pub fn between(mut from: UnixStream, mut to: UnixStream, mut alter: impl FnMut(usize, &mut [u8]) + Send + 'static) {
    std::thread::spawn(move || {
        let (mut buffer, mut at) = ([0; 4096], 0);
        while let Ok(got @ 1..) = from.read(&mut buffer) {
            alter(at, &mut buffer[..got]);
            at += got;
            if to.write_all(&buffer[..got]).is_err() {
                break;
            }
        }
        let _ = to.shutdown(std::net::Shutdown::Both);
        let _ = from.shutdown(std::net::Shutdown::Both);
    });
}
