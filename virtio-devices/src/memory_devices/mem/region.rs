//! The memory of a device, shared by its driver and its host.

use std::fmt;
use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use parking_lot::Mutex;

use super::blocks::Blocks;
use super::slots::MemSlots;
use crate::device::config::read;
use crate::memory::discard::{self, discard};
use crate::{GuestMap, Interrupts, Reach};

/// The most blocks whose pages are freed before checking for a stop.
const STEP: usize = 64;
/// The most bytes reclaimed in one call, or a block if that is larger.
const RECLAIMED: u64 = 64 << 20;

/// The memory of a device, of which the driver plugs as much as the host requests: shared by the device and the code
/// that resizes it. All of it is mapped in this process. Unplugged blocks are outside the guest's memory, for vCPUs
/// ([`MemSlots`]) and for devices of this process ([`Reach`]).
pub struct MemRegion {
    state: Mutex<State>,
    /// The plugged blocks, for devices.
    reach: Arc<Reach>,
    /// The memory slots for vCPUs, while there is a VM.
    slots: Mutex<Option<Arc<dyn MemSlots>>>,
    /// Held by the thread that plugs or unplugs blocks, or that reclaims unplugged ones.
    turn: Mutex<()>,
    /// True if devices of the host may have pinned its pages, so that it must keep them. Locked while pages are freed.
    keeps_pages: Mutex<bool>,
}

#[derive(Debug)]
struct State {
    blocks: Blocks,
    /// The size that the host requests, in bytes.
    requested: u64,
    generation: u8,
    /// Interrupts for a change while a driver runs.
    interrupts: Option<Arc<Interrupts>>,
}

/// The reply to a request (`virtio 1.4 §5.15.6`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Answer {
    /// Done.
    Ack,
    /// More than the requested size.
    Nack,
    /// Not possible at the moment: the host fails.
    Busy,
    /// Not valid blocks, or blocks in another state.
    Error,
    /// All blocks are plugged, none is, or some are.
    State(u16),
}

/// Work that remains after a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Work {
    /// None: the request has this reply.
    Done(Answer),
    /// The worker must stop: the request is left for the next one.
    Stopped,
}

impl MemRegion {
    /// Creates the memory at `region`, guest addresses, in blocks of `block` bytes. `per_slot` blocks share a memory
    /// slot. The requested size is 0.
    pub fn new(region: &Range<u64>, block: u64, per_slot: usize) -> Self {
        let blocks = Blocks::new(region, block, per_slot);
        let reach = Arc::new(Reach::new(blocks.size(), blocks.count()));
        let state = State { blocks, requested: 0, generation: 0, interrupts: None };
        Self {
            state: Mutex::new(state),
            reach,
            slots: Mutex::new(None),
            turn: Mutex::new(()),
            keeps_pages: Mutex::new(false),
        }
    }

    /// The first guest address.
    pub fn start(&self) -> u64 {
        self.state.lock().blocks.start()
    }

    /// The size of the part of a memory slot in bytes, and the number of parts.
    pub fn parts(&self) -> (u64, usize) {
        let state = self.state.lock();
        let all = 0..state.blocks.count();
        (state.blocks.part_size(), state.blocks.parts(&all).len())
    }

    /// The plugged blocks, which devices can reach.
    pub fn reach(&self) -> &Arc<Reach> {
        &self.reach
    }

    /// Shows the plugged blocks to the vCPUs of a new VM, whose memory slots for this memory are `slots`. No worker
    /// runs.
    ///
    /// # Errors
    ///
    /// The host has refused a memory slot.
    pub fn attach(&self, slots: Arc<dyn MemSlots>) -> io::Result<()> {
        let used: Vec<_> = {
            let state = self.state.lock();
            let all = 0..state.blocks.count();
            state.blocks.parts(&all).filter(|part| state.blocks.used(*part) > 0).collect()
        };
        used.into_iter().try_for_each(|part| slots.show(part))?;
        *self.slots.lock() = Some(slots);
        Ok(())
    }

    /// Returns pages of unplugged blocks to the host: those written by a backend with direct access to all of the
    /// memory, or by a request in flight when they were unplugged. Begins at block `from`, unless a worker is active,
    /// and takes up to `most` steps, and none after the first once `until` has passed. A step is a gap between plugged
    /// blocks without pages, or the first 64 MiB with pages in a gap. Returns the block to continue from: 0 after the
    /// last gap, and `from` if a worker is active.
    pub fn reclaim(&self, memory: &GuestMap, from: usize, most: usize, until: Instant) -> usize {
        let Some(_turn) = self.turn.try_lock() else { return from };
        let mut next = from;
        for step in 0..most {
            if step > 0 && Instant::now() >= until {
                break;
            }
            let keeps_pages = self.keeps_pages.lock();
            let Some(gap) = self.reach.run(next, false).filter(|_| !*keeps_pages) else { return 0 };
            next = self.reclaim_first(memory, gap);
        }
        next
    }

