//! How weights divide a disk between two equal applications: over time, before and after the weight of one is doubled.

use std::path::Path;

use anyhow::{Context, Result};
use impresario_workload::report::Page;
use impresario_workload::simulated::plots::{byte_axis, curve, time_line};
use impresario_workload::stop::Stop;

use super::Disk;
use super::server::Server;
use crate::server_bench::load::{Application, Load};
use crate::server_bench::{Bed, Clients, tenths};

const USERS: [u32; 2] = [1001, 1002];
const PROCESSES: u64 = 8;
const REQUEST_BYTES: u64 = 64 << 10;
const FILE_BYTES: u64 = 64 << 20;
/// Tenths at the start of each part in which the disk's queue forms.
const SETTLING: usize = 10;

/// Bytes of both applications in each tenth of a second, in both parts.
pub struct Shown {
    parts: [(u32, Vec<Vec<u64>>); 2],
}

/// Runs them for `seconds` with equal weights, and as long with the first one's doubled.
pub fn run(bed: &Disk, clients: &Clients, folder: &Path, seconds: u32, stop: &Stop) -> Result<Shown> {
    let application =
        |user: u32| Application { user, ..Application::new("reader", PROCESSES, false, REQUEST_BYTES, FILE_BYTES) };
    let mut load = Load { name: "weights".into(), applications: USERS.map(application).into() };
    bed.prepare(&mut load)?;
    let part = |weight: u32| -> Result<(u32, Vec<Vec<u64>>)> {
        // Turns of bytes in proportion to the weights, one request at the disk at a time.
        let quantum = |weight: u32| u64::from(weight) * REQUEST_BYTES;
        let rules = format!(
            "first: user={} {{quantum_bytes={}}}; second: user={} {{quantum_bytes={}}}",
            USERS[0],
            quantum(weight),
            USERS[1],
            quantum(1)
        );
        let policy = format!("wfq by=user rules=\"{rules}\"");
        let options = ["--policy", &policy, "--in-flight", "1", "--read-ahead", "0"].map(String::from);
        let name = format!("weight {weight}");
        let server = Server::start(&name, Some(options.into()), &bed.export(), folder, stop)?;
        bed.reset()?;
        let said = clients.run(&server.url, &load.lines(0), f64::from(seconds), stop).context(name)?;
        Ok((weight, tenths(&said, USERS.len())?))
    };
    Ok(Shown { parts: [part(1)?, part(2)?] })
}

impl Shown {
    /// Bytes of both in a part, after the queue has formed.
    fn sums(&self, part: usize) -> [u64; 2] {
        let of = |application: usize| self.parts[part].1[application].iter().skip(SETTLING).sum();
        [of(0), of(1)]
    }

    /// The share of the first application in both parts.
    pub fn text(&self) -> String {
        let mut out = String::from("two equal applications on a bare MODELLED disk, weights by wfq\n");
        for (part, (weight, _)) in self.parts.iter().enumerate() {
            let [first, second] = self.sums(part);
            out += &format!(
                "weights {weight} : 1   bytes {:.3} : 1   share of the first {:.1} %\n",
                first as f64 / second.max(1) as f64,
                100.0 * first as f64 / (first + second).max(1) as f64
            );
        }
        out
    }

    /// One row a tenth: the time, the weight of the first, bytes per second of both.
    pub fn csv(&self) -> String {
        let mut out = String::from("time_s,weight_of_first,first_bytes_per_s,second_bytes_per_s\n");
        let mut tenth = 0;
        for (weight, series) in &self.parts {
            for (first, second) in series[0].iter().zip(&series[1]) {
                tenth += 1;
                out += &format!("{:.1},{weight},{},{}\n", f64::from(tenth) / 10.0, first * 10, second * 10);
            }
        }
        out
    }

    pub fn html(&self) -> String {
        // A point a half second: requests of 64 KiB are coarse.
        const TOGETHER: usize = 5;
        let series = |application: usize| -> Vec<f64> {
            let all = self.parts.iter().flat_map(|(_, series)| series[application].iter().copied());
            let all: Vec<u64> = all.collect();
            all.chunks(TOGETHER).map(|c| c.iter().sum::<u64>() as f64 * 10.0 / c.len() as f64).collect()
        };
        let both = [series(0), series(1)];
        let interval_s = TOGETHER as f64 / 10.0;
        let (x_end, x_marks) = time_line(both[0].len() as f64 * interval_s);
        let top = both.iter().flatten().copied().fold(0.0, f64::max);
        let (y_end, y_marks) = byte_axis(top, "/s");
        let names = ["first application", "second application"];
        let curves: Vec<_> = names
            .iter()
            .zip(&both)
            .map(|(name, series)| curve(name.to_string(), series, interval_s, (x_end, y_end)))
            .collect();
        let mut page = Page::new("Weights over time");
        page.text(
            "Two equal applications of 8 processes read 64 KiB at a time from one bare modelled disk through an NFS server. Half-way \
             the weight of the first is doubled (the server starts again with it).",
        );
        page.note(self.text().trim_end()).lines("Bytes per second of both applications", &curves, &x_marks, &y_marks);
        page.html()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_are_told_and_drawn_over_time() {
        let part = |weight, first: u64| (weight, vec![vec![first; 30], vec![100; 30]]);
        let shown = Shown { parts: [part(1, 100), part(2, 200)] };
        assert!(
            shown.text().contains("weights 1 : 1   bytes 1.000 : 1   share of the first 50.0 %"),
            "{}",
            shown.text()
        );
        assert!(shown.text().contains("weights 2 : 1   bytes 2.000 : 1"));
        let csv = shown.csv();
        assert_eq!((csv.lines().count(), csv.lines().nth(1)), (61, Some("0.1,1,1000,1000")));
        assert_eq!(csv.lines().last(), Some("6.0,2,2000,1000"));
        let html = shown.html();
        assert!(html.contains("<svg") && html.contains("second application") && html.contains("2.000 : 1"));
    }
}
