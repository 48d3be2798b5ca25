//! A quick measurement of the device under a file, when it has not been calibrated: a few direct reads of an existing file. A calibration (`impresario calibrate`) is better; this tells a disk from flash from a limited volume.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use impresario_base::Random;
use impresario_sched::{CostCurve, Nanos, OpCost};

use super::device::Device;

/// Sizes that are measured, bytes.
const SIZES: [u64; 3] = [4096, 128 << 10, 1 << 20];
/// Files below this tell too little.
const FILE_BYTES_MIN: u64 = 8 << 20;

/// Small files of a device that are read to measure it.
const SMALL_FILES_MAX: usize = 64;

/// Measures for about `time` (half a second at least: volumes with limits let short bursts pass), on a file of at least 8 MiB if
/// there is one among `paths`, else on small ones together, whose reads say nothing of sequential ones and little of long ones.
///
/// # Errors
/// There is no file with data among them, or their file system does not read past the page cache (`O_DIRECT`).
pub fn probe(paths: &[PathBuf], time: Duration) -> io::Result<Device> {
    let open = |path: &PathBuf| -> io::Result<(File, u64)> {
        let opened = OpenOptions::new().read(true).custom_flags(libc::O_DIRECT).open(path);
        let sized = opened.and_then(|file| Ok((file.metadata()?.len(), file)));
        let (size, file) = sized.map_err(|e| io::Error::new(e.kind(), format!("{}: {e}", path.display())))?;
        Ok((file, size))
    };
    let size = |path: &&PathBuf| std::fs::metadata(path).map_or(0, |meta| meta.len());
    let time = time.max(Duration::from_millis(500));
    let mut buffer = Aligned::new(SIZES[2] as usize);
    if let Some(path) = paths.iter().find(|path| size(path) >= FILE_BYTES_MIN) {
        let (random, sequential) = of_large(&open(path)?, time, &mut buffer)?;
        let device = Device::of(random, sequential, format!("measured in a moment on {}", path.display()));
        return Ok(device.with_kernel(path));
    }
    let small: Vec<&PathBuf> = paths.iter().filter(|path| size(path) > 0).take(SMALL_FILES_MAX).collect();
    let Some(first) = small.first() else {
        return Err(io::Error::new(io::ErrorKind::NotFound, "none of the files that would tell is here"));
    };
    let files = small.iter().map(|path| open(path)).collect::<io::Result<Vec<_>>>()?;
    let cost = of_small(&files, time, &mut buffer)?;
    let source = format!("measured in a moment on {} small files, {} the first", small.len(), first.display());
    Ok(Device::of(cost.clone(), cost, source).with_kernel(first))
}

fn curve(points: &[(u64, Nanos)]) -> io::Result<OpCost> {
    CostCurve::through(points).map(OpCost::from).map_err(|e| io::Error::other(e.to_string()))
}

/// What reads at random and in order cost.
fn of_large((file, size): &(File, u64), time: Duration, buffer: &mut Aligned) -> io::Result<(OpCost, OpCost)> {
    let each = time / (2 * SIZES.len() as u32);
    let mut random = Vec::new();
    let mut sequential = Vec::new();
    let mut random_place = Random::new(*size);
    for len in SIZES {
        let places = (size - len) / 4096 + 1;
        let anywhere = |_: u64| (file, random_place.below(places) * 4096);
        random.push((len, median(len, each, buffer, anywhere)?));
        let begin = size / 3 / 4096 * 4096;
        let on = |i: u64| (file, (begin + i * len) % ((size - len).max(1)) / 4096 * 4096);
        sequential.push((len, median(len, each, buffer, on)?));
    }
    Ok((curve(&random)?, curve(&sequential)?))
}

/// What reads of the beginnings of files cost, up to the middle one's length.
fn of_small(files: &[(File, u64)], time: Duration, buffer: &mut Aligned) -> io::Result<OpCost> {
    let mut sizes: Vec<u64> = files.iter().map(|(_, size)| *size).collect();
    sizes.sort_unstable();
    let long = (sizes[sizes.len() / 2] / 4096 * 4096).clamp(2 * SIZES[0], SIZES[2]);
    let mut points = Vec::new();
    for len in [SIZES[0], long] {
        let beginning = |i: u64| (&files[i as usize % files.len()].0, 0);
        points.push((len, median(len, time / 2, buffer, beginning)?));
    }
    curve(&points)
}

fn median<'a>(
    len: u64,
    time: Duration,
    buffer: &mut Aligned,
    mut place: impl FnMut(u64) -> (&'a File, u64),
) -> io::Result<Nanos> {
    let begin = Instant::now();
    let mut times = Vec::new();
    // At least three: the median of fewer is no median.
    while times.len() < 3 || begin.elapsed() < time && times.len() < 10_000 {
        let (file, offset) = place(times.len() as u64);
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
    fn real_files_are_measured() {
        let dir = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        let path = dir.path().join("f");
        std::fs::write(&path, vec![1u8; 9 << 20]).unwrap();
        let small = |i: u32| {
            let path = dir.path().join(i.to_string());
            std::fs::write(&path, vec![1u8; 3000 * i as usize]).unwrap();
            path
        };
        let small: Vec<PathBuf> = (0..20).map(small).collect();
        match probe(std::slice::from_ref(&path), Duration::from_millis(500)) {
            Ok(device) => {
                assert!(device.random.ttp(1 << 20) >= device.random.ttp(4096));
                assert!(device.source.contains("measured"));
                let device = probe(&small, Duration::from_millis(500)).unwrap();
                assert!(device.source.contains("19 small files"), "{}", device.source);
                assert!(device.random.ttp(1 << 20) >= device.random.ttp(4096));
            }
            // Not every file system reads past the page cache; the caller falls back on an assumption.
            Err(e) => assert_eq!(e.kind(), io::ErrorKind::InvalidInput, "{e}"),
        }
        assert!(probe(&small[..1], Duration::ZERO).is_err(), "it has no data");
        assert!(probe(&[], Duration::ZERO).is_err());
    }
}
