//! The functions of an X550 as ports of a switch, as the device calls them.

use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use x550::{Direction, Doorbell};

use super::host_end::HostEnd;
use super::messages::MessagesLater;
use super::{X550Path, number_of};
use crate::HostNic;
use crate::device::worker::thread_name;
use crate::net::NetCounters;
use crate::os::thread::Thread;
use crate::x550_sriov::{DataPath, X550Handle};

/// The functions of an X550 as ports of a switch.
pub struct X550Ports(Arc<X550Path>);

impl X550Ports {
    /// Ports of `path`.
    pub(crate) fn new(path: Arc<X550Path>) -> Self {
        Self(path)
    }

    /// The counters of all functions, the PF's first.
    pub fn counters(&self) -> Vec<Arc<NetCounters>> {
        self.0.counters()
    }
}

impl DataPath for X550Ports {
    fn begin(&self, nic: &X550Handle) {
        if self.0.nic.set(nic.clone()).is_ok() {
            let deferred = MessagesLater::new(nic.clone(), self.0.counters());
            self.0.threads.core().send_interrupts_of(Box::new(deferred));
            self.0.threads.look_at_uplink();
            nic.set_link(self.0.has_link());
        }
    }

    fn host_nics(&self) -> Vec<Box<dyn HostNic + Send>> {
        HostEnd::all(&self.0)
    }

    fn queues_changed(&self, nic: &X550Handle) -> Vec<Thread> {
        let path = &self.0;
        let changed = path.note_wanted(nic);
        if changed.is_empty() {
            return Vec::new();
        }
        let (path, nic) = (Arc::clone(path), nic.clone());
        let name = thread_name(path.threads.core().id(), "port", 0);
        vec![Thread::of_end(name, move || {
            changed.into_iter().for_each(|number| path.reconcile_or_note(number, &nic));
        })]
    }

    fn pools_changed(&self, _: &X550Handle) {
        self.0.outdate();
    }

    fn moderation_changed(&self, nic: &X550Handle) {
        // Workers start with the first queue. A message that waits before would be sent by none.
        if self.0.threads.has_worker() {
            self.0.threads.core().watch_interrupts();
        } else {
            nic.flush(None);
        }
    }

    fn doorbell(&self, nic: &X550Handle, doorbell: Doorbell) {
        let place = nic.lock().owner(doorbell.queue).0;
        let Some(port) = self.0.port(place) else { return };
        if port.has_failed.load(Ordering::Acquire) {
            self.0.retry(number_of(place), nic);
        }
        if port.wanted.lock().has(doorbell)
            && let Some(open) = &*port.open.load()
            // Buffers matter to a sender that waits for them: it has said so before it looked for them.
            && match doorbell.direction {
                Direction::Transmit => open.bell.ring(),
                Direction::Receive => open.waiters.load(Ordering::SeqCst) != 0,
            }
        {
            // A full counter has woken the worker already.
            let _ = open.kick.write(1);
        }
    }

    fn pause(&self, nic: &X550Handle) -> Vec<Thread> {
        self.0.threads.core().hold_frames(true);
        self.queues_changed(nic)
    }

    fn resume(&self, nic: &X550Handle) -> io::Result<()> {
        let core = self.0.threads.core();
        core.hold_frames(true);
        self.0.outdate();
        self.0.note_wanted(nic);
        let resumed = (0..self.0.ports.len()).try_for_each(|number| self.0.reconcile(number, nic));
        core.hold_frames(false);
        resumed
    }

    fn is_running(&self) -> bool {
        self.0.ports.iter().any(|port| port.open.load().is_some())
    }
}
