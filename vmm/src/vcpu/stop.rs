//! Reasons why a guest stops by itself, and the report to its machine.

use std::io;
use std::sync::Arc;

use parking_lot::Mutex;
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

use crate::vcpu::error::VcpuError;

/// Reason why a guest stopped.
#[derive(Debug)]
pub enum Stop {
    /// It powered off.
    PowerOff,
    /// It asked for a reset.
    Reset,
    /// Triple fault of a vCPU, which resets the machine.
    TripleFault,
    /// It cannot continue.
    Failed(VcpuError),
}

/// Report of vCPUs that the guest stopped. The first report counts.
#[derive(Debug)]
pub struct StopSignal {
    event: Arc<EventFd>,
    first: Mutex<Option<Stop>>,
}

impl StopSignal {
    /// A signal without a report.
    ///
    /// # Errors
    ///
    /// No file descriptor is left.
    pub fn new() -> io::Result<Self> {
        Ok(Self { event: Arc::new(EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC)?), first: Mutex::new(None) })
    }

    /// Readable after a report. The generic event device signals it, too.
    pub fn event(&self) -> &Arc<EventFd> {
        &self.event
    }

    /// Takes the first report, if there is one, and forgets it.
    pub fn take(&self) -> Option<Stop> {
        let _ = self.event.read();
        self.first.lock().take()
    }

    /// Looks at the first report, if there is one.
    pub fn look<T>(&self, look: impl FnOnce(Option<&Stop>) -> T) -> T {
        look(self.first.lock().as_ref())
    }

    /// Reports why the guest stops.
    pub fn send(&self, stop: Stop) {
        self.first.lock().get_or_insert(stop);
        // The counter cannot be full: it is read before each boot.
        let _ = self.event.write(1);
    }
}
