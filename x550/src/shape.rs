//! Configuration spaces of the PF and its VFs. Drivers read some registers at fixed offsets, so the capabilities are
//! where the hardware has them (`PCIe Configuration Space`).

use pci::{
    BarIndex, BarKind, CapabilityKind, ConfigShape, Identity, MsixShape, PortType, Rid, Role, SriovShape, VfPlacement,
};

use crate::mac::Mac;
use crate::model::Model;

/// Bytes of the PF's BAR 0.
pub const BAR0_SIZE: u64 = 0x8_0000;
/// Bytes of a VF's BAR 0.
pub const VF_BAR0_SIZE: u64 = 0x4000;
/// VFs of a NIC: a pool is the PF's.
pub const TOTAL_VFS: u16 = 63;
/// The BAR with the registers, of the PF and of a VF.
pub const REGISTERS_BAR: BarIndex = BarIndex::ALL[0];
/// The BAR with the PF's MSI-X structures.
pub const MSIX_BAR: BarIndex = BarIndex::ALL[4];
/// The BAR with a VF's MSI-X structures.
pub const VF_MSIX_BAR: BarIndex = BarIndex::ALL[3];

const VENDOR: u16 = 0x8086;
const REVISION: u8 = 1;
/// Bytes of a BAR with MSI-X structures, and the offset of the pending bits.
const MSIX_SIZE: u64 = 0x4000;
const PBA: u64 = 0x2000;

/// Offsets of the capabilities. Those that a function does not have are ignored.
const OFFSETS: [(CapabilityKind, u16); 8] = [
    (CapabilityKind::Power, 0x40),
    (CapabilityKind::Msix, 0x70),
    (CapabilityKind::Pcie, 0xa0),
    (CapabilityKind::Aer, 0x100),
    (CapabilityKind::SerialNumber, 0x140),
    (CapabilityKind::Ari, 0x150),
    (CapabilityKind::Acs, 0x158),
    (CapabilityKind::Sriov, 0x160),
];

fn memory(size: u64) -> BarKind {
    BarKind::Memory64 { size, prefetchable: true }
}

fn vf_bars() -> Vec<(BarIndex, BarKind)> {
    vec![(REGISTERS_BAR, memory(VF_BAR0_SIZE)), (VF_MSIX_BAR, memory(MSIX_SIZE))]
}

fn config(device: u16, role: Role, port: PortType, vectors: u16, bar: BarIndex) -> ConfigShape {
    let identity = Identity {
        vendor: VENDOR,
        device,
        revision: REVISION,
        class: [2, 0, 0],
        subsystem_vendor: VENDOR,
        subsystem: 1,
    };
    ConfigShape {
        port,
        msix: Some(MsixShape { vectors, table: (bar, 0), pba: (bar, PBA) }),
        aer: true,
        offsets: OFFSETS.to_vec(),
        ..ConfigShape::new(identity, role)
    }
}

impl Model {
    /// The configuration space of a PF of this model; see [`pf_config`].
    pub fn pf_config(self, rid: Rid, mac: Mac, vfs: VfPlacement, port: PortType) -> ConfigShape {
        let [device, vf_device] = self.devices();
        let role = Role::Pf(SriovShape::new(rid, vfs, vf_device, vf_bars()));
        ConfigShape {
            bars: vec![(REGISTERS_BAR, memory(BAR0_SIZE)), (MSIX_BAR, memory(MSIX_SIZE))],
            serial_number: Some(mac.serial_number()),
            ..config(device, role, port, 64, MSIX_BAR)
        }
    }

    /// The configuration space of a VF of a PF of this model with the same `port`.
    pub fn vf_config(self, port: PortType) -> ConfigShape {
        let [_, device] = self.devices();
        ConfigShape { bars: vf_bars(), ..config(device, Role::Vf, port, 3, VF_MSIX_BAR) }
    }
}

/// The configuration space of the PF of an X550 at `rid`, with the permanent address `mac` and its VFs at `vfs`, of
/// which [`pci::VfPlacement::total_vfs`] exist, at most [`TOTAL_VFS`].
pub fn pf_config(rid: Rid, mac: Mac, vfs: VfPlacement, port: PortType) -> ConfigShape {
    Model::X550.pf_config(rid, mac, vfs, port)
}

/// The configuration space of a VF of an X550 whose PF has the same `port`.
pub fn vf_config(port: PortType) -> ConfigShape {
    Model::X550.vf_config(port)
}

