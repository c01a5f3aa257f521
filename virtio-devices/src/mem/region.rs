//! The memory of a device, as its driver and its host share it.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;

use super::blocks::Blocks;
use crate::discard::{self, discard};
use crate::{GuestMap, Interrupts};

/// The most blocks that are plugged or unplugged before a stop is looked at.
const PART: usize = 64;

/// The memory of a device, of which the driver plugs as much as the host wants: one for a device and for who resizes
/// it. All of it is mapped; what is not plugged takes no memory of the host, unless the guest writes to it.
#[derive(Debug)]
pub struct MemRegion {
    state: Mutex<State>,
    /// Whether devices of the host may have pinned its pages, so that it must keep them. Locked while some are given
    /// back.
    keeps_pages: Mutex<bool>,
}

#[derive(Debug)]
struct State {
    blocks: Blocks,
    /// The bytes that the host wants to be plugged.
    requested: u64,
    generation: u8,
    /// Where a change is signalled while a driver runs.
    interrupts: Option<Arc<Interrupts>>,
}

/// The answer to a request (`virtio 1.4 §5.15.6`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Answer {
    /// Done.
    Ack,
    /// More than the host wants.
    Nack,
    /// Not blocks, or not in the state for it.
    Error,
    /// All blocks are plugged, none is, or some are.
    State(u16),
}

/// What a request leaves to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Work {
    /// It is done.
    Done(Answer),
    /// The worker is to stop: the request waits for the next one.
    Stopped,
}

impl MemRegion {
    /// The memory at `region`, guest addresses, in blocks of `block` bytes. The host wants nothing to be plugged.
    pub fn new(region: &Range<u64>, block: u64) -> Self {
        let blocks = Blocks::new(region, block);
        let state = State { blocks, requested: 0, generation: 0, interrupts: None };
        Self { state: Mutex::new(state), keeps_pages: Mutex::new(false) }
    }

    /// Asks the driver to plug `bytes` in all, in whole blocks and at most all of them. It takes some time, and may not
    /// be able to unplug as much. Without a driver, the next one is asked.
    pub fn resize(&self, bytes: u64) {
        let interrupts = {
            let mut state = self.state.lock();
            let size = state.blocks.size();
            let requested = bytes.min(state.blocks.len()) / size * size;
            if state.requested == requested {
                return;
            }
            state.requested = requested;
            state.generation = state.generation.wrapping_add(1);
            state.interrupts.clone()
        };
        if let Some(interrupts) = interrupts {
            interrupts.signal_config();
        }
    }

    /// The bytes that the host wants to be plugged.
    pub fn requested(&self) -> u64 {
        self.state.lock().requested
    }

    /// The bytes that are plugged.
    pub fn plugged(&self) -> u64 {
        self.state.lock().blocks.plugged()
    }

    /// Notes that devices of the host may have pinned the pages of guest memory: those of blocks that are unplugged are
    /// cleared from now on, in place of given back. Waits until what is being given back has been.
    pub fn keep_pages(&self) {
        *self.keeps_pages.lock() = true;
    }

    /// Whether that was noted.
    pub fn keeps_pages(&self) -> bool {
        *self.keeps_pages.lock()
    }

    /// Unplugs everything when the machine is reset. No worker runs, and the caller clears the memory.
    pub fn unplug_all(&self) {
        let mut state = self.state.lock();
        let all = 0..state.blocks.count();
        state.blocks.set(all, false);
        state.generation = state.generation.wrapping_add(1);
    }

    pub(super) fn generation(&self) -> u8 {
        self.state.lock().generation
    }

    /// Signals changes to `interrupts` from now on, or to nothing if `None`. A driver reads the size when it starts.
    pub(super) fn signal_to(&self, interrupts: Option<Arc<Interrupts>>) {
        self.state.lock().interrupts = interrupts;
    }

    /// Reads the device configuration at `offset` (`virtio 1.4 §5.15.4`, `struct virtio_mem_config`).
    pub(super) fn read(&self, node: u16, offset: u64, data: &mut [u8]) {
        data.fill(0);
        let state = self.state.lock();
        let (blocks, requested) = (&state.blocks, state.requested);
        // All of it is usable at any time.
        let words =
            [blocks.size(), node.into(), blocks.start(), blocks.len(), blocks.len(), blocks.plugged(), requested];
        let words = words.map(u64::to_le_bytes);
        let rest = usize::try_from(offset).ok().and_then(|offset| words.as_flattened().get(offset..));
        data.iter_mut().zip(rest.unwrap_or_default()).for_each(|(to, from)| *to = *from);
    }

