//! Runs a channel's queues step by step on the caller's thread, without waiting. For fuzz targets.

use std::io;
use std::sync::Arc;

use super::counters::{ChannelCounter, ChannelCounters};
use super::end::ChannelEnd;
use super::ports::Ports;
use crate::device::queue_worker::steps::{QueueSteps, SteppedQueue};
use crate::net::steps::{Step, Stepped};
use crate::os::clock;
use crate::{DeviceSpecific, GuestMap, SharedQueue, StateError};

/// A channel whose requests are not limited by time, and one of its queues at a time.
pub struct ChannelSteps {
    steps: QueueSteps<Ports>,
    index: u16,
    end: Arc<ChannelEnd>,
    counters: Arc<ChannelCounters>,
}

impl ChannelSteps {
    /// Creates a channel whose driver negotiated `features` of the rings and several ports.
    ///
    /// # Errors
    ///
    /// Fails if the host has no descriptor left.
    pub fn new(memory: GuestMap, features: u64) -> io::Result<Self> {
        let counters = Arc::new(ChannelCounters::new());
        let end = Arc::new(ChannelEnd::with_rate(None, clock::now())?);
        let ports = Ports::new(Arc::clone(&end), ["control", "events"], true);
        let steps = QueueSteps::new(ports, memory, features, &counters)?;
        Ok(Self { steps, index: 0, end, counters })
    }

    /// Selects the queue that the next steps are of.
    pub fn select(&mut self, index: u16) {
        self.index = index;
    }

    /// The host's end.
    pub fn end(&self) -> &ChannelEnd {
        &self.end
    }

    /// Ends a check of all queues, as the worker does.
    pub fn end_pass(&mut self) {
        self.steps.after_look();
    }

    /// Saves the channel, and restores it in its place.
    ///
    /// # Errors
    ///
    /// Fails if what was saved is refused.
    pub fn save_and_restore(&mut self) -> Result<DeviceSpecific, StateError> {
        let state = self.end.save();
        self.end.restore(&state)?;
        Ok(DeviceSpecific::Channel(Box::new(state)))
    }

    /// The value of a counter.
    pub fn count(&self, counter: ChannelCounter) -> u64 {
        self.counters.get(counter)
    }
}

impl Stepped for ChannelSteps {
    type Queue<'q> = SteppedQueue<'q>;

    fn queue<'q>(&self, queue: &'q SharedQueue) -> Option<SteppedQueue<'q>> {
        self.steps.queue(self.index, queue)
    }

    fn step(&mut self, queue: &mut SteppedQueue<'_>) -> Step {
        self.steps.step(queue)
    }

    fn take_interrupt(&self) -> bool {
        self.steps.take_interrupt()
    }
}
