//! What is behind a virtio-pci function.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

use parking_lot::Mutex;
use virtio_queue::Queue;
use vm_memory::{GuestMemoryAtomic, GuestMemoryMmap};
use vmm_sys_util::eventfd::EventFd;

use crate::backend::DoorbellPages;
use crate::interrupt::Interrupts;
use crate::port::Port;
use crate::{DeviceSpecific, StateError};

/// The guest's memory; the map can be exchanged while devices use it.
pub type Memory = GuestMemoryAtomic<GuestMemoryMmap>;

/// A queue that its worker owns as long as it runs: the worker locks it once, when it starts, and unlocks it when it ends, so
/// that the queue's position outlives the worker and a successor waits for its predecessor.
pub type SharedQueue = Arc<Mutex<Queue>>;

/// A virtio device: its features, configuration and queues, without its transport.
///
/// `start` and `reset` are called with the device's lock held, on a vCPU thread: neither may wait for a backend or for a
/// worker.
pub trait VirtioDevice: Send {
    /// The device type (`virtio 1.4 §5`): 1 for a network device.
    fn device_type(&self) -> u16;

    /// The class code of its function: base class, sub-class, programming interface.
    fn class(&self) -> [u8; 3];

    /// The feature bits that the device offers. The transport adds those that are its own, as `VIRTIO_F_SR_IOV`.
    fn features(&self) -> u64;

    /// Pairs of feature bits, the first of which a driver may not accept without the second.
    fn feature_requirements(&self) -> &'static [(u32, u32)] {
        &[]
    }

    /// The largest size of each queue, a power of two, in the order of their indices.
    fn queue_sizes(&self) -> &[u16];

    /// Reads device configuration at `offset`. What is beyond the configuration reads 0.
    fn config_read(&self, offset: u64, data: &mut [u8]);

    /// Writes device configuration at `offset`. What is read-only is ignored.
    fn config_write(&mut self, offset: u64, data: &[u8]);

    /// Changes with each change of the device configuration (`virtio 1.4 §4.1.4.3`).
    fn config_generation(&self) -> u8;

    /// Starts the queues' workers: at DRIVER_OK, and again after a stop that was not a reset, with the same queues.
    ///
    /// # Errors
    ///
    /// When an eventfd or a thread cannot be had. Nothing has been started then.
    fn start(&mut self, start: Start) -> io::Result<Vec<Worker>>;

    /// A network device's end of its link.
    fn port(&mut self) -> Option<&mut dyn Port> {
        None
    }

    /// The doorbells that a guest may be given as pages while the queues run, if there can ever be any. That there can is the same for
    /// the life of the device: where its doorbells are follows from it.
    fn doorbell_pages(&self) -> Option<&DoorbellPages> {
        None
    }

    /// Returns to the state of power-on. The workers have been told to stop, and may still be ending.
    fn reset(&mut self);

    /// What its driver made of the device, without its transport and its queues, and what the driver was told. The queues stand
    /// still.
    fn save(&self) -> DeviceSpecific {
        DeviceSpecific::PowerOn
    }

    /// Brings the device, which has been reset, to `state`. `started` are the negotiated features if the queues have been started
    /// since the reset before `state`: without, there is nothing that a driver could have commanded. They are started again later.
    ///
    /// # Errors
    ///
    /// When the state is of another kind of device, or none that a driver could have brought it to. The caller resets it then.
    fn restore(&mut self, state: &DeviceSpecific, _started: Option<u64>) -> Result<(), StateError> {
        if *state == DeviceSpecific::PowerOn { Ok(()) } else { Err(StateError::Shape("kinds of device")) }
    }
}

/// What the workers of a device run on.
#[derive(Clone)]
pub struct Start {
    /// The guest's memory.
    pub memory: Memory,
    /// The negotiated feature bits.
    pub features: u64,
    /// The queues that the driver enabled, with their indices in ascending order. Their addresses and sizes are the guest's
    /// and may be nonsense.
    pub queues: Vec<(u16, SharedQueue)>,
    /// Where the workers signal what they have done.
    pub interrupts: Arc<Interrupts>,
}

/// A thread that runs queues.
pub struct Worker {
    /// The queues that it answers for, and what a write to the doorbell of each signals: its own `kick`, or what wakes whoever runs
    /// the queue in its place.
    pub doorbells: Vec<(u16, Arc<EventFd>)>,
    /// Wakes the worker.
    pub kick: Arc<EventFd>,
    /// Set, before a last kick, to make the worker end after at most the buffers it has in hand.
    pub stop: Arc<AtomicBool>,
    /// The thread.
    pub thread: JoinHandle<()>,
}

impl Worker {
    /// A thread that runs `queues` itself.
    pub fn new(
        queues: impl IntoIterator<Item = u16>,
        kick: Arc<EventFd>,
        stop: Arc<AtomicBool>,
        thread: JoinHandle<()>,
    ) -> Self {
        let doorbells = queues.into_iter().map(|queue| (queue, Arc::clone(&kick))).collect();
        Self { doorbells, kick, stop, thread }
    }

    /// Wakes it, to look again at what it does not own.
    pub fn wake(&self) {
        // A full counter has woken the worker already.
        let _ = self.kick.write(1);
    }

    /// Tells the worker to end, and returns what to join. It touches neither guest memory nor its backend after that.
    pub fn stop(self) -> JoinHandle<()> {
        self.stop.store(true, Ordering::Release);
        self.wake();
        self.thread
    }
}
