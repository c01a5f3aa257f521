//! Gives a NIC another backend if its own was missing, or if its tap was deleted.

use parking_lot::MutexGuard;
use virtio_bindings::virtio_net::{VIRTIO_NET_F_CTRL_VQ, VIRTIO_NET_F_MTU, VIRTIO_NET_F_STANDBY};

use super::Net;
use super::SEGMENT_QUEUE_SIZE;
use super::engine::{Engine, Offered};
use super::filter::is_multicast;
use super::spec::{NetError, NetSpec};
use super::wire::Backend;
use crate::backend::{Ability, BackendKind, QueueRunner};
use crate::frames::net_protocol::features;
use crate::transport::features::has;
use crate::{ConnectError, DeviceSpecific, NewBackend};

/// A backend that was opened, and the features of a NIC over it.
struct Opened {
    engine: Engine,
    offered: Offered,
    has_control_queue: bool,
}

/// Opens `backend` for a NIC with this `spec`, before the NIC is touched.
///
/// # Errors
///
/// Fails if `backend` cannot serve a NIC with this `spec`.
pub fn new_backend(spec: &NetSpec, backend: impl Into<Backend>) -> Result<NewBackend, NetError> {
    let backend = backend.into();
    let has_control_queue = match &backend {
        Backend::Runner(runner) => runner.ability().control_queue,
        Backend::Tap(_) | Backend::Switch(_) | Backend::Absent(_) => false,
    };
    let (engine, offered) = Engine::new(spec, backend)?;
    let (kind, name) = (engine.kind(), engine.name().to_string());
    Ok(NewBackend::of(kind, name, Opened { engine, offered, has_control_queue }))
}

impl Net {
    /// The reason why the NIC has no backend, if it has none.
    pub(super) fn absence(&self) -> Option<&str> {
        match &self.engine {
            Engine::Runner(Ability { kind: BackendKind::Absent, name, .. }, _) => Some(name),
            _ => None,
        }
    }

    /// True if the NIC's tap was deleted. Checks a tap that has no worker now.
    pub(super) fn has_lost_tap(&self) -> bool {
        match &self.engine {
            Engine::Tap(tap) => self.health.is_lost() || tap.is_gone_unnoticed(),
            Engine::Runner(ability, backend) if ability.kind == BackendKind::VhostNet => {
                let is_gone = |mut backend: MutexGuard<'_, Box<dyn QueueRunner>>| backend.attend().is_err();
                self.health.is_lost() || backend.try_lock().is_some_and(is_gone)
            }
            Engine::Runner(..) | Engine::Switch(_) => false,
        }
    }

    /// The features that the NIC offers over a backend with `features`.
    pub(super) fn with_own(&self, features: u64) -> u64 {
        let is_short = self.spec.queue_size < SEGMENT_QUEUE_SIZE;
        let features = if is_short { features::without_received_segments(features) } else { features };
        features | u64::from(self.spec.standby) << VIRTIO_NET_F_STANDBY
    }

    /// As [`crate::VirtioDevice::adopt`]: without a backend, only features that the driver was promised are offered.
    pub(super) fn adopt_features(&mut self, accepted: u64, state: &DeviceSpecific) {
        if self.absence().is_none() {
            return;
        }
        let all = features::offered_by(u64::MAX, super::engine::offloads(&self.spec), true, self.spec.queue_pairs > 1);
        self.features = accepted & self.with_own(all);
        if has(accepted, VIRTIO_NET_F_MTU) {
            self.spec.mtu = self.spec.mtu.or(Some(USUAL_MTU));
        }
        if let DeviceSpecific::Net(state) = state
            && self.takes_mac
            && !is_multicast(&state.mac)
            && state.mac != [0; 6]
        {
            self.spec.mac = state.mac;
        }
    }

    /// As [`crate::VirtioDevice::connect`].
    pub(super) fn exchange(&mut self, new: &mut NewBackend, negotiated: Option<u64>) -> Result<(), ConnectError> {
        let was_absent = self.absence().is_some();
        if !was_absent && !self.has_lost_tap() {
            return Err(ConnectError::Present(self.engine.name().to_string()));
        }
        let given = new.name().to_string();
        let name = || given.clone();
        let Some(new) = new.inside_mut::<Opened>() else { return Err(ConnectError::NoNic) };
        let offered = self.with_own(new.offered.features);
        let accepted = negotiated.unwrap_or(0) & self.features;
        if accepted & !offered != 0 {
            return Err(ConnectError::Features { name: name(), missing: accepted & !offered });
        }
        if let (true, Some(told), Some(has)) = (has(accepted, VIRTIO_NET_F_MTU), self.spec.mtu, new.offered.mtu)
            && has < told
        {
            return Err(ConnectError::Mtu { name: name(), has, told });
        }
        let is_driven = negotiated.is_some();
        if is_driven && new.offered.mac.is_some_and(|mac| mac != self.spec.mac) {
            return Err(ConnectError::Mac(name()));
        }
        // Its other needs are in the device's registers, which stay.
        let is_smaller = self.queue_sizes.last().is_some_and(|size| new.offered.control_size < *size);
        if new.has_control_queue && (has(accepted, VIRTIO_NET_F_CTRL_VQ) || is_smaller) {
            return Err(ConnectError::ControlQueue(name()));
        }
        self.features = offered;
        self.spec.mtu = if has(accepted, VIRTIO_NET_F_MTU) { self.spec.mtu } else { new.offered.mtu };
        if let Some(mac) = new.offered.mac
            && mac != self.spec.mac
        {
            self.spec.mac = mac;
            self.state.set_mac(mac);
        }
        if is_driven && matches!(self.engine, Engine::Tap(_)) {
            // Workers of this program have taken buffers from the driver's rings.
            self.state.progress().set_touched();
        }
        std::mem::swap(&mut self.engine, &mut new.engine);
        // Frames for the function from before it had this backend are not for its driver.
        self.state.progress().set_fresh(true);
        self.attach();
        if was_absent {
            self.state.hold_link(false);
        }
        self.state.lose_link(false);
        // The driver has read that the link is down.
        self.signal_config();
        Ok(())
    }
}

/// The MTU of a network whose own is unknown (`RFC 894`).
const USUAL_MTU: u16 = 1500;
