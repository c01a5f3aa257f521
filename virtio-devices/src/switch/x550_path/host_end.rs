//! A function of an X550, as the host sees it.

use std::sync::Arc;

use x550::Place;

use super::{FunctionPort, X550Path};
use crate::frames::policy::{Policy, Replaced};
use crate::{BackendKind, BackendObserver, HostNic, MacError, RateLimits};

/// The host's end of a function. Its guest governs addresses and policy; the host's rules are the uplink's.
pub(crate) struct HostEnd {
    path: Arc<X550Path>,
    place: Place,
}

impl HostEnd {
    /// The host's ends of all functions, the PF's first.
    pub(super) fn all(path: &Arc<X550Path>) -> Vec<Box<dyn HostNic + Send>> {
        let end = |port: &FunctionPort| -> Box<dyn HostNic + Send> {
            Box::new(Self { path: Arc::clone(path), place: port.place })
        };
        path.ports.iter().map(end).collect()
    }

    fn port(&self) -> Option<&FunctionPort> {
        self.path.port(self.place)
    }
}

impl HostNic for HostEnd {
    fn backend_kind(&self) -> BackendKind {
        BackendKind::Switch
    }

    fn backend_lost(&self) -> bool {
        false
    }

    fn backend_losses(&self) -> u64 {
        0
    }

    fn observe_backend(&self, _: BackendObserver) {}

    fn backend_name(&self) -> &str {
        self.path.threads.core().id()
    }

    fn mac(&self) -> [u8; 6] {
        self.port().map_or([0; 6], |port| port.carried.state.mac())
    }

    fn set_mac(&mut self, _: [u8; 6]) -> Result<Replaced, MacError> {
        // The PF's driver sets the addresses of all functions.
        Err(MacError::InUse)
    }

    fn set_policy(&mut self, _: Policy, _: RateLimits) -> Replaced {
        // The configuration refuses policies of functions: the registers have them.
        Replaced::default()
    }

    fn link_up(&self) -> bool {
        self.path.threads.look_at_uplink();
        self.path.has_link() && self.port().is_some_and(|port| port.carried.state.link_up())
    }

    fn set_link(&mut self, up: bool) -> Replaced {
        self.path.connect(up);
        Replaced::default()
    }

    fn hold_link(&mut self, held: bool) {
        self.path.hold(held);
    }

    fn announce(&mut self) -> bool {
        false
    }

    fn announce_here(&mut self) -> bool {
        let Some(port) = self.port() else { return false };
        if !self.link_up() {
            return false;
        }
        port.carried.state.ask_rarp();
        // A full counter has woken the worker already.
        port.open.load().iter().for_each(|open| drop(open.kick.write(1)));
        true
    }
}
