//! The rings as a peer sees them: mapped by itself, at addresses of another process or at the driver's I/O addresses.

use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use virtio_queue::desc::split::Descriptor;
use virtio_queue::{Queue, QueueT};
use vm_memory::{Bytes, FileOffset, GuestAddress, GuestMemory, GuestMemoryBackend, GuestMemoryRegion, Permissions};

use super::super::message::{u32_at, u64_at};
use super::iotlb::Iotlb;
use crate::backend::iotlb::Miss;
use crate::memory::Translate;
use crate::{DmaSpace, DmaView, GuestMap, GuestRegion, Memory};

/// A ring, as far as it is set up.
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

/// The address of the region described at the start of `at` in the other process, its length, and its address in the
/// guest.
fn place(at: &[u8]) -> [u64; 3] {
    [16, 8, 0].map(|field| u64_at(at, field).unwrap())
}

/// All rings of a peer, and the memory that they are in.
pub(crate) struct Rings {
    rings: Vec<PeerRing>,
    memory: Option<GuestMap>,
    /// The difference of an address in the other process and in the guest, for the first region.
    offset: u64,
    /// The addresses of regions in the other process, their lengths, and their addresses in the guest.
    places: Vec<[u64; 3]>,
    /// The device status.
    pub status: u64,
    /// The log of written pages.
    pub log: Option<File>,
    /// True if writes are logged.
    pub logs: bool,
    /// The translations, if there are any.
    pub iotlb: Option<Arc<Iotlb>>,
}

impl Rings {
    pub(crate) fn new(queues: usize) -> Self {
        Self {
            rings: (0..queues).map(|_| PeerRing::default()).collect(),
            memory: None,
            offset: 0,
            places: Vec::new(),
            status: 0,
            log: None,
            logs: false,
            iotlb: None,
        }
    }

    /// Changes a ring. A missing ring is a bug of the test or of the frontend.
    pub(crate) fn set(&mut self, index: u32, change: impl FnOnce(&mut PeerRing)) -> Option<Vec<u8>> {
        change(&mut self.rings[index as usize]);
        None
    }

    /// Maps guest memory. The rings are in its first region.
    pub(crate) fn map(&mut self, table: &[u8], files: Vec<OwnedFd>) {
        assert_eq!(u32_at(table, 0).map(|regions| regions as usize), Some(files.len()));
        let regions: Vec<_> = files.into_iter().zip(table[8..].chunks(32)).map(|(file, at)| region(at, file)).collect();
        self.memory = Some(GuestMap::from_regions(regions).unwrap());
        self.places = table[8..].chunks(32).map(place).collect();
        self.offset = u64_at(table, 24).unwrap() - u64_at(table, 8).unwrap();
    }

    /// Maps one more region.
    pub(crate) fn add(&mut self, payload: &[u8], file: OwnedFd) {
        assert_eq!((payload.len(), u64_at(payload, 0)), (40, Some(0)));
        self.places.push(place(&payload[8..]));
        let region = Arc::new(region(&payload[8..], file));
        let memory = self.memory.as_ref().expect("the table comes before further regions");
        self.memory = Some(memory.insert_region(region).unwrap());
    }

    /// The address and the length of each region of guest memory.
    pub(crate) fn regions(&self) -> Vec<(u64, u64)> {
        let memory = self.memory.iter().flat_map(GuestMap::iter);
        memory.map(|region| (region.start_addr().0, region.len())).collect()
    }

    /// Starts a ring with its doorbell.
    pub(crate) fn start(&mut self, index: usize, kick: OwnedFd) {
        let space = self.space().expect("memory comes before rings start");
        let offset = if self.iotlb.is_some() { 0 } else { self.offset };
        let ring = &mut self.rings[index];
        assert!(ring.call.is_some() && ring.size > 0, "a ring is complete when it starts");
        let [descriptors, available, used] = ring.addresses.map(|address| address - offset);
        let halves = |address: u64| (Some(address as u32), Some((address >> 32) as u32));
        let mut queue = Queue::new(ring.size).unwrap();
        queue.set_desc_table_address(halves(descriptors).0, halves(descriptors).1);
        queue.set_avail_ring_address(halves(available).0, halves(available).1);
        queue.set_used_ring_address(halves(used).0, halves(used).1);
        queue.set_next_avail(ring.base);
        // It has the rings' translations before they start.
        queue.set_next_used(space.pass().read_obj(GuestAddress(used + 2)).unwrap());
        queue.set_ready(true);
        (ring.kick, ring.queue) = (Some(kick), Some(queue));
    }

    /// The address space of rings and buffers.
    fn space(&self) -> Option<DmaSpace> {
        let memory = Memory::new(self.memory.clone()?);
        Some(match &self.iotlb {
            Some(iotlb) => DmaSpace::translated(memory, Arc::clone(iotlb) as Arc<dyn Translate>),
            None => memory.into(),
        })
    }

