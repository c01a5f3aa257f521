//! Reasons why the queues of a function do not run although its driver is ready.

use super::VirtioFunction;
use super::run::Run;
use crate::queue::ring::RingFault;
use crate::{StoppedBy, VirtioDevice};

impl<D: VirtioDevice> VirtioFunction<D> {
    /// The register that keeps the queues of a ready driver stopped, if one does; see [`Function`](pci::Function) for
    /// `powered`.
    pub(crate) fn stopped_by(&self, powered: bool) -> Option<StoppedBy> {
        if !self.transport.ready() {
            None
        } else if !powered {
            Some(StoppedBy::PfD3hot)
        } else if !self.config.is_d0() {
            Some(StoppedBy::D3hot)
        } else {
            (!self.config.bus_master()).then_some(StoppedBy::BusMaster)
        }
    }

    /// Logs that the queues run, with the number of their workers.
    pub(super) fn log_run(&self) {
        if let (Some(log), Some(run)) = (&self.log, &self.run) {
            let workers = run.num_workers();
            let noun = if workers == 1 { "worker" } else { "workers" };
            log.log(|| format!("queues run: {workers} {noun}"));
        }
    }

    /// Logs that the queues stopped, if they ran before.
    pub(super) fn log_stop(&self, did_run: bool, reason: impl FnOnce(&Self) -> String) {
        if let Some(log) = self.log.as_ref().filter(|_| did_run) {
            log.log(|| format!("queues stopped: {}", reason(self)));
        }
    }

    /// The reason why queues that ran are not to run now.
    pub(super) fn stop_reason(&self, powered: bool) -> String {
        match self.stopped_by(powered) {
            _ if self.paused => "the host pauses the function".to_string(),
            Some(register) => register.to_string(),
            None => "the driver or the device gave up; a reset starts them again".to_string(),
        }
    }

    /// The queues whose rings are invalid now, with the fault of each, in words. Leaves out those that a worker runs,
    /// and all behind an IOMMU, whose lookups have effects.
    pub(crate) fn broken_rings(&self) -> Vec<String> {
        if self.memory.has_iommu() {
            return Vec::new();
        }
        let memory = self.memory.pass();
        let queues = self.run.as_ref().map(Run::queues).unwrap_or_default();
        let faults = queues.iter().filter_map(|(index, queue)| {
            // The worker of a valid ring may hold its lock.
            let fault = RingFault::of(&*queue.try_lock()?, &memory)?;
            Some(format!("queue {index} stopped: {fault}"))
        });
        faults.collect()
    }
}
