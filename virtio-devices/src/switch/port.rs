//! A port while its driver runs.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use parking_lot::Mutex;
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

use super::account::Account;
use super::receiver::PortRx;
use super::rx_run::Receiver;
use super::sender::PortTx;
use super::table::PortIndex;
use crate::SharedQueue;
use crate::net::Shared;

/// A port with running queues: from DRIVER_OK to a stop.
pub(crate) struct OpenPort {
    /// The port's number.
    pub index: PortIndex,
    /// The parameters of its start.
    pub shared: Arc<Shared>,
    /// The doorbell of all its queues.
    pub kick: Arc<EventFd>,
    /// Set to stop it.
    pub stop: Arc<AtomicBool>,
    /// The receive queues, which senders lock.
    rx: Box<[Mutex<PortRx>]>,
    /// The other queues, which its worker locks for a batch.
    pub tx: Mutex<PortTx>,
    /// The workers whose ports wait for its buffers, by their bits.
    pub waiters: AtomicU64,
    /// The cost that it has caused to others, now and before.
    pub account: Arc<Account>,
    /// Set when it receives a frame.
    heard: AtomicBool,
}

impl OpenPort {
    /// A port with these queues.
    ///
    /// # Errors
    ///
    /// Fails if the host has no eventfd left.
    pub(crate) fn new(
        index: PortIndex,
        shared: &Arc<Shared>,
        queues: &[(u16, SharedQueue)],
        account: Arc<Account>,
    ) -> io::Result<Self> {
        let (pairs, features) = (shared.pairs, shared.features);
        let queue = |index| queues.iter().find(|(other, _)| *other == index);
        let rx = (0..pairs).map(|pair| Mutex::new(PortRx::new(queue(2 * pair), features))).collect();
        let transmit = (0..pairs).filter_map(|pair| queue(2 * pair + 1));
        // The control queue follows the last pair that the driver uses (`virtio 1.4 §5.1.2`).
        let tx = PortTx::new(transmit, queue(2 * pairs), features);
        Ok(Self {
            index,
            shared: Arc::clone(shared),
            kick: Arc::new(EventFd::new(EFD_CLOEXEC | EFD_NONBLOCK)?),
            stop: Arc::new(AtomicBool::new(false)),
            rx,
            tx: Mutex::new(tx),
            waiters: AtomicU64::new(0),
            account,
            heard: AtomicBool::new(false),
        })
    }

    /// True if the port must stop.
    pub(crate) fn is_stopped(&self) -> bool {
        self.stop.load(Ordering::Acquire)
    }

    /// The number of the receive queue for the frames of `flow`, among those that the driver uses. Frames of one
    /// sender's queue stay in one queue, so that none overtakes another.
    pub(crate) fn queue_of(&self, flow: usize) -> usize {
        let active = usize::from(self.shared.state.active_pairs()).clamp(1, self.rx.len().max(1));
        flow % active
    }

    /// A receive queue.
    pub(crate) fn rx(&self, queue: usize) -> Option<&Mutex<PortRx>> {
        self.rx.get(queue)
    }

    /// The parameters for a run of one of its receive queues.
    pub(crate) fn receiver(&self) -> Receiver<'_> {
        let Self { shared, stop, waiters, account, .. } = self;
        Receiver { shared, stop, waiters, waits: &account.waits, owes: account.debt.is_due() }
    }

    /// Records that it received a frame for it alone.
    pub(crate) fn set_heard(&self) {
        self.heard.store(true, Ordering::Relaxed);
    }

    /// True if it received a frame for it alone since the last call.
    pub(crate) fn take_heard(&self) -> bool {
        self.heard.load(Ordering::Relaxed) && self.heard.swap(false, Ordering::Relaxed)
    }

    /// Takes the workers whose ports wait for its buffers, if it has some now.
    pub(crate) fn take_waiters(&self) -> u64 {
        if self.waiters.load(Ordering::SeqCst) == 0 {
            return 0;
        }
        let memory = self.shared.memory.pass();
        let has_some = self.rx.iter().any(|rx| rx.lock().has_buffers(&memory));
        if has_some { self.waiters.swap(0, Ordering::SeqCst) } else { 0 }
    }

    /// Waits until no sender uses the host's old settings.
    pub(crate) fn settle(&self) {
        for rx in &self.rx {
            drop(rx.lock());
        }
    }

    /// Closes a port that must stop: no thread touches its queues afterwards. Waits for at most one frame.
    pub(crate) fn close(&self) {
        self.stop.store(true, Ordering::Release);
        for rx in &self.rx {
            rx.lock().close(&self.shared);
        }
        self.tx.lock().close(&self.shared);
    }
}