#[cfg(test)]
mod tests {
    use super::*;
    use pci::{Ari, ConfigSpace, Dword, EndpointShape, Link, LinkSpeed, LinkWidth};

    const MAC: Mac = Mac([0x52, 0x54, 0, 1, 2, 3]);

    fn endpoint() -> PortType {
        let link = Link { speed: LinkSpeed::Gt5_0, width: LinkWidth::X8 };
        PortType::Endpoint(EndpointShape { link, ari: Some(Ari::default()), acs: false })
    }

    fn pf(port: PortType) -> ConfigSpace {
        let vfs = VfPlacement { total_vfs: TOTAL_VFS, first_vf_offset: 0x100, vf_stride: 1 };
        ConfigSpace::new(pf_config(Rid::from_bits(0x100), MAC, vfs, port)).unwrap()
    }

    fn read(space: &ConfigSpace, offset: u16) -> u32 {
        space.read(Dword::containing(offset))
    }

    /// IDs and offsets of the capabilities of the first 256 bytes, then of the extended ones.
    fn capabilities(space: &ConfigSpace) -> Vec<(u32, u32)> {
        let mut found = Vec::new();
        let mut at = read(space, 0x34) & 0xff;
        while at != 0 {
            let header = read(space, u16::try_from(at).unwrap());
            found.push((header & 0xff, at));
            at = header >> 8 & 0xff;
        }
        at = 0x100;
        while at != 0 {
            let header = read(space, u16::try_from(at).unwrap());
            found.push((header & 0xffff, at));
            at = header >> 20;
        }
        found
    }

    /// X28: configuration space.
    #[test]
    fn the_pf_has_its_capabilities_where_drivers_read_them() {
        let pf = pf(endpoint());
        assert_eq!((read(&pf, 0), read(&pf, 8) >> 8), (0x1563_8086, 0x02_0000));
        let expected = [(1, 0x40), (0x11, 0x70), (0x10, 0xa0), (1, 0x100), (3, 0x140), (0xe, 0x150), (0x10, 0x160)];
        assert_eq!(capabilities(&pf), expected);
        assert_eq!(read(&pf, 0x70) >> 16, 63, "64 vectors");
        assert_eq!((read(&pf, 0x74), read(&pf, 0x78)), (4, 0x2004));
        assert_eq!((read(&pf, 0x144), read(&pf, 0x148)), (0xff01_0203, 0x5254_00ff));
        assert_eq!(read(&pf, 0x16c), 63 << 16 | 63);
        assert_eq!(read(&pf, 0x178) >> 16, 0x1565);
        let sizes = [0x10, 0x20].map(|offset| read(&pf, offset) & 0xf);
        assert_eq!(sizes, [0xc, 0xc], "64-bit and prefetchable");
    }

    #[test]
    fn a_pf_on_a_root_bus_has_no_ari() {
        let expected = [(1, 0x40), (0x11, 0x70), (0x10, 0xa0), (1, 0x100), (3, 0x140), (0x10, 0x160)];
        assert_eq!(capabilities(&pf(PortType::RcIntegratedEndpoint)), expected);
    }

    /// X28: configuration space.
    #[test]
    fn an_x540_differs_in_its_identity_alone() {
        let vfs = VfPlacement { total_vfs: TOTAL_VFS, first_vf_offset: 0x100, vf_stride: 1 };
        let rid = Rid::from_bits(0x100);
        let x540 = ConfigSpace::new(Model::X540.pf_config(rid, MAC, vfs, endpoint())).unwrap();
        assert_eq!((read(&x540, 0), read(&x540, 0x178) >> 16), (0x1528_8086, 0x1515));
        assert_eq!(capabilities(&x540), capabilities(&pf(endpoint())));
        assert!(ConfigSpace::new(Model::X540.vf_config(endpoint())).is_ok());
    }

    /// X28: configuration space.
    #[test]
    fn a_vf_has_three_vectors_and_no_power_state() {
        let vf = ConfigSpace::new(vf_config(endpoint())).unwrap();
        assert_eq!(capabilities(&vf), [(0x11, 0x70), (0x10, 0xa0), (1, 0x100), (0xe, 0x150)]);
        assert_eq!((read(&vf, 0), read(&vf, 8) >> 8, read(&vf, 0x70) >> 16), (u32::MAX, 0x02_0000, 2));
        assert_eq!((read(&vf, 0x74), read(&vf, 0x78)), (3, 0x2003));
    }
}
