//! virtio-vsock, whose connections end at Unix sockets of the host (`virtio 1.4 §5.10`).
//!
//! A client of the host connects to the device's socket, sends `CONNECT <port>` and a newline, and reads `OK <port>`
//! once a program in the guest has accepted; the port in the reply is the host's. A connection that a program in the
//! guest opens to port P of the host (context ID 2) goes to the listener of `<socket>_P`. Only stream sockets.
//!
//! A single thread serves all queues and connections. Connections outlive a pause, and end with a reset of the device.
//! They are not saved: a restored driver gets an event that they are closed.

mod caller;
mod connection;
mod counters;
mod credit;
mod error;
mod events;
mod host;
mod muxer;
mod packet;
mod pass;
mod poller;
mod receive;
#[cfg(any(test, feature = "testing"))]
pub(crate) mod steps;
mod transmit;
mod worker;

#[cfg(test)]
mod tests;

use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;
use virtio_bindings::virtio_config::{VIRTIO_F_IN_ORDER, VIRTIO_F_VERSION_1};
use virtio_bindings::virtio_ids::VIRTIO_ID_VSOCK;
use virtio_bindings::virtio_ring::{VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC};
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

use crate::device::config::{ConfigField, Rule, read};
use crate::device::counters::Counted;
use crate::device::worker::{WorkerKind, spawn, thread_name};
use crate::os::socket_path::{PassedSockets, SocketHandle};
use crate::{DeviceSpecific, Start, StateError, VirtioDevice, Worker};
pub use counters::{VsockCounter, VsockCounters};
pub use error::VsockError;
use host::HostSocket;
use muxer::Muxer;
use worker::{EVENTS, QueueWorker, RECEIVE, TRANSMIT};

/// The device configuration (`virtio 1.4 §5.10.4`). The driver reads it again on the transport reset event (`virtio 1.4
/// §5.10.6.7`).
pub(crate) const FIELDS: &[ConfigField] = &[ConfigField::new("guest_cid", 0, 8, Rule::Announced)];
/// Receive, transmit, events.
const QUEUE_SIZES: &[u16] = &[256, 256, 256];
const FEATURES: u64 =
    1 << VIRTIO_F_VERSION_1 | 1 << VIRTIO_F_IN_ORDER | 1 << VIRTIO_RING_F_INDIRECT_DESC | 1 << VIRTIO_RING_F_EVENT_IDX;

/// Description of a socket device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VsockSpec {
    /// Id, also the name of its thread.
    pub id: String,
    /// The guest's context ID, from 3 to 0xffff_fffe.
    pub cid: u32,
    /// The Unix socket that clients of the host connect to; its path is the prefix of those for the guest's
    /// connections.
    pub socket: PathBuf,
}

/// A virtio socket device.
pub struct Vsock {
    spec: VsockSpec,
    host: Arc<HostSocket>,
    /// The connections since the last reset.
    muxer: Option<Arc<Mutex<Muxer>>>,
    /// True if the driver must be notified that its connections are closed.
    owes_reset: Arc<AtomicBool>,
    counted: Counted<VsockCounters>,
}

impl Vsock {
    /// Listens on the socket.
    ///
    /// # Errors
    ///
    /// Fails if another program listens on the path, or it cannot be used.
    pub fn open(spec: VsockSpec) -> Result<Self, VsockError> {
        Self::open_with(spec, &PassedSockets::default())
    }

    /// As [`Self::open`], with the listener in `passed` if that has one.
    ///
    /// # Errors
    ///
    /// Fails as [`Self::open`] does, or if the listener does not belong to the path.
    pub fn open_with(spec: VsockSpec, passed: &PassedSockets) -> Result<Self, VsockError> {
        let host = Arc::new(HostSocket::listen(&spec.socket, passed)?);
        Ok(Self { counted: Counted::new(&spec.id), spec, host, muxer: None, owes_reset: Arc::default() })
    }

