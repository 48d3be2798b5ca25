//! The program's callbacks.

use std::ffi::c_void;

/// Type of the callback for one request, version 2 and later.
pub type IdentifierFn = unsafe extern "C" fn(i64) -> *mut c_void;
/// Type of the callback for several requests, version 2 and later.
pub type IdentifiersFn = unsafe extern "C" fn(*mut i64, i32) -> *mut c_void;
/// Type of a request's own callback, version 3.
pub type OwnFn = unsafe extern "C" fn(i64, *mut c_void) -> *mut c_void;

/// The callback for one request.
#[derive(Clone, Copy, Debug)]
pub enum One {
    /// Given to init, version 2 and later.
    Identifier(IdentifierFn),
    /// A request's own function and its argument, version 3.
    Own(OwnFn, *mut c_void),
    /// From `struct client`.
    Data(unsafe extern "C" fn(i64)),
}

/// The callback for several requests at once.
#[derive(Clone, Copy, Debug)]
pub enum Many {
    /// Given to init, version 2 and later.
    Identifiers(IdentifiersFn),
    /// From `struct client`.
    Data(unsafe extern "C" fn(*mut i64, i32)),
}

/// The callbacks of a request.
#[derive(Clone, Copy, Default, Debug)]
pub struct Sink {
    /// For a single request; `None`: `many` with one.
    pub one: Option<One>,
    /// For several requests with the same callback.
    pub many: Option<Many>,
}

// SAFETY: the pointer in it is only passed to the program's own function.
unsafe impl Send for Sink {}
// SAFETY: as above; nothing in it changes.
unsafe impl Sync for Sink {}

/// By address: equal functions at different addresses count as different, which only keeps them apart.
impl PartialEq for One {
    fn eq(&self, other: &One) -> bool {
        match (*self, *other) {
            (One::Identifier(a), One::Identifier(b)) => a as usize == b as usize,
            (One::Own(a, x), One::Own(b, y)) => a as usize == b as usize && x == y,
            (One::Data(a), One::Data(b)) => a as usize == b as usize,
            _ => false,
        }
    }
}

impl PartialEq for Many {
    fn eq(&self, other: &Many) -> bool {
        match (*self, *other) {
            (Many::Identifiers(a), Many::Identifiers(b)) => a as usize == b as usize,
            (Many::Data(a), Many::Data(b)) => a as usize == b as usize,
            _ => false,
        }
    }
}

impl PartialEq for Sink {
    fn eq(&self, other: &Sink) -> bool {
        self.one == other.one && self.many == other.many
    }
}

impl Sink {
    /// Whether there is a callback.
    pub fn is_there(&self) -> bool {
        self.one.is_some() || self.many.is_some()
    }

    /// Calls it for one request.
    pub fn call_one(&self, mut identifier: i64) {
        // SAFETY: functions of the types that the header asks for.
        unsafe {
            match self.one {
                Some(One::Identifier(f)) => drop(f(identifier)),
                Some(One::Own(f, argument)) => drop(f(identifier, argument)),
                Some(One::Data(f)) => f(identifier),
                None => self.call_many(std::slice::from_mut(&mut identifier)),
            }
        }
    }

    /// Calls it for several requests; one by one where it takes one only.
    pub fn call_many(&self, identifiers: &mut [i64]) {
        let count = identifiers.len() as i32;
        // SAFETY: functions of the types that the header asks for; the array has `count` numbers.
        unsafe {
            match self.many {
                Some(Many::Identifiers(f)) => drop(f(identifiers.as_mut_ptr(), count)),
                Some(Many::Data(f)) => f(identifiers.as_mut_ptr(), count),
                None if self.one.is_some() => identifiers.iter().for_each(|identifier| self.call_one(*identifier)),
                None => {}
            }
        }
    }
}
