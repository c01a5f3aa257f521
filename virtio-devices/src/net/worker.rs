//! The worker of a queue pair over a tap.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use parking_lot::{Mutex, MutexGuard};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use virtio_bindings::virtio_ring::VIRTIO_RING_F_EVENT_IDX;
use vmm_sys_util::eventfd::EventFd;

use super::control::Control;
use super::counters::{Counter, Tally};
use super::pass::{Next, Pass, Shared, give_up};
use super::rarp;
use super::receive::Receive;
use super::tap_watch::{TapEnd, TapWatch};
use super::transmit::Transmit;
use crate::SharedQueue;
use crate::backend::{Successor, TapQueue};
use crate::device::worker::own;
use crate::frames::net_protocol::Offloads;
use crate::os::eventfd::borrow;
use crate::queue::ring::{BrokenRing, Ring};
use crate::transport::features::has;

/// A queue pair, and the control queue with the first.
pub(crate) struct Pair {
    /// The number of the pair.
    pub index: u16,
    /// The receive queue, if the driver enabled it.
    pub receive: Option<(u16, SharedQueue)>,
    /// The transmit queue, if the driver enabled it.
    pub transmit: Option<(u16, SharedQueue)>,
    /// The control queue, if the driver enabled it.
    pub control: Option<(u16, SharedQueue)>,
    /// The pair's queue of the backend.
    pub tap: Arc<Mutex<TapQueue>>,
    /// The handover of a new tap's queue, after the old tap was deleted.
    pub successor: Arc<Successor>,
    /// The data for handling the loss of the tap; only the first pair has it.
    pub end: Option<TapEnd>,
    /// Wakes the worker.
    pub kick: Arc<EventFd>,
    /// Stops the worker.
    pub stop: Arc<AtomicBool>,
    /// The events that wake the other pairs' workers; only the first pair has any.
    pub peers: Vec<Arc<EventFd>>,
}

impl Pair {
    /// Runs the queues until it must stop. First waits until all workers are spawned and its predecessor has ended.
    pub(crate) fn run(self, shared: &Shared) {
        if !*shared.complete.lock() {
            return;
        }
        let Some(mut tap) = self.own_tap() else { return };
        let mut tally = Tally::new();
        let mut queues = self.open(&mut tap, shared, &mut tally);
        // Offloads apply to the whole tap; the first pair's worker sets them, as it also serves the driver's commands.
        if self.index == 0 {
            set_offloads(&tap, shared.state.offloads());
        }
        // Dropped only now: an older segment may be of a kind that this driver does not accept.
        if shared.fresh && queues.receive.is_some() {
            tap.follow_link(shared.state.link().changes());
            tally.add(Counter::RxStale, tap.discard_stale());
        }

        let mut watch = self.end.as_ref().map(TapWatch::new);
        let mut wakeup = Wakeup { kicked: true, frame: true };
        while !self.stop.load(Ordering::Acquire) {
            if wakeup.kicked {
                self.take_successor(&mut tap);
                self.follow_active_pairs(&mut tap, shared);
            }
            if watch.as_mut().is_some_and(|watch| watch.look(&mut tap, shared)) {
                set_offloads(&tap, shared.state.offloads());
                self.wake_peers();
            }
            shared.failures.settle();
            let memory = shared.memory.pass();
            let batch = shared.state.link().batch();
            if tap.follow_link(shared.state.link().changes()) {
                tally.add(Counter::RxLinkDown, tap.discard_stale());
            }
            if self.index == 0 && shared.state.take_rarp() && shared.state.link_up() {
                let frames = rarp::frames(&shared.state.filter(), &shared.policy.load().policy);
                tap.announce(&frames);
            }
            let mut pass = Pass {
                memory: &memory,
                backend: &*tap,
                state: &shared.state,
                policy: &shared.policy,
                tally: &mut tally,
                failures: &shared.failures,
                interrupts: &shared.interrupts,
                log: shared.log.as_deref(),
            };
            let busy = queues.run(&wakeup, &mut pass);
            drop(batch);
            drop(memory);
            tally.flush(&shared.counters);
            // Without a wait, all queues are checked again.
            wakeup = Wakeup { kicked: true, frame: true };
            if !busy {
                let looks = watch.as_ref().map(TapWatch::wait);
                let limit = [queues.limited_for(), shared.failures.settles_in(), looks].into_iter().flatten().min();
                let waits_for =
                    TapEvents { frame: queues.waits_for_frame(), up: watch.as_ref().is_some_and(TapWatch::expects_up) };
                let (woken, changed) = self.wait(&tap, waits_for, limit, &mut tally);
                watch.iter_mut().filter(|_| changed).for_each(TapWatch::hurry);
                wakeup = woken;
            }
        }
        if let Some((mut receive, _)) = queues.receive {
            receive.give_up(&mut tally);
            tap.keep_spill(receive.into_spill());
        }
        tally.flush(&shared.counters);
        // The first queue stays attached, so that the tap keeps its carrier.
        if self.index > 0 {
            let _ = tap.set_attached(false);
        }
    }

