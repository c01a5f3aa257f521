//! The properties and abilities of a vDPA device, and the features that a NIC over it can offer.

use virtio_bindings::virtio_config::{VIRTIO_F_ACCESS_PLATFORM, VIRTIO_F_VERSION_1};
use virtio_bindings::virtio_ids::VIRTIO_ID_NET;
use virtio_bindings::virtio_net::{
    VIRTIO_NET_F_CTRL_GUEST_OFFLOADS, VIRTIO_NET_F_CTRL_VQ, VIRTIO_NET_F_GUEST_ANNOUNCE, VIRTIO_NET_F_MAC,
    VIRTIO_NET_F_MQ, VIRTIO_NET_F_MTU, VIRTIO_NET_F_STATUS, VIRTIO_NET_S_LINK_UP,
};

use super::error::VdpaFault;
use super::kernel::Kernel;
use super::spec::VdpaSpec;
use crate::backend::{Ability, BackendKind};
use crate::frames::net_protocol::features::served_for_any;
use crate::transport::features::has;

/// The start of `struct virtio_net_config`: address, status, pairs of queues, MTU (`virtio 1.4 §5.1.4`).
const CONFIG: usize = 12;
/// The offset of the link status in it.
const STATUS: u32 = 6;

/// The constant properties of a device.
pub(crate) struct Identity {
    /// The feature bits that the device offers.
    pub features: u64,
    /// The device's own address, if it has one.
    pub mac: Option<[u8; 6]>,
    mtu: Option<u16>,
    /// The queue pairs that a driver can use.
    pairs: u16,
    queue_count: u32,
    queue_size: u16,
}

impl Identity {
    /// Reads the properties from the device.
    ///
    /// # Errors
    ///
    /// Fails if it is not a network device, or lacks a feature that every vDPA device needs.
    pub(crate) fn ask(kernel: &dyn Kernel) -> Result<Self, VdpaFault> {
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
            // A device without an address has nothing to filter by.
            mac: (has(features, VIRTIO_NET_F_MAC) && mac != [0; 6]).then_some(mac),
            mtu: has(features, VIRTIO_NET_F_MTU).then_some(u16::from_le_bytes([t0, t1])),
            // A command is needed to use pairs beyond the first (`virtio 1.4 §5.1.6.5.5`).
            pairs: if multi_queue { u16::from_le_bytes([p0, p1]).max(1) } else { 1 },
            queue_count: kernel.queue_count().map_err(VdpaFault::of("read the device's number of queues"))?,
            queue_size: kernel.queue_size().map_err(VdpaFault::of("read the device's size of queues"))?,
        })
    }

    /// Sets the device's address to `wanted`, unless it has that one or has no address.
    ///
    /// # Errors
    ///
    /// Fails if the device keeps another.
    pub(crate) fn give_mac(&mut self, kernel: &dyn Kernel, wanted: Option<[u8; 6]>) -> Result<(), VdpaFault> {
        let Some(wanted) = wanted.filter(|wanted| has(self.features, VIRTIO_NET_F_MAC) && self.mac != Some(*wanted))
        else {
            return Ok(());
        };
        // Drivers ignore an address they do not accept, so the result is read back.
        let _ = kernel.set_config(0, &wanted);
        let [m0, m1, m2, m3, m4, m5, ..] = config(kernel)?;
        let has = [m0, m1, m2, m3, m4, m5];
        if has != wanted {
            return Err(VdpaFault::Mac { wanted, has });
        }
        self.mac = Some(wanted);
        Ok(())
    }

    /// The abilities for a NIC with this `spec`.
    ///
    /// # Errors
    ///
    /// Fails if the device has too few queues, or its control queue has another index.
    pub(crate) fn ability(&self, spec: &VdpaSpec) -> Result<Ability, VdpaFault> {
        let control_queue = has(self.features, VIRTIO_NET_F_CTRL_VQ);
        let (wanted, has) = (spec.queue_pairs, self.pairs);
        if wanted > has || wanted == 0 {
            return Err(VdpaFault::Queues { wanted, has });
        }
        // With one pair, VIRTIO_NET_F_MQ is not offered, and the device also expects the control queue next.
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
            // The kernel's vhost-vdpa refuses one (`drivers/vhost/vdpa.c`, VHOST_SET_LOG_BASE).
            logs_writes: false,
            has_state: false,
        })
    }

    /// The feature bits for a NIC. A device with an address filters by it, so without a control queue of its own the
    /// NIC cannot serve commands about addresses and filters, except the driver's confirmation of an announcement. A
    /// device without an address does not filter.
    fn offered(&self, control_queue: bool) -> u64 {
        if control_queue {
            return self.features;
        }
        let own = self.features & !(served_for_any() | 1 << VIRTIO_NET_F_CTRL_GUEST_OFFLOADS);
        let of_all = 1 << VIRTIO_NET_F_CTRL_VQ | 1 << VIRTIO_NET_F_GUEST_ANNOUNCE;
        let served = if self.mac.is_none() { served_for_any() & !(1 << VIRTIO_NET_F_MQ) } else { of_all };
        own | served
    }
}

/// True if the device's link is up, which is always so without a link status.
pub(crate) fn link_up(kernel: &dyn Kernel, features: u64) -> std::io::Result<bool> {
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