    /// Reclaims the first pages of a gap between plugged blocks. Returns the block after them.
    fn reclaim_first(&self, memory: &GuestMap, gap: Range<usize>) -> usize {
        let (addresses, size) = {
            let blocks = &self.state.lock().blocks;
            (blocks.addresses(&gap), blocks.size())
        };
        let Some(first) = discard::first_page(memory, &addresses) else { return gap.end };
        let start = first.saturating_sub(first.saturating_sub(addresses.start) % size);
        let end = start.saturating_add((RECLAIMED / size).max(1).saturating_mul(size)).min(addresses.end);
        discard::reclaim(memory, &(start..end));
        let done = usize::try_from((end - addresses.start) / size).unwrap_or(usize::MAX);
        gap.start.saturating_add(done)
    }

    /// Requests `bytes` of plugged memory, in whole blocks and at most all of them. The driver takes some time, and may
    /// not be able to unplug as much. Without a driver, the request is for the next one.
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

    /// The size that the host requests, in bytes.
    pub fn requested(&self) -> u64 {
        self.state.lock().requested
    }

    /// The bytes that are plugged.
    pub fn plugged(&self) -> u64 {
        self.state.lock().blocks.plugged()
    }

    /// Notes that devices of the host may have pinned the pages of guest memory: unplugged blocks are cleared from now
    /// on instead of freed. Waits for freeing in progress.
    pub fn keep_pages(&self) {
        *self.keeps_pages.lock() = true;
    }

    /// True if it must keep its pages.
    pub fn keeps_pages(&self) -> bool {
        *self.keeps_pages.lock()
    }

    /// Unplugs everything when the machine is reset. No worker and no VM runs, and the caller clears the memory.
    pub fn unplug_all(&self) {
        *self.slots.lock() = None;
        let mut state = self.state.lock();
        let all = 0..state.blocks.count();
        self.reach.set(all.clone(), false);
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
        let state = self.state.lock();
        let (blocks, requested) = (&state.blocks, state.requested);
        // All of it is usable at any time.
        let words =
            [blocks.size(), node.into(), blocks.start(), blocks.len(), blocks.len(), blocks.plugged(), requested];
        let words = words.map(u64::to_le_bytes);
        read(words.as_flattened(), offset, data);
    }

    /// A bit for each block; `None` if none is plugged.
    pub(super) fn save(&self) -> Option<Vec<u8>> {
        let state = self.state.lock();
        (state.blocks.plugged() > 0).then(|| state.blocks.bits().to_vec())
    }

    /// Replaces the bits. Returns false if their number is wrong.
    pub(super) fn restore(&self, bits: &[u8]) -> bool {
        let mut state = self.state.lock();
        if !state.blocks.set_bits(bits) {
            return false;
        }
        (0..state.blocks.count()).for_each(|block| self.reach.set(block..block + 1, state.blocks.is_plugged(block)));
        true
    }

    /// Plugs the `count` blocks at `address`, which then read as zero.
    pub(super) fn plug(&self, memory: &GuestMap, address: u64, count: u16, stop: &AtomicBool) -> Work {
        let _turn = self.turn.lock();
        let (range, parts) = {
            let state = self.state.lock();
            let blocks = &state.blocks;
            let Some(range) = blocks.find(address, count) else { return Work::Done(Answer::Error) };
            if blocks.plugged_in(&range) > 0 {
                return Work::Done(Answer::Error);
            }
            let more = u64::from(count).saturating_mul(blocks.size());
            if blocks.plugged().saturating_add(more) > state.requested {
                return Work::Done(Answer::Nack);
            }
            // Blocks that share a memory slot become reachable together: at most as many slots as the requested size
            // needs. Busy, because the driver may unplug other blocks; after other replies Linux would repeat the
            // request at once.
            let most = state.requested.div_ceil(blocks.part_size()).saturating_mul(blocks.part_size());
            let parts: Vec<_> = blocks.parts(&range).filter(|part| blocks.used(*part) == 0).collect();
            if !parts.is_empty() && blocks.shown_with(&range) > most {
                return Work::Done(Answer::Busy);
            }
            (range, parts)
        };
        // Normally there are no pages. A backend may have written to unplugged blocks.
        for part in steps(&range) {
            let addresses = self.state.lock().blocks.addresses(&part);
            let keeps_pages = self.keeps_pages.lock();
            if *keeps_pages {
                break;
            }
            if stop.load(Ordering::Acquire) {
                return Work::Stopped;
            }
            discard(memory, &addresses);
            discard::clear_copies(memory, &addresses);
        }
        match self.each_slot(&parts, stop, |slots, part| slots.show(part)) {
            Ok(true) => self.mark(range, true),
            unfinished => {
                self.as_marked(&range);
                unfinished.map_or(Work::Done(Answer::Busy), |_| Work::Stopped)
            }
        }
    }

    /// Unplugs the `count` blocks at `address`.
    pub(super) fn unplug(&self, memory: &GuestMap, address: u64, count: u16, stop: &AtomicBool) -> Work {
        let _turn = self.turn.lock();
        let range = {
            let state = self.state.lock();
            let range = state.blocks.find(address, count);
            match range.filter(|range| state.blocks.plugged_in(range) == range.len()) {
                Some(range) => range,
                None => return Work::Done(Answer::Error),
            }
        };
        self.take(memory, range, stop)
    }

