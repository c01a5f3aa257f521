//! The properties of a NIC that the host inspects and changes while a guest uses it.

use std::num::NonZeroU32;

use virtio_bindings::virtio_net::VIRTIO_NET_F_GUEST_ANNOUNCE;

use super::Net;
use super::engine::Engine;
use super::filter::is_multicast;
use crate::backend::{BackendKind, BackendObserver};
use crate::frames::policy::{Policy, Replaced};
use crate::transport::features::has;
use crate::{HostNic, HostSettings, MacError, RateLimits};

impl HostNic for Net {
    fn backend_kind(&self) -> BackendKind {
        self.engine.kind()
    }

    fn backend_name(&self) -> &str {
        self.engine.name()
    }

    fn observe_backend(&self, observer: BackendObserver) {
        self.health.observe(observer);
    }

    fn backend_missing(&self) -> Option<&str> {
        self.absence()
    }

    fn takes_backend(&self) -> bool {
        self.absence().is_some() || self.has_lost_tap()
    }

    fn backend_replaced(&mut self) {
        self.health.set_tap_down(false);
        if self.health.set_lost(false) {
            self.signal_config();
        }
    }

    fn backend_lost(&self) -> bool {
        self.health.is_lost() || self.has_lost_tap()
    }

    fn backend_losses(&self) -> u64 {
        self.health.losses()
    }

    fn mac(&self) -> [u8; 6] {
        self.state.mac()
    }

    fn set_mac(&mut self, mac: [u8; 6]) -> Result<Replaced, MacError> {
        if is_multicast(&mac) || mac == [0; 6] {
            return Err(MacError::NotUnicast);
        }
        // Behind a switch, frames of a driver that keeps using the address it has read are not the function's.
        if self.interrupts.is_some() && !matches!(self.engine, Engine::Switch(_)) {
            return Err(MacError::InUse);
        }
        Ok(self.take_mac(mac))
    }

    fn set_mac_for_guest(&mut self, mac: [u8; 6]) -> Result<Replaced, MacError> {
        if is_multicast(&mac) || mac == [0; 6] {
            return Err(MacError::NotUnicast);
        }
        Ok(self.take_mac(mac))
    }

    fn begin_changes(&mut self) {
        self.is_changing = true;
    }

    fn end_changes(&mut self) -> Replaced {
        self.is_changing = false;
        self.carrier_changed().unwrap_or_default()
    }

    fn return_to(&mut self, host: Option<HostSettings>) {
        self.host = host.map(Box::new);
    }

    fn set_policy(&mut self, policy: Policy, limits: RateLimits) -> Replaced {
        let rate = self.rate();
        (self.spec.policy, self.spec.limits) = (policy.clone(), limits);
        let replaced = self.policy.replace(policy, limits);
        if self.rate() != rate {
            self.state.changed();
            self.signal_config();
        }
        match self.carrier_changed() {
            Some(table) => replaced.and(table),
            None => replaced,
        }
    }

    fn link_up(&self) -> bool {
        if let Engine::Switch(port) = &self.engine {
            port.carrier().look();
        }
        // Without a driver, nothing has recorded the loss of its tap yet.
        self.state.link_up()
            && self.health.reports_link()
            && !self.has_lost_tap()
            && !(self.health.follows_tap() && self.tap_down())
    }

    fn tap_down(&self) -> bool {
        let Engine::Tap(tap) = &self.engine else { return false };
        tap.is_down_unnoticed().unwrap_or_else(|| self.health.is_tap_down()) && !self.backend_lost()
    }

    fn follow_tap(&mut self, follows: bool) {
        self.spec.follows_tap = follows;
        let before = self.has_link();
        self.health.follow_tap(follows);
        if self.has_link() != before {
            self.state.changed();
            self.signal_config();
        }
    }

    fn set_link(&mut self, up: bool) -> Replaced {
        let changed = self.state.set_link_up(up);
        // This includes a link that is down already: an earlier call may not have waited for the end of all batches.
        let replaced = if up && !changed { None } else { self.carrier_changed().filter(|_| !up) };
        if changed {
            self.tell_link();
        }
        replaced.unwrap_or_default()
    }

    fn hold_link(&mut self, held: bool) {
        if self.absence().is_some() || !self.state.hold_link(held) {
            return;
        }
        self.tell_link();
    }

    fn announce_here(&mut self) -> bool {
        let does_it_itself = has(self.negotiated, VIRTIO_NET_F_GUEST_ANNOUNCE);
        if self.negotiated == 0 || does_it_itself || !self.link_up() {
            return false;
        }
        self.state.ask_rarp();
        // The first worker has the wire.
        self.wake.first().into_iter().for_each(|wake| drop(wake.write(1)));
        true
    }

    fn announce(&mut self) -> bool {
        if !has(self.negotiated, VIRTIO_NET_F_GUEST_ANNOUNCE) || !self.link_up() {
            return false;
        }
        self.state.set_announce(true);
        self.signal_config();
        true
    }
}

impl Net {
    /// Makes `mac` the function's address, now and after resets.
    fn take_mac(&mut self, mac: [u8; 6]) -> Replaced {
        self.spec.mac = mac;
        self.state.set_mac(mac);
        self.carrier_changed().unwrap_or_default()
    }

    /// Returns to the settings of [`HostNic::return_to`], if there are any. The function has just been reset: no queue
    /// uses the others.
    pub(super) fn return_to_host(&mut self) {
        let Some(host) = self.host.take() else { return };
        let HostSettings { mac, policy, limits, link_up, follows_tap } = *host;
        // All of it makes one table of a switch.
        self.begin_changes();
        drop(mac.map(|mac| self.take_mac(mac)));
        drop(self.set_policy(policy, limits));
        self.follow_tap(follows_tap);
        if let Engine::Switch(port) = &self.engine {
            port.carrier().follow_uplink(follows_tap);
        }
        drop(self.set_link(link_up));
        drop(self.end_changes());
    }

    /// True if the link is up, as the driver reads it: a tap's state is that which its worker has seen last.
    pub(super) fn has_link(&self) -> bool {
        self.state.link_up() && self.health.link_up()
    }

    /// The limit in Mbit/s that the driver reads as the link's speed: its own, or that of its switch's uplink.
    pub(super) fn rate(&self) -> Option<NonZeroU32> {
        self.spec.policy.max_tx_rate.or_else(|| self.engine.rate())
    }

    /// Sends the driver, if there is one, a configuration-change interrupt.
    pub(super) fn signal_config(&self) {
        if let Some(interrupts) = &self.interrupts {
            interrupts.signal_config();
        }
    }

    /// Notifies the driver and the workers that the link has changed.
    fn tell_link(&self) {
        self.signal_config();
        for wake in &self.wake {
            // A full counter has woken the worker already.
            let _ = wake.write(1);
        }
    }
}