    /// Adds or removes a translation.
    pub(crate) fn learn(&self, payload: &[u8]) -> String {
        self.iotlb.as_ref().expect("the feature was agreed on").learn(payload, |host| {
            let of = |[start, len, at]: &[u64; 3]| {
                Some(host.wrapping_sub(*start)).filter(|off| off < len).map(|off| at + off)
            };
            self.places.iter().find_map(of).expect("an address in the memory table")
        })
    }

    /// Takes the misses to send.
    pub(crate) fn misses(&self) -> Vec<Miss> {
        self.iotlb.as_ref().map(|iotlb| iotlb.misses()).unwrap_or_default()
    }

    /// Stops a ring, and returns its position.
    pub(crate) fn stop(&mut self, index: u32) -> u16 {
        let ring = &mut self.rings[index as usize];
        assert!(!ring.enabled, "a ring is disabled before it is stopped");
        (ring.kick, ring.call) = (None, None);
        ring.queue.take().unwrap().next_avail()
    }

    /// True if no ring runs.
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

    /// Moves frames between the wire and the enabled rings. Returns the number of buffers that were taken and kept.
    pub(crate) fn carry(&mut self, wire: BorrowedFd<'_>, keeps_buffers: bool) -> usize {
        let Some(space) = self.space() else { return 0 };
        let memory = &*space.pass();
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

/// The log, if writes are logged.
#[derive(Clone, Copy)]
struct Log<'l>(Option<&'l File>);

impl Log<'_> {
    /// Marks the page at `address`, through the file: in these tests nothing else writes to it.
    fn note(self, address: u64) {
        let Some(file) = self.0 else { return };
        let (page, mut byte) = (address / 4096, [0]);
        file.read_exact_at(&mut byte, page / 8).unwrap();
        file.write_all_at(&[byte[0] | 1 << (page % 8)], page / 8).unwrap();
    }
}

/// Writes frames that have come to the driver's buffers.
fn fill(queue: &mut Queue, memory: &DmaView, wire: BorrowedFd<'_>, log: Log<'_>, used: Option<u64>) -> bool {
    let mut done = false;
    while let Some((head, buffers)) = take(queue, memory) {
        let mut frame = vec![0; 4096];
        let Ok(len) = rustix::io::read(wire, &mut frame) else {
            queue.set_next_avail(queue.next_avail().wrapping_sub(1));
            break;
        };
        let mut rest = &frame[..len];
        for descriptor in buffers {
            let piece = rest.len().min(descriptor.len() as usize);
            memory.write_slice(&rest[..piece], descriptor.addr()).unwrap();
            log.note(found(memory, descriptor.addr().0));
            rest = &rest[piece..];
        }
        assert!(rest.is_empty(), "the frame fits");
        queue.add_used(memory, head, len as u32).unwrap();
        used.into_iter().for_each(|used| log.note(found(memory, used)));
        done = true;
    }
    done
}

/// The guest physical address of a write.
fn found(memory: &DmaView, address: u64) -> u64 {
    let mut slices = memory.get_slices(GuestAddress(address), 1, Permissions::Write).unwrap();
    let slice = slices.next().unwrap().unwrap();
    let host = slice.ptr_guard().as_ptr() as u64;
    let mut regions = memory.map().iter();
    let region = regions.find(|region| host.wrapping_sub(region.as_ptr() as u64) < region.len()).unwrap();
    region.start_addr().0 + (host - region.as_ptr() as u64)
}

/// The next chain, if all of it and of the rings is mapped. Otherwise a miss is sent, and the chain is taken when the
/// mapping has arrived.
fn take(queue: &mut Queue, memory: &DmaView) -> Option<(u16, Vec<Descriptor>)> {
    let within = |(at, len): (u64, u64), access| memory.check_range(GuestAddress(at), len as usize, access);
    let [descriptors, available, used] = crate::queue::ring::areas(queue.size());
    if !within((queue.desc_table(), descriptors), Permissions::Read)
        || !within((queue.avail_ring(), available), Permissions::Read)
        || !within((queue.used_ring(), used), Permissions::Write)
    {
        return None;
    }
    let chain = queue.pop_descriptor_chain(memory)?;
    let (head, buffers) = (chain.head_index(), chain.collect::<Vec<_>>());
    let access = |buffer: &Descriptor| if buffer.is_write_only() { Permissions::Write } else { Permissions::Read };
    if buffers.iter().all(|buffer| within((buffer.addr().0, buffer.len().into()), access(buffer))) {
        return Some((head, buffers));
    }
    queue.set_next_avail(queue.next_avail().wrapping_sub(1));
    None
}

/// Sends the frames that the driver has made available.
fn send(queue: &mut Queue, memory: &DmaView, wire: BorrowedFd<'_>) -> bool {
    let mut done = false;
    while let Some((head, buffers)) = take(queue, memory) {
        let mut frame = Vec::new();
        for descriptor in buffers {
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
