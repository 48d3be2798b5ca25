//! What it is worth to fill a program's page table for it, by a thread of the program (`MADV_POPULATE_READ`; no other process
//! can). What `impresario-lab guided --maps` runs: one program that adds up a mapped file, from memory, and guided from the
//! latency-bound mount. Beside the time stands the processor time of all its threads, which other work on the machine changes
//! little.

use std::fs;
use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Instant;

use anyhow::{Context, Result, bail};
use impresario_base::Random;
use impresario_workload::kernel_disk::tool;
use impresario_workload::programs::TestBed;
use impresario_workload::rounds::shuffled;
use impresario_workload::stats::{Interval, gains, median};
use impresario_workload::stop::Stop;
use serde::Serialize;

use super::slow_mount::{SlowMount, Slowness};

/// The size of the file, bytes.
const FILE_BYTES: u64 = 256 << 20;
/// How pages come into the table; the first is what there is without us.
const WAYS: [&str; 4] = ["plain", "present", "fetch", "first"];

/// One run.
#[derive(Clone, Copy, PartialEq, Debug, Serialize)]
pub struct Taken {
    /// From start to end, s.
    pub wall_s: f64,
    /// Processor time of the program, and of the manager where it is guided, s.
    pub cpu_s: f64,
}

/// On one device.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct Row {
    /// `memory` or `mount`.
    pub bed: String,
    /// Of each of [`WAYS`], its runs in the order of the pairs.
    pub runs: [Vec<Taken>; 4],
}

/// Processor time of all programs that have ended and were waited for, s.
fn ended_cpu_s() -> f64 {
    // SAFETY: numbers, for which zeros are values.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    // SAFETY: the kernel writes a structure of this type.
    unsafe { libc::getrusage(libc::RUSAGE_CHILDREN, &mut usage) };
    let seconds = |time: libc::timeval| time.tv_sec as f64 + time.tv_usec as f64 / 1e6;
    seconds(usage.ru_utime) + seconds(usage.ru_stime)
}

fn timed(command: &mut Command) -> Result<(Taken, Vec<u8>)> {
    let (began, cpu_s) = (Instant::now(), ended_cpu_s());
    let ran = command.stderr(Stdio::inherit()).output()?;
    let taken = Taken { wall_s: began.elapsed().as_secs_f64(), cpu_s: ended_cpu_s() - cpu_s };
    if !ran.status.success() {
        bail!("{command:?}: {}", ran.status);
    }
    Ok((taken, ran.stdout))
}

/// Runs the program on both.
///
/// # Errors
/// Where it cannot be compiled or fails, or the mount needs rights that are not there.
pub fn run(folder: &Path, pairs: u32, slowness: Slowness, stop: &Stop, say: &mut dyn FnMut(&str)) -> Result<Vec<Row>> {
    let scratch = tempfile::Builder::new().prefix("maps-").tempdir_in(folder)?;
    let data = scratch.path().join("data");
    fs::create_dir(&data)?;
    let (source, program, file) = (scratch.path().join("maps.c"), scratch.path().join("maps"), data.join("file"));
    fs::write(&source, include_str!("programs/maps.c"))?;
    tool(Command::new("cc").args(["-O2", "-pthread", "-o"]).arg(&program).arg(&source))?;
    let (mut random, mut out) = (Random::new(7), std::io::BufWriter::new(fs::File::create(&file)?));
    for _ in 0..FILE_BYTES / 8 {
        out.write_all(&random.next_u64().to_le_bytes())?;
    }
    out.into_inner().context("writing the file")?.sync_all()?;
    let mount = SlowMount::new(&data, folder, slowness)?;
    let mut rows = Vec::new();
    for bed in ["memory", "mount"] {
        say(&format!("memory maps, {bed}"));
        let (mut runs, mut sums) = (<[Vec<Taken>; 4]>::default(), Vec::new());
        for _ in 0..pairs {
            for way in shuffled(WAYS.len(), &mut random) {
                stop.check()?;
                let mut command = if bed == "memory" {
                    std::io::copy(&mut fs::File::open(&file)?, &mut std::io::sink())?;
                    Command::new(&program)
                } else {
                    mount.cool()?;
                    let mut command = Command::new(crate::impresario()?);
                    command.args(["assist", "run", "--quiet", "--"]).arg(&program);
                    command
                };
                let place = if bed == "memory" { file.clone() } else { mount.path().join("file") };
                let (taken, sum) = timed(command.arg(WAYS[way]).arg(place))?;
                runs[way].push(taken);
                sums.push(sum);
            }
        }
        if sums.windows(2).any(|pair| pair[0] != pair[1]) {
            bail!("the sums of the file differ");
        }
        rows.push(Row { bed: bed.into(), runs });
    }
    Ok(rows)
}

/// Medians, and what each way saves beside faults.
pub fn table(rows: &[Row]) -> String {
    let mut out = format!("a map of {} MiB, added up\n", FILE_BYTES >> 20);
    for Row { bed, runs } in rows {
        for (way, taken) in WAYS.iter().zip(runs) {
            let mut line = format!("{bed:<7} {way:<8}");
            for (what, of) in [("", (|t| t.wall_s) as fn(&Taken) -> f64), (" of processors", |t| t.cpu_s)] {
                let [base, own] = [&runs[0], taken].map(|runs| runs.iter().map(of).collect::<Vec<f64>>());
                let saved = Interval::of(&gains(&own, &base));
                let (mean, low, high) = (saved.mean * 100.0, saved.low * 100.0, saved.high * 100.0);
                line += &format!(" {:>7.1} ms{what}, saved {mean:+.1} % [{low:.1}, {high:.1}]", median(&own) * 1000.0);
            }
            out += &(line + "\n");
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_way_stands_beside_faults() {
        let taken = |wall_s| vec![Taken { wall_s, cpu_s: 2.0 * wall_s }; 2];
        let row = Row { bed: "memory".into(), runs: [1.0, 0.9, 1.0, 1.0].map(taken) };
        let text = table(&[row]);
        let wanted = "memory  present    900.0 ms, saved +10.0 % [10.0, 10.0]  1800.0 ms of processors, saved +10.0 %";
        assert!(text.contains(wanted), "{text}");
    }

    #[test]
    fn programs_that_have_ended_have_taken_time() {
        let before = ended_cpu_s();
        let (taken, said) =
            timed(Command::new("sh").args(["-c", "for i in $(seq 20000); do :; done; echo x"])).unwrap();
        assert!(taken.cpu_s > 0.0 && taken.wall_s > 0.0 && ended_cpu_s() > before);
        assert_eq!(said, b"x\n");
        assert!(timed(&mut Command::new("false")).is_err());
    }
}
