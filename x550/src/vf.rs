//! A VF: its own registers, and its view of its PF's (`Virtual Function Registers`).
//!
//! Most registers of a VF are those of its pool, at another offset. Those that are not are in [`Vf`].

use crate::effects::Direction;
use crate::interrupts::vector;
use crate::mailbox::Mailbox;
use crate::queue::{self, QUEUES};
use crate::registers::Registers;
use crate::spec::{self, QUEUE_LEN, receive, transmit, vf};
use crate::vectors::{Sent, Vectors};

/// The vectors of a VF, a bit each.
pub(crate) const VECTORS: u64 = 0b111;

/// The registers of a VF that no register of its PF shows.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Vf {
    pub(crate) mailbox: Mailbox,
    pub(crate) vectors: Vectors,
    /// VTIVAR.
    pub(crate) allocation: [u32; 4],
    /// VTIVAR_MISC.
    pub(crate) allocation_misc: u32,
    /// VTEITR.
    pub(crate) throttle: [u32; 3],
}

/// The register of the PF that a VF sees at `offset`; `None` if there is none, or it is one of [`Vf`]. A VF reaches the
/// queues of its own pool alone.
pub(crate) fn alias(registers: &Registers, index: u16, offset: u32) -> Option<u32> {
    let pool = u32::from(index);
    let own = |first: u32, len: u32, base: u32| {
        let within = offset.checked_sub(first).filter(|within| *within < len)?;
        Some(base + within)
    };
    match offset {
        vf::VFLINKS => Some(spec::LINKS),
        vf::VFPSRTYPE => Some(spec::PSRTYPE + 4 * pool),
        vf::VFMRQC => Some(spec::PFVFMRQC + 4 * pool),
        0x3100..0x3128 => own(vf::VFRSSRK, 0x28, spec::PFVFRSSRK + 0x40 * pool),
        0x3200..0x3240 => own(vf::VFRETA, 0x40, spec::PFVFRETA + 0x40 * pool),
        0x101c => Some(0x101c + 0x40 * pool),
        0x1020 => Some(0x1020 + 0x40 * pool),
        0x1024 => Some(0xd020 + 0x40 * pool),
        0x1034 => Some(0xd01c + 0x40 * pool),
        0x201c => Some(0x8300 + 4 * pool),
        0x2020 => Some(0x8400 + 8 * pool),
        0x2024 => Some(0x8404 + 8 * pool),
        0x1000..0x1200 => {
            let within = offset - vf::RECEIVE;
            let queue = own_queue(registers, index, within / QUEUE_LEN)?;
            let register = within % QUEUE_LEN;
            let has = matches!(register, 0..=receive::RDT | receive::RXDCTL | receive::RSCCTL);
            has.then(|| queue::receive_block(queue) + register)
        }
        0x2000..0x2200 => {
            let within = offset - vf::TRANSMIT;
            let queue = own_queue(registers, index, within / QUEUE_LEN)?;
            let register = within % QUEUE_LEN;
            let has = matches!(register, 0..=transmit::TDT | transmit::TXDCTL | transmit::TDWBAL..QUEUE_LEN);
            has.then(|| queue::transmit_block(queue) + register)
        }
        _ => None,
    }
}

/// The NIC's number of queue `queue` of VF `index`.
fn own_queue(registers: &Registers, index: u16, queue: u32) -> Option<u16> {
    let per_pool = queue::per_pool(registers);
    let queue = u16::try_from(queue).ok().filter(|queue| *queue < per_pool)?;
    let queue = index.checked_mul(per_pool)?.checked_add(queue)?;
    (queue < QUEUES).then_some(queue)
}

impl Vf {
    /// True if `offset` is one of these registers, or the mailbox.
    pub(crate) fn has(offset: u32) -> bool {
        matches!(offset, vf::VTEICR..=vf::VTEIAM | 0x120..0x130 | vf::VTIVAR_MISC | 0x820..0x82c)
    }

    /// The register at `offset`, without side effects.
    #[expect(clippy::cast_possible_truncation, reason = "there are three vectors")]
    pub(crate) fn peek(&self, offset: u32) -> u32 {
        let element = |values: &[u32], first: u32| {
            let place = usize::try_from((offset - first) / 4).ok();
            place.and_then(|place| values.get(place)).copied().unwrap_or(0)
        };
        match offset {
            vf::VTEICR | vf::VTEICS => self.vectors.cause as u32,
            vf::VTEIMS => self.vectors.enabled as u32,
            vf::VTEIAC => self.vectors.auto_clear as u32,
            vf::VTEIAM => self.vectors.auto_mask as u32,
            0x120..0x130 => element(&self.allocation, vf::VTIVAR),
            vf::VTIVAR_MISC => self.allocation_misc,
            0x820..0x82c => element(&self.throttle, vf::VTEITR),
            _ => 0,
        }
    }

    /// Clears the causes that were read.
    pub(crate) fn after_read(&mut self, offset: u32) {
        if offset == vf::VTEICR {
            self.vectors.cause = 0;
        }
    }

    /// Writes the register at `offset`. Returns the vectors to send; the interval of `running` ones has not ended.
    pub(crate) fn write(&mut self, offset: u32, value: u32, masks: bool, running: u64) -> Sent {
        let bits = u64::from(value) & VECTORS;
        match offset {
            vf::VTEICR => self.vectors.cause &= !bits,
            vf::VTEICS => return Sent::now(self.vectors.raise(bits, masks)),
            vf::VTEIMS => return self.vectors.enable(bits, masks, running),
            vf::VTEIMC => self.vectors.disable(bits),
            vf::VTEIAC => self.vectors.auto_clear = bits,
            vf::VTEIAM => self.vectors.auto_mask = bits,
            0x120..0x130 => set(&mut self.allocation, offset - vf::VTIVAR, value & 0x8383_8383),
            vf::VTIVAR_MISC => self.allocation_misc = value & 0x83,
            0x820..0x82c => set(&mut self.throttle, offset - vf::VTEITR, value & 0x8ff8),
            _ => {}
        }
        Sent::default()
    }

    /// An event of the mailbox. Returns the vector to send.
    pub(crate) fn mailbox_event(&mut self, masks: bool) -> u64 {
        let [allocation, ..] = self.allocation_misc.to_le_bytes();
        self.vectors.raise(vector(allocation) & VECTORS, masks)
    }

    /// Resets the VF; its PF sees that.
    pub(crate) fn reset(&mut self) {
        let mut mailbox = std::mem::take(&mut self.mailbox);
        mailbox.reset_vf();
        *self = Self { mailbox, ..Self::default() };
    }
}

fn set(values: &mut [u32], offset: u32, value: u32) {
    let place = usize::try_from(offset / 4).ok();
    if let Some(slot) = place.and_then(|place| values.get_mut(place)) {
        *slot = value;
    }
}

/// The byte of IVAR or VTIVAR that belongs to a queue: receive and transmit of an even one, then of an odd one.
pub(crate) fn queue_byte(allocation: u32, direction: Direction, queue: u16) -> u8 {
    let [even_receive, even_transmit, odd_receive, odd_transmit] = allocation.to_le_bytes();
    match (queue % 2, direction) {
        (0, Direction::Receive) => even_receive,
        (0, Direction::Transmit) => even_transmit,
        (_, Direction::Receive) => odd_receive,
        (_, Direction::Transmit) => odd_transmit,
    }
}
