//! The queues of a function between DRIVER_OK and a reset, and the workers that run them.

use std::io;
use std::sync::Arc;
use std::thread::JoinHandle;

use vmm_sys_util::eventfd::EventFd;

use crate::{SharedQueue, Start, VirtioDevice, Worker};

/// Queues that outlive their workers: a stop that is not a reset keeps their positions.
#[derive(Default)]
pub struct Run {
    queues: Vec<(u16, SharedQueue)>,
    /// The workers, while the queues run.
    workers: Option<Vec<Worker>>,
}

impl Run {
    /// Queues that do not run yet.
    pub fn new(queues: Vec<(u16, SharedQueue)>) -> Self {
        Self { queues, workers: None }
    }

    /// The queues and their indices.
    pub fn queues(&self) -> &[(u16, SharedQueue)] {
        &self.queues
    }

    /// Whether the queues run.
    pub fn is_running(&self) -> bool {
        self.workers.is_some()
    }

    /// Starts the workers.
    ///
    /// # Errors
    ///
    /// When the device cannot; the queues do not run then.
    pub fn start(&mut self, device: &mut impl VirtioDevice, start: Start) -> io::Result<()> {
        let workers = device.start(start)?;
        for (_, doorbell) in workers.iter().flat_map(|worker| &worker.doorbells) {
            // One that rang while the queues stood still was not heard.
            ring(doorbell);
        }
        self.workers = Some(workers);
        Ok(())
    }

    /// Tells the workers to end, and appends what to join.
    pub fn stop(&mut self, stopping: &mut Vec<JoinHandle<()>>) {
        stopping.extend(self.workers.take().into_iter().flatten().map(Worker::stop));
    }

    fn workers(&self) -> impl Iterator<Item = &Worker> {
        self.workers.iter().flatten()
    }

    /// The driver rings the doorbell of `queue`.
    pub fn ring(&self, queue: u16) {
        if let Some((_, doorbell)) = self.doorbells().find(|(index, _)| *index == queue) {
            ring(doorbell);
        }
    }

    /// Has the workers look again at where they signal the driver.
    pub fn wake(&self) {
        self.workers().for_each(Worker::wake);
    }

    /// The queues that run, and what a doorbell of theirs signals.
    pub fn doorbells(&self) -> impl Iterator<Item = (u16, &Arc<EventFd>)> {
        self.workers().flat_map(|worker| worker.doorbells.iter().map(|(queue, eventfd)| (*queue, eventfd)))
    }
}

impl Drop for Run {
    fn drop(&mut self) {
        // A function that goes away without a reset leaves no worker behind that would run on. Nobody waits for their end.
        let mut unjoined = Vec::new();
        self.stop(&mut unjoined);
    }
}

fn ring(doorbell: &EventFd) {
    // A full counter has woken whoever waits for it already.
    let _ = doorbell.write(1);
}