    /// A bit for each block; none if none is plugged.
    pub(super) fn save(&self) -> Option<Vec<u8>> {
        let state = self.state.lock();
        (state.blocks.plugged() > 0).then(|| state.blocks.bits().to_vec())
    }

    /// Takes a bit for each block. Returns whether there are as many.
    pub(super) fn restore(&self, bits: &[u8]) -> bool {
        self.state.lock().blocks.set_bits(bits)
    }

    /// Plugs the `count` blocks at `address`, which read as zero then.
    pub(super) fn plug(&self, memory: &GuestMap, address: u64, count: u16, stop: &AtomicBool) -> Work {
        let range = {
            let state = self.state.lock();
            let Some(range) = state.blocks.find(address, count) else { return Work::Done(Answer::Error) };
            if state.blocks.plugged_in(&range) > 0 {
                return Work::Done(Answer::Error);
            }
            let more = u64::from(count).saturating_mul(state.blocks.size());
            if state.blocks.plugged().saturating_add(more) > state.requested {
                return Work::Done(Answer::Nack);
            }
            range
        };
        // Normally there are no pages. A guest may have written where nothing was plugged.
        let addresses = |part: &Range<usize>| self.state.lock().blocks.addresses(part);
        for part in parts(&range) {
            let addresses = addresses(&part);
            let keeps_pages = self.keeps_pages.lock();
            if *keeps_pages {
                break;
            }
            if stop.load(Ordering::Acquire) {
                return Work::Stopped;
            }
            discard(memory, &addresses);
        }
        self.mark(range, true)
    }

    /// Unplugs the `count` blocks at `address`.
    pub(super) fn unplug(&self, memory: &GuestMap, address: u64, count: u16, stop: &AtomicBool) -> Work {
        let range = {
            let state = self.state.lock();
            let range = state.blocks.find(address, count);
            match range.filter(|range| state.blocks.plugged_in(range) == range.len()) {
                Some(range) => range,
                None => return Work::Done(Answer::Error),
            }
        };
        if self.clear(memory, &range, stop) { self.mark(range, false) } else { Work::Stopped }
    }

    /// Unplugs all blocks that are plugged.
    pub(super) fn unplug_everything(&self, memory: &GuestMap, stop: &AtomicBool) -> Work {
        let all = 0..self.state.lock().blocks.count();
        for part in parts(&all) {
            if self.state.lock().blocks.plugged_in(&part) > 0 && !self.clear(memory, &part, stop) {
                return Work::Stopped;
            }
        }
        self.mark(all, false)
    }

    /// Whether the `count` blocks at `address` are plugged.
    pub(super) fn state_of(&self, address: u64, count: u16) -> Answer {
        /// All are plugged.
        const PLUGGED: u16 = 0;
        /// None is.
        const UNPLUGGED: u16 = 1;
        /// Some are.
        const MIXED: u16 = 2;
        let state = self.state.lock();
        let Some(range) = state.blocks.find(address, count) else { return Answer::Error };
        Answer::State(match state.blocks.plugged_in(&range) {
            0 => UNPLUGGED,
            plugged if plugged == range.len() => PLUGGED,
            _ => MIXED,
        })
    }

    /// Gives the pages of the blocks in `range` back to the host, or clears them where that cannot be. The lock is not
    /// held meanwhile; only the worker, which calls this, changes what is plugged. Returns whether all was done.
    fn clear(&self, memory: &GuestMap, range: &Range<usize>, stop: &AtomicBool) -> bool {
        for part in parts(range) {
            if stop.load(Ordering::Acquire) {
                return false;
            }
            let addresses = self.state.lock().blocks.addresses(&part);
            let freed = {
                let keeps_pages = self.keeps_pages.lock();
                if *keeps_pages { 0 } else { discard(memory, &addresses).freed }
            };
            if freed < addresses.end - addresses.start {
                discard::clear(memory, &addresses);
            }
        }
        true
    }

    fn mark(&self, range: Range<usize>, plugged: bool) -> Work {
        let mut state = self.state.lock();
        state.blocks.set(range, plugged);
        state.generation = state.generation.wrapping_add(1);
        Work::Done(Answer::Ack)
    }
}

/// `range` in parts of at most [`PART`] blocks.
fn parts(range: &Range<usize>) -> impl Iterator<Item = Range<usize>> + use<> {
    let end = range.end;
    range.clone().step_by(PART).map(move |start| start..end.min(start.saturating_add(PART)))
}
