//! A placeholder for a NIC's missing backend. The NIC keeps the driver's state: queues and their positions, filters,
//! commands. Its link is down, so that no queue runs, until it is given a backend.

use std::io;
use std::os::fd::BorrowedFd;

use virtio_bindings::virtio_config::VIRTIO_F_VERSION_1;
use vmm_sys_util::eventfd::EventFd;

use super::{Ability, Attention, BackendKind, QueueRun, QueueRunner, RunnerError, StartError};
use crate::GuestMap;
use crate::frames::net_protocol::{MAX_QUEUE_SIZE, Offloads};

/// A backend that is missing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Absent {
    /// The reason, in one line.
    pub reason: String,
    /// The NIC's pairs of queues.
    pub queue_pairs: u16,
    /// The missing backend is in this host's kernel, so a driver that starts in the meantime is offered every feature
    /// that this program supports. For any other backend, whose features are unknown, drivers are offered what all
    /// backends support.
    pub of_kernel: bool,
    /// The NIC had the backend's own address; the saved state has it.
    pub has_own_mac: bool,
}

impl QueueRunner for Absent {
    fn ability(&self) -> Ability {
        Ability {
            kind: BackendKind::Absent,
            name: self.reason.clone(),
            features: if self.of_kernel { u64::MAX } else { 1 << VIRTIO_F_VERSION_1 },
            queue_pairs: self.queue_pairs,
            queue_size: MAX_QUEUE_SIZE,
            mac: None,
            mtu: None,
            control_queue: false,
            switches_offloads: true,
            logs_writes: true,
            has_state: false,
        }
    }

    /// Not called, because the link is down.
    fn start(&mut self, _run: &QueueRun<'_>) -> Result<(), StartError> {
        Err(missing().into())
    }

    fn stop(&mut self) -> Vec<Option<u16>> {
        Vec::new()
    }

    fn set_call(&mut self, _queue: u16, _call: &EventFd) -> Result<(), RunnerError> {
        Ok(())
    }

    fn set_active_pairs(&mut self, _pairs: u16) -> Result<(), RunnerError> {
        Ok(())
    }

    /// Does nothing: the NIC keeps the setting and applies it to the next backend.
    fn set_offloads(&self, _offloads: Offloads) -> io::Result<()> {
        Ok(())
    }

    fn set_memory(&mut self, _memory: &GuestMap) -> Result<(), RunnerError> {
        Ok(())
    }

    fn watched(&self) -> Vec<BorrowedFd<'_>> {
        Vec::new()
    }

    fn attend(&mut self) -> Result<Attention, RunnerError> {
        Ok(Attention::Nothing)
    }

    fn recover(&mut self) -> Result<(), RunnerError> {
        Err(missing())
    }
}

fn missing() -> RunnerError {
    RunnerError { what: "run the queues", source: io::ErrorKind::NotConnected.into() }
}
