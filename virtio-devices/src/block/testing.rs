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
pub(crate) use crate::net::testing::{BUFFERS, DriverQueue, MEMORY, WRITE, eventually, memory};
use crate::{DmaSpace, Interrupts, Memory, RateLimits, Start, Translate, VirtioDevice, Worker};

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

pub(crate) struct Guest {
    pub block: Block,
    pub file: tempfile::NamedTempFile,
    pub queues: Vec<DriverQueue>,
    pub interrupts: Arc<Interrupts>,
    pub workers: Vec<Worker>,
    pub memory: Memory,
}

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
        let map = memory();
        let count = block.queue_sizes().len() as u16;
        let interrupts = Arc::new(Interrupts::new(count, count + 1));
        (0..count).for_each(|queue| interrupts.set_queue_vector(queue, queue));
        interrupts.set_config_vector(count);
        let queues = block.queue_sizes().iter().enumerate();
        let queues = queues.map(|(index, size)| DriverQueue::new(&map, index as u16, *size)).collect();
        let mut guest = Self { block, file, queues, interrupts, workers: Vec::new(), memory: Memory::new(map) };
        guest.start(guest.block.features());
        guest
    }

    pub(crate) fn start(&mut self, features: u64) {
        self.start_in(self.memory.clone().into(), features);
    }

    /// Starts the stopped disk behind an IOMMU.
    pub(crate) fn start_behind(&mut self, iommu: Arc<dyn Translate>) {
        self.start_in(DmaSpace::translated(self.memory.clone(), iommu), self.block.features());
    }

    fn start_in(&mut self, memory: DmaSpace, features: u64) {
        let queues = self.queues.iter().enumerate().map(|(i, queue)| (i as u16, Arc::clone(&queue.queue))).collect();
        let interrupts = Arc::clone(&self.interrupts);
        self.workers = self.block.start(Start { memory, features, queues, interrupts }).unwrap();
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
        self.block.size = other.size();
        change(Arc::get_mut(&mut self.block.image).unwrap());
        self.block.size = BlockSize::new(Arc::clone(&self.block.image));
    }

    pub(crate) fn stop(&mut self) {
        for worker in self.workers.drain(..) {
            worker.stop().join().unwrap();
        }
    }

    pub(crate) fn kick(&self, queue: u16) {
        let mut doorbells = self.workers.iter().flat_map(|worker| &worker.doorbells);
        doorbells.find(|(index, _)| *index == queue).unwrap().1.write(1).unwrap();
    }

    pub(crate) fn count(&self, counter: BlockCounter) -> u64 {
        self.block.counters().get(counter)
    }

    pub(crate) fn image(&self) -> Vec<u8> {
        read_all(self.file.as_file())
    }

    pub(crate) fn put(&self, at: u64, data: &[u8]) {
        self.queues[0].memory.write_slice(data, GuestAddress(at)).unwrap();
    }

    /// Makes a chain available to queue 0, and returns its used length.
    pub(crate) fn run(&mut self, buffers: &[(u64, u32, u16)]) -> u32 {
        let head = self.queues[0].add(buffers);
        self.kick(0);
        self.wait_used(0, 1)
            .iter()
            .map(|(used, len)| (*used == u32::from(head)).then_some(*len))
            .sum::<Option<u32>>()
            .unwrap()
    }

    pub(crate) fn wait_used(&mut self, queue: usize, count: usize) -> Vec<(u32, u32)> {
        let mut used = Vec::new();
        let queue = &mut self.queues[queue];
        eventually("completion", || {
            used.extend(queue.take_used());
            used.len() >= count
        });
        used
    }

    pub(crate) fn put_header(&self, kind: u32, sector: u64) {
        self.put(HEADER_AT, &header(kind, sector));
        self.put(STATUS_AT, &[0xee]);
    }

    /// Executes a request with these data buffers, and returns the status and the used length.
    pub(crate) fn request(&mut self, kind: u32, sector: u64, data: &[(u64, u32, u16)]) -> (u8, u32) {
        self.put_header(kind, sector);
        let chain = [&[(HEADER_AT, 16, 0)], data, &[(STATUS_AT, 1, WRITE)]].concat();
        let len = self.run(&chain);
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

impl Drop for Guest {
    fn drop(&mut self) {
        self.stop();
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
