//! Devices other than NICs that another process runs over vhost-user: shared file systems (`virtio 1.4 §5.11`), disks
//! (`virtio 1.4 §5.2`), and devices of which this program knows only the type.
//!
//! The process runs all queues. One worker of this process starts, stops and recovers it, and forwards the driver's
//! configuration writes to it.

mod config;
mod kind;
mod worker;

use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use log::debug;
use parking_lot::Mutex;
use virtio_bindings::virtio_blk::VIRTIO_BLK_F_RO;
use vmm_sys_util::eventfd::EventFd;

use crate::backend::{
    BackendKind, BackendObserver, Cancel, Health, MemoryMailbox, MemoryUser, QueueRunner, VhostUser, VhostUserError,
    VhostUserRole, VhostUserSocket, VhostUserSpec,
};
use crate::device::config::ConfigField;
use crate::device::runner::{LentQueue, Progress, RunnerWorker, SharedRunner};
use crate::device::worker::{WorkerKind, spawn, thread_name};
use crate::os::thread::Thread;
use crate::transport::features::has;
use crate::{DeviceSpecific, Memory, Start, StateError, VirtioDevice, Worker};
use config::DeviceConfig;
#[cfg(test)]
pub(crate) use config::{FILE_SYSTEM, OTHER};
pub use kind::VhostUserKind;
use worker::DeviceWorker;

/// Description of a device over vhost-user.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VhostUserDeviceSpec {
    /// Id, also the name of its thread.
    pub id: String,
    /// Type of the device.
    pub kind: VhostUserKind,
    /// The size of each of its queues, a power of two up to 32,768. A file system has a high-priority queue before the
    /// others.
    pub queue_sizes: Vec<u16>,
    /// The socket that the process listens on.
    pub socket: PathBuf,
}

/// A virtio device that another process runs. It and its connection outlive resets of the device and reboots of the
/// guest.
pub struct VhostUserDevice {
    spec: VhostUserDeviceSpec,
    /// The socket's path, for log and error messages.
    name: String,
    features: u64,
    /// True if the process can log its writes to guest memory.
    logs_writes: bool,
    /// True if the process has a state besides its queues.
    has_state: bool,
    backend: SharedRunner,
    config: Arc<DeviceConfig>,
    health: Arc<Health>,
    /// Guest memory changes that wait for the worker.
    mailbox: Arc<MemoryMailbox>,
    progress: Arc<Progress>,
    /// Eventfd that wakes the worker while the driver is up.
    wake: Option<Arc<EventFd>>,
}

impl VhostUserDevice {
    /// Connects to the process, reads its features, and makes it map the guest's memory. `cancel` ends the wait for it.
    ///
    /// # Errors
    ///
    /// Fails with one line that contains the remedy; see [`VhostUserError`].
    pub fn connect(spec: VhostUserDeviceSpec, memory: &Memory, cancel: Option<Cancel>) -> Result<Self, VhostUserError> {
        let queues = u16::try_from(spec.queue_sizes.len()).unwrap_or(u16::MAX);
        let role = VhostUserRole::Device {
            queues,
            features: spec.kind.features(queues),
            config: spec.kind.config_of_backend(),
        };
        let socket = VhostUserSocket::of_peer(spec.socket.clone());
        let backend = VhostUser::connect(VhostUserSpec { socket, role, until: Instant::now(), cancel }, memory)?;
        let ability = backend.ability();
        if spec.kind.needs_config() && backend.config().len() < spec.kind.config_of_backend() as usize {
            return Err(VhostUserError::NoConfig(ability.name));
        }
        let config = Arc::new(DeviceConfig::new(&spec.kind, queues, ability.features, backend.config()));
        debug!("{}: {} runs {queues} queues", spec.id, ability.name);
        Ok(Self {
            name: ability.name,
            features: ability.features,
            logs_writes: ability.logs_writes,
            has_state: ability.has_state,
            backend: Arc::new(Mutex::new(Box::new(backend))),
            config,
            health: Arc::default(),
            mailbox: Arc::default(),
            progress: Arc::new(Progress::new()),
            wake: None,
            spec,
        })
    }

    /// Id of the device.
    pub fn id(&self) -> &str {
        &self.spec.id
    }

    /// The path of the socket.
    pub fn backend_name(&self) -> &str {
        &self.name
    }

    /// Notifies `observer` when its backend is lost, and when it has recovered.
    pub fn observe_backend(&self, observer: BackendObserver) {
        self.health.observe(observer);
    }
}

