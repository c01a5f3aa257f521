//! What a vDPA device is and can do, and what a NIC over it may offer.

use virtio_bindings::virtio_config::{VIRTIO_F_ACCESS_PLATFORM, VIRTIO_F_VERSION_1};
use virtio_bindings::virtio_ids::VIRTIO_ID_NET;
use virtio_bindings::virtio_net::{
    VIRTIO_NET_F_CTRL_GUEST_OFFLOADS, VIRTIO_NET_F_CTRL_VQ, VIRTIO_NET_F_MAC, VIRTIO_NET_F_MQ, VIRTIO_NET_F_MTU,
    VIRTIO_NET_F_STATUS, VIRTIO_NET_S_LINK_UP,
};

use super::VdpaSpec;
use super::error::VdpaFault;
use super::kernel::Kernel;
use crate::backend::{Ability, BackendKind};
use crate::features::has;
use crate::net::served_for_any;

/// The start of `struct virtio_net_config`: address, status, pairs of queues, MTU (`virtio 1.4 §5.1.4`).
const CONFIG: usize = 12;
/// Where the link's state is in it.
const STATUS: u32 = 6;

/// A device that has been asked for all that does not change.
pub struct Identity {
    /// The feature bits that it offers.
    pub features: u64,
    /// Its own address, if it has one.
    pub mac: Option<[u8; 6]>,
    mtu: Option<u16>,
    /// The pairs of queues of which it knows, as far as a driver can use them.
    pairs: u16,
    queue_count: u32,
    queue_size: u16,
}

impl Identity {
    /// Asks the device.
    ///
    /// # Errors
    ///
    /// When it is no network device, or does not offer what a vDPA device has to.
    pub fn ask(kernel: &dyn Kernel) -> Result<Self, VdpaFault> {
        match kernel.device_id().map_err(VdpaFault::of("read the device's type"))? {
            VIRTIO_ID_NET => {}
            other => return Err(VdpaFault::NotNet(other)),
        }
        let features = kernel.features().map_err(VdpaFault::of("read the device's features"))?;
        for (feature, name) in
            [(VIRTIO_F_VERSION_1, "VIRTIO_F_VERSION_1"), (VIRTIO_F_ACCESS_PLATFORM, "VIRTIO_F_ACCESS_PLATFORM")]
        {
            if !has(features, feature) {
                return Err(VdpaFault::Feature(name));
            }
        }
        let [m0, m1, m2, m3, m4, m5, _, _, p0, p1, t0, t1] = config(kernel)?;
        let mac = [m0, m1, m2, m3, m4, m5];
        let multi_queue = has(features, VIRTIO_NET_F_MQ) && has(features, VIRTIO_NET_F_CTRL_VQ);
        Ok(Self {
            features,
            // One that has not been given an address yet has none to filter by.
            mac: (has(features, VIRTIO_NET_F_MAC) && mac != [0; 6]).then_some(mac),
            mtu: has(features, VIRTIO_NET_F_MTU).then_some(u16::from_le_bytes([t0, t1])),
            // Pairs beyond the first are taken into use by a command (`virtio 1.4 §5.1.6.5.5`).
            pairs: if multi_queue { u16::from_le_bytes([p0, p1]).max(1) } else { 1 },
            queue_count: kernel.queue_count().map_err(VdpaFault::of("read the device's number of queues"))?,
            queue_size: kernel.queue_size().map_err(VdpaFault::of("read the device's size of queues"))?,
        })
    }

    /// Gives the device the address `wanted`, unless it has that one or has none of its own.
    ///
    /// # Errors
    ///
    /// When it keeps another.
    pub fn give_mac(&mut self, kernel: &dyn Kernel, wanted: Option<[u8; 6]>) -> Result<(), VdpaFault> {
        let Some(wanted) = wanted.filter(|wanted| has(self.features, VIRTIO_NET_F_MAC) && self.mac != Some(*wanted))
        else {
            return Ok(());
        };
        // Whether it was refused is seen by what it has then: drivers ignore what they do not take.
        let _ = kernel.set_config(0, &wanted);
        let [m0, m1, m2, m3, m4, m5, ..] = config(kernel)?;
        let has = [m0, m1, m2, m3, m4, m5];
        if has != wanted {
            return Err(VdpaFault::Mac { wanted, has });
        }
        self.mac = Some(wanted);
        Ok(())
    }

    /// What a NIC as `spec` says may offer over it.
    ///
    /// # Errors
    ///
    /// When it has not enough queues, or has its control queue elsewhere.
    pub fn ability(&self, spec: &VdpaSpec) -> Result<Ability, VdpaFault> {
        let control_queue = has(self.features, VIRTIO_NET_F_CTRL_VQ);
        let (wanted, has) = (spec.queue_pairs, self.pairs);
        if wanted > has || wanted == 0 {
            return Err(VdpaFault::Queues { wanted, has });
        }
        // With one pair no driver is offered more, and the device, too, takes the next queue for the control queue.
        if control_queue && wanted > 1 && wanted < has {
            return Err(VdpaFault::ControlQueue { wanted, has });
        }
        let needed = 2 * u32::from(wanted) + u32::from(control_queue);
        if needed > self.queue_count {
            return Err(VdpaFault::QueueCount { count: self.queue_count, pairs: wanted, needed });
        }
        Ok(Ability {
            kind: BackendKind::Vdpa,
            name: spec.path.display().to_string(),
            features: self.offered(control_queue),
            queue_pairs: wanted,
            queue_size: self.queue_size,
            mac: self.mac,
            mtu: self.mtu,
            control_queue,
            switches_offloads: false,
        })
    }

    /// The feature bits for a NIC. A device without a control queue that has an address filters by it, and whoever carries out commands
    /// about addresses and filters beside it would lie; one without an address has nothing to filter by.
    fn offered(&self, control_queue: bool) -> u64 {
        if control_queue {
            return self.features;
        }
        let own = self.features & !(served_for_any() | 1 << VIRTIO_NET_F_CTRL_GUEST_OFFLOADS);
        let served = if self.mac.is_none() { served_for_any() & !(1 << VIRTIO_NET_F_MQ) } else { 0 };
        own | served
    }
}

/// Whether the device's link is up. One that does not tell has it up.
pub fn link_up(kernel: &dyn Kernel, features: u64) -> std::io::Result<bool> {
    if !has(features, VIRTIO_NET_F_STATUS) {
        return Ok(true);
    }
    let mut status = [0; 2];
    kernel.config(STATUS, &mut status)?;
    Ok(u32::from(u16::from_le_bytes(status)) & VIRTIO_NET_S_LINK_UP != 0)
}

/// The start of the configuration; 0 beyond its end.
fn config(kernel: &dyn Kernel) -> Result<[u8; CONFIG], VdpaFault> {
    let what = "read the device's configuration";
    let size = kernel.config_size().map_err(VdpaFault::of(what))?;
    let mut config = [0; CONFIG];
    let len = usize::try_from(size).map_or(CONFIG, |size| size.min(CONFIG));
    if let Some(present) = config.get_mut(..len).filter(|present| !present.is_empty()) {
        kernel.config(0, present).map_err(VdpaFault::of(what))?;
    }
    Ok(config)
}
