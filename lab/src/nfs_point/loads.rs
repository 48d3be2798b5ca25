//! The loads of aioli-2006 ("Evaluations"), scaled down.

use crate::server_bench::load::{Application, Load};

/// All loads; `bytes` is the size of the file that is taken apart (4 GB in the paper).
pub fn loads(bytes: u64, processes: u64) -> Vec<Load> {
    let mut loads = Vec::new();
    for request_kib in [8, 64, 128] {
        for collective in [false, true] {
            let how = if collective { "collective" } else { "POSIX" };
            let whole = Application::new("decomposition", processes, false, request_kib << 10, bytes);
            loads.push(Load {
                name: format!("decomposition, {request_kib} KiB, {how}"),
                applications: vec![Application { collective, ..whole }],
            });
        }
    }
    loads.push(Load {
        name: "cat beside a decomposition".into(),
        applications: vec![
            Application::new("decomposition", processes, false, 64 << 10, bytes),
            Application { delay_ms: 300, ..cat(bytes) },
        ],
    });
    loads.push(Load { name: "cat alone".into(), applications: vec![cat(bytes)] });
    loads.push(Load { name: "ten applications".into(), applications: ten(bytes) });
    loads
}

/// A small file read from start to end (16 MB in the paper beside 4 GB; not less than 2 MiB here).
fn cat(bytes: u64) -> Application {
    Application::new("cat", 1, false, 32 << 10, (bytes / 256).max(2 << 20))
}

/// The paper's ten, with files in the ratio of `bytes` to 4 GB.
fn ten(bytes: u64) -> Vec<Application> {
    const GB: u64 = 1 << 30;
    [
        ("read decomposition 2 GB", 32, false, 128 << 10, 2 * GB),
        ("write decomposition 2 GB", 32, true, 128 << 10, 2 * GB),
        ("read decomposition 256 MB", 16, false, 8 << 10, GB / 4),
        ("write decomposition 128 MB", 8, true, 64 << 10, GB / 8),
        ("read sequential 1 GB", 1, false, 1 << 20, GB),
        ("write sequential 512 MB", 1, true, 1 << 20, GB / 2),
        ("read sequential 32 MB", 1, false, 4 << 10, GB / 32),
        ("write sequential 32 MB", 1, true, 4 << 10, GB / 32),
        ("read sequential 4 MB", 1, false, 32 << 10, GB / 256),
        ("write sequential 4 MB", 1, true, 32 << 10, GB / 256),
    ]
    .map(|(name, processes, writes, request, size)| {
        let size = (u128::from(size) * u128::from(bytes) / u128::from(4 * GB)) as u64;
        Application::new(name, processes, writes, request, size)
    })
    .into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_covered_and_keep_their_ratio() {
        loads(64 << 20, 32).iter().for_each(crate::server_bench::load::covers);
        assert_eq!(ten(4 << 30)[2].file_bytes, 256 << 20);
    }
}
