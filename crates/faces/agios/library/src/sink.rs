//! The program's callbacks.

use std::ffi::c_void;

/// Type of the callback for one request, version 2 and later.
pub type IdentifierFn = unsafe extern "C" fn(i64) -> *mut c_void;
/// Type of the callback for several requests, version 2 and later.
pub type IdentifiersFn = unsafe extern "C" fn(*mut i64, i32) -> *mut c_void;
/// Type of a request's own callback, version 3.
pub type OwnFn = unsafe extern "C" fn(i64, *mut c_void) -> *mut c_void;
/// Types of the callbacks in `struct client`, version 1.
pub type DataFn = unsafe extern "C" fn(i64);
/// For several requests.
pub type AllDataFn = unsafe extern "C" fn(*mut i64, i32);

/// The callbacks of a request: for it alone, and for several requests with the same callback. Where there is none for
/// one, that for several gets one.
#[derive(Clone, Copy, Debug)]
pub enum Sink {
    /// Given to init, version 2 and later; or with a request, for it alone.
    Identifiers(Option<IdentifierFn>, Option<IdentifiersFn>),
    /// A request's own function and its argument, version 3.
    Own(OwnFn, *mut c_void),
    /// From `struct client`.
    Data(Option<DataFn>, Option<AllDataFn>),
}

// SAFETY: the pointer in it is only passed to the program's own function.
unsafe impl Send for Sink {}
// SAFETY: as above; nothing in it changes.
unsafe impl Sync for Sink {}

/// By address: equal functions at different addresses count as different, which only keeps them apart.
impl PartialEq for Sink {
    fn eq(&self, other: &Sink) -> bool {
        match (*self, *other) {
            (Sink::Own(f, x), Sink::Own(g, y)) => f as usize == g as usize && x == y,
            (Sink::Own(..), _) | (_, Sink::Own(..)) => false,
            _ => self.addresses() == other.addresses(),
        }
    }
}

impl Sink {
    /// The kind of interface, and where its functions are.
    fn addresses(&self) -> (bool, Option<usize>, Option<usize>) {
        match *self {
            Sink::Identifiers(one, many) => (false, one.map(|f| f as usize), many.map(|f| f as usize)),
            Sink::Own(f, _) => (false, Some(f as usize), None),
            Sink::Data(one, many) => (true, one.map(|f| f as usize), many.map(|f| f as usize)),
        }
    }

    /// Whether there is a callback.
    pub fn is_there(&self) -> bool {
        !matches!(self, Sink::Identifiers(None, None) | Sink::Data(None, None))
    }

    /// Whether requests with the other callbacks may be given to the callback for several.
    pub fn goes_with(&self, other: &Sink) -> bool {
        let (mine, its) = (self.addresses(), other.addresses());
        mine.2.is_some() && (mine.0, mine.2) == (its.0, its.2)
    }

    /// Calls it for one request.
    pub fn call_one(&self, mut identifier: i64) {
        // SAFETY: functions of the types that the header asks for.
        unsafe {
            match *self {
                Sink::Identifiers(Some(f), _) => drop(f(identifier)),
                Sink::Own(f, argument) => drop(f(identifier, argument)),
                Sink::Data(Some(f), _) => f(identifier),
                Sink::Identifiers(None, _) | Sink::Data(None, _) => {
                    self.call_many(std::slice::from_mut(&mut identifier))
                }
            }
        }
    }

    /// Calls it for several requests; one by one where it takes one only.
    pub fn call_many(&self, identifiers: &mut [i64]) {
        let count = identifiers.len() as i32;
        // SAFETY: functions of the types that the header asks for; the array has `count` numbers.
        unsafe {
            match *self {
                Sink::Identifiers(_, Some(f)) => drop(f(identifiers.as_mut_ptr(), count)),
                Sink::Data(_, Some(f)) => f(identifiers.as_mut_ptr(), count),
                _ if self.is_there() => identifiers.iter().for_each(|identifier| self.call_one(*identifier)),
                _ => {}
            }
        }
    }
}
