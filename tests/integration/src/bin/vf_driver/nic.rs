//! A driver of virtio-net that polls (`virtio 1.4 §4.1.4, §5.1`): one queue each way, without offloads.

use std::hint;
use std::net::Ipv4Addr;
use std::sync::atomic::{Ordering, fence};
use std::thread;
use std::time::{Duration, Instant};

use crate::vfio::{Access, Function, Shared};

/// A page. Each buffer is one page.
pub(crate) const PAGE: usize = 0x1000;
/// The queues.
pub(crate) const RECEIVE: usize = 0;
pub(crate) const TRANSMIT: usize = 1;
/// Time that a queue may take to return a buffer.
const PATIENCE: Duration = Duration::from_secs(20);

/// Descriptors of a queue.
const SIZE: u16 = 64;
/// The rings of a queue in its memory: descriptors, available, used.
const AVAILABLE: usize = PAGE;
const USED: usize = 2 * PAGE;
const QUEUE: usize = 3 * PAGE;
/// Address of the rings of the first queue, as the function uses it.
const RINGS: u64 = 0x10_0000;
/// The flag of a descriptor that the device writes to.
const WRITE: u16 = 2;
/// The header before each frame.
const HEADER: usize = 12;

/// Vendor-specific capability, and the kinds of virtio's.
const VENDOR: u8 = 9;
const COMMON: u8 = 1;
const NOTIFY: u8 = 2;
const DEVICE: u8 = 4;

/// VIRTIO_F_VERSION_1 and VIRTIO_F_ACCESS_PLATFORM, in the second word of features.
const FEATURES: [u32; 2] = [1 << 5, 0b11];
const STATUS: usize = 20;

/// A NIC that is up.
pub(crate) struct Nic {
    pub(crate) function: Function,
    /// MAC address.
    pub(crate) mac: [u8; 6],
    rings: Shared,
    notify: [(Shared, usize); 2],
    /// For each queue, the numbers of buffers that were posted, and that were returned.
    counts: [(u16, u16); 2],
}

/// Registers: a BAR, and the offset in it.
type Registers = (Shared, usize);

impl Nic {
    /// Brings the NIC at `address` up.
    pub(crate) fn start(address: &str) -> Nic {
        let function = Function::open(address);
        let [common, notify, device] = [COMMON, NOTIFY, DEVICE].map(|kind| registers(&function, kind));
        let rings = Shared::memory(2 * QUEUE);
        function.map(RINGS, rings, Access::Both);
        let (config, at) = common.0;
        let write8 = |value: u8| config.write(at + STATUS, value);
        write8(0);
        while config.read::<u8>(at + STATUS) != 0 {
            hint::spin_loop();
        }
        write8(1);
        write8(3);
        for (select, features) in (0_u32..).zip(FEATURES) {
            config.write(at + 8, select);
            config.write(at + 12, features);
        }
        write8(11);
        assert_eq!(config.read::<u8>(at + STATUS), 11, "the features are accepted");
        let places = [RECEIVE, TRANSMIT].map(|queue| {
            config.write(at + 22, u16::try_from(queue).expect("a queue"));
            config.write(at + 24, SIZE);
            for (register, part) in [(32, 0), (40, AVAILABLE), (48, USED)] {
                let address = RINGS + (queue * QUEUE + part) as u64;
                // Registers of 64 bits are written by halves (`virtio 1.4 §4.1.3.1`).
                config.write(at + register, (address & 0xffff_ffff) as u32);
                config.write(at + register + 4, (address >> 32) as u32);
            }
            let place = usize::from(config.read::<u16>(at + 30)) * notify.1 as usize;
            config.write(at + 28, 1_u16);
            (notify.0.0, notify.0.1 + place)
        });
        write8(15);
        let (registers, at) = device.0;
        let mac = std::array::from_fn(|n| registers.read(at + n));
        Nic { function, mac, rings, notify: places, counts: [(0, 0); 2] }
    }

    /// Posts a buffer of a page at `address`, or of `len` bytes to send.
    pub(crate) fn post(&mut self, queue: usize, address: u64, len: usize) {
        let (posted, _) = &mut self.counts[queue];
        let (base, slot) = (queue * QUEUE, usize::from(*posted % SIZE));
        self.rings.write(base + slot * 16, address);
        self.rings.write(base + slot * 16 + 8, u32::try_from(len).expect("a buffer"));
        self.rings.write(base + slot * 16 + 12, if queue == RECEIVE { WRITE } else { 0 });
        self.rings.write(base + AVAILABLE + 4 + slot * 2, u16::try_from(slot).expect("a slot"));
        *posted = posted.wrapping_add(1);
        fence(Ordering::SeqCst);
        self.rings.write(base + AVAILABLE + 2, *posted);
        fence(Ordering::SeqCst);
        let (registers, at) = self.notify[queue];
        registers.write(at, u16::try_from(queue).expect("a queue"));
    }

    /// Takes one buffer back, if there is one. Returns the number of bytes written into it.
    pub(crate) fn take(&mut self, queue: usize) -> Option<usize> {
        let (_, taken) = &mut self.counts[queue];
        let base = queue * QUEUE + USED;
        if self.rings.read::<u16>(base + 2) == *taken {
            return None;
        }
        fence(Ordering::SeqCst);
        let len = self.rings.read::<u32>(base + 4 + usize::from(*taken % SIZE) * 8 + 4);
        *taken = taken.wrapping_add(1);
        Some(len as usize)
    }

    /// Waits for one buffer.
    pub(crate) fn await_used(&mut self, queue: usize) -> usize {
        let began = Instant::now();
        loop {
            if let Some(len) = self.take(queue) {
                return len;
            }
            assert!(began.elapsed() < PATIENCE, "queue {queue} gives no buffer back");
            thread::yield_now();
        }
    }
}

/// The registers of a kind, and the number after its capability: the distance between two queues' doorbells.
fn registers(function: &Function, kind: u8) -> (Registers, u32) {
    let [mut at] = function.config::<1>(0x34);
    while at != 0 {
        let [id, next, _, found, bar, _, _, _] = function.config::<8>(at.into());
        if id == VENDOR && found == kind {
            let offset = u32::from_le_bytes(function.config(u64::from(at) + 8));
            let multiplier = u32::from_le_bytes(function.config(u64::from(at) + 16));
            return ((function.bar(bar), offset as usize), multiplier);
        }
        at = next;
    }
    panic!("the function has no registers of kind {kind}")
}

/// An ARP request for the host `target`, which makes the host send a frame, with the header before it.
pub(crate) fn question(mac: [u8; 6], own: Ipv4Addr, target: Ipv4Addr) -> Vec<u8> {
    let mut packet = vec![0; HEADER];
    packet.extend([0xff; 6]);
    packet.extend(mac);
    // ARP: Ethernet, IPv4, lengths of addresses, a request.
    packet.extend([8, 6, 0, 1, 8, 0, 6, 4, 0, 1]);
    packet.extend(mac);
    packet.extend(own.octets());
    packet.extend([0; 6]);
    packet.extend(target.octets());
    packet.resize(HEADER + 60, 0);
    packet
}

/// True if `packet` is `target`'s reply to the request of `own`.
pub(crate) fn is_answer(packet: &[u8], mac: [u8; 6], target: Ipv4Addr, own: Ipv4Addr) -> bool {
    let Some(frame) = packet.get(HEADER..).filter(|frame| frame.len() >= 42) else { return false };
    let is_ours = frame[..6] == mac && frame[12..14] == [8, 6] && frame[20..22] == [0, 2];
    is_ours && frame[28..32] == target.octets() && frame[38..42] == own.octets()
}
