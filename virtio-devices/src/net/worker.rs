//! The thread of a queue pair.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::{Mutex, MutexGuard};
use rustix::event::{PollFd, PollFlags, poll};
use virtio_bindings::virtio_ring::VIRTIO_RING_F_EVENT_IDX;
use vm_memory::{GuestAddressSpace, GuestMemoryMmap};
use vmm_sys_util::eventfd::EventFd;

use super::control::Control;
use super::counters::{Counter, NetCounters, Tally};
use super::features::has;
use super::receive::{Next, Receive};
use super::state::NetState;
use super::transmit::Transmit;
use crate::backend::{Offloads, TapQueue};
use crate::eventfd::borrow;
use crate::ring::{BrokenRing, Ring};
use crate::worker::own;
use crate::{Interrupts, Memory, SharedQueue};

/// The most frames that are dropped because they arrived before the driver was ready: a tap holds 1,000 unless told otherwise.
pub const MAX_STALE: u32 = 4096;

/// What the workers of one start have in common.
pub struct Shared {
    /// The guest's memory.
    pub memory: Memory,
    /// The negotiated features.
    pub features: u64,
    /// The number of queue pairs that the driver may use.
    pub pairs: u16,
    /// What the driver changes at run time.
    pub state: Arc<NetState>,
    /// What is counted.
    pub counters: Arc<NetCounters>,
    /// Where the driver is interrupted.
    pub interrupts: Arc<Interrupts>,
    /// Whether this is the first start since a reset.
    pub fresh: bool,
    /// Whether all workers have been spawned. Locked until that is known: before it, none of them touches anything.
    pub complete: Mutex<bool>,
}

/// A queue pair, and the control queue with the first.
pub struct Pair {
    /// Its number.
    pub index: u16,
    /// Its queues, as far as the driver enabled them.
    pub receive: Option<(u16, SharedQueue)>,
    /// See [`Self::receive`].
    pub transmit: Option<(u16, SharedQueue)>,
    /// See [`Self::receive`].
    pub control: Option<(u16, SharedQueue)>,
    /// Its queue of the backend.
    pub tap: Arc<Mutex<TapQueue>>,
    /// What wakes it.
    pub kick: Arc<EventFd>,
    /// Set when it shall end.
    pub stop: Arc<AtomicBool>,
    /// What wakes the other pairs' workers; only the first has any.
    pub peers: Vec<Arc<EventFd>>,
}

/// What one turn of a worker's loop works with. Who carries no frames itself has another backend than a tap's queue.
pub struct Pass<'m, B: ?Sized = TapQueue> {
    /// The guest's memory.
    pub memory: &'m GuestMemoryMmap,
    /// The backend.
    pub backend: &'m B,
    /// What the driver changes at run time.
    pub state: &'m NetState,
    /// What is counted.
    pub tally: &'m mut Tally,
    /// Where the driver is interrupted.
    pub interrupts: &'m Interrupts,
}

impl<B: ?Sized> Pass<'_, B> {
    /// Interrupts the driver if it wants that.
    pub fn interrupt(&mut self, ring: &mut Ring<'_>) -> Result<(), BrokenRing> {
        if ring.wants_interrupt(self.memory)? {
            self.interrupts.signal_queue(ring.index());
            self.tally.count(Counter::Interrupts);
        }
        Ok(())
    }
}

impl Pair {
    /// Runs the queues until told to stop. Waits for the other workers and for a predecessor's end first.
    pub fn run(self, shared: &Shared) {
        if !*shared.complete.lock() {
            return;
        }
        let Some(mut tap) = self.own_tap() else { return };
        let mut tally = Tally::new();
        let mut queues = self.open(&mut tap, shared, &mut tally);
        // They are the whole tap's, and the first pair's worker is the one that changes them when the driver commands.
        if self.index == 0 {
            set_offloads(&tap, shared.state.offloads());
        }
        // After that: a segment of before may be one that this driver does not take.
        if shared.fresh && queues.receive.is_some() {
            tally.add(Counter::RxStale, tap.discard(MAX_STALE));
        }

        let mut events = Events { kicked: true, frame: true };
        while !self.stop.load(Ordering::Acquire) {
            if events.kicked {
                self.follow_active_pairs(&mut tap, shared);
            }
            let memory = shared.memory.memory();
            let mut pass = Pass {
                memory: &memory,
                backend: &*tap,
                state: &shared.state,
                tally: &mut tally,
                interrupts: &shared.interrupts,
            };
            let busy = queues.run(&events, &mut pass);
            drop(memory);
            tally.flush(&shared.counters);
            // Without a wait, everything is looked at again.
            events = Events { kicked: true, frame: true };
            if !busy {
                events = self.wait(&tap, queues.waits_for_frame(), &mut tally);
            }
        }
        if let Some((mut receive, _)) = queues.receive {
            receive.give_up(&mut tally);
            tap.keep_spill(receive.into_spill());
        }
        tally.flush(&shared.counters);
        // The first queue stays, so that the tap keeps its carrier.
        if self.index > 0 {
            let _ = tap.set_attached(false);
        }
    }

