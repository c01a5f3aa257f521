//! The queues of a function between DRIVER_OK and a reset, and the workers that run them.

use std::io;
use std::sync::Arc;

use vmm_sys_util::eventfd::EventFd;

use crate::os::thread::Thread;
use crate::{SharedQueue, Start, VirtioDevice, Worker};

/// Queues that outlive their workers: a stop without a reset keeps their positions.
#[derive(Default)]
pub(crate) struct Run {
    queues: Vec<(u16, SharedQueue)>,
    /// The workers, while the queues run.
    workers: Option<Vec<Worker>>,
}

impl Run {
    /// Creates queues that do not run yet.
    pub(crate) fn new(queues: Vec<(u16, SharedQueue)>) -> Self {
        Self { queues, workers: None }
    }

    /// The queues and their indices.
    pub(crate) fn queues(&self) -> &[(u16, SharedQueue)] {
        &self.queues
    }

    /// True if the queues run.
    pub(crate) fn is_running(&self) -> bool {
        self.workers.is_some()
    }

    /// Starts the workers.
    ///
    /// # Errors
    ///
    /// Fails if the device cannot start them. The queues do not run then.
    pub(crate) fn start(&mut self, device: &mut impl VirtioDevice, start: Start) -> io::Result<()> {
        let workers = device.start(start)?;
        for doorbells in workers.iter().map(|worker| &worker.doorbells) {
            for (n, (_, doorbell)) in doorbells.iter().enumerate() {
                // A doorbell rung while the queues were stopped had no effect, so all are rung now. A shared doorbell
                // is rung once: a second ring could wake a fast worker again for nothing.
                if doorbells.iter().take(n).all(|(_, other)| !Arc::ptr_eq(other, doorbell)) {
                    ring(doorbell);
                }
            }
        }
        self.workers = Some(workers);
        Ok(())
    }

    /// Stops the workers, and returns the threads to join.
    #[must_use]
    pub(crate) fn stop(&mut self) -> Vec<Thread> {
        self.workers.take().into_iter().flatten().map(Worker::stop).collect()
    }

    /// Number of workers; 0 while the queues do not run.
    pub(crate) fn num_workers(&self) -> usize {
        self.workers().count()
    }

    fn workers(&self) -> impl Iterator<Item = &Worker> {
        self.workers.iter().flatten()
    }

    /// The driver rings the doorbell of `queue`.
    pub(crate) fn ring(&self, queue: u16) {
        if let Some((_, doorbell)) = self.doorbells().find(|(index, _)| *index == queue) {
            ring(doorbell);
        }
    }

    /// Wakes the workers, which then check where to signal the driver.
    pub(crate) fn wake(&self) {
        self.workers().for_each(Worker::wake);
    }

    /// The running queues, and the eventfd that the doorbell of each signals.
    pub(crate) fn doorbells(&self) -> impl Iterator<Item = (u16, &Arc<EventFd>)> {
        self.workers().flat_map(|worker| worker.doorbells.iter().map(|(queue, eventfd)| (*queue, eventfd)))
    }
}

impl Drop for Run {
    fn drop(&mut self) {
        // A function dropped without a reset leaves no worker running. Their threads are not joined.
        drop(self.stop());
    }
}

fn ring(doorbell: &EventFd) {
    // A full counter has already woken the worker.
    let _ = doorbell.write(1);
}
