//! A port while its driver runs.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use parking_lot::Mutex;
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

use super::account::Account;
use super::frame::Frame;
use super::frame::body::Body;
use super::port_nic::PortNic;
use super::receiver::{PortRx, ReceiveRing};
use super::rings::{VirtqueueReceive, VirtqueueSend};
use super::rx_run::Receiver;
use super::sender::{ControlQueue, PortTx, SendQueue};
use super::steering::Steering;
use super::table::PortIndex;
use crate::SharedQueue;
use crate::net::Shared;

/// A doorbell whose writes reach this process.
#[derive(Debug, Default)]
pub(crate) struct Bell {
    /// The worker drains the queues on a timer.
    is_silent: AtomicBool,
    /// The worker will come, and has not come since.
    is_rung: AtomicBool,
}

impl Bell {
    /// Silences the doorbell, or ends that: the worker drains the queues afterwards.
    pub(crate) fn silence(&self, silent: bool) {
        self.is_silent.store(silent, Ordering::SeqCst);
    }

    /// Returns true if the worker must be woken for descriptors that were made available before this call.
    pub(crate) fn ring(&self) -> bool {
        !self.is_silent.load(Ordering::SeqCst) && !self.is_rung.swap(true, Ordering::SeqCst)
    }

    /// Records that the worker has come, before it looks for descriptors.
    pub(crate) fn heard(&self) {
        self.is_rung.store(false, Ordering::SeqCst);
    }
}

/// A port with running queues: from DRIVER_OK to a stop.
pub(crate) struct OpenPort {
    /// The port's number.
    pub index: PortIndex,
    /// The NIC of the port.
    pub nic: PortNic,
    /// The doorbell of all its queues.
    pub kick: Arc<EventFd>,
    /// Decides which writes of a driver ring `kick`, if they reach this process.
    pub bell: Bell,
    /// Set to stop it.
    pub stop: Arc<AtomicBool>,
    /// The receive queues, which senders lock.
    rx: Box<[Mutex<PortRx>]>,
    /// The distribution of frames to them, if the driver decides it.
    steering: Option<Arc<Steering>>,
    /// Makes policy and filter follow the driver's registers. Called before frames are taken, with no
    /// lock of a port held.
    pub follow: Option<Box<dyn Fn() + Send + Sync>>,
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
    /// A port of `nic` with these queues.
    ///
    /// # Errors
    ///
    /// Fails if the host has no eventfd left.
    pub(crate) fn new(
        index: PortIndex,
        nic: PortNic,
        receive: impl Iterator<Item = Option<ReceiveRing>>,
        tx: PortTx,
        account: Arc<Account>,
    ) -> io::Result<Self> {
        Ok(Self {
            index,
            nic,
            kick: Arc::new(EventFd::new(EFD_CLOEXEC | EFD_NONBLOCK)?),
            bell: Bell::default(),
            stop: Arc::new(AtomicBool::new(false)),
            rx: receive.map(|ring| Mutex::new(PortRx::new(ring))).collect(),
            steering: None,
            follow: None,
            tx: Mutex::new(tx),
            waiters: AtomicU64::new(0),
            account,
            heard: AtomicBool::new(false),
        })
    }

    /// A port with the virtqueues of a driver's start.
    ///
    /// # Errors
    ///
    /// As [`Self::new`].
    pub(crate) fn of_virtio(
        index: PortIndex,
        shared: &Arc<Shared>,
        queues: &[(u16, SharedQueue)],
        account: Arc<Account>,
    ) -> io::Result<Self> {
        let queue = |index| queues.iter().find(|(other, _)| *other == index);
        let receive = |pair| Some(ReceiveRing::Virtqueue(VirtqueueReceive::new(queue(2 * pair)?, shared)));
        let send = |pair| Some(SendQueue::Virtqueue(VirtqueueSend::new(queue(2 * pair + 1)?, shared)));
        // The control queue follows the last pair that the driver uses (`virtio 1.4 §5.1.2`).
        let control = queue(2 * shared.pairs).map(|queue| ControlQueue::new(queue, shared));
        let tx = PortTx::new((0..shared.pairs).filter_map(send), control);
        Self::new(index, PortNic::of_virtio(shared), (0..shared.pairs).map(receive), tx, account)
    }

    /// Distributes frames to the receive queues by `steering`, and calls `follow` before frames are taken.
    pub(crate) fn steered_by(self, steering: Arc<Steering>, follow: impl Fn() + Send + Sync + 'static) -> Self {
        Self { steering: Some(steering), follow: Some(Box::new(follow)), ..self }
    }

    /// True if the port must stop.
    pub(crate) fn is_stopped(&self) -> bool {
        self.stop.load(Ordering::Acquire)
    }

    /// The number of the receive queue for a frame of `flow`, among those that the driver uses. Frames of one sender's
    /// queue stay in one queue, so that none overtakes another, unless the driver distributes them.
    pub(crate) fn queue_of(&self, flow: usize, frame: &Frame<'_>, body: &Body<'_, '_, '_>) -> usize {
        if let Some(steering) = &self.steering {
            let queue = frame.queue.unwrap_or_else(|| steering.queue_of(frame, body));
            return queue.min(self.rx.len().saturating_sub(1));
        }
        let active = usize::from(self.nic.state.active_pairs()).clamp(1, self.rx.len().max(1));
        flow % active
    }

    /// A receive queue.
    pub(crate) fn rx(&self, queue: usize) -> Option<&Mutex<PortRx>> {
        self.rx.get(queue)
    }

    /// The parameters for a run of one of its receive queues.
    pub(crate) fn receiver(&self) -> Receiver<'_> {
        let Self { nic, stop, waiters, account, .. } = self;
        Receiver { nic, stop, waiters, waits: &account.waits, owes: account.debt.is_due() }
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
        let memory = self.nic.memory.pass();
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
            rx.lock().close(&self.nic);
        }
        self.tx.lock().close(&self.nic);
    }
}
