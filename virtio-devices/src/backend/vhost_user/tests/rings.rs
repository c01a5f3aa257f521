//! The rings as a peer sees them: mapped by itself, named by addresses of another process.

use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use virtio_queue::{Queue, QueueT};
use vm_memory::{Bytes, FileOffset, GuestAddress, GuestMemoryBackend, GuestMemoryRegion};

use super::super::message::{u32_at, u64_at};
use crate::{GuestMap, GuestRegion};

/// A ring, as far as it is known.
#[derive(Default)]
pub(crate) struct PeerRing {
    pub size: u16,
    pub base: u16,
    /// Descriptor table, available ring, used ring.
    pub addresses: [u64; 3],
    pub call: Option<OwnedFd>,
    pub error: Option<OwnedFd>,
    pub enabled: bool,
    /// The guest address of the used ring, where that is logged.
    pub log: Option<u64>,
    kick: Option<OwnedFd>,
    queue: Option<Queue>,
}

/// The region that is described at the start of `at`.
fn region(at: &[u8], file: OwnedFd) -> GuestRegion {
    let [address, size, _, offset] = [0, 8, 16, 24].map(|field| u64_at(at, field).unwrap());
    let file = FileOffset::new(File::from(file), offset);
    GuestRegion::from_range(GuestAddress(address), size as usize, Some(file)).unwrap()
}

/// All rings of a peer, and the memory that they are in.
pub(crate) struct Rings {
    rings: Vec<PeerRing>,
    memory: Option<GuestMap>,
    /// What an address of the other process is more than the guest's.
    offset: u64,
    /// The device status.
    pub status: u64,
    /// Where pages that are written are noted.
    pub log: Option<File>,
    /// Whether they are.
    pub logs: bool,
}

impl Rings {
    pub(crate) fn new(queues: usize) -> Self {
        Self {
            rings: (0..queues).map(|_| PeerRing::default()).collect(),
            memory: None,
            offset: 0,
            status: 0,
            log: None,
            logs: false,
        }
    }

    /// Changes a ring. One that does not exist is a bug of the test's or of the frontend's.
    pub(crate) fn set(&mut self, index: u32, change: impl FnOnce(&mut PeerRing)) -> Option<Vec<u8>> {
        change(&mut self.rings[index as usize]);
        None
    }

    /// Maps guest memory. The rings are in its first region.
    pub(crate) fn map(&mut self, table: &[u8], files: Vec<OwnedFd>) {
        assert_eq!(u32_at(table, 0).map(|regions| regions as usize), Some(files.len()));
        let regions: Vec<_> = files.into_iter().zip(table[8..].chunks(32)).map(|(file, at)| region(at, file)).collect();
        self.memory = Some(GuestMap::from_regions(regions).unwrap());
        self.offset = u64_at(table, 24).unwrap() - u64_at(table, 8).unwrap();
    }

    /// Maps one more region.
    pub(crate) fn add(&mut self, payload: &[u8], file: OwnedFd) {
        assert_eq!((payload.len(), u64_at(payload, 0)), (40, Some(0)));
        let region = Arc::new(region(&payload[8..], file));
        let memory = self.memory.as_ref().expect("the table comes before further regions");
        self.memory = Some(memory.insert_region(region).unwrap());
    }

    /// Where each region of guest memory is, and its length.
    pub(crate) fn regions(&self) -> Vec<(u64, u64)> {
        let memory = self.memory.iter().flat_map(GuestMap::iter);
        memory.map(|region| (region.start_addr().0, region.len())).collect()
    }

    /// Starts a ring with its doorbell.
    pub(crate) fn start(&mut self, index: usize, kick: OwnedFd) {
        let memory = self.memory.as_ref().expect("memory comes before rings start");
        let ring = &mut self.rings[index];
        assert!(ring.call.is_some() && ring.size > 0, "a ring is complete when it starts");
        let [descriptors, available, used] = ring.addresses.map(|address| (address - self.offset) as u32);
        let mut queue = Queue::new(ring.size).unwrap();
        queue.set_desc_table_address(Some(descriptors), None);
        queue.set_avail_ring_address(Some(available), None);
        queue.set_used_ring_address(Some(used), None);
        queue.set_next_avail(ring.base);
        queue.set_next_used(memory.read_obj(GuestAddress(u64::from(used) + 2)).unwrap());
        queue.set_ready(true);
        (ring.kick, ring.queue) = (Some(kick), Some(queue));
    }

