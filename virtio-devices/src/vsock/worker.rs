//! The worker of all queues, which waits for the driver and for the host's sockets at the same time.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rustix::event::Timespec;
use virtio_bindings::virtio_ring::VIRTIO_RING_F_EVENT_IDX;
use vmm_sys_util::eventfd::EventFd;

use super::counters::{Tally, VsockCounter, VsockCounters};
use super::events::tell_of_reset;
use super::host::HostSocket;
use super::muxer::{DOORBELL, LISTENER, Muxer};
use super::pass::{Next, Pass};
use super::poller::Event;
use super::receive::Receive;
use super::transmit::Transmit;
use crate::device::worker::own;
use crate::os::eventfd::borrow;
use crate::queue::ring::{BrokenRing, Ring};
use crate::transport::features::has;
use crate::{DmaSpace, Interrupts, SharedQueue};

/// The queue that the driver receives from (`virtio 1.4 §5.10.2`).
pub(crate) const RECEIVE: u16 = 0;
/// The queue that the driver transmits to.
pub(crate) const TRANSMIT: u16 = 1;
/// The queue of events.
pub(crate) const EVENTS: u16 = 2;
/// The most clients accepted before the queues are served.
const CLIENTS: usize = 32;
/// Delay before accepting a client again for which the host had no descriptor.
const RETRY: Duration = Duration::from_millis(100);

/// Context of the worker.
pub(crate) struct QueueWorker {
    /// The queues that the driver enabled, by their indices.
    pub queues: [Option<SharedQueue>; 3],
    /// The connections.
    pub muxer: Arc<Mutex<Muxer>>,
    /// Source of clients; tests may pass clients to the muxer instead.
    pub host: Arc<HostSocket>,
    /// True if the driver must be notified that its connections are closed.
    pub owes_reset: Arc<AtomicBool>,
    /// The negotiated features.
    pub features: u64,
    /// The guest's memory.
    pub memory: DmaSpace,
    /// Interrupts of the device.
    pub interrupts: Arc<Interrupts>,
    /// The counters.
    pub counters: Arc<VsockCounters>,
    /// Wakes the worker.
    pub kick: Arc<EventFd>,
    /// Stops the worker.
    pub stop: Arc<AtomicBool>,
}

/// The queues while they run.
struct Running<'q> {
    receive: Option<Receive<'q>>,
    transmit: Option<Transmit<'q>>,
    events: Option<Ring<'q>>,
}

/// New clients of the host.
#[derive(Debug, Clone, Copy)]
enum Clients {
    None,
    Waiting,
    /// The host had no descriptor for one.
    Later(Instant),
}

impl QueueWorker {
    /// Runs the queues until stopped. First waits for the predecessor's end.
    pub(crate) fn run(self) {
        let mut tally = Tally::new();
        if let Some(mut muxer) = own(&self.muxer, &self.stop) {
            let poller = muxer.poller();
            if poller.add_doorbell(borrow(&self.kick), DOORBELL).is_ok()
                && poller.add_listener(&*self.host, LISTENER).is_ok()
            {
                self.serve(&mut muxer, &mut tally);
            } else {
                // Without memory for a poll set of three, there is no guest, either.
                self.interrupts.ask_for_reset();
            }
            muxer.poller().remove(borrow(&self.kick));
            muxer.poller().remove(&*self.host);
        }
        tally.flush(&self.counters);
    }

    fn serve(&self, muxer: &mut Muxer, tally: &mut Tally) {
        let mut running = Running {
            receive: self.open(RECEIVE, tally).map(Receive::new),
            transmit: self.open(TRANSMIT, tally).map(Transmit::new),
            events: self.open(EVENTS, tally),
        };
        let mut happened = Vec::new();
        let mut clients = Clients::Waiting;
        let mut busy = true;
        while !self.stop.load(Ordering::Acquire) {
            let timeout = if busy { Some(Duration::ZERO) } else { timeout(muxer, clients) };
            let timeout = timeout.and_then(|timeout| Timespec::try_from(timeout).ok());
            muxer.poller().wait(timeout.as_ref(), &mut happened);
            let now = Instant::now();
            for event in happened.drain(..) {
                self.handle(event, &mut clients, muxer, now, tally);
            }
            muxer.expire(now, tally);
            clients = self.accept(clients, muxer, now, tally);
            busy = self.turn(&mut running, muxer, now, tally) || matches!(clients, Clients::Waiting);
            tally.flush(&self.counters);
        }
    }

