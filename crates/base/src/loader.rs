//! Libraries that are loaded at run time: a machine that does not need what one does need not have it.

use std::ffi::{CStr, c_void};

/// A library that is loaded, and stays so: libraries of this kind start threads that nothing ends for certain.
pub struct Library(*mut c_void);

impl Library {
    /// Loads a library. The error is the loader's message.
    pub fn load(name: &CStr) -> Result<Library, String> {
        // SAFETY: loading runs the library's constructors; the configuration that needs the library consents to that.
        let library = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        if library.is_null() { Err(loader_says()) } else { Ok(Library(library)) }
    }

    /// A symbol, of that version if the library has several. The error is the loader's message.
    pub fn symbol(&self, name: &CStr, version: Option<&CStr>) -> Result<*mut c_void, String> {
        // SAFETY: a library that is loaded, and terminated strings.
        let found = unsafe {
            match version {
                Some(version) => libc::dlvsym(self.0, name.as_ptr(), version.as_ptr()),
                None => libc::dlsym(self.0, name.as_ptr()),
            }
        };
        if found.is_null() { Err(loader_says()) } else { Ok(found) }
    }
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
        let missing = Library::load(c"libno-such-library.so.7").err().unwrap();
        assert!(missing.contains("libno-such-library.so.7"), "{missing}");
        let library = Library::load(c"libc.so.6").unwrap();
        assert!(library.symbol(c"getpid", None).is_ok());
        let missing = library.symbol(c"no_such_function", None).unwrap_err();
        assert!(missing.contains("no_such_function"), "{missing}");
        assert!(library.symbol(c"getpid", Some(c"NO_SUCH_VERSION")).is_err());
    }
}
