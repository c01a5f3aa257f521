//! A virtio device without its transport, and the threads that run its queues.

pub(crate) mod config;
pub(crate) mod counters;
pub(crate) mod driver_log;
pub(crate) mod failures;
pub(crate) mod fault;
pub(crate) mod host_nic;
pub(crate) mod queue_worker;
pub(crate) mod rate_limiter;
pub(crate) mod runner;
pub(crate) mod worker;

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use virtio_bindings::virtio_config::VIRTIO_F_VERSION_1;
use virtio_bindings::virtio_ring::{VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC};
use vmm_sys_util::eventfd::EventFd;

use crate::backend::{DoorbellPages, MemoryUser};
use crate::device::config::ConfigField;
use crate::device::driver_log::DriverLog;
use crate::device::host_nic::HostNic;
use crate::memory::SharedQueue;
use crate::memory::file_mapping::FileMapping;
use crate::os::thread::Thread;
use crate::transport::interrupt::Interrupts;
use crate::{ConnectError, DeviceSpecific, DmaSpace, FeatureRequirement, NewBackend, StateError};

/// Features of the rings that most devices offer.
pub(crate) const RING_FEATURES: u64 =
    1 << VIRTIO_F_VERSION_1 | 1 << VIRTIO_RING_F_INDIRECT_DESC | 1 << VIRTIO_RING_F_EVENT_IDX;

/// A virtio device: its features, configuration and queues, without its transport.
///
/// `start` and `reset` are called on a vCPU thread with the device's lock held. Neither may wait for a backend or a
/// worker.
pub trait VirtioDevice: Send {
    /// The device type (`virtio 1.4 §5`): 1 for a network device.
    fn device_type(&self) -> u16;

    /// The class code of its function: base class, sub-class, programming interface. Unassigned by default.
    fn class(&self) -> [u8; 3] {
        [0xff, 0x00, 0x00]
    }

    /// The feature bits that the device offers. The transport adds its own, such as `VIRTIO_F_SR_IOV`.
    fn features(&self) -> u64 {
        RING_FEATURES
    }

