//! The engine of a NIC's queues (workers of this process over a tap, or the backend itself), and the features that the
//! NIC can offer with it.

use std::num::NonZeroU32;
use std::sync::Arc;

use parking_lot::Mutex;
use virtio_bindings::virtio_config::VIRTIO_F_VERSION_1;
use virtio_bindings::virtio_net::{VIRTIO_NET_F_CTRL_GUEST_OFFLOADS, VIRTIO_NET_F_GUEST_ANNOUNCE};

use super::carrier::PortHandle;
use super::spec::{NetError, NetSpec};
use super::wire::Backend;
use crate::backend::{Ability, BackendKind, DoorbellPages, QueueRunner, Tap};
use crate::frames::net_protocol::{MIN_MTU, Offloads, features};
use crate::state::{BucketState, HeldAddress, StateError};
use crate::transport::features::has;

/// The size of the control queue.
const CONTROL_SIZE: u16 = 64;

/// The engine of the queues.
pub(crate) enum Engine {
    /// Workers of this process, a pair of queues each.
    Tap(Tap),
    /// The backend itself.
    Runner(Ability, Arc<Mutex<Box<dyn QueueRunner>>>),
    /// The workers of a switch.
    Switch(PortHandle),
}

/// The features that a NIC offers because of its backend.
pub(crate) struct Offered {
    /// The feature bits.
    pub features: u64,
    /// The MTU that the driver is offered, in bytes.
    pub mtu: Option<u16>,
    /// The size of the control queue.
    pub control_size: u16,
    /// The backend's own address.
    pub mac: Option<[u8; 6]>,
    /// The doorbell pages that the guest can write to directly.
    pub doorbells: Option<Arc<DoorbellPages>>,
}

impl Engine {
    /// The engine of a NIC with this `spec` over `backend`, and the features that the NIC offers then.
    ///
    /// # Errors
    ///
    /// [`NetError`] if they do not fit.
    pub(crate) fn new(spec: &NetSpec, backend: Backend) -> Result<(Self, Offered), NetError> {
        match backend {
            Backend::Tap(tap) => over_tap(spec, tap),
            Backend::Runner(backend) => over_runner(spec, backend),
            Backend::Switch(port) => on_switch(spec, port),
            Backend::Absent(absent) => over_runner(spec, Box::new(absent)),
        }
    }

    /// The kind of the backend.
    pub(crate) fn kind(&self) -> BackendKind {
        match self {
            Self::Tap(_) => BackendKind::Tap,
            Self::Runner(ability, _) => ability.kind,
            Self::Switch(_) => BackendKind::Switch,
        }
    }

    /// The backend's name.
    pub(crate) fn name(&self) -> &str {
        match self {
            Self::Tap(tap) => tap.name(),
            Self::Runner(ability, _) => &ability.name,
            Self::Switch(port) => port.carrier().name(),
        }
    }

    /// The limit in Mbit/s that several NICs share, if there is one.
    pub(super) fn rate(&self) -> Option<NonZeroU32> {
        match self {
            Self::Switch(port) => port.carrier().rate(),
            Self::Tap(_) | Self::Runner(..) => None,
        }
    }

    /// The addresses on a switch that the NIC's driver has set.
    pub(super) fn save_addresses(&self) -> Vec<HeldAddress> {
        match self {
            Self::Switch(port) => port.carrier().save_addresses(),
            Self::Tap(_) | Self::Runner(..) => Vec::new(),
        }
    }

    /// Restores the addresses of [`Self::save_addresses`].
    ///
    /// # Errors
    ///
    /// Fails if the NIC is not on a switch.
    pub(super) fn restore_addresses(&self, addresses: &[HeldAddress]) -> Result<(), StateError> {
        match self {
            Self::Switch(port) => port.carrier().restore_addresses(addresses),
            Self::Tap(_) | Self::Runner(..) if !addresses.is_empty() => {
                return Err(StateError::Shape("addresses on a switch"));
            }
            Self::Tap(_) | Self::Runner(..) => {}
        }
        Ok(())
    }

    /// The NIC's debt in a limit that several NICs share; `None` if there is none.
    pub(super) fn save_share(&self) -> Option<BucketState> {
        match self {
            Self::Switch(port) => port.carrier().save_share(),
            Self::Tap(_) | Self::Runner(..) => None,
        }
    }

