//! Runs a socket device's queues step by step on the caller's thread, without waiting and without a clock. For tests
//! and fuzz targets of other crates.

use std::io;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use virtio_bindings::virtio_ring::VIRTIO_RING_F_EVENT_IDX;

use super::counters::{Tally, VsockCounter, VsockCounters};
use super::events::tell_of_reset;
use super::muxer::Muxer;
use super::pass::{Next, Pass};
use super::receive::Receive;
use super::transmit::Transmit;
use super::worker::{EVENTS, RECEIVE, TRANSMIT};
use crate::net::steps::Step;
use crate::queue::ring::{BrokenRing, Ring};
use crate::transport::features::has;
use crate::{DmaView, GuestMap, Interrupts, SharedQueue};

/// A socket device in its power-on state.
pub struct VsockSteps {
    memory: DmaView,
    muxer: Muxer,
    tally: Tally,
    counters: VsockCounters,
    interrupts: Interrupts,
    features: u64,
    now: Instant,
}

impl VsockSteps {
    /// Creates a device of a guest with the context ID `cid`, whose driver negotiated `features`. `connect` returns a
    /// non-blocking socket for the guest's connection to a port.
    ///
    /// # Errors
    ///
    /// Fails if the host has no descriptor for the poll set.
    pub fn new(
        memory: GuestMap,
        cid: u32,
        features: u64,
        connect: impl Fn(u32) -> io::Result<UnixStream> + Send + 'static,
    ) -> io::Result<Self> {
        Ok(Self {
            memory: DmaView::identity(&memory),
            muxer: Muxer::new(cid.into(), 0, Box::new(connect))?,
            tally: Tally::new(),
            counters: VsockCounters::new(),
            interrupts: Interrupts::new(3, 0),
            features,
            now: Instant::now(),
        })
    }

    /// Adds a client of the host, a non-blocking socket.
    pub fn admit(&mut self, client: UnixStream) {
        self.muxer.admit(client, self.now, &mut self.tally);
    }

    /// Advances the time.
    pub fn wait(&mut self, time: Duration) {
        self.now += time;
        self.muxer.expire(self.now, &mut self.tally);
    }

    /// Handles events of the sockets.
    pub fn look(&mut self) {
        let mut happened = Vec::new();
        for round in 0_u32.. {
            assert!(round < 10_000, "what is done about a change of a socket leads to the next change");
            self.muxer.poller().wait(Some(&rustix::event::Timespec::default()), &mut happened);
            if happened.is_empty() {
                return;
            }
            for event in happened.drain(..) {
                self.muxer.happened(event, self.now, &mut self.tally);
            }
        }
    }

    /// Runs one turn of a worker's loop for the receive queue.
    pub fn receive(&mut self, queue: &SharedQueue) -> Step {
        self.run(RECEIVE, queue, |ring, pass| Receive::new(ring).run(pass))
    }

    /// As [`Self::receive`], for the transmit queue. [`Step::Frame`] means that the driver must take packets first.
    pub fn transmit(&mut self, queue: &SharedQueue) -> Step {
        self.run(TRANSMIT, queue, |ring, pass| Transmit::new(ring).run(pass))
    }

    /// Sends a transport reset event on the event queue. [`Step::More`] once it is sent.
    pub fn tell_of_reset(&mut self, queue: &SharedQueue) -> Step {
        self.run(EVENTS, queue, |mut ring, pass| tell_of_reset(&mut ring, pass))
    }

    fn run<'q>(
        &mut self,
        index: u16,
        queue: &'q SharedQueue,
        run: impl FnOnce(Ring<'q>, &mut Pass<'_>) -> Result<Next, BrokenRing>,
    ) -> Step {
        let Self { memory, muxer, tally, counters, interrupts, features, now } = self;
        let ring = Ring::open(index, queue.lock(), has(*features, VIRTIO_RING_F_EVENT_IDX), memory);
        let mut pass = Pass { memory, muxer, tally, now: *now, interrupts };
        let result = ring.and_then(|ring| run(ring, &mut pass));
        tally.flush(counters);
        match result {
            Ok(Next::More) => Step::More,
            Ok(Next::Room) => Step::Frame,
            Ok(Next::Doorbell) => Step::Doorbell,
            Err(BrokenRing) => Step::Broken,
        }
    }

    /// The value of a counter.
    pub fn count(&mut self, counter: VsockCounter) -> u64 {
        self.tally.flush(&self.counters);
        self.counters.get(counter)
    }

    /// The number of connections, and of clients that have not named a port.
    pub fn census(&self) -> (usize, usize) {
        self.muxer.census()
    }

    /// The number of queued resets.
    pub fn resets(&self) -> usize {
        self.muxer.resets()
    }
}
