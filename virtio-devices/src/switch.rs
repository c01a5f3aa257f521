//! The embedded switch, which connects a PF, its VFs and an uplink.
//!
//! A frame is copied once, from its sender's buffers to its receiver's. A few workers carry the frames of all ports:
//! each port has one that takes frames from its transmit queues and puts them into the receive queues of others, which
//! it locks for a run of frames at a time. Frames are forwarded by a [table](table), an immutable snapshot that is
//! rebuilt on each change.

mod account;
mod control;
mod flow_rules;
mod forward;
mod frame;
mod handle;
mod mailbox;
mod mode;
mod polling;
mod port;
mod port_nic;
mod port_set;
mod receiver;
mod report;
mod rings;
mod rx_run;
mod sender;
mod shares;
mod source;
mod spec;
mod steering;
#[cfg(any(test, feature = "testing"))]
pub(crate) mod steps;
mod switch_core;
mod table;
mod tx_batch;
mod uplink;
mod uplink_policy;
mod uplink_rx;
mod uplink_watch;
mod worker;
mod x550_path;

#[cfg(test)]
mod tests;

use std::num::NonZeroU32;
use std::sync::Arc;

use crate::backend::BackendObserver;
use crate::device::failures::FailureObserver;
use crate::frames::policy::Replaced;
use crate::net::{NetCounters, PortHandle};
use handle::{SwitchPort, Threads};
pub use switch_core::PortSettings;
use switch_core::SwitchCore;
use x550_path::X550Path;

pub use mode::SwitchMode;
pub use spec::{MAX_PORTS, MAX_WORKERS, SwitchError, SwitchSpec};
pub use uplink_policy::UplinkPolicy;
pub use x550_path::ports::X550Ports;

/// A switch. Clones are the same switch. Its threads end when the last clone and the last port's NIC are dropped.
#[derive(Clone)]
pub struct Switch(Arc<Threads>);

impl Switch {
    /// Creates a switch whose ports have no NIC yet.
    ///
    /// # Errors
    ///
    /// [`SwitchError`].
    pub fn new(spec: SwitchSpec) -> Result<Self, SwitchError> {
        Ok(Self(Arc::new(Threads::new(SwitchCore::new(spec)?))))
    }

    /// Creates a switch without threads: the caller does the work of its one worker, step by step.
    #[cfg(any(test, feature = "testing"))]
    fn stepped(spec: SwitchSpec) -> Result<(Self, worker::SwitchWorker), SwitchError> {
        let core = SwitchCore::new(SwitchSpec { workers: 1, ..spec })?;
        let threads = Threads::stepped(core);
        let worker = worker::SwitchWorker::new(Arc::clone(threads.core()), 0, None);
        Ok((Self(Arc::new(threads)), worker))
    }

    /// The port with this number, for a NIC: 0 is the PF's, 1 that of its first VF. `None` if there is none. A port has
    /// one NIC at a time.
    pub fn port(&self, index: u16) -> Option<PortHandle> {
        (index < self.0.core().ports()).then(|| PortHandle::new(SwitchPort::new(Arc::clone(&self.0), index)))
    }

    /// Changes the host's settings for a port beyond its NIC's policy. They apply to all frames once the caller has
    /// waited for the returned handle. Ignores a port that does not exist.
    pub fn set_port(&self, index: u16, settings: PortSettings) -> Replaced {
        self.0.core().set_port(index, settings)
    }

    /// As [`Self::set_port`], for a change of the port's NIC in progress, with which it applies
    /// ([`HostNic::end_changes`](crate::HostNic::end_changes)).
    pub fn prepare_port(&self, index: u16, settings: PortSettings) {
        self.0.core().prepare_port(index, settings);
    }

    /// Number of tables that the switch has built.
    #[cfg(any(test, feature = "testing"))]
    pub fn tables(&self) -> u64 {
        self.0.core().tables()
    }

    /// As [`Self::set_port`], for several at once.
    pub fn set_ports(&self, ports: impl IntoIterator<Item = (u16, PortSettings)>) -> Replaced {
        self.0.core().set_ports(ports)
    }

    /// Applies `policy` to all frames to and from the uplink, whatever the policies of the ports are. For a new switch,
    /// before its ports are opened: only the first policy is kept. Ignored without an uplink.
    pub fn restrict_uplink(&self, policy: UplinkPolicy) {
        if let Some(uplink) = self.0.core().uplink() {
            uplink.restrict(policy);
        }
    }

    /// The data path of an X550 with `total_vfs` VFs: port 0 is its PF's, and the others are those of its VFs. `mac` is
    /// the PF's permanent address.
    pub fn x550(&self, mac: [u8; 6], total_vfs: u16) -> Arc<X550Ports> {
        Arc::new(X550Ports::new(X550Path::new(Arc::clone(&self.0), mac, total_vfs)))
    }

    /// The forwarding mode.
    pub fn mode(&self) -> SwitchMode {
        self.0.core().mode()
    }

    /// The most threads that carry its frames.
    pub fn workers(&self) -> u16 {
        self.0.core().mailboxes().len() as u16
    }

    /// The interface of its uplink, if it has one.
    pub fn uplink_name(&self) -> Option<&str> {
        self.0.core().uplink().map(uplink::Uplink::name)
    }

    /// The limit of all ports' traffic to the uplink together, in Mbit/s, if there is one.
    pub fn uplink_rate(&self) -> Option<NonZeroU32> {
        self.0.core().uplink_rate()
    }

    /// True if the uplink was deleted, and there is no new one of its name yet; false without one.
    pub fn uplink_gone(&self) -> bool {
        self.0.core().uplink().is_some_and(uplink::Uplink::is_gone)
    }

    /// The number of deletions of the uplink while a driver ran; `None` without an uplink.
    pub fn uplink_losses(&self) -> Option<u64> {
        self.0.core().uplink().map(|uplink| uplink.health().losses())
    }

    /// True if the uplink was passed as a descriptor, so that no new one replaces it.
    pub fn uplink_was_passed(&self) -> bool {
        self.0.core().uplink().is_some_and(|uplink| uplink.search().spec.is_none())
    }

    /// Calls `observer` when the uplink was deleted, and when there is a new one. It is checked while a driver runs.
    pub fn observe_uplink_loss(&self, observer: BackendObserver) {
        if let Some(uplink) = self.0.core().uplink() {
            uplink.health().observe(observer);
        }
    }

    /// True if the uplink is up; `None` without one.
    pub fn uplink_up(&self) -> Option<bool> {
        self.0.look_at_uplink();
        let core = self.0.core();
        core.uplink().map(|_| core.uplink_up())
    }

    /// Calls `observer` when the uplink starts to fail, and when it works again. It is checked while a driver runs.
    pub fn observe_uplink(&self, observer: FailureObserver) {
        if let Some(uplink) = self.0.core().uplink() {
            uplink.failures().observe(observer);
        }
    }

    /// The traffic from the uplink, `rx`, and to it, `tx`; `None` without one.
    pub fn uplink_counters(&self) -> Option<Arc<NetCounters>> {
        self.0.core().uplink().map(uplink::Uplink::counters)
    }
}

impl std::fmt::Debug for Switch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Switch")
            .field("mode", &self.mode())
            .field("uplink", &self.uplink_name())
            .finish_non_exhaustive()
    }
}
