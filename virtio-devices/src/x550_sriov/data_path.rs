//! The part of an X550 that moves frames, as the device sees it.

use std::io;

use x550::Doorbell;

use super::handle::X550Handle;
use crate::HostNic;
use crate::os::thread::Thread;

/// The part of an X550 that moves frames between its rings and a network.
///
/// The device calls it with its own lock held and the NIC's lock free, mostly on vCPU threads: no method may wait for a
/// thread, a backend or the guest. Calls are hints to look again at the plain values of the NIC ([`x550::Nic::pool`],
/// [`x550::Nic::switching`], [`x550::Nic::receive_queue`], [`x550::Nic::transmit_queue`]) and at
/// [`X550Handle::may_run`]; there may be more of them than changes, and each change is followed by one. A method that
/// starts threads gives them a clone of the handle.
///
/// A queue runs while its registers enable it ([`x550::ReceiveQueue::enabled`], [`x550::TransmitQueue::enabled`]) and
/// the function that owns it ([`x550::Nic::owner`]) may run. Its memory is [`X550Handle::memory`] of that function, by
/// which VFs are isolated from each other and from their PF.
pub trait DataPath: Send + Sync {
    /// Takes the NIC, once, before any other call.
    fn begin(&self, _nic: &X550Handle) {}

    /// The host's ends of all functions, the PF's first; none by default.
    fn host_nics(&self) -> Vec<Box<dyn HostNic + Send>> {
        Vec::new()
    }

    /// Starts and stops queues: one was enabled, disabled or moved to another ring, pool or owner; or a function may
    /// run, or no longer.
    ///
    /// Returns threads that still use a queue which is not to run now, or the end of their work ([`Thread`]). Once they
    /// have been joined, nothing touches its ring and buffers, nor changes its head or sends its interrupt. The guest's
    /// access completes only then. Queues keep their heads in the NIC.
    #[must_use = "the guest's access completes when they have ended"]
    fn queues_changed(&self, nic: &X550Handle) -> Vec<Thread>;

    /// Takes over the pools and the switch: addresses, VLANs, modes, rates or the number of VFs.
    fn pools_changed(&self, nic: &X550Handle);

    /// Calls [`X550Handle::send_deferred`] at [`X550Handle::due`], which may be earlier than before: an access has made
    /// an interrupt wait. By default it waits for the next.
    fn moderation_changed(&self, _nic: &X550Handle) {}

    /// Serves a queue whose tail was written. The queue need not run.
    fn doorbell(&self, nic: &X550Handle, doorbell: Doorbell);

    /// As [`Self::queues_changed`], when the host has held all functions. A frame that is on its way to a stopped queue
    /// is kept until [`Self::resume`]. Called again before, this does nothing.
    #[must_use = "the device is paused when they have ended"]
    fn pause(&self, nic: &X550Handle) -> Vec<Thread> {
        self.queues_changed(nic)
    }

    /// Starts the queues again after [`Self::pause`], from the heads in the NIC, and rings their doorbells: a tail may
    /// have been written in between.
    ///
    /// # Errors
    ///
    /// Fails if the host lacks something. The device then stays paused, and the host may try again.
    fn resume(&self, nic: &X550Handle) -> io::Result<()>;

    /// True while a thread may use a ring.
    fn is_running(&self) -> bool;
}