    fn handle(&self, event: Event, clients: &mut Clients, muxer: &mut Muxer, now: Instant, tally: &mut Tally) {
        match event.token {
            DOORBELL => {
                if self.kick.read().is_ok() {
                    tally.count(VsockCounter::Kicks);
                }
            }
            LISTENER => *clients = Clients::Waiting,
            _ => muxer.happened(event, now, tally),
        }
    }

    /// Accepts clients that wait.
    fn accept(&self, clients: Clients, muxer: &mut Muxer, now: Instant, tally: &mut Tally) -> Clients {
        match clients {
            Clients::None => return clients,
            Clients::Later(time) if now < time => return clients,
            Clients::Later(_) | Clients::Waiting => {}
        }
        for _ in 0..CLIENTS {
            match self.host.accept() {
                Ok(stream) => muxer.admit(stream, now, tally),
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => return Clients::None,
                // The client has disconnected, or a signal arrived.
                Err(error)
                    if matches!(
                        error.kind(),
                        std::io::ErrorKind::ConnectionAborted | std::io::ErrorKind::Interrupted
                    ) => {}
                Err(_) => return Clients::Later(now + RETRY),
            }
        }
        Clients::Waiting
    }

    /// Serves each queue, up to a limit; returns true if there may be more to do.
    fn turn(&self, running: &mut Running<'_>, muxer: &mut Muxer, now: Instant, tally: &mut Tally) -> bool {
        let memory = self.memory.pass();
        let mut pass = Pass { memory: &memory, muxer, tally, now, interrupts: &self.interrupts };
        if self.owes_reset.load(Ordering::Acquire) {
            let told = self.attempt(&mut running.events, &mut pass, |ring, pass| tell_of_reset(ring, pass));
            if told == Next::More {
                self.owes_reset.store(false, Ordering::Release);
            }
        }
        let sent = self.attempt(&mut running.transmit, &mut pass, |queue, pass| queue.run(pass));
        let received = self.attempt(&mut running.receive, &mut pass, |queue, pass| queue.run(pass));
        sent == Next::More || received == Next::More || sent == Next::Room && pass.muxer.takes_packets()
    }

    fn open(&self, index: u16, tally: &mut Tally) -> Option<Ring<'_>> {
        let queue = self.queues.get(usize::from(index))?.as_ref()?;
        let event_idx = has(self.features, VIRTIO_RING_F_EVENT_IDX);
        let ring = Ring::open(index, own(queue, &self.stop)?, event_idx, &self.memory.pass());
        ring.inspect_err(|BrokenRing| self.give_up(tally)).ok()
    }

    /// Runs a queue, and stops it if its ring is invalid.
    fn attempt<Q>(
        &self,
        queue: &mut Option<Q>,
        pass: &mut Pass<'_>,
        run: impl FnOnce(&mut Q, &mut Pass<'_>) -> Result<Next, BrokenRing>,
    ) -> Next {
        let Some(running) = queue else { return Next::Doorbell };
        run(running, pass).unwrap_or_else(|BrokenRing| {
            *queue = None;
            self.give_up(pass.tally);
            Next::Doorbell
        })
    }

    /// Counts an invalid ring, and asks the driver for a reset.
    fn give_up(&self, tally: &mut Tally) {
        tally.count(VsockCounter::BrokenRings);
        self.interrupts.ask_for_reset();
    }
}

/// Time until the next timeout; `None` if there is none.
fn timeout(muxer: &Muxer, clients: Clients) -> Option<Duration> {
    let later = if let Clients::Later(time) = clients { Some(time) } else { None };
    let next = muxer.deadline().into_iter().chain(later).min()?;
    Some(next.saturating_duration_since(Instant::now()))
}
