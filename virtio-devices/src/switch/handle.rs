//! A switch's end of a NIC, and the threads that carry its frames.

use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use parking_lot::Mutex;

use super::hub::Hub;
use super::port::OpenPort;
use super::table::PortIndex;
use super::uplink_rx::UplinkRx;
use super::worker::SwitchWorker;
use crate::device::worker::{WorkerKind, spawn, thread_name};
use crate::frames::net_protocol::Offloads;
use crate::frames::policy::Replaced;
use crate::net::{CarriedNic, Carrier, Shared};
use crate::os::thread::Thread;
use crate::state::{BucketState, HeldAddress, StateError};
use crate::{SharedQueue, Worker};

/// A switch and its threads, which end when this is dropped.
pub(crate) struct Threads {
    hub: Arc<Hub>,
    running: Mutex<Vec<Thread>>,
    /// True if there are threads: a test may do their work.
    threaded: bool,
}

impl Threads {
    /// A switch without threads yet: they start with the first port that is opened.
    pub(crate) fn new(hub: Hub) -> Self {
        Self { hub: Arc::new(hub), running: Mutex::default(), threaded: true }
    }

    /// A switch whose caller does the threads' work, step by step.
    #[cfg(any(test, feature = "testing"))]
    pub(crate) fn stepped(hub: Hub) -> Self {
        Self { hub: Arc::new(hub), running: Mutex::default(), threaded: false }
    }

    /// The switch.
    pub(crate) fn hub(&self) -> &Arc<Hub> {
        &self.hub
    }

    /// Starts the threads that do not run yet.
    fn start(&self) -> io::Result<()> {
        if !self.threaded {
            return Ok(());
        }
        let mut running = self.running.lock();
        for index in running.len()..self.hub.lanes().len() {
            let (hub, uplink) = (Arc::clone(&self.hub), self.uplink_of(index)?);
            let name = thread_name(self.hub.id(), "sw", index as u16);
            running.push(spawn(WorkerKind::Switch, name, move || SwitchWorker::new(hub, index, uplink).run())?);
        }
        Ok(())
    }

    /// The reader of the uplink, for the first worker.
    fn uplink_of(&self, worker: usize) -> io::Result<Option<UplinkRx>> {
        let reads = worker == 0 && self.hub.uplink().is_some();
        reads.then(|| UplinkRx::new(self.hub.uplink_index())).transpose()
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        self.hub.end.store(true, Ordering::Release);
        self.hub.lanes().iter().for_each(super::lane::Lane::wake);
        for thread in self.running.get_mut().drain(..) {
            if thread.join().is_err() {
                log::error!("{}: a worker of its switch panicked; please report this", self.hub.id());
            }
        }
    }
}

/// A port of a switch, for its NIC.
pub(crate) struct SwitchPort {
    threads: Arc<Threads>,
    index: PortIndex,
}

impl SwitchPort {
    /// The port with this number.
    pub(crate) fn new(threads: Arc<Threads>, index: PortIndex) -> Self {
        Self { threads, index }
    }
}

impl Carrier for SwitchPort {
    fn name(&self) -> &str {
        self.threads.hub.id()
    }

    fn offloads(&self) -> Offloads {
        self.threads.hub.offloads()
    }

    fn mtu(&self) -> Option<u16> {
        self.threads.hub.uplink().and_then(super::uplink::Uplink::mtu)
    }

    fn attach(&self, nic: CarriedNic) {
        self.threads.hub.attach(self.index, Some(nic));
    }

    fn detach(&self) {
        self.threads.hub.attach(self.index, None);
    }

    fn open(&self, shared: &Arc<Shared>, queues: &[(u16, SharedQueue)]) -> io::Result<Worker> {
        let hub = Arc::clone(&self.threads.hub);
        let port = Arc::new(OpenPort::new(self.index, shared, queues, hub.account(self.index))?);
        self.threads.start()?;
        hub.open(&port);
        let (kick, stop) = (Arc::clone(&port.kick), Arc::clone(&port.stop));
        let name = thread_name(hub.id(), "port", self.index);
        let end = Thread::of_end(name, move || hub.close(&port));
        Ok(Worker::new(queues.iter().map(|(index, _)| *index), kick, stop, end))
    }

    fn changed(&self) -> Replaced {
        self.threads.hub.changed(self.index)
    }

    fn hold_frames(&self, held: bool) {
        self.threads.hub.hold_frames(held);
    }

    fn save_share(&self) -> Option<BucketState> {
        self.threads.hub.shares()?.lock().save(self.index)
    }

    fn save_addresses(&self) -> Vec<HeldAddress> {
        let addresses = self.threads.hub.addresses_of(self.index).into_iter();
        addresses.map(|(address, since)| HeldAddress { address, since }).collect()
    }

    fn restore_addresses(&self, addresses: &[HeldAddress]) {
        self.threads.hub.remember(self.index, addresses.iter().map(|held| (held.address, held.since)));
    }

    fn restore_share(&self, share: Option<BucketState>) -> Result<(), StateError> {
        match (self.threads.hub.shares(), share) {
            (Some(shares), Some(share)) => shares.lock().restore(self.index, share),
            (None, Some(_)) => Err(StateError::Shape("rate limits")),
            (_, None) => Ok(()),
        }
    }
}
