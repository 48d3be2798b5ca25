//! The exported names. Every version of the interface has its functions under the names of its library: one macro per
//! version, given these names. In each, functions of this crate stand after `=`.

/// C functions that call functions of this crate.
#[macro_export]
macro_rules! export {
    ($($(#[$doc:meta])* $name:ident($($argument:ident: $type:ty),*) $(-> $result:ty)? = $function:path;)*) => {$(
        $(#[$doc])*
        ///
        /// # Safety
        /// As the function that it calls.
        #[unsafe(no_mangle)]
        #[allow(unused_unsafe)] // some are safe
        pub unsafe extern "C" fn $name($($argument: $type),*) $(-> $result)? {
            // SAFETY: as this function's caller promises.
            unsafe { $function($($argument),*) }
        }
    )*};
}

/// Functions of version 1 under these names.
#[macro_export]
macro_rules! export_version_1 {
    (
        init = $init:ident,
        add_request = $add_request:ident,
        release_request = $release_request:ident,
        cancel_request = $cancel_request:ident,
        set_stripe_size = $set_stripe_size:ident,
        print_stats_file = $print_stats_file:ident,
        reset_stats = $reset_stats:ident $(,)?
    ) => {
        mod version_1 {
            use std::ffi::{c_char, c_int, c_long, c_short};

            use $crate::generation1 as of;

            type Text = *const c_char;

            $crate::export! {
                /// Version 1: starts the library. The last argument is an int.
                $init(client: *const of::Client, config_file: Text, max_app_id: usize) -> c_int = of::init;
                /// Version 1: adds a request.
                $add_request(file_id: Text, kind: c_short, offset: c_long, len: c_long, data: i64,
                             client: *const of::Client, app_id: c_int) -> c_int = of::add_request;
                /// Version 1: releases a delivered request. Some programs pass two more arguments.
                $release_request(file_id: Text, kind: c_short, len: c_long, offset: c_long) -> c_int
                    = of::release_request;
                /// Version 1: cancels a queued request.
                $cancel_request(file_id: Text, kind: c_short, len: c_long, offset: c_long) -> c_int
                    = of::cancel_request;
                /// Version 1: without effect.
                $set_stripe_size(file_id: Text, stripe_size: c_int) -> c_int = of::set_stripe_size;
                /// Version 1: writes the statistics to a file.
                $print_stats_file(filename: Text) = of::print_stats_file;
                /// Version 1: resets the statistics.
                $reset_stats() = of::reset_stats;
            }
        }
    };
}

/// The functions common to versions 2 and 3, under their names.
#[macro_export]
macro_rules! export_versions_2_and_3 {
    () => {
        $crate::export! {
            /// Versions 2 and 3: releases a delivered request.
            agios_release_request(file_id: *const ::std::ffi::c_char, kind: i32, len: i64, offset: i64) -> bool
                = $crate::calls::release;
            /// Versions 2 and 3: cancels a queued request.
            agios_cancel_request(file_id: *const ::std::ffi::c_char, kind: i32, len: i64, offset: i64) -> bool
                = $crate::calls::cancel;
        }
    };
}

/// The functions of version 3 only, under these names.
#[macro_export]
macro_rules! export_version_3 {
    (init = $init:ident, add_request = $add_request:ident $(,)?) => {
        $crate::export! {
            /// Version 3: starts the library; callbacks may be NULL.
            $init(process_request: Option<$crate::IdentifierFn>, process_requests: Option<$crate::IdentifiersFn>,
                  config_file: *const ::std::ffi::c_char, max_queue_id: i32) -> bool = $crate::generation3::init;
            /// Version 3: adds a request with its own callback. Programs older than its argument pass none, and their
            /// callbacks expect none.
            $add_request(file_id: *const ::std::ffi::c_char, kind: i32, offset: i64, len: i64, identifier: i64,
                         queue_id: i32, callback: Option<$crate::OwnFn>, argument: *mut ::std::ffi::c_void) -> bool
                = $crate::generation3::add_request;
            /// Version 3: metrics since the start or the last call, in memory from malloc.
            agios_get_metrics_and_reset() -> *mut $crate::MetricsC = $crate::generation3::get_metrics_and_reset;
        }
    };
}

/// The functions of every version, under its names.
#[macro_export]
macro_rules! export_all_versions {
    () => {
        $crate::export! {
            /// All versions: stops the library.
            agios_exit() = $crate::calls::exit;
        }
    };
}
