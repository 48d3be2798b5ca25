//! `libagios.so.3`, for programs linked against the development branch of the public library: the names of version 2,
//! with an additional callback.

agios_library::export_all_versions!();
agios_library::export_versions_2_and_3!();
agios_library::export_version_3!(init = agios_init, add_request = agios_add_request);