    /// Restores the debt of [`Self::save_share`].
    ///
    /// # Errors
    ///
    /// Fails if there is no such limit, or the debt is impossible.
    pub(super) fn restore_share(&self, share: Option<BucketState>) -> Result<(), StateError> {
        match self {
            Self::Switch(port) => port.carrier().restore_share(share),
            Self::Tap(_) | Self::Runner(..) if share.is_some() => Err(StateError::Shape("rate limits")),
            Self::Tap(_) | Self::Runner(..) => Ok(()),
        }
    }
}

fn over_tap(spec: &NetSpec, tap: Tap) -> Result<(Engine, Offered), NetError> {
    let queues = tap.queues().len();
    if queues != usize::from(spec.queue_pairs) || queues == 0 {
        return Err(NetError::QueuePairs { pairs: spec.queue_pairs, queues });
    }
    let offloads = offloads(spec) & tap.offloads();
    let mtu = known(spec.mtu.or(tap.mtu()));
    let features = features::offered(offloads, mtu.is_some(), queues > 1);
    Ok((Engine::Tap(tap), Offered { features, mtu, control_size: CONTROL_SIZE, mac: None, doorbells: None }))
}

fn on_switch(spec: &NetSpec, port: PortHandle) -> Result<(Engine, Offered), NetError> {
    if spec.queue_pairs == 0 {
        return Err(NetError::QueuePairs { pairs: 0, queues: 1 });
    }
    let offloads = offloads(spec) & port.carrier().offloads();
    let mtu = known(spec.mtu.or(port.carrier().mtu()));
    let features = features::offered(offloads, mtu.is_some(), spec.queue_pairs > 1);
    Ok((Engine::Switch(port), Offered { features, mtu, control_size: CONTROL_SIZE, mac: None, doorbells: None }))
}

fn over_runner(spec: &NetSpec, mut backend: Box<dyn QueueRunner>) -> Result<(Engine, Offered), NetError> {
    let ability = backend.ability();
    let (name, pairs) = (ability.name.clone(), spec.queue_pairs);
    if pairs > ability.queue_pairs || pairs == 0 {
        return Err(NetError::TooFewPairs { name, pairs, has: ability.queue_pairs });
    }
    if spec.queue_size > ability.queue_size {
        return Err(NetError::TooLarge { name, size: spec.queue_size, has: ability.queue_size });
    }
    if !has(ability.features, VIRTIO_F_VERSION_1) {
        return Err(NetError::Legacy(name));
    }
    if let (Some(mtu), Some(has)) = (spec.mtu, ability.mtu)
        && mtu > has
    {
        return Err(NetError::Mtu { name, mtu, has });
    }
    let mtu = known(spec.mtu.or(ability.mtu));
    let unable = u64::from(!ability.switches_offloads && !ability.control_queue) << VIRTIO_NET_F_CTRL_GUEST_OFFLOADS
        // The NIC requests an announcement, so it must receive the driver's confirmation.
        | u64::from(ability.control_queue) << VIRTIO_NET_F_GUEST_ANNOUNCE;
    let features = features::offered_by(ability.features & !unable, offloads(spec), mtu.is_some(), pairs > 1);
    backend.promise(features, mtu);
    // A vDPA device may filter by its address, and was given the configured one. For vhost-user the configuration
    // decides.
    let mac = ability.mac.filter(|_| ability.kind == BackendKind::Vdpa);
    // A control queue that the backend runs is no larger than the backend allows.
    let control_size = if ability.control_queue { CONTROL_SIZE.min(ability.queue_size) } else { CONTROL_SIZE };
    let offered = Offered { features, mtu, control_size, mac, doorbells: backend.doorbell_pages() };
    Ok((Engine::Runner(ability, Arc::new(Mutex::new(backend))), offered))
}

/// An MTU that may be reported to a driver.
fn known(mtu: Option<u16>) -> Option<u16> {
    mtu.filter(|mtu| *mtu >= MIN_MTU)
}

pub(crate) fn offloads(spec: &NetSpec) -> Offloads {
    // Segments have checksums to be filled in (`virtio 1.4 §5.1.3.1`).
    if !spec.offload_csum {
        return Offloads::empty();
    }
    let mut offloads = Offloads::CHECKSUM;
    offloads.set(Offloads::TSO4 | Offloads::TSO6 | Offloads::ECN, spec.offload_tso);
    offloads.set(Offloads::UFO | Offloads::USO4 | Offloads::USO6, spec.offload_ufo);
    offloads
}