    /// Features that require others.
    fn feature_requirements(&self) -> &'static [FeatureRequirement] {
        &[]
    }

    /// The largest size of each queue, a power of two, in the order of their indices.
    fn queue_sizes(&self) -> &[u16];

    /// The fields of the device configuration, by ascending offsets and without gaps. Beyond them it reads 0. None by
    /// default.
    fn config_fields(&self) -> &'static [ConfigField] {
        &[]
    }

    /// Properties that a driver relies on and that are in neither its features nor its configuration, by the names of
    /// their options. A device that a restored driver uses must have the same.
    fn promises(&self) -> Vec<(&'static str, String)> {
        Vec::new()
    }

    /// Takes over as much as it can serve ([`Rule::Served`](crate::Rule)) of the device configuration `config` that a
    /// driver has read, before the driver is restored with this device. `accepted` are the driver's features, if it has
    /// chosen them.
    fn serve(&mut self, _config: &[u8], _accepted: Option<u64>) {}

    /// Called after a restore if the device configuration differs from what the driver read, before a configuration
    /// change interrupt notifies the driver.
    fn config_changed(&mut self) {}

    /// Reads device configuration at `offset`. Beyond its end it reads 0.
    fn config_read(&self, _offset: u64, data: &mut [u8]) {
        data.fill(0);
    }

    /// As [`Self::config_read`], for a device whose [memory](Self::memory) is at the guest address `start` now; 0 while
    /// it is not mapped.
    fn placed_config_read(&self, _start: u64, offset: u64, data: &mut [u8]) {
        self.config_read(offset, data);
    }

    /// Writes device configuration at `offset`. Writes to read-only fields are ignored, which all are by default.
    fn config_write(&mut self, _offset: u64, _data: &[u8]) {}

    /// Called after each [`Self::config_write`]. Returns threads that are still applying the write; the access
    /// completes when they have ended.
    fn config_written(&mut self) -> Vec<Thread> {
        Vec::new()
    }

    /// Changes with each change of the device configuration (`virtio 1.4 §4.1.4.3`).
    fn config_generation(&self) -> u8 {
        0
    }

    /// Starts the queues' workers: at DRIVER_OK, and again after a stop that was not a reset, with the same queues.
    ///
    /// # Errors
    ///
    /// Fails if the host cannot provide an eventfd or a thread. Nothing has been started then.
    fn start(&mut self, start: Start) -> io::Result<Vec<Worker>>;

    /// Called when the driver rings the doorbell of a running queue that has no worker. Returns true if the device
    /// serves its driver itself, before the access completes; it must not wait for anything that its driver does in the
    /// meantime.
    fn doorbell_rung(&mut self, _queue: u16) -> bool {
        false
    }

    /// Holds back the frames that this device carries for other devices, or releases them: before several devices that
    /// send to each other stop or start, and after that.
    fn hold_frames(&self, _held: bool) {}

    /// The port of a network device.
    fn host_nic(&mut self) -> Option<&mut dyn HostNic> {
        None
    }

    /// The doorbells that a guest may map as pages while the queues run; `None` if there can never be any. This does
    /// not change during the life of the device, because the layout of its doorbells depends on it.
    fn doorbell_pages(&self) -> Option<&DoorbellPages> {
        None
    }

    /// The memory that the guest sees in a separate BAR, if the device has any. Always the same.
    fn memory(&self) -> Option<&Arc<FileMapping>> {
        None
    }

    /// The backend that accesses guest memory directly, if there is one.
    fn memory_user(&self) -> Option<MemoryUser> {
        None
    }

    /// Returns to the power-on state. The workers are stopping; some may still run.
    fn reset(&mut self);

    /// Ends settings that the guest has made through the host. Called after a conventional reset: a VF has one when it
    /// ceases to exist.
    fn end_guest_settings(&mut self) {}

    /// Called before the device is restored to `state`, in which a driver has accepted the feature bits `accepted`. A
    /// device whose backend is missing offers these from now on.
    fn adopt(&mut self, _accepted: u64, _state: &DeviceSpecific) {}

    /// Connects a NIC whose backend is missing or lost to `new`, and takes its link up. Its queues do not run.
    /// `negotiated` are the features of its driver, if any were negotiated. The old backend is left in `new`.
    ///
    /// # Errors
    ///
    /// Nothing has changed then.
    fn connect(&mut self, _new: &mut NewBackend, _negotiated: Option<u64>) -> Result<(), ConnectError> {
        Err(ConnectError::NoNic)
    }

    /// The state that the driver configured and was shown, without the transport and the queues. The queues do not run.
    fn save(&self) -> DeviceSpecific {
        DeviceSpecific::PowerOn
    }

    /// Restores the device, which has been reset, to `state`. `started` holds the negotiated features if the queues
    /// were ever started in `state`; otherwise no driver can have sent a command. The caller starts the queues again
    /// later.
    ///
    /// # Errors
    ///
    /// Fails if the state is of another kind of device, or no driver could have produced it. The caller then resets the
    /// device.
    fn restore(&mut self, state: &DeviceSpecific, _started: Option<u64>) -> Result<(), StateError> {
        if *state == DeviceSpecific::PowerOn { Ok(()) } else { Err(StateError::Shape("kinds of device")) }
    }
}

/// Resources that the workers of a device use.
#[derive(Clone)]
pub struct Start {
    /// The guest's memory, as the device reaches it.
    pub memory: DmaSpace,
    /// The negotiated feature bits.
    pub features: u64,
    /// The queues that the driver enabled, with their indices in ascending order. Their addresses and sizes come from
    /// the guest and are not validated.
    pub queues: Vec<(u16, SharedQueue)>,
    /// Interrupts of the device.
    pub interrupts: Arc<Interrupts>,
    /// The log of the driver's commands, if they are logged.
    pub log: Option<Arc<DriverLog>>,
}

/// A thread that runs queues.
pub struct Worker {
    /// The queues of the worker, and the eventfd that the doorbell of each signals: the worker's `kick`, or that of the
    /// backend that runs the queue.
    pub doorbells: Vec<(u16, Arc<EventFd>)>,
    /// Wakes the worker.
    pub kick: Arc<EventFd>,
    /// Set before the last kick. The worker then finishes at most the buffers that it has taken, and ends.
    pub stop: Arc<AtomicBool>,
    /// The thread.
    pub thread: Thread,
}

impl Worker {
    /// Creates a worker that runs `queues` itself.
    pub fn new(
        queues: impl IntoIterator<Item = u16>,
        kick: Arc<EventFd>,
        stop: Arc<AtomicBool>,
        thread: Thread,
    ) -> Self {
        let doorbells = queues.into_iter().map(|queue| (queue, Arc::clone(&kick))).collect();
        Self { doorbells, kick, stop, thread }
    }

    /// Wakes the worker to check state that others change.
    pub fn wake(&self) {
        // A full counter has already woken the worker.
        let _ = self.kick.write(1);
    }

    /// Stops the worker, and returns its thread. Once that has ended, it touches neither guest memory nor its backend.
    pub fn stop(self) -> Thread {
        self.stop.store(true, Ordering::Release);
        self.wake();
        self.thread
    }
}
