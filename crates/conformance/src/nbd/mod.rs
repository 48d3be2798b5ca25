//! The checks of an NBD server.

use crate::target::Address;
use crate::{Check, Error, Options, Report};

pub(crate) const CHECKS: &[Check<()>] = &[];

pub(crate) fn run(options: &Options, _: &Address, _: &mut dyn FnMut(&str)) -> Result<Report, Error> {
    Err(Error::Usage(format!("{}: is a socket; give a folder of a mount", options.target.to_string_lossy())))
}