    /// Unplugs all plugged blocks.
    pub(super) fn unplug_everything(&self, memory: &GuestMap, stop: &AtomicBool) -> Work {
        let _turn = self.turn.lock();
        let all = 0..self.state.lock().blocks.count();
        self.take(memory, all, stop)
    }

    /// Takes the blocks in `range` from the guest: from devices, then from vCPUs; then frees their pages.
    fn take(&self, memory: &GuestMap, range: Range<usize>, stop: &AtomicBool) -> Work {
        self.reach.set(range.clone(), false);
        let parts: Vec<_> = {
            let blocks = &self.state.lock().blocks;
            let stays = |part: &usize| {
                let of_part = blocks.of_part(*part);
                let taken = of_part.start.max(range.start)..of_part.end.min(range.end);
                blocks.used(*part) > blocks.plugged_in(&taken)
            };
            blocks.parts(&range).filter(|part| blocks.used(*part) > 0 && !stays(part)).collect()
        };
        let hidden = self.each_slot(&parts, stop, |slots, part| slots.hide(part));
        let done = hidden.map(|all| all && self.clear(memory, &range, stop));
        match done {
            Ok(true) => self.mark(range, false),
            unfinished => {
                self.as_marked(&range);
                unfinished.map_or(Work::Done(Answer::Busy), |_| Work::Stopped)
            }
        }
    }

    /// Runs `work` for the memory slots of these parts, if there is a VM. Returns false if it was stopped.
    fn each_slot(
        &self,
        parts: &[usize],
        stop: &AtomicBool,
        work: impl Fn(&dyn MemSlots, usize) -> io::Result<()>,
    ) -> io::Result<bool> {
        let Some(slots) = self.slots.lock().clone() else { return Ok(true) };
        for part in parts {
            if stop.load(Ordering::Acquire) {
                return Ok(false);
            }
            work(&*slots, *part)
                .inspect_err(|error| log::warn!("the host refuses a change of memory slots: {error}"))?;
        }
        Ok(true)
    }

    /// Resets the access of vCPUs and devices to the blocks in `range` to the plugged ones, after a failed request.
    fn as_marked(&self, range: &Range<usize>) {
        let (plugged, parts): (Vec<_>, Vec<_>) = {
            let blocks = &self.state.lock().blocks;
            let parts = blocks.parts(range).map(|part| (part, blocks.used(part) > 0));
            (range.clone().filter(|block| blocks.is_plugged(*block)).collect(), parts.collect())
        };
        if let Some(slots) = self.slots.lock().clone() {
            for (part, is_used) in parts {
                let result = if is_used { slots.show(part) } else { slots.hide(part) };
                if let Err(error) = result {
                    log::warn!("the host refuses a change of memory slots: {error}");
                }
            }
        }
        plugged.into_iter().for_each(|block| self.reach.set(block..block + 1, true));
    }

    /// State of the `count` blocks at `address`: plugged, unplugged or mixed.
    pub(super) fn state_of(&self, address: u64, count: u16) -> Answer {
        /// All are plugged.
        const PLUGGED: u16 = 0;
        /// None is plugged.
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

    /// Returns the pages of the plugged blocks in `range` to the host, or clears them if that is not possible. The lock
    /// is not held in the meantime; only the worker, which calls this, plugs and unplugs. Returns false if it was
    /// stopped.
    fn clear(&self, memory: &GuestMap, range: &Range<usize>, stop: &AtomicBool) -> bool {
        for part in steps(range) {
            if stop.load(Ordering::Acquire) {
                return false;
            }
            let addresses = {
                let blocks = &self.state.lock().blocks;
                if blocks.plugged_in(&part) == 0 {
                    continue;
                }
                blocks.addresses(&part)
            };
            let freed = {
                let keeps_pages = self.keeps_pages.lock();
                if *keeps_pages {
                    0
                } else {
                    discard(memory, &addresses).freed + discard::drop_copies(memory, &addresses)
                }
            };
            if freed < addresses.end - addresses.start {
                discard::clear(memory, &addresses);
            }
        }
        true
    }

    fn mark(&self, range: Range<usize>, plugged: bool) -> Work {
        let mut state = self.state.lock();
        state.blocks.set(range.clone(), plugged);
        self.reach.set(range, plugged);
        state.generation = state.generation.wrapping_add(1);
        Work::Done(Answer::Ack)
    }
}

impl fmt::Debug for MemRegion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemRegion").field("state", &self.state).finish_non_exhaustive()
    }
}

/// `range` in steps of at most [`STEP`] blocks.
fn steps(range: &Range<usize>) -> impl Iterator<Item = Range<usize>> + use<> {
    let end = range.end;
    range.clone().step_by(STEP).map(move |start| start..end.min(start.saturating_add(STEP)))
}

#[cfg(test)]
#[path = "slot_tests.rs"]
mod tests;