    /// Locks the tap's queue. `None` if the worker must stop in the meantime: a successor may have locked it first, and
    /// a vCPU that waits for this worker to end must not wait for the successor.
    fn own_tap(&self) -> Option<MutexGuard<'_, TapQueue>> {
        own(&self.tap, &self.stop)
    }

    /// Locks the queues. A queue with invalid rings is given up.
    fn open(&self, tap: &mut TapQueue, shared: &Shared, tally: &mut Tally) -> Queues<'_> {
        let features = shared.features;
        let receive = ring(&self.receive, shared, tally).and_then(|ring| {
            // Without memory, the driver must try again later.
            let spill = tap.take_spill().inspect_err(|_| give_up(tally, &shared.interrupts)).ok()?;
            Some((Receive::new(ring, features, spill), Next::More))
        });
        Queues {
            receive,
            transmit: ring(&self.transmit, shared, tally).map(|ring| (Transmit::new(ring, features), Next::More)),
            control: ring(&self.control, shared, tally)
                .map(|ring| Control::new(ring, features, shared.pairs, self.peers.clone())),
        }
    }

    /// Continues with the queue of a new tap, if there is one.
    fn take_successor(&self, tap: &mut TapQueue) {
        if let Some(new) = self.successor.take(self.index) {
            tap.replace_by(new);
        }
    }

    /// Wakes the other pairs' workers for their queues of a new tap.
    fn wake_peers(&self) {
        // A full counter has woken a worker already.
        self.peers.iter().for_each(|peer| drop(peer.write(1)));
    }

    /// Attaches the backend's queue if the driver uses this pair, and detaches it if not.
    fn follow_active_pairs(&self, tap: &mut TapQueue, shared: &Shared) {
        // This also fails if the tap was deleted, which the receive queue then detects.
        let _ = tap.set_attached(self.index < shared.state.active_pairs());
    }

    /// Waits for a doorbell, a stop, or an event of the tap among `waits_for`, at most for `limit`. Also returns true
    /// if the tap reports an error, or is up.
    fn wait(&self, tap: &TapQueue, waits_for: TapEvents, limit: Option<Duration>, tally: &mut Tally) -> (Wakeup, bool) {
        // A time that is too long for the kernel counts as infinite.
        let limit = limit.and_then(|limit| Timespec::try_from(limit).ok());
        let mut events = PollFlags::empty();
        events.set(PollFlags::IN, waits_for.frame);
        events.set(PollFlags::OUT, waits_for.up);
        let watches_tap = tap.attached() && !events.is_empty();
        let kick = borrow(&self.kick);
        let mut fds = [PollFd::new(&kick, PollFlags::IN), PollFd::new(tap, events)];
        let watched = if watches_tap { &mut fds[..] } else { &mut fds[..1] };
        // If this fails (a signal, no memory), the queues are checked and the wait is repeated.
        let _ = poll(watched, limit.as_ref());
        let kicked = !fds[0].revents().is_empty();
        let of_tap = if watches_tap { fds[1].revents() } else { PollFlags::empty() };
        let changed = of_tap.intersects(PollFlags::ERR | PollFlags::HUP | PollFlags::OUT);
        let frame = waits_for.frame && !(of_tap - PollFlags::OUT).is_empty();
        if kicked && self.kick.read().is_ok() {
            tally.count(Counter::Kicks);
        }
        (Wakeup { kicked, frame }, changed)
    }
}

