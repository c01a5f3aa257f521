//! virtio-blk over a raw or qcow2 image (`virtio 1.4 §5.2`).
//!
//! Each queue has a thread, which owns the queue while the driver runs it. The thread submits many requests to the
//! kernel at once and completes each as its result arrives. A malformed request gets an error status or is dropped; it
//! is counted and never logged.

mod call;
mod config;
mod counters;
mod engine;
mod error;
mod geometry;
pub(crate) mod image;
mod latency;
mod operation;
mod request;
mod requests;
mod resize;
#[cfg(any(test, feature = "testing"))]
pub(crate) mod steps;
mod storage_lock;
mod storage_locks;
mod uring;
mod worker;
mod zeroing;

#[cfg(test)]
pub(crate) mod testing;
#[cfg(test)]
mod tests;

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use log::debug;
use parking_lot::Mutex;
use virtio_bindings::virtio_blk::*;
use virtio_bindings::virtio_config::VIRTIO_F_VERSION_1;
use virtio_bindings::virtio_ids::VIRTIO_ID_BLOCK;
use virtio_bindings::virtio_ring::{VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC};
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

use crate::device::config::ConfigField;
use crate::device::counters::Counted;
use crate::device::failures::{FailureObserver, Failures};
use crate::device::rate_limiter::{RateLimitGroup, RateLimits};
use crate::device::worker::{WorkerKind, can_run_on, cpu_set, run_on, spawn_after, spawn_all, thread_name};
use crate::transport::features::has;
use crate::{BlockState, DeviceSpecific, Start, StateError, VirtioDevice, Worker};
pub(crate) use config::FIELDS;
use config::{BLK_SIZE, Config, PHYSICAL, SEG_MAX, WRITEBACK};
pub use counters::{BlockCounter, BlockCounters};
use engine::Engine;
pub use error::{BlockError, ResizeError};
use image::Image;
use image::access::Access;
pub use image::access::{ImageFormat, LockGranularity};
pub use latency::BlockLatencies;
use operation::Abilities;
pub use resize::BlockSize;
pub use storage_lock::StorageLock;
pub use storage_locks::{StorageLockError, StorageLocks};
use worker::{MAX_DEPTH, QueueWorker, Shared};

/// Mass storage controller, other: the class that no other driver binds to.
const CLASS: [u8; 3] = [0x01, 0x80, 0x00];
/// The largest size of a virtqueue (`virtio 1.4 §2.7`).
const MAX_SIZE: u16 = 32_768;
/// The length of a serial number.
const SERIAL: usize = VIRTIO_BLK_ID_BYTES as usize;
/// Default limit of data segments in a request: two of the queue's descriptors are for the header and the status, and
/// each segment may span two parts of guest memory.
const MAX_SEGMENTS: u16 = 254;

/// Features that every disk offers.
const ALWAYS: &[u32] = &[
    VIRTIO_F_VERSION_1,
    VIRTIO_RING_F_INDIRECT_DESC,
    VIRTIO_RING_F_EVENT_IDX,
    VIRTIO_BLK_F_SIZE_MAX,
    VIRTIO_BLK_F_SEG_MAX,
    VIRTIO_BLK_F_BLK_SIZE,
    VIRTIO_BLK_F_TOPOLOGY,
    VIRTIO_BLK_F_FLUSH,
    VIRTIO_BLK_F_CONFIG_WCE,
];

/// Description of a disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BlockSpec {
    /// Id, also the prefix of its threads' names.
    pub id: String,
    /// The image: a file or a block device.
    pub path: PathBuf,
    /// True if the guest cannot write the image. Others may then read it at the same time.
    pub read_only: bool,
    /// True if I/O bypasses the host's page cache.
    pub direct: bool,
    /// The format of the image.
    pub format: ImageFormat,
    /// True if ranges may be discarded. Otherwise all space of a file is allocated on opening.
    pub sparse: bool,
    /// The part of the image that is locked.
    pub lock: LockGranularity,
    /// The number of its queues, 1 or more.
    pub queues: u16,
    /// The size of its queues, a power of two up to 32,768.
    pub queue_size: u16,
    /// The serial number that the guest reads, at most 20 bytes. Defaults to the beginning of the id.
    pub serial: Option<String>,
    /// Rate limits, shared by its queues. Discarding and zeroing count as operations only.
    pub limits: RateLimits,
    /// The group that shares these limits. The caller that opens the group's disks applies it: see
    /// [`Block::limited_by`].
    pub limit_group: Option<String>,
    /// Tries io_uring. Without it, a queue executes one request at a time.
    pub io_uring: bool,
    /// The host CPUs that queues run on, below 1,024. Other queues run on any.
    pub queue_cpus: Vec<(u16, Vec<u32>)>,
}

