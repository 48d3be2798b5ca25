//! Faults, scheduled and random.

use impresario_sched::Op;

use crate::model::{FaultKind, Scenario};
use crate::simulation::{Event, Simulation};

/// A planned or current fault.
#[derive(Clone, Copy)]
pub(crate) struct ActiveFault {
    what: FaultKind,
    which: u32,
    for_ns: u64,
    factor: f64,
}

/// Maximum lines of the fault log.
const LOG_MAX: usize = 1000;

impl Simulation {
    pub(crate) fn plan_faults(&mut self) {
        for f in self.scenario.fault.clone() {
            let fault = ActiveFault { what: f.what, which: f.which, for_ns: (f.for_s * 1e9) as u64, factor: f.factor };
            self.faults.push(fault);
            self.at((f.at_s * 1e9) as u64, Event::FaultBegins(self.faults.len() as u32 - 1));
        }
        self.plan_random_fault();
    }

    fn plan_random_fault(&mut self) {
        let Some(random) = &self.scenario.random_faults else { return };
        if self.random_faults_left == 0 {
            return;
        }
        self.random_faults_left -= 1;
        let after = (self.fault_random.exponential(random.mean_interval_s) * 1e9) as u64;
        self.at(self.now.saturating_add(after), Event::RandomFault);
    }

    pub(crate) fn random_fault(&mut self) {
        if self.running == 0 {
            return; // no application is running
        }
        let Scenario { random_faults: Some(random), .. } = &self.scenario else { return };
        let for_ns = (self.fault_random.exponential(random.mean_duration_s) * 1e9) as u64;
        let kinds: &[FaultKind] = if self.io.is_empty() {
            &[FaultKind::SlowDisk, FaultKind::RestartedServer, FaultKind::PartitionedServer]
        } else {
            &[
                FaultKind::SlowDisk,
                FaultKind::RestartedServer,
                FaultKind::PartitionedServer,
                FaultKind::LostIoNode,
                FaultKind::PartitionedIoNode,
            ]
        };
        let what = kinds[self.fault_random.below(kinds.len() as u64) as usize];
        let there = match what {
            FaultKind::LostIoNode | FaultKind::PartitionedIoNode => self.io.len(),
            _ => self.servers.len(),
        };
        let which = self.fault_random.below(there as u64) as u32;
        self.faults.push(ActiveFault { what, which, for_ns, factor: 10.0 });
        self.fault_begins(self.faults.len() as u32 - 1);
        self.plan_random_fault();
    }

    pub(crate) fn fault_begins(&mut self, number: u32) {
        let ActiveFault { what, which, for_ns, factor } = self.faults[number as usize];
        if self.running == 0 {
            return;
        }
        self.at(self.now.saturating_add(for_ns), Event::FaultEnds(number));
        let name = match what {
            FaultKind::SlowDisk => {
                self.servers[which as usize].slow_down(factor);
                format!("the device of data server {which} is {factor} times as slow")
            }
            FaultKind::LostIoNode => {
                self.cut[which as usize] += 1;
                self.lose_io_node(which as u16);
                format!("I/O node {which} is lost")
            }
            FaultKind::RestartedServer => {
                self.cut[self.io.len() + which as usize] += 1;
                self.restart_server(which as u16);
                format!("data server {which} is gone")
            }
            FaultKind::PartitionedServer => {
                self.cut[self.io.len() + which as usize] += 1;
                format!("data server {which} is cut off")
            }
            FaultKind::PartitionedIoNode => {
                self.cut[which as usize] += 1;
                format!("I/O node {which} is cut off")
            }
            FaultKind::TruncatedFile => {
                self.at_all_servers(which, Op::Truncate, self.files[which as usize].len / 2);
                format!("file {which} is cut off at the half")
            }
            FaultKind::ReplacedFile => {
                self.at_all_servers(which, Op::Unlink, 0);
                format!("file {which} is removed")
            }
        };
        self.log(format!("{name} for {:.6} s", for_ns as f64 / 1e9));
    }

    pub(crate) fn fault_ends(&mut self, number: u32) {
        let ActiveFault { what, which, .. } = self.faults[number as usize];
        match what {
            FaultKind::SlowDisk => {
                self.servers[which as usize].slow_down(1.0);
                self.log(format!("the device of data server {which} is itself again"));
            }
            FaultKind::LostIoNode | FaultKind::PartitionedIoNode => {
                self.cut[which as usize] -= 1;
                self.log(format!("I/O node {which} is back"));
            }
            FaultKind::RestartedServer | FaultKind::PartitionedServer => {
                self.cut[self.io.len() + which as usize] -= 1;
                self.log(format!("data server {which} is back"));
            }
            FaultKind::TruncatedFile | FaultKind::ReplacedFile => {
                self.at_all_servers(which, Op::Truncate, self.files[which as usize].len);
                self.log(format!("file {which} is whole again"));
            }
        }
    }

    /// Applies a barrier from an offset on at every data server of a file. Partitioned servers do not get it.
    fn at_all_servers(&mut self, file: u32, op: Op, offset: u64) {
        let layout = self.files[file as usize].layout;
        for server in 0..self.servers.len() as u16 {
            if let Some(k) = layout.position_of(server).filter(|_| self.cut[self.io.len() + usize::from(server)] == 0) {
                self.barrier(server, file, op, layout.lane_len(k, offset));
            }
        }
    }

    fn log(&mut self, what: String) {
        if self.fault_log.len() < LOG_MAX {
            self.fault_log.push(format!("{:.6} s: {what}", self.now as f64 / 1e9));
        }
    }
}
