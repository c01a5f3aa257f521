//! Queues: their registers as plain values, and their distribution to pools.

use crate::effects::{Direction, Doorbell};
use crate::registers::Registers;
use crate::spec::{self, QUEUE_LEN, receive, transmit};

/// Queues of each direction.
pub(crate) const QUEUES: u16 = 128;
/// Bytes of a descriptor.
const DESCRIPTOR: u32 = 16;

/// Queues of each pool, from GCR_EXT.VT_MODE; 0 without pools.
pub(crate) fn per_pool(registers: &Registers) -> u16 {
    match registers.get(spec::GCR_EXT) & 3 {
        0 => 0,
        1 => 8,
        2 => 4,
        _ => 2,
    }
}

/// The first register of receive queue `queue`.
pub(crate) fn receive_block(queue: u16) -> u32 {
    let queue = u32::from(queue);
    if queue < 64 { receive::LOW + QUEUE_LEN * queue } else { receive::HIGH + QUEUE_LEN * (queue - 64) }
}

/// The first register of transmit queue `queue`.
pub(crate) fn transmit_block(queue: u16) -> u32 {
    transmit::FIRST + QUEUE_LEN * u32::from(queue)
}

/// The queue whose tail is at `offset`.
pub(crate) fn doorbell(offset: u32) -> Option<Doorbell> {
    let (direction, block, first) = match offset {
        0x1000..0x2000 => (Direction::Receive, offset - receive::LOW, 0),
        0xd000..0xe000 => (Direction::Receive, offset - receive::HIGH, 64),
        0x6000..0x8000 => (Direction::Transmit, offset - transmit::FIRST, 0),
        _ => return None,
    };
    let queue = u16::try_from(block / QUEUE_LEN).ok()?;
    // RDT and TDT are at the same place.
    (block % QUEUE_LEN == transmit::TDT).then_some(Doorbell { direction, queue: queue + first })
}

/// The number of descriptors of a ring that the NIC may use: from head to before tail. 0 if either is outside of it.
fn available(len: u32, head: u32, tail: u32) -> u32 {
    let count = len / DESCRIPTOR;
    if head >= count || tail >= count { 0 } else { (tail + count - head) % count }
}

/// A receive queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReceiveQueue {
    /// RXDCTL.ENABLE and RXCTRL.RXEN.
    pub enabled: bool,
    /// Guest address of the ring.
    pub base: u64,
    /// Length of the ring, in bytes: a multiple of 128 that may be 0.
    pub len: u32,
    /// Index of the descriptor that the NIC uses next; any 16 bits.
    pub head: u32,
    /// Index of the first descriptor that the NIC must not use; any 16 bits.
    pub tail: u32,
    /// Bytes of each buffer, 0 to 31 KiB.
    pub buffer: u32,
    /// SRRCTL.Drop_En: frames are dropped while the ring is empty.
    pub drops: bool,
    /// RXDCTL.VME: VLAN tags are moved to the descriptor.
    pub strips_vlan: bool,
    /// Longest frame, in bytes, if RXDCTL limits it.
    pub longest: Option<u16>,
}

impl ReceiveQueue {
    pub(crate) fn of(registers: &Registers, queue: u16) -> Self {
        let block = receive_block(queue.min(QUEUES - 1));
        let get = |register| registers.get(block + register);
        let (control, split) = (get(receive::RXDCTL), get(receive::SRRCTL));
        let limited = control & 1 << 15 != 0;
        Self {
            enabled: control & spec::QUEUE_ENABLE != 0 && registers.get(spec::RXCTRL) & spec::RXCTRL_RXEN != 0,
            base: registers.pair(block + receive::RDBAL),
            len: get(receive::RDLEN),
            head: get(receive::RDH),
            tail: get(receive::RDT),
            buffer: (split & 0x1f) << 10,
            drops: split & 1 << 28 != 0,
            strips_vlan: control & 1 << 30 != 0,
            longest: u16::try_from(control & 0x3fff).ok().filter(|_| limited),
        }
    }

    /// The number of descriptors that the NIC may use.
    pub fn available(&self) -> u32 {
        available(self.len, self.head, self.tail)
    }
}

/// A transmit queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TransmitQueue {
    /// TXDCTL.ENABLE and DMATXCTL.TE.
    pub enabled: bool,
    /// Guest address of the ring.
    pub base: u64,
    /// Length of the ring, in bytes: a multiple of 128 that may be 0.
    pub len: u32,
    /// Index of the descriptor that the NIC uses next; any 16 bits.
    pub head: u32,
    /// Index of the first descriptor that the NIC must not use; any 16 bits.
    pub tail: u32,
    /// Guest address to which the head is written, if TDWBAL enables it.
    pub head_write_back: Option<u64>,
}

impl TransmitQueue {
    pub(crate) fn of(registers: &Registers, queue: u16) -> Self {
        let block = transmit_block(queue.min(QUEUES - 1));
        let get = |register| registers.get(block + register);
        let write_back = registers.pair(block + transmit::TDWBAL);
        Self {
            enabled: get(transmit::TXDCTL) & spec::QUEUE_ENABLE != 0
                && registers.get(spec::DMATXCTL) & spec::DMATXCTL_TE != 0,
            base: registers.pair(block + transmit::TDBAL),
            len: get(transmit::TDLEN),
            head: get(transmit::TDH),
            tail: get(transmit::TDT),
            head_write_back: (write_back & 1 != 0).then_some(write_back & !3),
        }
    }

    /// The number of descriptors that the NIC may use.
    pub fn available(&self) -> u32 {
        available(self.len, self.head, self.tail)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// X27: rings.
    #[test]
    fn descriptors_from_head_to_tail_are_available() {
        for (len, head, tail, expected) in [
            (128, 0, 0, 0),
            (128, 0, 7, 7),
            (128, 7, 0, 1),
            (128, 3, 2, 7),
            (0, 0, 0, 0),
            (0, 0, 5, 0),
            (128, 0, 8, 0),
            (128, 0xffff, 0, 0),
            (0xfff80, 0xfff7, 0xfff6, 0xfff7),
        ] {
            assert_eq!(available(len, head, tail), expected, "{len} {head} {tail}");
        }
    }

    /// X27: rings.
    #[test]
    fn each_tail_is_the_doorbell_of_its_queue() {
        for queue in 0..QUEUES {
            for (direction, block) in
                [(Direction::Receive, receive_block(queue)), (Direction::Transmit, transmit_block(queue))]
            {
                assert_eq!(doorbell(block + 0x18), Some(Doorbell { direction, queue }));
                assert_eq!([0, 0x10, 0x1c, 0x28].map(|other| doorbell(block + other)), [None; 4]);
            }
        }
        assert_eq!([0x18, 0x5018, 0xe018].map(doorbell), [None; 3]);
    }
}
