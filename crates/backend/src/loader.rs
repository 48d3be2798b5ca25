//! Libraries of file systems, loaded at run time: a machine that does not serve such a file system needs none of them.

use std::ffi::{CStr, c_void};

/// Declares a table of a library's functions, `Api`, each with its symbol and, where its arguments changed between
/// releases, the version of the symbol that has these. The caller vouches for the signatures.
macro_rules! functions {
    ($($name:ident, $symbol:literal $(, $version:literal)?: fn($($argument:ty),*) $(-> $answer:ty)?;)*) => {
        /// The functions, each as the header documents it.
        pub(super) struct Api {
            $(pub(super) $name: unsafe extern "C" fn($($argument),*) $(-> $answer)?,)*
        }

        impl Api {
            fn look_up(library: *mut std::ffi::c_void) -> Result<Api, String> {
                Ok(Api {
                    $($name: {
                        let version: &[&std::ffi::CStr] = &[$($version)?];
                        let found = $crate::loader::symbol(library, $symbol, version.first().copied())?;
                        // SAFETY: the function of that name and version has this signature.
                        unsafe {
                            std::mem::transmute::<
                                *mut std::ffi::c_void,
                                unsafe extern "C" fn($($argument),*) $(-> $answer)?,
                            >(found)
                        }
                    },)*
                })
            }
        }
    };
}

pub(crate) use functions;

/// Loads a library, which stays loaded: libraries of this kind start threads that nothing ends for certain.
pub(crate) fn load(name: &CStr) -> Result<*mut c_void, String> {
    // SAFETY: loading runs the library's constructors; the configuration that names such a file system consents to that.
    let library = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
    if library.is_null() { Err(loader_says()) } else { Ok(library) }
}

/// A symbol of a library that [`load`] gave.
pub(crate) fn symbol(library: *mut c_void, name: &CStr, version: Option<&CStr>) -> Result<*mut c_void, String> {
    // SAFETY: a library that is loaded, and terminated strings.
    let found = unsafe {
        match version {
            Some(version) => libc::dlvsym(library, name.as_ptr(), version.as_ptr()),
            None => libc::dlsym(library, name.as_ptr()),
        }
    };
    if found.is_null() { Err(loader_says()) } else { Ok(found) }
}

fn loader_says() -> String {
    // SAFETY: the loader's message is a string that is valid until its next call in this thread.
    let text = unsafe {
        let text = libc::dlerror();
        (!text.is_null()).then(|| CStr::from_ptr(text).to_string_lossy().into_owned())
    };
    text.unwrap_or_else(|| "the loader does not say why".into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_missing_is_named() {
        let missing = load(c"libno-such-library.so.7").unwrap_err();
        assert!(missing.contains("libno-such-library.so.7"), "{missing}");
        let library = load(c"libc.so.6").unwrap();
        assert!(symbol(library, c"getpid", None).is_ok());
        let missing = symbol(library, c"no_such_function", None).unwrap_err();
        assert!(missing.contains("no_such_function"), "{missing}");
        assert!(symbol(library, c"getpid", Some(c"NO_SUCH_VERSION")).is_err());
    }
}
