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
use virtio_bindings::virtio_ids::VIRTIO_ID_RNG;

use crate::device::counters::Counted;
use crate::device::queue_worker;
use crate::device::worker::WorkerKind;
use crate::{ErrorKind, Start, VirtioDevice, Worker};
pub use counters::{RngCounter, RngCounters};
use filler::Filler;

/// The size of the only queue.
const QUEUE_SIZES: &[u16] = &[256];

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
    source: Arc<Mutex<OwnedFd>>,
    counted: Counted<RngCounters>,
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
        Ok(Self { source: Arc::new(Mutex::new(source)), counted: Counted::new(&spec.id) })
    }

    /// Id of the device.
    pub fn id(&self) -> &str {
        self.counted.id()
    }

    /// Counters of the device.
    pub fn counters(&self) -> Arc<RngCounters> {
        Arc::clone(self.counted.counters())
    }
}

impl VirtioDevice for Rng {
    fn device_type(&self) -> u16 {
        VIRTIO_ID_RNG as u16
    }

    fn queue_sizes(&self) -> &[u16] {
        QUEUE_SIZES
    }

    fn start(&mut self, start: Start) -> io::Result<Vec<Worker>> {
        let filler = Filler(Arc::clone(&self.source));
        queue_worker::start(filler, WorkerKind::Rng, self.counted.id(), start, self.counted.counters())
    }

    fn reset(&mut self) {
        self.counted.was_reset();
    }
}