/// The backing files of the image of `spec`, which are opened with it. The list ends at the first unreadable or invalid
/// file; opening reports the fault.
pub fn backing_files(spec: &BlockSpec) -> Vec<PathBuf> {
    match spec.format {
        ImageFormat::Qcow2 { backing_files: true } => image::qcow2::chain(&spec.path),
        _ => Vec::new(),
    }
}

/// A virtio block device. It and its image outlive resets of the device and reboots of the guest.
pub struct Block {
    spec: BlockSpec,
    image: Arc<Image>,
    serial: [u8; SERIAL],
    features: u64,
    queue_sizes: Vec<u16>,
    latencies: Arc<BlockLatencies>,
    failures: Arc<Failures>,
    size: Arc<BlockSize>,
    counted: Counted<BlockCounters>,
    /// Value that the driver wrote into `writeback` since the reset: true if writes may stay in the host's cache until
    /// a flush (`virtio 1.4 §5.2.4`).
    chosen: Option<bool>,
    /// The features of the last start, which define the meaning of `writeback`. `None` between a reset and a start.
    negotiated: Option<u64>,
    /// Limit of data segments in a request, as the driver reads it.
    segments: u32,
    /// True if a write completes only once it is on the medium. Read by the workers.
    stable: Arc<AtomicBool>,
    /// Rate limits. A reset does not refill them.
    limiter: Option<RateLimitGroup>,
}

impl Block {
    /// Opens and locks the image.
    ///
    /// # Errors
    ///
    /// Fails with one line that contains the remedy; see [`BlockError`].
    pub fn open(spec: BlockSpec) -> Result<Self, BlockError> {
        Self::with(spec, Image::open)
    }

    /// Opens an image that another program writes. [`StorageLock::take`] locks it later; the device must not be started
    /// before.
    ///
    /// # Errors
    ///
    /// As [`Self::open`].
    pub fn open_unlocked(spec: BlockSpec) -> Result<Self, BlockError> {
        Self::with(spec, Image::open_unlocked)
    }

    fn with(
        spec: BlockSpec,
        open: impl FnOnce(&Path, Access) -> Result<Image, BlockError>,
    ) -> Result<Self, BlockError> {
        if spec.queues == 0 {
            return Err(BlockError::NoQueue);
        }
        if !spec.queue_size.is_power_of_two() || !(2..=MAX_SIZE).contains(&spec.queue_size) {
            return Err(BlockError::QueueSize(spec.queue_size));
        }
        if let Some(serial) = spec.serial.as_ref().filter(|serial| serial.len() > SERIAL) {
            return Err(BlockError::Serial(serial.clone()));
        }
        for (queue, cpus) in &spec.queue_cpus {
            if !can_run_on(&cpu_set(cpus)) {
                return Err(BlockError::Cpus(*queue));
            }
        }
        let BlockSpec { read_only, direct, format, sparse, lock, .. } = spec;
        let image = Arc::new(open(&spec.path, Access { read_only, direct, format, sparse, lock })?);
        let abilities = image.abilities();
        let mut serial = [0; SERIAL];
        let text = spec.serial.as_ref().unwrap_or(&spec.id).as_bytes();
        serial.iter_mut().zip(text).for_each(|(to, from)| *to = *from);
        let optional = [
            (VIRTIO_BLK_F_RO, spec.read_only),
            (VIRTIO_BLK_F_MQ, spec.queues > 1),
            (VIRTIO_BLK_F_DISCARD, abilities.discard),
            (VIRTIO_BLK_F_WRITE_ZEROES, abilities.zero),
        ];
        let optional = optional.iter().filter(|(_, offered)| *offered).map(|(bit, _)| bit);
        Ok(Self {
            features: ALWAYS.iter().chain(optional).fold(0, |features, bit| features | 1 << bit),
            queue_sizes: vec![spec.queue_size; spec.queues.into()],
            size: BlockSize::new(Arc::clone(&image)),
            image,
            serial,
            counted: Counted::new(&spec.id),
            latencies: Arc::default(),
            failures: Arc::new(Failures::new(&spec.id, "image")),
            chosen: None,
            negotiated: None,
            segments: spec.queue_size.saturating_sub(2).clamp(1, MAX_SEGMENTS).into(),
            stable: Arc::new(AtomicBool::new(false)),
            limiter: RateLimitGroup::new(spec.limits),
            spec,
        })
    }

    /// Id of the disk.
    pub fn id(&self) -> &str {
        &self.spec.id
    }

    /// Replaces the disk's own limits by those of `group`.
    pub fn limited_by(mut self, group: RateLimitGroup) -> Self {
        self.limiter = Some(group);
        self
    }

