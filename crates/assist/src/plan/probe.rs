//! A quick measurement of the device under a file, when it has not been calibrated: a few direct reads of an existing file. A calibration (`impresario calibrate`) is better; this tells a disk from flash from a limited volume.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::time::{Duration, Instant};

use impresario_base::Random;
use impresario_sched::{CostCurve, Nanos, OpCost};

use super::device::Device;

/// Sizes that are measured, bytes.
const SIZES: [u64; 3] = [4096, 128 << 10, 1 << 20];
/// Files below this tell too little.
const FILE_BYTES_MIN: u64 = 8 << 20;

/// Measures for about `time` (half a second at least: volumes with limits let short bursts pass). Needs a file of at least
/// 8 MiB on a file system that reads past the page cache (`O_DIRECT`).
pub fn probe(path: &Path, time: Duration) -> io::Result<Device> {
    let file = OpenOptions::new().read(true).custom_flags(libc::O_DIRECT).open(path)?;
    let size = file.metadata()?.len();
    if size < FILE_BYTES_MIN {
        let text = format!("{} has {size} bytes; at least {FILE_BYTES_MIN} are needed to measure", path.display());
        return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
    }
    let mut buffer = Aligned::new(SIZES[2] as usize);
    let each = time.max(Duration::from_millis(500)) / (2 * SIZES.len() as u32);
    let mut random = Vec::new();
    let mut sequential = Vec::new();
    let mut random_place = Random::new(size);
    for len in SIZES {
        let places = (size - len) / 4096 + 1;
        let anywhere = |_: u64| random_place.below(places) * 4096;
        random.push((len, median(&file, len, each, &mut buffer, anywhere)?));
        let begin = size / 3 / 4096 * 4096;
        let on = |i: u64| (begin + i * len) % ((size - len).max(1)) / 4096 * 4096;
        sequential.push((len, median(&file, len, each, &mut buffer, on)?));
    }
    let curve = |points: &[(u64, Nanos)]| -> io::Result<OpCost> {
        CostCurve::through(points).map(OpCost::from).map_err(|e| io::Error::other(e.to_string()))
    };
    let (random, sequential) = (curve(&random)?, curve(&sequential)?);
    let device = Device::of(random, sequential, format!("measured in a moment on {}", path.display()));
    Ok(device.with_kernel(path))
}

fn median(
    file: &File,
    len: u64,
    time: Duration,
    buffer: &mut Aligned,
    mut place: impl FnMut(u64) -> u64,
) -> io::Result<Nanos> {
    let begin = Instant::now();
    let mut times = Vec::new();
    // At least three: the median of fewer is no median.
    while times.len() < 3 || begin.elapsed() < time && times.len() < 10_000 {
        let offset = place(times.len() as u64);
        let at = Instant::now();
        let got = file.read_at(buffer.take(len as usize), offset)?;
        if got == 0 {
            return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the file became shorter"));
        }
        times.push(at.elapsed().as_nanos() as u64);
    }
    // What a limit lets pass in a burst is not what a program gets: the mean tells more than the median then.
    let mean = times.iter().sum::<u64>() / times.len() as u64;
    times.sort_unstable();
    Ok(Nanos(times[times.len() / 2].max(mean / 2).max(1)))
}

/// Memory as direct reads want it.
struct Aligned {
    memory: Vec<u8>,
    from: usize,
}

impl Aligned {
    fn new(len: usize) -> Aligned {
        let memory = vec![0; len + 4096];
        let from = memory.as_ptr().align_offset(4096).min(4096);
        Aligned { memory, from }
    }

    fn take(&mut self, len: usize) -> &mut [u8] {
        &mut self.memory[self.from..self.from + len]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_real_file_is_measured() {
        let dir = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        let path = dir.path().join("f");
        std::fs::write(&path, vec![1u8; 9 << 20]).unwrap();
        match probe(&path, Duration::from_millis(500)) {
            Ok(device) => {
                assert!(device.random.ttp(1 << 20) >= device.random.ttp(4096));
                assert!(device.source.contains("measured"));
            }
            // Not every file system reads past the page cache; the caller falls back on an assumption.
            Err(e) => assert_eq!(e.kind(), io::ErrorKind::InvalidInput, "{e}"),
        }
        std::fs::write(&path, b"short").unwrap();
        assert!(probe(&path, Duration::ZERO).is_err());
    }
}