    /// Stops a ring, and returns where it goes on.
    pub(crate) fn stop(&mut self, index: u32) -> u16 {
        let ring = &mut self.rings[index as usize];
        assert!(!ring.enabled, "a ring is disabled before it is stopped");
        (ring.kick, ring.call) = (None, None);
        ring.queue.take().unwrap().next_avail()
    }

    /// Whether none runs.
    pub(crate) fn are_stopped(&self) -> bool {
        self.rings.iter().all(|ring| ring.queue.is_none())
    }

    /// The doorbells that matter now.
    pub(crate) fn kicks(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.rings.iter().filter(|ring| ring.enabled).filter_map(|ring| ring.kick.as_ref()).map(AsFd::as_fd)
    }

    pub(crate) fn can_receive(&self) -> bool {
        self.rings.first().is_some_and(|ring| ring.enabled && ring.queue.is_some())
    }

    pub(crate) fn call_broken(&self) {
        rustix::io::write(self.rings[0].error.as_ref().unwrap(), &1u64.to_ne_bytes()).unwrap();
    }

    /// Carries frames between the wire and those rings that are enabled. Returns how many buffers were taken to be
    /// kept.
    pub(crate) fn carry(&mut self, wire: BorrowedFd<'_>, keeps_buffers: bool) -> usize {
        let Some(memory) = &self.memory else { return 0 };
        let log = Log(self.log.as_ref().filter(|_| self.logs));
        let mut kept = 0;
        for (index, ring) in self.rings.iter_mut().enumerate().filter(|(_, ring)| ring.enabled) {
            let Some(queue) = &mut ring.queue else { continue };
            let _ = rustix::io::read(ring.kick.as_ref().unwrap(), &mut [0; 8]);
            let done = match index {
                0 => fill(queue, memory, wire, log, ring.log),
                index if index % 2 == 1 && keeps_buffers => {
                    kept += std::iter::from_fn(|| queue.pop_descriptor_chain(memory)).count();
                    false
                }
                index if index % 2 == 1 => send(queue, memory, wire),
                _ => false,
            };
            if done {
                rustix::io::write(ring.call.as_ref().unwrap(), &1u64.to_ne_bytes()).unwrap();
            }
        }
        kept
    }
}

/// The log, as far as pages are noted.
#[derive(Clone, Copy)]
struct Log<'l>(Option<&'l File>);

impl Log<'_> {
    /// Notes the page at `address`, by the file: nobody else writes to it in these tests but who takes the notes.
    fn note(self, address: u64) {
        let Some(file) = self.0 else { return };
        let (page, mut byte) = (address / 4096, [0]);
        file.read_exact_at(&mut byte, page / 8).unwrap();
        file.write_all_at(&[byte[0] | 1 << (page % 8)], page / 8).unwrap();
    }
}

/// Writes frames that have come to the driver's buffers.
fn fill(queue: &mut Queue, memory: &GuestMap, wire: BorrowedFd<'_>, log: Log<'_>, used: Option<u64>) -> bool {
    let mut done = false;
    while queue.avail_idx(memory, std::sync::atomic::Ordering::Acquire).unwrap().0 != queue.next_avail() {
        let mut frame = vec![0; 4096];
        let Ok(len) = rustix::io::read(wire, &mut frame) else { break };
        let chain = queue.pop_descriptor_chain(memory).unwrap();
        let (head, mut rest) = (chain.head_index(), &frame[..len]);
        for descriptor in chain {
            let piece = rest.len().min(descriptor.len() as usize);
            memory.write_slice(&rest[..piece], descriptor.addr()).unwrap();
            log.note(descriptor.addr().0);
            rest = &rest[piece..];
        }
        assert!(rest.is_empty(), "the frame fits");
        queue.add_used(memory, head, len as u32).unwrap();
        used.into_iter().for_each(|used| log.note(used));
        done = true;
    }
    done
}

/// Sends the frames that the driver has made available.
fn send(queue: &mut Queue, memory: &GuestMap, wire: BorrowedFd<'_>) -> bool {
    let mut done = false;
    while let Some(chain) = queue.pop_descriptor_chain(memory) {
        let (head, mut frame) = (chain.head_index(), Vec::new());
        for descriptor in chain {
            let mut piece = vec![0; descriptor.len() as usize];
            memory.read_slice(&mut piece, descriptor.addr()).unwrap();
            frame.extend(piece);
        }
        rustix::io::write(wire, &frame).unwrap();
        queue.add_used(memory, head, 0).unwrap();
        done = true;
    }
    done
}