    /// Image and its lock.
    pub fn storage_lock(&self) -> StorageLock {
        StorageLock::of_image(Arc::clone(&self.image))
    }

    /// Handle to the size, which the host can change.
    pub fn size(&self) -> Arc<BlockSize> {
        Arc::clone(&self.size)
    }

    /// Latencies of its requests.
    pub fn latencies(&self) -> Arc<BlockLatencies> {
        Arc::clone(&self.latencies)
    }

    /// Notifies `observer` when requests fail on the host, and when they succeed again.
    pub fn observe_failures(&self, observer: FailureObserver) {
        self.failures.observe(observer);
    }

    /// Counters of the disk.
    pub fn counters(&self) -> Arc<BlockCounters> {
        Arc::clone(self.counted.counters())
    }

    /// Sets for the workers whether writes must be stable (`virtio 1.4 §5.2.6.2`): if the driver chose that, or if it
    /// cannot flush because it did not negotiate flushes.
    fn settle_cache(&self, features: u64) {
        let stable =
            if has(features, VIRTIO_BLK_F_CONFIG_WCE) { !self.writeback() } else { !has(features, VIRTIO_BLK_F_FLUSH) };
        self.stable.store(stable, Ordering::Release);
    }

    /// The field that the driver reads. Unless the driver chose, the cache is on, except with a driver that negotiated
    /// `VIRTIO_BLK_F_CONFIG_WCE` but not flushes (`virtio 1.4 §5.2.5.2`).
    fn writeback(&self) -> bool {
        let unflushed = |features| has(features, VIRTIO_BLK_F_CONFIG_WCE) && !has(features, VIRTIO_BLK_F_FLUSH);
        self.chosen.unwrap_or(!self.negotiated.is_some_and(unflushed))
    }

    fn workers(&self, start: &Start) -> io::Result<Vec<QueueWorker>> {
        // Without VIRTIO_BLK_F_MQ there is one queue.
        let count = if has(start.features, VIRTIO_BLK_F_MQ) { self.spec.queues } else { 1 };
        let queues = start.queues.iter().filter(|(index, _)| *index < count);
        queues
            .map(|(index, queue)| {
                Ok(QueueWorker {
                    index: *index,
                    queue: Arc::clone(queue),
                    kick: Arc::new(EventFd::new(EFD_CLOEXEC | EFD_NONBLOCK)?),
                    stop: Arc::new(AtomicBool::new(false)),
                })
            })
            .collect()
    }

    fn shared(&self, start: &Start) -> Arc<Shared> {
        Arc::new(Shared {
            image: Arc::clone(&self.image),
            serial: self.serial,
            stable: Arc::clone(&self.stable),
            memory: start.memory.clone(),
            features: start.features,
            counters: Arc::clone(self.counted.counters()),
            latencies: Arc::clone(&self.latencies),
            failures: Arc::clone(&self.failures),
            interrupts: Arc::clone(&start.interrupts),
            limiter: self.limiter.clone(),
            complete: Mutex::new(false),
        })
    }

    fn spawn(&self, worker: QueueWorker, shared: &Arc<Shared>) -> io::Result<Worker> {
        let (queues, kick, stop) = (vec![worker.index], Arc::clone(&worker.kick), Arc::clone(&worker.stop));
        let shared = Arc::clone(shared);
        let name = thread_name(&self.spec.id, "q", worker.index);
        let cpus = self.spec.queue_cpus.iter().find(|(queue, _)| *queue == worker.index).map(|(_, cpus)| cpu_set(cpus));
        let (image, made) = (Arc::clone(&shared.image), Arc::new(Mutex::new(None)));
        let (id, depth, io_uring) = (self.spec.id.clone(), self.spec.queue_size.min(MAX_DEPTH), self.spec.io_uring);
        let make = {
            let made = Arc::clone(&made);
            move || {
                let with = || Engine::with_io_uring(&id, Arc::clone(&image), depth);
                *made.lock() = Some(if io_uring { with() } else { Engine::new(image) });
            }
        };
        let run = move || {
            if let Some(cpus) = cpus {
                run_on(&cpus);
            }
            if let Some(engine) = made.lock().take() {
                worker.run(engine, &shared);
            }
        };
        // The worker itself may not create an io_uring: its operations would bypass this worker's system call filter.
        let thread = spawn_after(make, WorkerKind::Block, name, run)?;
        Ok(Worker::new(queues, kick, stop, thread))
    }
}

impl VirtioDevice for Block {
    fn device_type(&self) -> u16 {
        VIRTIO_ID_BLOCK as u16
    }