/// Makes the tap deliver `offloads`. If the tap refuses the combination, offloads are switched off: the setting of an
/// earlier driver must not stay in force.
fn set_offloads(tap: &TapQueue, offloads: Offloads) {
    if tap.set_offloads(offloads).is_err() {
        // A tap that refuses this, too, was deleted.
        let _ = tap.set_offloads(Offloads::empty());
    }
}

fn ring<'q>(queue: &'q Option<(u16, SharedQueue)>, shared: &Shared, tally: &mut Tally) -> Option<Ring<'q>> {
    let (index, queue) = queue.as_ref()?;
    let event_idx = has(shared.features, VIRTIO_RING_F_EVENT_IDX);
    // The tap is locked, so the predecessor has ended and released the queue.
    Ring::open(*index, queue.lock(), event_idx, &shared.memory.pass())
        .inspect_err(|BrokenRing| give_up(tally, &shared.interrupts))
        .ok()
}

/// The events of the tap that the worker waits for.
#[derive(Debug, Clone, Copy)]
struct TapEvents {
    /// A frame to receive.
    frame: bool,
    /// The tap accepts frames.
    up: bool,
}

/// The reasons why the worker woke up.
struct Wakeup {
    kicked: bool,
    frame: bool,
}

/// The queues that a worker runs, and the events that they wait for. A queue that was given up is `None`.
struct Queues<'q> {
    receive: Option<(Receive<'q>, Next)>,
    transmit: Option<(Transmit<'q>, Next)>,
    control: Option<Control<'q>>,
}

impl Queues<'_> {
    fn waits_for_frame(&self) -> bool {
        matches!(self.receive, Some((_, Next::Frame | Next::More)))
    }

    /// The least time that a queue must wait for its limit.
    fn limited_for(&self) -> Option<Duration> {
        let next = [self.receive.as_ref().map(|(_, next)| *next), self.transmit.as_ref().map(|(_, next)| *next)];
        let limits = next.into_iter().flatten().filter_map(|next| match next {
            Next::Limited(wait) => Some(wait),
            _ => None,
        });
        limits.min()
    }

    /// Runs the queues that may have work. Returns true if there is more to do.
    fn run(&mut self, wakeup: &Wakeup, pass: &mut Pass<'_>) -> bool {
        let mut busy = false;
        if wakeup.kicked || matches!(self.transmit, Some((_, Next::Limited(_)))) {
            busy |= attempt(&mut self.transmit, pass, |(transmit, next), pass| {
                *next = transmit.run(pass)?;
                Ok(*next == Next::More)
            });
        }
        if wakeup.kicked {
            busy |= attempt(&mut self.control, pass, |control, pass| control.run(pass));
        }
        let receivable = pass.backend.attached()
            && match self.receive {
                Some((_, Next::Doorbell)) => wakeup.kicked,
                Some((_, Next::Limited(_))) => true,
                Some(_) => wakeup.frame,
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

/// Runs a queue, and gives it up if its ring is invalid.
fn attempt<Q>(
    queue: &mut Option<Q>,
    pass: &mut Pass<'_>,
    run: impl FnOnce(&mut Q, &mut Pass<'_>) -> Result<bool, BrokenRing>,
) -> bool {
    let Some(running) = queue else { return false };
    run(running, pass).unwrap_or_else(|BrokenRing| {
        // Released first: the log names the fault of a ring that no worker runs.
        *queue = None;
        give_up(pass.tally, pass.interrupts);
        false
    })
}