    /// Locks the backend's queue. None if told to stop before that: a successor may have been faster, and whoever waits for this
    /// worker's end must not have to wait for that one's.
    fn own_tap(&self) -> Option<MutexGuard<'_, TapQueue>> {
        own(&self.tap, &self.stop)
    }

    /// Locks the queues. One that makes no sense is given up.
    fn open(&self, tap: &mut TapQueue, shared: &Shared, tally: &mut Tally) -> Queues<'_> {
        let features = shared.features;
        let receive = ring(&self.receive, shared, tally).and_then(|ring| {
            // Without memory the driver has to try again later.
            let spill = tap.take_spill().inspect_err(|_| give_up(tally, &shared.interrupts)).ok()?;
            Some((Receive::new(ring, features, spill), Next::More))
        });
        Queues {
            receive,
            transmit: ring(&self.transmit, shared, tally).map(|ring| Transmit::new(ring, features)),
            control: ring(&self.control, shared, tally)
                .map(|ring| Control::new(ring, features, shared.pairs, self.peers.clone())),
        }
    }

    /// Attaches the backend's queue if the driver uses this pair, and detaches it if not.
    fn follow_active_pairs(&self, tap: &mut TapQueue, shared: &Shared) {
        // A tap that is gone fails here, too, and is then found out by the receive queue.
        let _ = tap.set_attached(self.index < shared.state.active_pairs());
    }

    /// Waits for a doorbell, a stop, or a frame if `frame`.
    fn wait(&self, tap: &TapQueue, frame: bool, tally: &mut Tally) -> Events {
        let frame = frame && tap.attached();
        let kick = borrow(&self.kick);
        let mut fds = [PollFd::new(&kick, PollFlags::IN), PollFd::new(tap, PollFlags::IN)];
        let watched = if frame { &mut fds[..] } else { &mut fds[..1] };
        // Interrupted by a signal, or without memory for the call: the queues are looked at, and it is tried again.
        let _ = poll(watched, None);
        let kicked = !fds[0].revents().is_empty();
        let frame = frame && !fds[1].revents().is_empty();
        if kicked && self.kick.read().is_ok() {
            tally.count(Counter::Kicks);
        }
        Events { kicked, frame }
    }
}

/// Has the tap deliver `offloads`. If it refuses, as one without the other of UDP's two or without checksums, it delivers finished
/// frames only: left as it was, it would go on with what an earlier driver took.
fn set_offloads(tap: &TapQueue, offloads: Offloads) {
    if tap.set_offloads(offloads).is_err() {
        // A tap that refuses this, too, is gone.
        let _ = tap.set_offloads(Offloads::empty());
    }
}

fn ring<'q>(queue: &'q Option<(u16, SharedQueue)>, shared: &Shared, tally: &mut Tally) -> Option<Ring<'q>> {
    let (index, queue) = queue.as_ref()?;
    let event_idx = has(shared.features, VIRTIO_RING_F_EVENT_IDX);
    // Who owned it had the tap, too.
    Ring::open(*index, queue.lock(), event_idx, &shared.memory.memory())
        .inspect_err(|BrokenRing| give_up(tally, &shared.interrupts))
        .ok()
}

/// What woke the worker.
struct Events {
    kicked: bool,
    frame: bool,
}

/// The queues that a worker runs, as long as they make sense, and what the receive queue waits for.
struct Queues<'q> {
    receive: Option<(Receive<'q>, Next)>,
    transmit: Option<Transmit<'q>>,
    control: Option<Control<'q>>,
}

impl Queues<'_> {
    fn waits_for_frame(&self) -> bool {
        matches!(self.receive, Some((_, Next::Frame | Next::More)))
    }

    /// Runs those that something may have happened to. Returns whether there is more to do.
    fn run(&mut self, events: &Events, pass: &mut Pass<'_>) -> bool {
        let mut busy = false;
        if events.kicked {
            busy |= attempt(&mut self.transmit, pass, |transmit, pass| transmit.run(pass));
            busy |= attempt(&mut self.control, pass, |control, pass| control.run(pass));
        }
        let receivable = pass.backend.attached()
            && match self.receive {
                Some((_, Next::Doorbell)) => events.kicked,
                Some(_) => events.frame,
                None => false,
            };
        if receivable {
            busy |= attempt(&mut self.receive, pass, |(receive, next), pass| {
                *next = receive.run(pass)?;
                Ok(*next == Next::More)
            });
        }
        busy
    }
}

/// Runs a queue, and gives it up if its ring makes no sense: the driver has to reset the device.
fn attempt<Q>(
    queue: &mut Option<Q>,
    pass: &mut Pass<'_>,
    run: impl FnOnce(&mut Q, &mut Pass<'_>) -> Result<bool, BrokenRing>,
) -> bool {
    let Some(running) = queue else { return false };
    run(running, pass).unwrap_or_else(|BrokenRing| {
        give_up(pass.tally, pass.interrupts);
        *queue = None;
        false
    })
}

/// A ring makes no sense. The other queues go on until the driver resets the device, as it is asked to.
pub fn give_up(tally: &mut Tally, interrupts: &Interrupts) {
    tally.count(Counter::BrokenRings);
    interrupts.ask_for_reset();
}
