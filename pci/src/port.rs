//! Attachment of a function to the hierarchy: on a root bus, or behind a port.

use crate::{Rid, VfIndex};

/// The Device/Port Type of a function (`PCIe 6.2 §7.5.3.2`), with the registers specific to this type.
///
/// VFs have the type of their PF; give them the same value.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum PortType {
    /// A Root Complex Integrated Endpoint, on a root bus. It has no link, and neither ARI nor ACS applies to it.
    #[default]
    RcIntegratedEndpoint,
    /// A PCI Express Endpoint behind a root port or a switch's downstream port.
    Endpoint(EndpointShape),
}

impl PortType {
    /// The registers of an Endpoint; `None` for a Root Complex Integrated Endpoint.
    pub const fn endpoint(&self) -> Option<&EndpointShape> {
        match self {
            Self::RcIntegratedEndpoint => None,
            Self::Endpoint(shape) => Some(shape),
        }
    }
}

/// Registers of an Endpoint behind a port in addition to those of every function.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EndpointShape {
    /// Speed and width of the link.
    pub link: Link,
    /// The ARI extended capability. A PF and its VFs must have it (`§9.3.7`).
    pub ari: Option<Ari>,
    /// True if there is an ACS extended capability. All its bits are 0: no function sends requests to another one
    /// inside the device, so there is nothing to redirect (`§6.12.1.2`, `§7.7.11`).
    pub acs: bool,
}

/// The link of an Endpoint. It is always up, at the largest speed and width.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Link {
    /// The largest speed.
    pub speed: LinkSpeed,
    /// The largest width.
    pub width: LinkWidth,
}

/// A link speed. Higher speeds need extended capabilities that this crate does not implement (`§7.7.3`, Secondary PCI
/// Express).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LinkSpeed {
    /// 2.5 GT/s.
    Gt2_5,
    /// 5.0 GT/s.
    Gt5_0,
}

/// The number of lanes of a link.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LinkWidth {
    /// A single lane.
    X1,
    /// Two lanes.
    X2,
    /// Four lanes.
    X4,
    /// Eight lanes.
    X8,
    /// Sixteen lanes.
    X16,
}

impl Link {
    /// Speed in bits 3:0 and width in bits 9:4, as in Link Capabilities and Link Status.
    pub(crate) const fn bits(self) -> u32 {
        let speed = match self.speed {
            LinkSpeed::Gt2_5 => 1,
            LinkSpeed::Gt5_0 => 2,
        };
        let width = match self.width {
            LinkWidth::X1 => 1,
            LinkWidth::X2 => 2,
            LinkWidth::X4 => 4,
            LinkWidth::X8 => 8,
            LinkWidth::X16 => 16,
        };
        speed | width << 4
    }
}

/// The ARI extended capability (`PCIe 6.2 §7.8.8`; for ARI itself see `§6.13`).
///
/// Next Function Number is always 0: a device has one PF or one plain function, and software finds VFs through their
/// PF. This crate does not make multi-function devices.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Ari {
    /// Routing IDs of a PF's VFs while ARI Capable Hierarchy is set (`§9.3.3.3.5`); `None` if they do not depend on it.
    /// Other functions ignore it.
    pub vfs: Option<VfRouting>,
}

/// The routing IDs of a PF's VFs, relative to the PF.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct VfRouting {
    /// First VF Offset: the distance from the PF's routing ID to that of VF 0, at least 1.
    pub first_vf_offset: u16,
    /// VF Stride: the distance between two VFs, at least 1 with more than one VF.
    pub vf_stride: u16,
}

impl VfRouting {
    /// The distance from the PF's routing ID to that of the last of `total_vfs` VFs, before truncation to 16 bits.
    pub(crate) fn last(self, total_vfs: u16) -> u32 {
        u32::from(self.first_vf_offset) + u32::from(self.vf_stride) * u32::from(total_vfs.saturating_sub(1))
    }

    /// The routing ID of VF `index` of the PF `pf` (`PCIe 6.2 §9.3.3.9, §9.3.3.10`).
    #[must_use]
    pub const fn vf_rid(self, pf: Rid, index: VfIndex) -> Rid {
        pf.wrapping_add(self.first_vf_offset).wrapping_add(self.vf_stride.wrapping_mul(index.0))
    }
}
