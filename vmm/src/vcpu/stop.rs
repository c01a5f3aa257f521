//! Reasons why a guest stops, and their report to the control thread.

use std::io;
use std::sync::Arc;

use parking_lot::Mutex;
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

use crate::vcpu::error::VcpuError;

/// Reason why a guest stopped.
#[derive(Debug)]
pub enum Stop {
    /// Power-off by the guest.
    PowerOff,
    /// Reset by the guest.
    Reset,
    /// Triple fault of a vCPU, which resets the machine.
    TripleFault,
    /// The guest cannot continue.
    Failed(VcpuError),
}

/// Report of a stop from vCPUs. Only the first counts.
#[derive(Debug)]
pub struct StopSignal {
    event: Arc<EventFd>,
    first: Mutex<Option<Stop>>,
}

impl StopSignal {
    /// Creates a signal without a report.
    ///
    /// # Errors
    ///
    /// Fails if no file descriptor is left.
    pub fn new() -> io::Result<Self> {
        Ok(Self { event: Arc::new(EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC)?), first: Mutex::new(None) })
    }

    /// Returns an eventfd that is readable after a report. The generic event device signals it as well.
    pub fn event(&self) -> &Arc<EventFd> {
        &self.event
    }

    /// Takes the first report, if any.
    pub fn take(&self) -> Option<Stop> {
        let _ = self.event.read();
        self.first.lock().take()
    }

    /// Calls `look` with the first report, if any.
    pub fn look<T>(&self, look: impl FnOnce(Option<&Stop>) -> T) -> T {
        look(self.first.lock().as_ref())
    }

    /// Reports a stop.
    pub fn send(&self, stop: Stop) {
        self.first.lock().get_or_insert(stop);
        // The eventfd cannot be full: it is read before each boot.
        let _ = self.event.write(1);
    }
}
