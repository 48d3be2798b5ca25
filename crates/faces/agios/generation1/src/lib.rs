//! `libagios.so.1`, for programs linked against version 1 of the public library. Its functions have the same names as
//! in later versions but other arguments.

agios_library::export_all_versions!();
agios_library::export_version_1!(
    init = agios_init,
    add_request = agios_add_request,
    release_request = agios_release_request,
    cancel_request = agios_cancel_request,
    set_stripe_size = agios_set_stripe_size,
    print_stats_file = agios_print_stats_file,
    reset_stats = agios_reset_stats,
);
agios_library::export! {
    /// Waits until recorded runs are loaded.
    agios_wait_predict_init() = agios_library::calls::wait_predict_init;
}
