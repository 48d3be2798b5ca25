//! The exported names. Every version of the interface has its functions under the names of its library: one macro per
//! version, given these names.

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
        /// Version 1: starts the library.
        ///
        /// # Safety
        /// As `generation1::init`.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $init(
            client: *const $crate::generation1::Client,
            config_file: *const ::std::ffi::c_char,
            max_app_id: ::std::ffi::c_int,
        ) -> ::std::ffi::c_int {
            // SAFETY: as this function's caller promises.
            unsafe { $crate::generation1::init(client, config_file, max_app_id) }
        }

        /// Version 1: adds a request.
        ///
        /// # Safety
        /// As `generation1::add_request`.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $add_request(
            file_id: *const ::std::ffi::c_char,
            kind: ::std::ffi::c_short,
            offset: ::std::ffi::c_long,
            len: ::std::ffi::c_long,
            data: i64,
            client: *const $crate::generation1::Client,
            app_id: ::std::ffi::c_int,
        ) -> ::std::ffi::c_int {
            // SAFETY: as this function's caller promises.
            unsafe { $crate::generation1::add_request(file_id, kind, offset, len, data, client, app_id) }
        }

        /// Version 1: releases a delivered request. Some programs pass two more arguments.
        ///
        /// # Safety
        /// `file_id` is NULL or a string.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $release_request(
            file_id: *const ::std::ffi::c_char,
            kind: ::std::ffi::c_short,
            len: ::std::ffi::c_long,
            offset: ::std::ffi::c_long,
        ) -> ::std::ffi::c_int {
            // SAFETY: as this function's caller promises.
            unsafe { $crate::generation1::release_request(file_id, kind, len, offset) }
        }

        /// Version 1: cancels a queued request.
        ///
        /// # Safety
        /// `file_id` is NULL or a string.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $cancel_request(
            file_id: *const ::std::ffi::c_char,
            kind: ::std::ffi::c_short,
            len: ::std::ffi::c_long,
            offset: ::std::ffi::c_long,
        ) -> ::std::ffi::c_int {
            // SAFETY: as this function's caller promises.
            unsafe { $crate::generation1::cancel_request(file_id, kind, len, offset) }
        }

        /// Version 1: without effect.
        ///
        /// # Safety
        /// `file_id` is NULL or a string.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $set_stripe_size(
            file_id: *const ::std::ffi::c_char,
            stripe_size: ::std::ffi::c_int,
        ) -> ::std::ffi::c_int {
            // SAFETY: as this function's caller promises.
            unsafe { $crate::generation1::set_stripe_size(file_id, stripe_size) }
        }

        /// Version 1: writes the statistics to a file.
        ///
        /// # Safety
        /// `filename` is NULL or a string.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $print_stats_file(filename: *const ::std::ffi::c_char) {
            // SAFETY: as this function's caller promises.
            unsafe { $crate::generation1::print_stats_file(filename) }
        }

        /// Version 1: resets the statistics.
        #[unsafe(no_mangle)]
        pub extern "C" fn $reset_stats() {
            $crate::generation1::reset_stats();
        }
    };
}

/// The functions common to versions 2 and 3, under their names.
#[macro_export]
macro_rules! export_versions_2_and_3 {
    () => {
        /// Versions 2 and 3: releases a delivered request.
        ///
        /// # Safety
        /// `file_id` is NULL or a string.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn agios_release_request(
            file_id: *const ::std::ffi::c_char,
            kind: i32,
            len: i64,
            offset: i64,
        ) -> bool {
            // SAFETY: as this function's caller promises.
            unsafe { $crate::calls::release(file_id, kind, len, offset) }
        }

        /// Versions 2 and 3: cancels a queued request.
        ///
        /// # Safety
        /// `file_id` is NULL or a string.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn agios_cancel_request(
            file_id: *const ::std::ffi::c_char,
            kind: i32,
            len: i64,
            offset: i64,
        ) -> bool {
            // SAFETY: as this function's caller promises.
            unsafe { $crate::calls::cancel(file_id, kind, len, offset) }
        }
    };
}

/// The functions of version 3 only, under these names.
#[macro_export]
macro_rules! export_version_3 {
    (init = $init:ident, add_request = $add_request:ident $(,)?) => {
        /// Version 3: starts the library; callbacks may be NULL.
        ///
        /// # Safety
        /// As `generation3::init`.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $init(
            process_request: Option<$crate::IdentifierFn>,
            process_requests: Option<$crate::IdentifiersFn>,
            config_file: *const ::std::ffi::c_char,
            max_queue_id: i32,
        ) -> bool {
            // SAFETY: as this function's caller promises.
            unsafe { $crate::generation3::init(process_request, process_requests, config_file, max_queue_id) }
        }

        /// Version 3: adds a request with its own callback. Programs older than its argument pass none, and their
        /// callbacks expect none.
        ///
        /// # Safety
        /// As `generation3::add_request`.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $add_request(
            file_id: *const ::std::ffi::c_char,
            kind: i32,
            offset: i64,
            len: i64,
            identifier: i64,
            queue_id: i32,
            callback: Option<$crate::OwnFn>,
            argument: *mut ::std::ffi::c_void,
        ) -> bool {
            // SAFETY: as this function's caller promises.
            unsafe {
                $crate::generation3::add_request(file_id, kind, offset, len, identifier, queue_id, callback, argument)
            }
        }

        /// Version 3: metrics since the start or the last call, in memory from malloc.
        #[unsafe(no_mangle)]
        pub extern "C" fn agios_get_metrics_and_reset() -> *mut $crate::MetricsC {
            $crate::generation3::get_metrics_and_reset()
        }
    };
}

/// The functions of every version, under its names.
#[macro_export]
macro_rules! export_all_versions {
    () => {
        /// All versions: stops the library.
        #[unsafe(no_mangle)]
        pub extern "C" fn agios_exit() {
            $crate::calls::exit();
        }
    };
}
