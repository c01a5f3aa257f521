//! A switch's end of a NIC, and the threads that carry its frames.

use std::io;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;

use super::port::OpenPort;
use super::switch_core::SwitchCore;
use super::table::PortIndex;
use super::uplink::UplinkState;
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
    core: Arc<SwitchCore>,
    running: Mutex<Vec<Thread>>,
    /// True once the first thread runs, until all end.
    has_worker: AtomicBool,
    /// True if there are threads: a test may do their work.
    threaded: bool,
}

impl Threads {
    /// A switch without threads yet: they start with the first port that is opened.
    pub(crate) fn new(core: SwitchCore) -> Self {
        Self { core: Arc::new(core), running: Mutex::default(), has_worker: AtomicBool::new(false), threaded: true }
    }

    /// A switch whose caller does the threads' work, step by step.
    #[cfg(any(test, feature = "testing"))]
    pub(crate) fn stepped(core: SwitchCore) -> Self {
        Self { core: Arc::new(core), running: Mutex::default(), has_worker: AtomicBool::new(true), threaded: false }
    }

    /// True if a worker runs, which waits for doorbells and times.
    pub(super) fn has_worker(&self) -> bool {
        self.has_worker.load(Ordering::Acquire)
    }

    /// The switch.
    pub(crate) fn core(&self) -> &Arc<SwitchCore> {
        &self.core
    }

    /// Makes the links follow the uplink's present state while no thread watches it: before the first driver.
    pub(crate) fn look_at_uplink(&self) {
        if let (Some(uplink), Some(running)) = (self.core.uplink(), self.running.try_lock())
            && running.is_empty()
            && self.threaded
        {
            self.core.set_uplink_up(uplink.state() == UplinkState::Up);
        }
    }

    /// Starts the threads that do not run yet.
    pub(super) fn start(&self) -> io::Result<()> {
        if !self.threaded {
            return Ok(());
        }
        let mut running = self.running.lock();
        for index in running.len()..self.core.mailboxes().len() {
            let (core, uplink) = (Arc::clone(&self.core), self.uplink_of(index)?);
            let name = thread_name(self.core.id(), "sw", index as u16);
            running.push(spawn(WorkerKind::Switch, name, move || SwitchWorker::new(core, index, uplink).run())?);
            self.has_worker.store(true, Ordering::Release);
        }
        Ok(())
    }

    /// The reader of the uplink, for the first worker.
    fn uplink_of(&self, worker: usize) -> io::Result<Option<UplinkRx>> {
        let reads = worker == 0 && self.core.uplink().is_some();
        reads.then(|| UplinkRx::new(self.core.uplink_index())).transpose()
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        self.core.end.store(true, Ordering::Release);
        self.core.mailboxes().iter().for_each(super::mailbox::WorkerMailbox::wake);
        for thread in self.running.get_mut().drain(..) {
            if thread.join().is_err() {
                log::error!("{}: a worker of its switch panicked; please report this", self.core.id());
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
        self.threads.core.id()
    }

    fn offloads(&self) -> Offloads {
        self.threads.core.offloads()
    }

    fn mtu(&self) -> Option<u16> {
        self.threads.core.uplink().and_then(super::uplink::Uplink::mtu)
    }

    fn rate(&self) -> Option<NonZeroU32> {
        self.threads.core.uplink_rate()
    }

    fn look(&self) {
        self.threads.look_at_uplink();
    }

    fn attach(&self, nic: CarriedNic) {
        self.threads.core.attach(self.index, Some(nic));
    }

    fn follow_uplink(&self, follows: bool) {
        self.threads.core.set_follows_uplink(self.index, follows);
    }

    fn detach(&self) {
        self.threads.core.attach(self.index, None);
    }

    fn open(&self, shared: &Arc<Shared>, queues: &[(u16, SharedQueue)]) -> io::Result<Worker> {
        let core = Arc::clone(&self.threads.core);
        let port = Arc::new(OpenPort::of_virtio(self.index, shared, queues, core.account(self.index))?);
        self.threads.start()?;
        core.open(&port);
        let (kick, stop) = (Arc::clone(&port.kick), Arc::clone(&port.stop));
        let name = thread_name(core.id(), "port", self.index);
        let end = Thread::of_end(name, move || core.close(&port));
        Ok(Worker::new(queues.iter().map(|(index, _)| *index), kick, stop, end))
    }

    fn changed(&self) -> Replaced {
        self.threads.core.changed(self.index)
    }

    fn hold_frames(&self, held: bool) {
        self.threads.core.hold_frames(held);
    }

    fn save_share(&self) -> Option<BucketState> {
        self.threads.core.shares()?.lock().save(self.index)
    }

    fn save_addresses(&self) -> Vec<HeldAddress> {
        let addresses = self.threads.core.addresses_of(self.index).into_iter();
        addresses.map(|(address, since)| HeldAddress { address, since }).collect()
    }

    fn restore_addresses(&self, addresses: &[HeldAddress]) {
        self.threads.core.remember(self.index, addresses.iter().map(|held| (held.address, held.since)));
    }

    fn restore_share(&self, share: Option<BucketState>) -> Result<(), StateError> {
        match (self.threads.core.shares(), share) {
            (Some(shares), Some(share)) => shares.lock().restore(self.index, share),
            (None, Some(_)) => Err(StateError::Shape("rate limits")),
            (_, None) => Ok(()),
        }
    }
}
