//! Libraries of file systems, loaded at run time: a machine that does not serve such a file system needs none of them.

/// Declares a table of a library's functions, `Api`, each with its symbol and, where its arguments changed between
/// releases, the version of the symbol that has these. The caller vouches for the signatures.
macro_rules! functions {
    ($($name:ident, $symbol:literal $(, $version:literal)?: fn($($argument:ty),*) $(-> $answer:ty)?;)*) => {
        /// The functions, each as the header documents it.
        pub(super) struct Api {
            $(pub(super) $name: unsafe extern "C" fn($($argument),*) $(-> $answer)?,)*
        }

        impl Api {
            fn look_up(library: &impresario_base::loader::Library) -> Result<Api, String> {
                Ok(Api {
                    $($name: {
                        let version: &[&std::ffi::CStr] = &[$($version)?];
                        let found = library.symbol($symbol, version.first().copied())?;
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
