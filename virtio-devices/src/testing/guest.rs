//! A device with running workers, and its driver.

use std::sync::Arc;

use super::driver_queue::{DriverQueue, eventually, memory};
use crate::{DmaSpace, GuestMap, Interrupts, Memory, Start, VirtioDevice, Worker};

/// The size of the queue of a device that has one.
const SIZE: u16 = 16;

/// The guest, whose workers are stopped when this is dropped.
///
/// Queue `n` has vector `n`; changes of the configuration have the one after those of the queues.
pub(crate) struct Guest<D: VirtioDevice, H = ()> {
    pub device: D,
    /// The host's side of the device.
    pub host: H,
    pub queues: Vec<DriverQueue>,
    pub interrupts: Arc<Interrupts>,
    pub workers: Vec<Worker>,
    pub memory: Memory,
}

impl<D: VirtioDevice> Guest<D> {
    /// Starts `device`, which has one queue, with all features.
    pub(crate) fn new(device: D) -> Self {
        Self::in_memory(device, &memory())
    }

    /// As [`Self::new`], with `map` for guest memory, of at least the size of [`memory`].
    pub(crate) fn in_memory(device: D, map: &GuestMap) -> Self {
        let mut guest = Self::stopped(device, (), map, &[SIZE]);
        guest.start();
        guest
    }
}

impl<D: VirtioDevice, H> Guest<D, H> {
    /// A device that has not been started, with queues of these sizes.
    pub(crate) fn stopped(device: D, host: H, map: &GuestMap, sizes: &[u16]) -> Self {
        let count = sizes.len() as u16;
        let interrupts = Arc::new(Interrupts::new(count, count + 1));
        (0..count).for_each(|queue| interrupts.set_queue_vector(queue, queue));
        interrupts.set_config_vector(count);
        let queues = sizes.iter().zip(0..).map(|(size, index)| DriverQueue::new(map, index, *size)).collect();
        Self { device, host, queues, interrupts, workers: Vec::new(), memory: Memory::new(map.clone()) }
    }

    /// Starts the queues, with all features.
    pub(crate) fn start(&mut self) {
        self.start_with(self.device.features());
    }

    /// Starts the queues, with these features.
    pub(crate) fn start_with(&mut self, features: u64) {
        self.start_in(self.memory.clone().into(), features);
    }

    /// Starts the queues in `memory`, which may be behind an IOMMU.
    pub(crate) fn start_in(&mut self, memory: DmaSpace, features: u64) {
        let start = Start { memory, ..self.to_start(features) };
        self.workers = self.device.start(start).unwrap();
    }

    /// The parameters of a start.
    pub(crate) fn to_start(&self, features: u64) -> Start {
        let queues = (0..).zip(&self.queues).map(|(index, queue)| (index, Arc::clone(&queue.queue))).collect();
        Start {
            memory: self.memory.clone().into(),
            features,
            queues,
            interrupts: Arc::clone(&self.interrupts),
            log: None,
        }
    }

    /// Stops the queues.
    pub(crate) fn stop(&mut self) {
        for worker in self.workers.drain(..) {
            let thread = worker.stop();
            eventually("the end of a worker", || thread.is_end() || thread.is_finished());
            thread.join().unwrap();
        }
    }

    /// Rings the doorbell of `queue`.
    pub(crate) fn kick(&self, queue: u16) {
        let mut doorbells = self.workers.iter().flat_map(|worker| &worker.doorbells);
        doorbells.find(|(index, _)| *index == queue).unwrap().1.write(1).unwrap();
    }

    /// Waits until at least `count` chains of `queue` are used. Returns the head and the used length of each.
    pub(crate) fn await_used(&mut self, queue: u16, count: usize) -> Vec<(u32, u32)> {
        let queue = &mut self.queues[usize::from(queue)];
        let mut used = Vec::new();
        eventually("completion", || {
            used.extend(queue.take_used());
            used.len() >= count
        });
        used
    }

    /// Waits until exactly `count` chains of `queue` are used. Returns the used length of each.
    pub(crate) fn used(&mut self, queue: u16, count: usize) -> Vec<u32> {
        let used = self.await_used(queue, count);
        assert_eq!(used.len(), count);
        used.into_iter().map(|(_, len)| len).collect()
    }

    /// Makes a chain available in the first queue, rings the doorbell, and waits until it is used. Returns its used
    /// length.
    pub(crate) fn send(&mut self, chain: &[(u64, u32, u16)]) -> u32 {
        let head = self.queues[0].add(chain);
        self.kick(0);
        let used = self.await_used(0, 1);
        assert_eq!((used.len(), used[0].0), (1, head.into()));
        used[0].1
    }

    /// True if the vector of `queue` was signalled since the last call.
    pub(crate) fn interrupted(&self, queue: u16) -> bool {
        self.interrupts.eventfd(queue).unwrap().read().is_ok()
    }

    /// True if the driver was notified of a change of the configuration since the last call.
    pub(crate) fn config_changed(&self) -> bool {
        self.interrupted(self.queues.len() as u16)
    }

    /// Waits until the driver has been interrupted for `queue`.
    pub(crate) fn await_interrupt(&self, queue: u16) {
        eventually("an interrupt", || self.interrupted(queue));
    }

    /// Writes an invalid available index to `queue`, and waits until the device asks for a reset.
    pub(crate) fn break_ring(&self, queue: u16) {
        self.queues[usize::from(queue)].set_avail_index(1000);
        self.kick(queue);
        eventually("a request for a reset", || self.interrupts.needs_reset());
    }
}

impl<D: VirtioDevice, H> Drop for Guest<D, H> {
    fn drop(&mut self) {
        // A test that fails does not wait for a worker that hangs.
        if !std::thread::panicking() {
            self.stop();
        }
    }
}