    /// Id of the device.
    pub fn id(&self) -> &str {
        &self.spec.id
    }

    /// The handle by which the socket is passed to another program.
    pub fn socket(&self) -> SocketHandle {
        self.host.handle()
    }

    /// Counters of the device.
    pub fn counters(&self) -> Arc<VsockCounters> {
        Arc::clone(self.counted.counters())
    }

    /// The connections; creates an empty set after a reset.
    fn muxer(&mut self) -> io::Result<Arc<Mutex<Muxer>>> {
        if let Some(muxer) = &self.muxer {
            return Ok(Arc::clone(muxer));
        }
        // A restored driver remembers ports until it reads the transport reset event, so new ones start elsewhere.
        let mut port = [0; 4];
        if self.owes_reset.load(Ordering::Acquire) {
            rustix::rand::getrandom(&mut port, rustix::rand::GetRandomFlags::NONBLOCK)?;
        }
        let host = Arc::clone(&self.host);
        let connect = Box::new(move |port| host.connect(port));
        let muxer = Muxer::new(self.spec.cid.into(), u32::from_le_bytes(port), connect)?;
        Ok(Arc::clone(self.muxer.insert(Arc::new(Mutex::new(muxer)))))
    }
}

impl VirtioDevice for Vsock {
    fn device_type(&self) -> u16 {
        VIRTIO_ID_VSOCK as u16
    }

    fn features(&self) -> u64 {
        FEATURES
    }

    fn queue_sizes(&self) -> &[u16] {
        QUEUE_SIZES
    }

    /// Drivers read their context ID again on the transport reset event.
    fn config_changed(&mut self) {
        self.owes_reset.store(true, Ordering::Release);
    }

    fn config_fields(&self) -> &'static [ConfigField] {
        FIELDS
    }

    /// The guest's context ID (`virtio 1.4 §5.10.4`).
    fn config_read(&self, offset: u64, data: &mut [u8]) {
        read(&u64::from(self.spec.cid).to_le_bytes(), offset, data);
    }

    fn start(&mut self, start: Start) -> io::Result<Vec<Worker>> {
        let queue = |index| start.queues.iter().find(|(other, _)| *other == index).map(|(_, queue)| Arc::clone(queue));
        let indices: Vec<_> = start.queues.iter().map(|(index, _)| *index).collect();
        if indices.is_empty() {
            return Ok(Vec::new());
        }
        let kick = Arc::new(EventFd::new(EFD_CLOEXEC | EFD_NONBLOCK)?);
        let stop = Arc::new(AtomicBool::new(false));
        let worker = QueueWorker {
            queues: [RECEIVE, TRANSMIT, EVENTS].map(queue),
            muxer: self.muxer()?,
            host: Arc::clone(&self.host),
            owes_reset: Arc::clone(&self.owes_reset),
            features: start.features,
            memory: start.memory,
            interrupts: start.interrupts,
            counters: Arc::clone(self.counted.counters()),
            kick: Arc::clone(&kick),
            stop: Arc::clone(&stop),
        };
        let thread = spawn(WorkerKind::Vsock, thread_name(&self.spec.id, "q", 0), move || worker.run())?;
        Ok(vec![Worker::new(indices, kick, stop, thread)])
    }

    /// The connections end when the stopping worker releases them.
    fn reset(&mut self) {
        self.counted.was_reset();
        self.muxer = None;
        // A worker that still runs keeps the old flag.
        self.owes_reset = Arc::default();
    }

    /// Connections belong to this process, and cannot move with the guest.
    fn restore(&mut self, state: &DeviceSpecific, started: Option<u64>) -> Result<(), StateError> {
        if *state != DeviceSpecific::PowerOn {
            return Err(StateError::Shape("kinds of device"));
        }
        self.muxer = None;
        self.owes_reset = Arc::new(AtomicBool::new(started.is_some()));
        Ok(())
    }
}
