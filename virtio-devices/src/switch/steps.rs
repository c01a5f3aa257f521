//! Runs a switch step by step on the caller's thread, without waiting. For tests and fuzz targets of other crates.

use std::sync::Arc;

use vm_memory::GuestMemoryMmap;

use super::mode::SwitchMode;
use super::spec::SwitchSpec;
use super::worker::SwitchWorker;
use super::{Switch, SwitchError};
use crate::{Interrupts, Memory, Net, NetError, NetSpec, SharedQueue, Start, VirtioDevice, Worker};

/// A closed switch whose drivers run. No frame waits for its receiver, so that the same queues always have the same
/// effect.
pub struct SwitchSteps {
    worker: SwitchWorker,
    ports: Vec<(Net, Vec<Worker>, Arc<Interrupts>)>,
    switch: Switch,
}

/// Why there cannot be one.
#[derive(Debug)]
pub enum StepsError {
    /// See [`SwitchError`].
    Switch(SwitchError),
    /// See [`NetError`].
    Net(NetError),
    /// The host has no descriptors.
    Start(std::io::Error),
}

impl SwitchSteps {
    /// A port for each of `ports`: a NIC with one pair of queues, and those of its queues that its driver has enabled.
    /// All drivers have negotiated `features`.
    ///
    /// # Errors
    ///
    /// [`StepsError`].
    pub fn new(
        memory: &GuestMemoryMmap,
        features: u64,
        ports: Vec<(NetSpec, Vec<(u16, SharedQueue)>)>,
    ) -> Result<Self, StepsError> {
        let count = u16::try_from(ports.len()).unwrap_or(u16::MAX);
        let spec = SwitchSpec { id: "pf".into(), mode: SwitchMode::Veb, ports: count, workers: 1, uplink: None };
        let (switch, worker) = Switch::stepped(spec).map_err(StepsError::Switch)?;
        let mut opened = Vec::new();
        for ((spec, queues), port) in ports.into_iter().zip(0..).filter_map(|(p, n)| Some((p, switch.port(n)?))) {
            let mut net = Net::new(spec, port).map_err(StepsError::Net)?;
            let interrupts = Arc::new(Interrupts::new(3, 0));
            let start =
                Start { memory: Memory::new(memory.clone()), features, queues, interrupts: Arc::clone(&interrupts) };
            let workers = net.start(start).map_err(StepsError::Start)?;
            opened.push((net, workers, interrupts));
        }
        Ok(Self { worker: worker.impatient(), ports: opened, switch })
    }

    /// Rings all doorbells, and does what a worker does in one turn of its loop. Where frames go is up to date.
    pub fn step(&mut self) {
        drop(self.switch.0.hub().follow_now());
        self.ports.iter().flat_map(|(_, workers, _)| workers).for_each(Worker::wake);
        self.worker.step(Some(std::time::Duration::ZERO));
    }

    /// The NIC at a port.
    pub fn net(&mut self, port: usize) -> Option<&mut Net> {
        self.ports.get_mut(port).map(|(net, ..)| net)
    }

    /// Whether a port has asked its driver for a reset, because a ring is invalid.
    pub fn needs_reset(&self, port: usize) -> bool {
        self.ports.get(port).is_some_and(|(.., interrupts)| interrupts.needs_reset())
    }
}

impl Drop for SwitchSteps {
    fn drop(&mut self) {
        for worker in self.ports.iter_mut().flat_map(|(_, workers, _)| workers.drain(..)) {
            // Its end has no thread that could panic.
            let _ = worker.stop().join();
        }
    }
}