impl VirtioDevice for VhostUserDevice {
    fn device_type(&self) -> u16 {
        self.spec.kind.device_type()
    }

    fn class(&self) -> [u8; 3] {
        self.spec.kind.class()
    }

    fn features(&self) -> u64 {
        self.features
    }

    fn queue_sizes(&self) -> &[u16] {
        &self.spec.queue_sizes
    }

    /// A driver of a writable disk relies on being able to write. Read-only is a feature that the driver has accepted.
    fn promises(&self) -> Vec<(&'static str, String)> {
        let read_only = if has(self.features, VIRTIO_BLK_F_RO) { "on" } else { "off" };
        if self.spec.kind == VhostUserKind::Disk { vec![("readonly", read_only.to_string())] } else { Vec::new() }
    }

    fn config_fields(&self) -> &'static [ConfigField] {
        config::fields(&self.spec.kind)
    }

    fn config_read(&self, offset: u64, data: &mut [u8]) {
        self.config.read(offset, data);
    }

    fn config_write(&mut self, offset: u64, data: &[u8]) {
        if self.config.write(&self.spec.id, offset, data)
            && let Some(wake) = &self.wake
        {
            // A full counter has woken the worker already.
            let _ = wake.write(1);
        }
    }

    /// Before its driver is up, a separate thread forwards a write to the backend, and the access waits for it: the
    /// driver may read a reply next, as an input device's does.
    fn config_written(&mut self) -> Vec<Thread> {
        if self.wake.is_some() || !self.config.has_written() {
            return Vec::new();
        }
        let (backend, config) = (Arc::clone(&self.backend), Arc::clone(&self.config));
        let carry = move || worker::carry_writes(&mut **backend.lock(), &config);
        // Without a thread the write waits for the driver's start.
        spawn(WorkerKind::VhostUserConfig, thread_name(&self.spec.id, "cfg", 0), move || drop(carry()))
            .into_iter()
            .collect()
    }

    fn config_generation(&self) -> u8 {
        self.config.generation()
    }

    fn start(&mut self, start: Start) -> io::Result<Vec<Worker>> {
        let lent = LentQueue::lend(&start.queues, |index| self.spec.kind.has_queue(index, start.features))?;
        let runner = RunnerWorker::new(&self.spec.id, &start, lent, &self.backend, (&self.health, &self.mailbox))?;
        let (doorbells, kick, stop) = (runner.doorbells(), Arc::clone(&runner.kick), Arc::clone(&runner.stop));
        let worker = DeviceWorker { runner, config: Arc::clone(&self.config), progress: Arc::clone(&self.progress) };
        let thread = spawn(WorkerKind::VhostUser, thread_name(&self.spec.id, "vq", 0), move || worker.run())?;
        self.wake = Some(Arc::clone(&kick));
        Ok(vec![Worker { doorbells, kick, stop, thread }])
    }

    fn memory_user(&self) -> Option<MemoryUser> {
        let (backend, mailbox) = (Arc::clone(&self.backend), Arc::clone(&self.mailbox));
        let (kind, wake) = (BackendKind::VhostUser, self.wake.clone());
        Some(MemoryUser { backend, mailbox, wake, kind, logs_writes: self.logs_writes, has_state: self.has_state })
    }

    fn reset(&mut self) {
        let Self {
            spec: _,
            name: _,
            features: _,
            logs_writes: _,
            has_state: _,
            backend: _,
            config,
            health: _,
            mailbox: _,
            progress,
            wake,
        } = self;
        // A worker that is still ending keeps the old progress.
        *progress = Arc::new(Progress::new());
        *wake = None;
        config.reset();
    }

    /// Saves the disk driver's `writeback`, which a new backend must be given.
    fn save(&self) -> DeviceSpecific {
        self.config.writeback().map_or(DeviceSpecific::PowerOn, |writeback| DeviceSpecific::Config(vec![writeback]))
    }

    /// After the queues ran, the backend may have consumed something from them.
    fn restore(&mut self, state: &DeviceSpecific, started: Option<u64>) -> Result<(), StateError> {
        match state {
            DeviceSpecific::PowerOn => {}
            DeviceSpecific::Config(config) => {
                let [byte] = config[..] else { return Err(StateError::Shape("configuration lengths")) };
                if !self.config.restore_writeback(&self.spec.id, byte) {
                    return Err(StateError::Value("a disk's cache"));
                }
            }
            _ => return Err(StateError::Shape("kinds of device")),
        }
        if started.is_some() {
            self.progress.set_touched();
        }
        Ok(())
    }
}
