//! Messages to and from the manager: one system call each, which never waits.

use std::ffi::CStr;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use impresario_ring::message::{DESCRIPTORS_MAX, MESSAGE_BYTES, Packet, ToClient};
use impresario_ring::order::{self, Answer, ORDER_BYTES_MAX, Task};
use rustix::io::{Errno, IoSlice, IoSliceMut};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, SocketAddrUnix, SocketFlags, SocketType,
};

/// What came of sending or looking.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Trouble {
    /// The manager's queue is full, or there is no answer yet.
    Wait,
    /// The program's descriptor was closed meanwhile.
    Closed,
    /// The manager is not there any more.
    Gone,
}

impl Trouble {
    fn of(errno: Errno) -> Trouble {
        match errno {
            Errno::AGAIN | Errno::INTR | Errno::NOBUFS | Errno::NOMEM | Errno::TOOMANYREFS => Trouble::Wait,
            Errno::BADF => Trouble::Closed,
            _ => Trouble::Gone,
        }
    }
}

/// Connects; a manager that does not take connections quickly enough counts as absent.
pub(crate) fn connect(name: &CStr) -> Option<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).ok()?;
    let address = SocketAddrUnix::new(name);
    match address.and_then(|address| rustix::net::connect(&socket, &address)) {
        Ok(()) => Some(socket),
        Err(_) => {
            crate::own::close_raw(socket);
            None
        }
    }
}

/// Sends the answer to an order.
pub(crate) fn send_answer(socket: BorrowedFd<'_>, answer: Answer) -> Result<(), Trouble> {
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    rustix::net::send(socket, &answer.encode(), flags).map(|_| ()).map_err(Trouble::of)
}

/// Sends a message with at most [`DESCRIPTORS_MAX`] descriptors.
pub(crate) fn send(socket: BorrowedFd<'_>, packet: &Packet, with: &[BorrowedFd<'_>]) -> Result<(), Trouble> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !with.is_empty() && !control.push(SendAncillaryMessage::ScmRights(with)) {
        return Err(Trouble::Gone);
    }
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    match rustix::net::sendmsg(socket, &[IoSlice::new(packet.as_bytes())], &mut control, flags) {
        Ok(_) => Ok(()),
        Err(errno) => Err(Trouble::of(errno)),
    }
}

/// The manager's answer, if it is there. The descriptor is that of the patterns.
pub(crate) fn answer(socket: BorrowedFd<'_>) -> Result<Option<(ToClient, Option<OwnedFd>)>, Trouble> {
    // One byte more, so that a longer packet is seen to be longer.
    let mut bytes = [0u8; MESSAGE_BYTES + 1];
    let (len, descriptor) = receive(socket, &mut bytes)?;
    match ToClient::decode(bytes.get(..len).unwrap_or(&[])) {
        Ok(message) => Ok(Some((message, descriptor))),
        Err(_) => {
            if let Some(descriptor) = descriptor {
                crate::own::close_raw(descriptor);
            }
            Ok(None)
        }
    }
}

/// An order, if there is one. Anything else ends the conversation.
pub(crate) fn order(socket: BorrowedFd<'_>) -> Result<(Task, OwnedFd), Trouble> {
    let mut bytes = [0u8; ORDER_BYTES_MAX + 1];
    let (len, file) = receive(socket, &mut bytes)?;
    match (order::decode(bytes.get(..len).unwrap_or(&[])), file) {
        (Ok(task), Some(file)) => Ok((task, file)),
        (_, file) => {
            if let Some(file) = file {
                crate::own::close_raw(file);
            }
            Err(Trouble::Gone)
        }
    }
}

/// Takes one packet, and its first descriptor; others are closed.
fn receive(socket: BorrowedFd<'_>, bytes: &mut [u8]) -> Result<(usize, Option<OwnedFd>), Trouble> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
    let mut parts = [IoSliceMut::new(bytes)];
    let len = rustix::net::recvmsg(socket, &mut parts, &mut control, flags).map_err(Trouble::of)?.bytes;
    let mut first = None;
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(descriptors) = message {
            for descriptor in descriptors {
                match first {
                    None => first = Some(descriptor),
                    Some(_) => crate::own::close_raw(descriptor),
                }
            }
        }
    }
    match (len, first) {
        (0, Some(first)) => {
            crate::own::close_raw(first);
            Err(Trouble::Gone)
        }
        (0, None) => Err(Trouble::Gone),
        (len, first) => Ok((len, first)),
    }
}

/// Whether the manager is still there.
pub(crate) fn alive(socket: BorrowedFd<'_>) -> bool {
    let mut byte = [0u8; 1];
    match rustix::net::recv(socket, &mut byte[..], RecvFlags::DONTWAIT | RecvFlags::PEEK) {
        Ok((len, _)) => len > 0,
        Err(errno) => Trouble::of(errno) == Trouble::Wait,
    }
}

/// Sends one of the program's own descriptors.
pub(crate) fn send_file(socket: BorrowedFd<'_>, packet: &Packet, file: impl AsFd) -> Result<(), Trouble> {
    send(socket, packet, &[file.as_fd()])
}
