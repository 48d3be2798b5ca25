//! Arbitrary text as every file that users write: the configuration, a calibration, guided I/O's hints, options of the C
//! libraries. No panic, and a mistake has a place within the text.
#![no_main]

use std::path::Path;

use impresario_assist::config::Hints;
use impresario_config::{Calibration, Config};
use impresario_embed::{Options, parse_policy};

libfuzzer_sys::fuzz_target!(|text: &str| {
    let file = Path::new("/none/impresario.toml");
    match Config::parse(text, file) {
        Ok(config) => drop(config.check()),
        Err(errors) => {
            let lines = text.split('\n').count();
            for complaint in &errors.complaints {
                assert!(complaint.at.is_none_or(|(line, _)| (1..=lines).contains(&line)), "{errors}");
            }
        }
    }
    let _ = Calibration::parse(text, file);
    let _ = Hints::parse(text, file);
    let _ = Options::default().read(text);
    let _ = parse_policy(text);
});
