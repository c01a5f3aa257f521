//! Runs a switch step by step on the caller's thread, without waiting. For tests and fuzz targets of other crates.

use std::num::NonZeroU32;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use rustix::net::{AddressFamily, SocketFlags, SocketType};

use super::mode::SwitchMode;
use super::spec::SwitchSpec;
use super::worker::SwitchWorker;
use super::{Switch, SwitchError};
use crate::backend::Tap;
use crate::os::clock::testing::StoppedClock;
use crate::{GuestMap, Interrupts, Net, NetError, NetSpec, SharedQueue, Start, VirtioDevice, Worker};

/// The time of a turn of the worker.
const TURN: Duration = Duration::from_micros(100);

/// A switch whose drivers run. No frame waits for its receiver, and the clock of the caller's thread advances only with
/// the turns, so that the same queues always have the same effect.
pub struct SwitchSteps {
    clock: StoppedClock,
    worker: SwitchWorker,
    /// The other end of the uplink.
    beyond: Option<OwnedFd>,
    ports: Vec<(Net, Vec<Worker>, Arc<Interrupts>)>,
    switch: Switch,
}

/// The reason why it cannot be created.
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
    /// Creates a port for each of `ports`: a NIC with one pair of queues, and the queues that its driver has enabled.
    /// All drivers have negotiated `features`. With `uplink_rate`, in Mbit/s, there is an uplink with that rate.
    ///
    /// # Errors
    ///
    /// [`StepsError`].
    pub fn new(
        memory: &GuestMap,
        features: u64,
        uplink_rate: Option<NonZeroU32>,
        ports: Vec<(NetSpec, Vec<(u16, SharedQueue)>)>,
    ) -> Result<Self, StepsError> {
        let count = u16::try_from(ports.len()).unwrap_or(u16::MAX);
        let (id, mode) = ("pf".into(), SwitchMode::Veb);
        let clock = StoppedClock::new();
        let (near, beyond) = uplink_rate.map(|_| sockets()).transpose().map_err(StepsError::Start)?.unzip();
        let uplink = near.map(|near| Tap::over_sockets(vec![near]));
        let spec = SwitchSpec { id, mode, ports: count, workers: 1, uplink, uplink_rate };
        let (switch, mut worker) = Switch::stepped(spec).map_err(StepsError::Switch)?;
        let mut opened = Vec::new();
        for ((spec, queues), port) in ports.into_iter().zip(0..).filter_map(|(p, n)| Some((p, switch.port(n)?))) {
            let mut net = Net::new(spec, port).map_err(StepsError::Net)?;
            let interrupts = Arc::new(Interrupts::new(3, 0));
            let start = Start {
                memory: memory.clone().into(),
                features,
                queues,
                interrupts: Arc::clone(&interrupts),
                log: None,
            };
            let workers = net.start(start).map_err(StepsError::Start)?;
            opened.push((net, workers, interrupts));
        }
        worker.begin();
        Ok(Self { clock, worker: worker.impatient(), beyond, ports: opened, switch })
    }

    /// Rings all doorbells, and does the work of one turn of a worker. The forwarding table is up to date.
    pub fn step(&mut self) {
        drop(self.switch.0.core().follow_now());
        self.ports.iter().flat_map(|(_, workers, _)| workers).for_each(Worker::wake);
        self.worker.step(Some(Duration::ZERO));
        self.clock.advance(TURN);
    }

    /// Reads the next frame from the uplink, with its header, if it fits into `room`. Returns its length.
    pub fn leaves(&mut self, room: &mut [u8]) -> Option<usize> {
        rustix::io::read(self.beyond.as_ref()?, room).ok().filter(|len| *len > 0)
    }

    /// The NIC at a port.
    pub fn net(&mut self, port: usize) -> Option<&mut Net> {
        self.ports.get_mut(port).map(|(net, ..)| net)
    }

    /// True if a port has asked its driver for a reset, because a ring is invalid.
    pub fn needs_reset(&self, port: usize) -> bool {
        self.ports.get(port).is_some_and(|(.., interrupts)| interrupts.needs_reset())
    }
}

/// Both ends of an uplink.
fn sockets() -> std::io::Result<(OwnedFd, OwnedFd)> {
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    Ok(rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?)
}

impl Drop for SwitchSteps {
    fn drop(&mut self) {
        for worker in self.ports.iter_mut().flat_map(|(_, workers, _)| workers.drain(..)) {
            // Its end has no thread that could panic.
            let _ = worker.stop().join();
        }
    }
}