    fn class(&self) -> [u8; 3] {
        CLASS
    }

    fn features(&self) -> u64 {
        self.features
    }

    fn queue_sizes(&self) -> &[u16] {
        &self.queue_sizes
    }

    fn config_fields(&self) -> &'static [ConfigField] {
        FIELDS
    }

    /// A driver of a writable disk relies on being able to write, and identifies the disk by its serial number.
    fn promises(&self) -> Vec<(&'static str, String)> {
        let read_only = if self.spec.read_only { "on" } else { "off" };
        let serial = self.serial.iter().take_while(|byte| **byte != 0).flat_map(|byte| byte.escape_ascii());
        vec![("readonly", read_only.to_string()), ("serial", serial.map(char::from).collect())]
    }

    /// The block size is part of the disk's contents: partitions and file systems are measured in blocks.
    fn serve(&mut self, config: &[u8], _accepted: Option<u64>) {
        let [segments, block, exponent] = [SEG_MAX, BLK_SIZE, PHYSICAL].map(|field| field.number(config));
        if let Some(segments) = u32::try_from(segments).ok().filter(|segments| *segments > 0) {
            self.segments = segments;
        }
        self.image.serve_blocks(block, exponent);
    }

    fn config_read(&self, offset: u64, data: &mut [u8]) {
        let Abilities { geometry, zero, discard, .. } = self.image.abilities();
        let config = Config {
            geometry,
            segments: self.segments,
            writeback: self.writeback(),
            queues: self.spec.queues,
            zero,
            discard,
        };
        config.read(offset, data);
    }

    /// All fields except `writeback` are read-only; so is `writeback` for a driver without `VIRTIO_BLK_F_CONFIG_WCE`.
    /// Features are final only at the start, and the driver may write before that (`virtio 1.4 §3.1.1`).
    fn config_write(&mut self, offset: u64, data: &[u8]) {
        if self.negotiated.is_some_and(|features| !has(features, VIRTIO_BLK_F_CONFIG_WCE)) {
            return;
        }
        let byte = WRITEBACK.checked_sub(offset).and_then(|skip| data.get(usize::try_from(skip).ok()?));
        if let Some(byte) = byte {
            self.chosen = Some(*byte != 0);
            self.negotiated.iter().for_each(|features| self.settle_cache(*features));
        }
    }

    fn config_generation(&self) -> u8 {
        self.size.generation()
    }

    fn start(&mut self, start: Start) -> io::Result<Vec<Worker>> {
        let workers = self.workers(&start)?;
        self.negotiated = Some(start.features);
        if !has(start.features, VIRTIO_BLK_F_CONFIG_WCE) {
            self.chosen = None;
        }
        self.settle_cache(start.features);
        let shared = self.shared(&start);
        let workers = spawn_all(workers, &shared.complete, |worker| self.spawn(worker, &shared))?;
        self.size.set_driver(Some(start.interrupts));
        debug!("{}: {} queues over {}", self.spec.id, workers.len(), self.spec.path.display());
        Ok(workers)
    }

    fn reset(&mut self) {
        self.counted.was_reset();
        // Workers that are still ending keep their own setting.
        self.stable = Arc::new(AtomicBool::new(false));
        self.chosen = None;
        self.negotiated = None;
        self.size.set_driver(None);
    }

    fn save(&self) -> DeviceSpecific {
        let limits =
            self.limiter.as_ref().filter(|limiter| !limiter.is_full()).map_or(Vec::new(), RateLimitGroup::save);
        let state = BlockState { writeback: self.chosen, limits };
        if state == BlockState::default() { DeviceSpecific::PowerOn } else { DeviceSpecific::Block(state) }
    }

    fn restore(&mut self, state: &DeviceSpecific, started: Option<u64>) -> Result<(), StateError> {
        let none = BlockState::default();
        let BlockState { writeback, limits } = match state {
            DeviceSpecific::PowerOn => &none,
            DeviceSpecific::Block(state) => state,
            _ => return Err(StateError::Shape("kinds of device")),
        };
        let may_choose = started.is_none_or(|features| has(features, VIRTIO_BLK_F_CONFIG_WCE));
        if writeback.is_some() && !may_choose {
            return Err(StateError::Value("a disk's write cache"));
        }
        if !limits.is_empty() {
            let mut rest = &limits[..];
            self.limiter.iter().try_for_each(|limiter| limiter.restore(&mut rest))?;
            if !rest.is_empty() {
                return Err(StateError::Shape("rate limits"));
            }
        }
        self.chosen = *writeback;
        // Queues stopped for lack of bus mastering may stay stopped for long, and the driver can write the field in the
        // meantime.
        self.negotiated = started;
        Ok(())
    }
}
