//! Interrupts of the PF (`Interrupt Registers`).
//!
//! Queues have vectors 0 to 63, of which EICR shows 0 to 15. All other causes share the vector of IVAR_MISC. Causes of
//! vectors 16 and up clear when they are sent; those of 0 to 15 if EIAC has them.

use crate::spec;
use crate::vectors::{Sent, Vectors};

/// The causes of EICR that are no queue's.
const OTHER: u32 = 0x7fff_0000;
/// The vectors that EICR shows.
const LOW: u64 = 0xffff;

/// The interrupt registers that are not mere storage.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Interrupts {
    /// Vectors of queues.
    pub(crate) vectors: Vectors,
    /// Other causes, bits of EICR.
    pub(crate) other: u32,
    /// Other causes that are enabled.
    pub(crate) other_enabled: u32,
    /// EIAC of other causes.
    pub(crate) other_auto_clear: u32,
    /// EIAM of other causes.
    pub(crate) other_auto_mask: u32,
}

/// Registers that direct interrupts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Routing {
    /// GPIE.EIAME: a vector that is sent masks itself.
    pub(crate) masks: bool,
    /// The vector of other causes, a bit, from IVAR_MISC; 0 without one.
    pub(crate) other: u64,
    /// The vectors whose interval runs.
    pub(crate) running: u64,
}

/// The vector of a byte of IVAR or IVAR_MISC, a bit; 0 if the byte is not valid.
pub(crate) fn vector(allocation: u8) -> u64 {
    if allocation & spec::IVAR_VALID == 0 { 0 } else { 1 << (allocation & 0x3f) }
}

#[expect(clippy::cast_possible_truncation, reason = "the caller wants the lower half")]
const fn low(bits: u64) -> u32 {
    bits as u32
}

const fn high(bits: u64) -> u32 {
    low(bits >> 32)
}

impl Interrupts {
    /// The state after a reset.
    pub(crate) fn new() -> Self {
        let vectors = Vectors { auto_clear: !LOW, ..Vectors::default() };
        Self { vectors, other: 0, other_enabled: 0, other_auto_clear: 0, other_auto_mask: 0 }
    }

    /// True if `offset` is one of these registers.
    pub(crate) fn has(offset: u32) -> bool {
        matches!(
            offset,
            spec::EICR
                | spec::EICS
                | spec::EIAC
                | spec::EIMS
                | spec::EIMC
                | spec::EIAM
                | 0xa90
                | 0xa94
                | 0xaa0
                | 0xaa4
                | 0xab0
                | 0xab4
                | 0xad0
                | 0xad4
        )
    }

    /// The register at `offset`, without side effects. EICS reads as EICR; registers that clear masks read 0.
    pub(crate) fn peek(&self, offset: u32) -> u32 {
        let Self { vectors, other, other_enabled, other_auto_clear, other_auto_mask } = self;
        let shown = |bits: u64| low(bits & LOW);
        match offset {
            spec::EICR | spec::EICS => shown(vectors.cause) | other,
            spec::EIAC => shown(vectors.auto_clear) | other_auto_clear,
            spec::EIMS => shown(vectors.enabled) | other_enabled,
            spec::EIAM => shown(vectors.auto_mask) | other_auto_mask,
            0xa90 => low(vectors.cause),
            0xa94 => high(vectors.cause),
            0xaa0 => low(vectors.enabled),
            0xaa4 => high(vectors.enabled),
            0xad0 => low(vectors.auto_mask),
            0xad4 => high(vectors.auto_mask),
            _ => 0,
        }
    }

    /// Clears the causes that EICR shows; only those from bit 16 on if `keeps_queues` (GPIE.OCD).
    pub(crate) fn after_read(&mut self, offset: u32, keeps_queues: bool) {
        if offset == spec::EICR {
            if !keeps_queues {
                self.vectors.cause &= !LOW;
            }
            self.other = 0;
        }
    }

    /// Writes the register at `offset`. Returns the vectors to send. Intervals concern queues: software's causes and
    /// others are sent at once.
    pub(crate) fn write(&mut self, offset: u32, value: u32, routing: Routing) -> Sent {
        let bits = u64::from(value);
        let (queues, other) = (bits & LOW, value & OTHER);
        let vectors = &mut self.vectors;
        match offset {
            spec::EICR => {
                vectors.cause &= !queues;
                self.other &= !other;
            }
            spec::EICS => {
                let sent = Sent::now(vectors.raise(queues, routing.masks));
                return Sent { other: self.raise_other(other, routing), ..sent };
            }
            spec::EIAC => {
                vectors.auto_clear = vectors.auto_clear & !LOW | queues;
                self.other_auto_clear = other;
            }
            spec::EIMS => {
                let sent = vectors.enable(queues, routing.masks, routing.running);
                self.other_enabled |= other;
                return Sent { other: self.send_other(other, routing), ..sent };
            }
            spec::EIMC => {
                vectors.disable(queues);
                self.other_enabled &= !other;
            }
            spec::EIAM => {
                vectors.auto_mask = vectors.auto_mask & !LOW | queues;
                self.other_auto_mask = other;
            }
            0xa90 => return Sent::now(vectors.raise(bits, routing.masks)),
            0xa94 => return Sent::now(vectors.raise(bits << 32, routing.masks)),
            0xaa0 => return vectors.enable(bits, routing.masks, routing.running),
            0xaa4 => return vectors.enable(bits << 32, routing.masks, routing.running),
            0xab0 => vectors.disable(bits),
            0xab4 => vectors.disable(bits << 32),
            0xad0 => vectors.auto_mask = vectors.auto_mask >> 32 << 32 | bits,
            0xad4 => vectors.auto_mask = u64::from(low(vectors.auto_mask)) | bits << 32,
            _ => {}
        }
        Sent::default()
    }

    /// Sets other causes, bits of EICR. Returns the vector to send.
    pub(crate) fn raise_other(&mut self, causes: u32, routing: Routing) -> u64 {
        let new = causes & OTHER & !self.other;
        self.other |= causes & OTHER;
        self.send_other(new, routing)
    }

    fn send_other(&mut self, candidates: u32, routing: Routing) -> u64 {
        let sent = candidates & self.other & self.other_enabled;
        if sent == 0 || routing.other == 0 {
            return 0;
        }
        self.other &= !(sent & self.other_auto_clear);
        if routing.masks {
            self.other_enabled &= !(sent & self.other_auto_mask);
        }
        routing.other
    }
}
