//! A device with one queue and a running worker, and its driver.

use std::sync::Arc;

use crate::net::testing::{DriverQueue, eventually, memory};
use crate::{GuestMap, Interrupts, Start, VirtioDevice, Worker};

/// The size of the queue.
const SIZE: u16 = 16;
/// The vector of configuration changes. The queue has vector 0.
pub(crate) const CONFIG_VECTOR: u16 = 1;

/// The guest, whose worker is stopped when this is dropped.
pub(crate) struct Guest<D: VirtioDevice> {
    pub device: D,
    pub queue: DriverQueue,
    pub interrupts: Arc<Interrupts>,
    pub workers: Vec<Worker>,
}

impl<D: VirtioDevice> Guest<D> {
    /// Starts `device`.
    pub(crate) fn new(device: D) -> Self {
        Self::in_memory(device, &memory())
    }

    /// As [`Self::new`], with `map` for guest memory, of at least the size of [`memory`].
    pub(crate) fn in_memory(device: D, map: &GuestMap) -> Self {
        let interrupts = Arc::new(Interrupts::new(1, 2));
        interrupts.set_queue_vector(0, 0);
        interrupts.set_config_vector(CONFIG_VECTOR);
        let mut guest = Self { device, queue: DriverQueue::new(map, 0, SIZE), interrupts, workers: Vec::new() };
        guest.start();
        guest
    }

    /// Starts the queue, with all features.
    pub(crate) fn start(&mut self) {
        let start = Start {
            memory: self.queue.memory.clone().into(),
            features: self.device.features(),
            queues: vec![(0, Arc::clone(&self.queue.queue))],
            interrupts: Arc::clone(&self.interrupts),
        };
        self.workers = self.device.start(start).unwrap();
    }

    /// Stops the queue.
    pub(crate) fn stop(&mut self) {
        self.workers.drain(..).for_each(|worker| worker.stop().join().unwrap());
    }

    /// Rings the doorbell.
    pub(crate) fn kick(&self) {
        self.workers[0].kick.write(1).unwrap();
    }

    /// Waits until `count` chains are used. Returns the used length of each.
    pub(crate) fn used(&mut self, count: usize) -> Vec<u32> {
        let mut used = Vec::new();
        eventually("completion", || {
            used.extend(self.queue.take_used());
            used.len() >= count
        });
        assert_eq!(used.len(), count);
        used.into_iter().map(|(_, len)| len).collect()
    }

    /// Makes a chain available, rings the doorbell, and waits until it is used. Returns its used length.
    pub(crate) fn send(&mut self, chain: &[(u64, u32, u16)]) -> u32 {
        self.queue.add(chain);
        self.kick();
        self.used(1)[0]
    }

    /// Waits until the driver has been interrupted.
    pub(crate) fn await_interrupt(&self) {
        eventually("an interrupt", || self.interrupts.eventfd(0).unwrap().read().is_ok());
    }

    /// Writes an invalid available index, and waits until the device asks for a reset.
    pub(crate) fn break_ring(&self) {
        self.queue.write(self.queue.avail() + 2, 1000u16.to_le_bytes());
        self.kick();
        eventually("a request for a reset", || self.interrupts.needs_reset());
    }
}

impl<D: VirtioDevice> Drop for Guest<D> {
    fn drop(&mut self) {
        self.stop();
    }
}
