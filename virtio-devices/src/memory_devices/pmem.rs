//! virtio-pmem: a file of the host as persistent memory of the guest (`virtio 1.4 §5.19`).
//!
//! The guest accesses the file's pages as memory, without an exit. Its only requests to the device are flushes, which
//! write the pages to the medium.
//!
//! The memory is a BAR of the device, and the configuration has its present address. So it moves with the BAR, is
//! placed like all BARs, and disappears with the device. Drivers need only this: they take address and size from the
//! configuration.

mod counters;
mod error;
mod flushes;
mod spec;

#[cfg(test)]
mod tests;

use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::fs::{FileType, Mode, OFlags, SeekFrom};
use rustix::process::{Resource, getrlimit};
use virtio_bindings::virtio_ids::VIRTIO_ID_PMEM;

use crate::block::StorageLock;
use crate::device::config::{ConfigField, Rule, read};
use crate::device::counters::Counted;
use crate::device::queue_worker;
use crate::device::worker::WorkerKind;
use crate::memory::file_mapping::FileMapping;
use crate::{Start, VirtioDevice, Worker};
pub use counters::{PmemCounter, PmemCounters};
pub use error::PmemError;
use flushes::Flushes;
pub use spec::PmemSpec;

/// The device configuration (`virtio 1.4 §5.19.4`). `start` is derived from the saved BAR.
pub(crate) const FIELDS: &[ConfigField] =
    &[ConfigField::new("start", 0, 8, Rule::Saved), ConfigField::new("size", 8, 8, Rule::Same)];
/// The size of the only queue.
const QUEUE_SIZES: &[u16] = &[256];

/// A virtio persistent memory device.
pub struct Pmem {
    path: PathBuf,
    memory: Arc<FileMapping>,
    /// File that a flush writes to the medium; `None` if there is nothing to flush.
    file: Option<Arc<OwnedFd>>,
    counted: Counted<PmemCounters>,
}

impl Pmem {
    /// Opens and maps the file.
    ///
    /// # Errors
    ///
    /// Fails if the file cannot be used, or does not have the size. A temporary file is removed then.
    pub fn open(spec: PmemSpec) -> Result<Self, PmemError> {
        let path = &spec.file;
        let (file, size) = open(&spec)?;
        if size == 0 || size > PmemSpec::MOST || !size.is_multiple_of(PmemSpec::UNIT) {
            return Err(PmemError::Size { path: path.clone(), size });
        }
        let memory = FileMapping::new(&file, size, spec.discard_writes).map_err(|error| PmemError::File {
            path: path.clone(),
            action: "mapped",
            error,
        })?;
        Ok(Self {
            counted: Counted::new(&spec.id),
            path: spec.file,
            memory: Arc::new(memory),
            file: (!spec.discard_writes).then(|| Arc::new(file)),
        })
    }

    /// Id of the device.
    pub fn id(&self) -> &str {
        self.counted.id()
    }

    /// The file that the guest writes, if it does.
    pub fn storage_lock(&self) -> Option<StorageLock> {
        self.file.as_ref().map(|file| StorageLock::of_memory(Arc::clone(file), self.path.clone()))
    }

    /// Counters of the device.
    pub fn counters(&self) -> Arc<PmemCounters> {
        Arc::clone(self.counted.counters())
    }
}

/// Opens the file, and returns the number of bytes to map.
fn open(spec: &PmemSpec) -> Result<(OwnedFd, u64), PmemError> {
    let path = spec.file.as_path();
    let fail =
        |action| move |errno: rustix::io::Errno| PmemError::File { path: path.into(), action, error: errno.into() };
    let is_folder = rustix::fs::stat(path)
        .map(|stat| FileType::from_raw_mode(stat.st_mode) == FileType::Directory)
        .map_err(fail("opened"))?;
    if is_folder {
        let size = spec.size.ok_or_else(|| PmemError::Folder(path.into()))?;
        return temporary(path, size).map(|file| (file, size));
    }
    let access = if spec.discard_writes { OFlags::RDONLY } else { OFlags::RDWR };
    // Does not block, as a FIFO would: such a file is refused anyway.
    let file =
        rustix::fs::open(path, access | OFlags::CLOEXEC | OFlags::NONBLOCK, Mode::empty()).map_err(fail("opened"))?;
    let stat = rustix::fs::fstat(&file).map_err(fail("opened"))?;
    if !matches!(FileType::from_raw_mode(stat.st_mode), FileType::RegularFile | FileType::BlockDevice) {
        return Err(PmemError::Kind(path.into()));
    }
    let len = rustix::fs::seek(&file, SeekFrom::End(0)).map_err(fail("asked for its size"))?;
    match spec.size {
        Some(size) if size > len => Err(PmemError::TooShort { path: path.into(), size, len }),
        size => Ok((file, size.unwrap_or(len))),
    }
}

/// An unnamed temporary file of `size` bytes in `folder`, deleted with its last descriptor.
fn temporary(folder: &Path, size: u64) -> Result<OwnedFd, PmemError> {
    let fail = |action, error| PmemError::File { path: folder.into(), action, error };
    let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
    let file = rustix::fs::open(folder, flags, Mode::RUSR | Mode::WUSR)
        .map_err(|errno| fail("used for a temporary file", errno.into()))?;
    // The kernel would kill a process that exceeds its limit.
    if getrlimit(Resource::Fsize).current.is_some_and(|limit| size > limit) {
        return Err(fail("used for a file of this size", io::ErrorKind::FileTooLarge.into()));
    }
    rustix::fs::ftruncate(&file, size).map_err(|errno| fail("used for a file of this size", errno.into()))?;
    Ok(file)
}

impl VirtioDevice for Pmem {
    fn device_type(&self) -> u16 {
        VIRTIO_ID_PMEM as u16
    }

    fn queue_sizes(&self) -> &[u16] {
        QUEUE_SIZES
    }

    fn promises(&self) -> Vec<(&'static str, String)> {
        let discards = if self.file.is_some() { "off" } else { "on" };
        vec![("discard_writes", discards.to_string())]
    }

    fn config_fields(&self) -> &'static [ConfigField] {
        FIELDS
    }

    /// While the BAR is not placed, `start` is 0.
    fn config_read(&self, offset: u64, data: &mut [u8]) {
        self.placed_config_read(0, offset, data);
    }

    /// `start` and `size` (`virtio 1.4 §5.19.4`).
    fn placed_config_read(&self, start: u64, offset: u64, data: &mut [u8]) {
        let config = [start, self.memory.len()].map(u64::to_le_bytes);
        read(config.as_flattened(), offset, data);
    }

    fn memory(&self) -> Option<&Arc<FileMapping>> {
        Some(&self.memory)
    }

    fn start(&mut self, start: Start) -> io::Result<Vec<Worker>> {
        queue_worker::start(
            Flushes(self.file.clone()),
            WorkerKind::Flush,
            self.counted.id(),
            start,
            self.counted.counters(),
        )
    }

    fn reset(&mut self) {
        self.counted.was_reset();
    }
}
