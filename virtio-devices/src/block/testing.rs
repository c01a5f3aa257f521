//! A disk with running workers, and its driver.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

use parking_lot::Mutex;
use vm_memory::{Bytes, GuestAddress};

use super::counters::BlockCounter;
use super::image::Image;
use super::image::access::Access;
use super::{Block, BlockError, BlockSize, BlockSpec};
pub(crate) use crate::testing::driver_queue::{BUFFERS, DriverQueue, MEMORY, WRITE, eventually, memory};
use crate::testing::guest;
use crate::{DmaSpace, RateLimits, Translate, VirtioDevice};

/// The size of the image in bytes.
pub(crate) const SIZE: usize = 1 << 20;
/// Address in guest memory of a request's header and status.
pub(crate) const HEADER_AT: u64 = BUFFERS - 0x1000;
pub(crate) const STATUS_AT: u64 = BUFFERS - 0x800;
pub(crate) const OK: u8 = 0;
pub(crate) const IOERR: u8 = 1;
pub(crate) const UNSUPP: u8 = 2;

/// With and without io_uring. Where the kernel refuses io_uring, both are the same.
pub(crate) const ENGINES: [bool; 2] = [true, false];

/// A new process inherits the files of all tests, with their locks, until some time after its exec: Linux wakes the
/// parent before it closes them. So this lock is held until the process has ended.
pub(crate) static SPAWNING: Mutex<()> = Mutex::new(());

/// Opens an image that may have been open a moment ago.
pub(crate) fn open_image(path: &Path, access: Access) -> Result<Image, BlockError> {
    let _spawning = SPAWNING.lock();
    Image::open(path, access)
}

/// A disk, with the file of its image.
pub(crate) type Guest = guest::Guest<Block, tempfile::NamedTempFile>;

pub(crate) fn spec(io_uring: bool) -> BlockSpec {
    BlockSpec {
        id: "_disk0".into(),
        path: "".into(),
        read_only: false,
        direct: false,
        format: super::ImageFormat::Unknown,
        sparse: true,
        lock: Default::default(),
        queues: 1,
        queue_size: 64,
        serial: Some("serial-1".into()),
        limits: RateLimits::default(),
        limit_group: None,
        io_uring,
        queue_cpus: Vec::new(),
    }
}

impl Guest {
    pub(crate) fn new(io_uring: bool) -> Self {
        Self::with(spec(io_uring))
    }

    /// Starts a disk over an image of [`SIZE`] bytes.
    pub(crate) fn with(spec: BlockSpec) -> Self {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(SIZE as u64).unwrap();
        let block = Block::open(BlockSpec { path: file.path().into(), ..spec }).unwrap();
        let sizes = block.queue_sizes().to_vec();
        let mut guest = Self::stopped(block, file, &memory(), &sizes);
        guest.start();
        guest
    }

    /// Starts the stopped disk behind an IOMMU.
    pub(crate) fn start_behind(&mut self, iommu: Arc<dyn Translate>) {
        self.start_in(DmaSpace::translated(self.memory.clone(), iommu), self.device.features());
    }

    /// Makes the stopped disk align its transfers as for direct I/O, which some file systems here do not support.
    pub(crate) fn align(&mut self, alignment: usize) {
        self.change_image(|image| image.alignment = alignment);
    }

    /// Changes the image of the stopped disk.
    pub(crate) fn change_image(&mut self, change: impl FnOnce(&mut Image)) {
        let other = tempfile::NamedTempFile::new().unwrap();
        other.as_file().set_len(512).unwrap();
        let other = Block::open(BlockSpec { path: other.path().into(), ..spec(false) }).unwrap();
        self.device.size = other.size();
        change(Arc::get_mut(&mut self.device.image).unwrap());
        self.device.size = BlockSize::new(Arc::clone(&self.device.image));
    }

    pub(crate) fn count(&self, counter: BlockCounter) -> u64 {
        self.device.counters().get(counter)
    }

    pub(crate) fn image(&self) -> Vec<u8> {
        read_all(self.host.as_file())
    }

    pub(crate) fn put(&self, at: u64, data: &[u8]) {
        self.queues[0].memory.write_slice(data, GuestAddress(at)).unwrap();
    }

    pub(crate) fn put_header(&self, kind: u32, sector: u64) {
        self.put(HEADER_AT, &header(kind, sector));
        self.put(STATUS_AT, &[0xee]);
    }

    /// Executes a request with these data buffers, and returns the status and the used length.
    pub(crate) fn request(&mut self, kind: u32, sector: u64, data: &[(u64, u32, u16)]) -> (u8, u32) {
        self.put_header(kind, sector);
        let chain = [&[(HEADER_AT, 16, 0)], data, &[(STATUS_AT, 1, WRITE)]].concat();
        let len = self.send(&chain);
        (self.queues[0].bytes(STATUS_AT, 1)[0], len)
    }

    pub(crate) fn write(&mut self, sector: u64, data: &[u8]) -> (u8, u32) {
        self.put(BUFFERS, data);
        self.request(1, sector, &[(BUFFERS, data.len() as u32, 0)])
    }

    pub(crate) fn read(&mut self, sector: u64, len: usize) -> (u8, Vec<u8>) {
        let (status, used) = self.request(0, sector, &[(BUFFERS, len as u32, WRITE)]);
        if status == OK {
            assert_eq!(used as usize, len + 1);
        }
        (status, self.queues[0].bytes(BUFFERS, len))
    }
}

pub(crate) fn read_all(file: &File) -> Vec<u8> {
    let mut data = vec![0; file.metadata().unwrap().len() as usize];
    file.read_exact_at(&mut data, 0).unwrap();
    data
}

pub(crate) fn header(kind: u32, sector: u64) -> [u8; 16] {
    let mut header = [0; 16];
    header[..4].copy_from_slice(&kind.to_le_bytes());
    header[8..].copy_from_slice(&sector.to_le_bytes());
    header
}

/// The segment of a discard or write zeroes request.
pub(crate) fn segment(sector: u64, count: u32, flags: u32) -> [u8; 16] {
    let mut segment = [0; 16];
    segment[..8].copy_from_slice(&sector.to_le_bytes());
    segment[8..12].copy_from_slice(&count.to_le_bytes());
    segment[12..].copy_from_slice(&flags.to_le_bytes());
    segment
}

/// `len` bytes that differ by position.
pub(crate) fn pattern(len: usize, seed: u8) -> Vec<u8> {
    (0..len).map(|i| (i % 251) as u8 ^ seed).collect()
}
