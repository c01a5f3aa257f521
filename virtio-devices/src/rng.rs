//! virtio-rng over a random source of the host (`virtio 1.4 §5.4`).

mod counters;
mod filler;
#[cfg(any(test, feature = "testing"))]
pub(crate) mod steps;

#[cfg(test)]
mod tests;

use std::io;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;

use parking_lot::Mutex;
use rustix::fs::{FileType, Mode, OFlags};
use thiserror::Error;
use virtio_bindings::virtio_config::VIRTIO_F_VERSION_1;
use virtio_bindings::virtio_ids::VIRTIO_ID_RNG;
use virtio_bindings::virtio_ring::{VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC};

use crate::device::config::ConfigField;
use crate::device::counters::{Losses, log_losses};
use crate::device::queue_worker;
use crate::device::worker::WorkerKind;
use crate::{ErrorKind, Start, VirtioDevice, Worker};
pub use counters::{RngCounter, RngCounters};
use filler::Filler;

/// Unassigned class.
const CLASS: [u8; 3] = [0xff, 0x00, 0x00];
/// The size of the only queue.
const QUEUE_SIZES: &[u16] = &[256];
const FEATURES: u64 = 1 << VIRTIO_F_VERSION_1 | 1 << VIRTIO_RING_F_INDIRECT_DESC | 1 << VIRTIO_RING_F_EVENT_IDX;

/// Description of an entropy device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RngSpec {
    /// Id, also the name of its thread.
    pub id: String,
    /// An endless source of random bytes, such as `/dev/urandom`.
    pub source: PathBuf,
}

/// Reason why an entropy device cannot be opened: one line, to follow the option's name.
#[derive(Debug, Error)]
pub enum RngError {
    /// The source cannot be read.
    #[error("src={}: cannot be opened: {error}; /dev/urandom is on every host", path.display())]
    Open {
        /// The source.
        path: PathBuf,
        /// Cause.
        error: io::Error,
    },
    /// The source would end.
    #[error("src={}: is not a device; give one that never ends, such as /dev/urandom", .0.display())]
    NotADevice(PathBuf),
    /// The source has ended, so that a guest's requests would never complete.
    #[error("src={}: has no bytes; give a source that never ends, such as /dev/urandom", .0.display())]
    Empty(PathBuf),
}

impl RngError {
    /// Class of the error.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::Open { error, .. } if error.kind() == io::ErrorKind::NotFound => ErrorKind::Missing,
            Self::Open { .. } | Self::NotADevice(_) | Self::Empty(_) => ErrorKind::Unsuitable,
        }
    }
}

/// A virtio entropy device.
pub struct Rng {
    spec: RngSpec,
    source: Arc<Mutex<OwnedFd>>,
    counters: Arc<RngCounters>,
    losses: Losses,
}

impl Rng {
    /// Opens the source.
    ///
    /// # Errors
    ///
    /// Fails if the source cannot be read, or has ended.
    pub fn open(spec: RngSpec) -> Result<Self, RngError> {
        let fail = |errno: rustix::io::Errno| RngError::Open { path: spec.source.clone(), error: errno.into() };
        // An empty source must not keep the worker from ending.
        let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK;
        let source = rustix::fs::open(&spec.source, flags, Mode::empty()).map_err(fail)?;
        let stat = rustix::fs::fstat(&source).map_err(fail)?;
        if FileType::from_raw_mode(stat.st_mode) != FileType::CharacterDevice {
            return Err(RngError::NotADevice(spec.source));
        }
        // A source without data now may have some later.
        if rustix::io::read(&source, &mut [0; 1]) == Ok(0) {
            return Err(RngError::Empty(spec.source));
        }
        let counters = Arc::new(RngCounters::new());
        Ok(Self { spec, source: Arc::new(Mutex::new(source)), counters, losses: Losses::default() })
    }

    /// Id of the device.
    pub fn id(&self) -> &str {
        &self.spec.id
    }

    /// Counters of the device.
    pub fn counters(&self) -> Arc<RngCounters> {
        Arc::clone(&self.counters)
    }
}

impl VirtioDevice for Rng {
    fn device_type(&self) -> u16 {
        VIRTIO_ID_RNG as u16
    }

    fn class(&self) -> [u8; 3] {
        CLASS
    }

    fn features(&self) -> u64 {
        FEATURES
    }

    fn queue_sizes(&self) -> &[u16] {
        QUEUE_SIZES
    }
    fn config_fields(&self) -> &'static [ConfigField] {
        &[]
    }

    /// There is no configuration (`virtio 1.4 §5.4.4`).
    fn config_read(&self, _offset: u64, data: &mut [u8]) {
        data.fill(0);
    }

    fn config_write(&mut self, _offset: u64, _data: &[u8]) {}

    fn config_generation(&self) -> u8 {
        0
    }

    fn start(&mut self, start: Start) -> io::Result<Vec<Worker>> {
        let filler = Filler(Arc::clone(&self.source));
        queue_worker::start(filler, WorkerKind::Rng, &self.spec.id, start, &self.counters)
    }

    fn reset(&mut self) {
        log_losses(&self.spec.id, self.losses.doubled(&self.counters.losses()));
    }
}

impl Drop for Rng {
    fn drop(&mut self) {
        log_losses(&self.spec.id, self.losses.untold(&self.counters.losses()));
    }
}
