//! The smallest PF with VFs: configuration spaces, and MSI-X in BAR 4.
#![allow(dead_code, reason = "each test uses a part of it")]

use std::convert::Infallible;

use pci_sriov::testing::Observed;
use pci_sriov::{
    Ari, BarIndex, BarKind, ConfigShape, ConfigSpace, Effects, EndpointShape, Function, Identity, Link, LinkSpeed,
    LinkWidth, MsixShape, Outcome, PfWithVfs, PortType, Rid, Role, SriovShape, VfPlacement, VfRouting,
};

/// The PF: slot 3 of bus 0. Its VFs are on bus 1 and behind.
pub(crate) const PF: Rid = Rid::from_bits(3 << 3);

fn bars() -> Vec<(BarIndex, BarKind)> {
    let bar = |n| BarIndex::new(n).unwrap();
    vec![
        (bar(0), BarKind::Memory32 { size: 0x400 }),
        (bar(2), BarKind::Memory64 { size: 0x2000, prefetchable: true }),
        (bar(4), BarKind::Memory64 { size: 0x1000, prefetchable: true }),
    ]
}

/// An Endpoint with ARI and ACS. Its VFs follow it directly if the port above has ARI Forwarding enabled; otherwise
/// they begin on the next bus.
pub(crate) const ENDPOINT: PortType = PortType::Endpoint(EndpointShape {
    link: Link { speed: LinkSpeed::Gt5_0, width: LinkWidth::X4 },
    ari: Some(Ari { vfs: Some(VfRouting { first_vf_offset: 1, vf_stride: 1 }) }),
    acs: true,
});

/// A function in its power-on state.
pub(crate) fn space(role: Role) -> ConfigSpace {
    space_at(role, PortType::RcIntegratedEndpoint)
}

fn space_at(role: Role, port: PortType) -> ConfigSpace {
    let table = (BarIndex::new(4).unwrap(), 0);
    let pba = (BarIndex::new(4).unwrap(), 0x800);
    let identity = Identity {
        vendor: 0x1af4,
        device: 0x1041,
        revision: 1,
        class: [2, 0, 0],
        subsystem_vendor: 0x1af4,
        subsystem: 0x1041,
    };
    let msix = Some(MsixShape { vectors: 3, table, pba });
    ConfigSpace::new(ConfigShape { bars: bars(), port, msix, ..ConfigShape::new(identity, role) }).unwrap()
}

/// A function with only its configuration space, and MSI-X in BAR 4.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Bare(pub ConfigSpace);

/// A PF and its VFs.
pub(crate) type Device = PfWithVfs<Bare>;

impl Bare {
    /// A function in its power-on state.
    pub(crate) fn new(role: Role) -> Self {
        Self(space(role))
    }

    /// A PF with its VFs. No VF is enabled.
    pub(crate) fn with_vfs(total_vfs: u16) -> Observed<Device> {
        Self::at(PF, PortType::RcIntegratedEndpoint, 0xe8, total_vfs)
    }

    /// As [`Self::with_vfs`], an Endpoint.
    pub(crate) fn endpoint(rid: Rid, total_vfs: u16) -> Observed<Device> {
        Self::at(rid, ENDPOINT, 0x100, total_vfs)
    }

    fn at(rid: Rid, port: PortType, first_vf_offset: u16, total_vfs: u16) -> Observed<Device> {
        let vfs = VfPlacement { total_vfs, first_vf_offset, vf_stride: 1 };
        let shape = SriovShape::new(rid, vfs, 0x1041, bars());
        let vfs = (0..total_vfs).map(|_| Self(space_at(Role::Vf, port))).collect();
        Observed::new(PfWithVfs::new(rid, Self(space_at(Role::Pf(shape), port)), vfs).unwrap(), rid)
    }
}

impl Function for Bare {
    type Stopping = Infallible;

    fn config(&self) -> &ConfigSpace {
        &self.0
    }

    fn config_mut(&mut self) -> &mut ConfigSpace {
        &mut self.0
    }

    fn changed(&mut self, effects: Effects, _powered: bool) -> Outcome<Infallible> {
        effects.into()
    }

    fn bar_read(&mut self, bar: BarIndex, offset: u64, data: &mut [u8]) {
        if !self.0.msix_read(bar, offset, data, |_| false) {
            data.fill(0xff);
        }
    }

    fn bar_write(&mut self, bar: BarIndex, offset: u64, data: &[u8], _powered: bool) -> Outcome<Infallible> {
        self.0.msix_write(bar, offset, data).map_or(Outcome::none(), Outcome::from)
    }
}
