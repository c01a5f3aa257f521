//! The PCI Express capability (`PCIe 6.2 §7.5.3`).

use crate::port::{Link, LinkSpeed, PortType};
use crate::spec::{capability_id, pcie};
use crate::{Dword, DwordWrite, ResetKind};

/// The registers of the capability. Without a link the link registers read 0; slot and root registers always do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pcie {
    is_vf: bool,
    /// The link of an Endpoint.
    link: Option<Link>,
    device_control: u32,
    device_control_2: u32,
    link_control: u32,
    link_control_2: u32,
}

impl Pcie {
    /// Creates the capability of a function of this type. A VF's control registers store nothing; in Device Control
    /// only Initiate FLR has an effect (`§9.3.5`).
    pub fn new(port: &PortType, is_vf: bool) -> Self {
        let link = port.endpoint().map(|endpoint| endpoint.link);
        let mut this = Self { is_vf, link, device_control: 0, device_control_2: 0, link_control: 0, link_control_2: 0 };
        this.reset(ResetKind::Conventional);
        this
    }

    /// True if the function is an Endpoint with a link, and not a Root Complex Integrated Endpoint.
    pub fn has_link(&self) -> bool {
        self.link.is_some()
    }

    /// Reads the dword at `reg` from the start of the capability. The next pointer is 0.
    pub fn read(&self, reg: Dword) -> u32 {
        match (reg.offset(), self.link) {
            (pcie::CAPABILITIES, link) => {
                let port = if link.is_some() { pcie::TYPE_ENDPOINT } else { pcie::TYPE_RC_INTEGRATED_ENDPOINT };
                u32::from(capability_id::PCI_EXPRESS) | u32::from(pcie::VERSION_2 | port) << 16
            }
            (pcie::DEVICE_CAPABILITIES, _) => pcie::ROLE_BASED_ERROR_REPORTING | pcie::FLR_CAPABLE,
            (pcie::DEVICE_CONTROL, _) => self.device_control,
            (pcie::LINK_CAPABILITIES, Some(link)) => link.bits() | pcie::ASPM_OPTIONALITY_COMPLIANCE,
            // A VF shares its PF's link, which the PF controls and reports.
            (pcie::LINK_CONTROL, Some(link)) if !self.is_vf => self.link_control | link.bits() << 16,
            (pcie::DEVICE_CAPABILITIES_2, Some(_)) => pcie::COMPLETION_TIMEOUT_DISABLE,
            (pcie::DEVICE_CONTROL_2, _) => self.device_control_2,
            (pcie::LINK_CAPABILITIES_2, Some(Link { speed: LinkSpeed::Gt2_5, .. })) => pcie::SPEED_2_5,
            (pcie::LINK_CAPABILITIES_2, Some(_)) => pcie::SPEED_2_5 | pcie::SPEED_5_0,
            (pcie::LINK_CONTROL_2, _) => self.link_control_2,
            _ => 0,
        }
    }

    /// Writes the dword at `reg`; returns true if that initiates a function level reset.
    #[must_use]
    pub fn write(&mut self, reg: Dword, write: DwordWrite) -> bool {
        let (register, writable) = match (reg.offset(), self.link) {
            (pcie::DEVICE_CONTROL, _) => (&mut self.device_control, pcie::DEVICE_CONTROL_RW),
            (pcie::DEVICE_CONTROL_2, Some(_)) => (&mut self.device_control_2, pcie::COMPLETION_TIMEOUT_DISABLE),
            (pcie::LINK_CONTROL, Some(_)) => (&mut self.link_control, pcie::LINK_CONTROL_RW),
            (pcie::LINK_CONTROL_2, Some(Link { speed: LinkSpeed::Gt5_0, .. })) => {
                (&mut self.link_control_2, pcie::LINK_CONTROL_2_RW)
            }
            _ => return false,
        };
        *register = write.apply(*register, if self.is_vf { 0 } else { writable });
        reg.offset() == pcie::DEVICE_CONTROL && write.value() & pcie::INITIATE_FLR != 0
    }

    /// Returns to the power-on state. A function level reset leaves the link's registers unchanged: the link stays up
    /// (`§6.6.2`).
    pub fn reset(&mut self, kind: ResetKind) {
        let Self { is_vf, link, device_control, device_control_2, link_control, link_control_2 } = self;
        *device_control = if *is_vf { 0 } else { pcie::DEVICE_CONTROL_RESET };
        *device_control_2 = 0;
        if kind == ResetKind::Conventional {
            *link_control = 0;
            *link_control_2 = match link {
                Some(Link { speed: LinkSpeed::Gt5_0, .. }) if !*is_vf => pcie::TARGET_SPEED_5_0,
                _ => 0,
            };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::port::{EndpointShape, LinkWidth};

    const CONTROL: Dword = Dword::containing(pcie::DEVICE_CONTROL);
    const RC: PortType = PortType::RcIntegratedEndpoint;

    fn endpoint(speed: LinkSpeed, width: LinkWidth) -> PortType {
        PortType::Endpoint(EndpointShape { link: Link { speed, width }, ari: None, acs: false })
    }

    fn image(pcie: &Pcie) -> Vec<u32> {
        (0..pcie::LEN).step_by(4).map(|offset| pcie.read(Dword::containing(offset))).collect()
    }

    /// Writes ones to all bits except Initiate FLR.
    fn fill(pcie: &mut Pcie) {
        for offset in (0..pcie::LEN).step_by(4) {
            let value = if offset == pcie::DEVICE_CONTROL { !pcie::INITIATE_FLR } else { u32::MAX };
            assert!(!pcie.write(Dword::containing(offset), DwordWrite::full(value)));
        }
    }

    #[test]
    fn initiate_flr_reads_zero() {
        let mut pcie = Pcie::new(&RC, false);
        assert!(pcie.write(CONTROL, DwordWrite::new(0xffff, 0b0011)));
        assert_eq!(pcie.read(CONTROL), 0x781f);
        assert!(!pcie.write(CONTROL, DwordWrite::new(0x00ff, 0b0001)));
        pcie.reset(ResetKind::Flr);
        assert_eq!(pcie, Pcie::new(&RC, false));
    }

    /// G33: Device Control of a VF.
    #[test]
    fn a_vfs_device_control_reads_zero() {
        for port in [RC, endpoint(LinkSpeed::Gt5_0, LinkWidth::X4)] {
            let mut pcie = Pcie::new(&port, true);
            assert!(pcie.write(CONTROL, DwordWrite::full(u32::MAX)));
            assert_eq!(pcie.read(CONTROL), 0);
            assert_ne!(pcie.read(Dword::containing(pcie::DEVICE_CAPABILITIES)) & 1 << 28, 0);
        }
    }

    #[test]
    fn there_is_no_link() {
        for offset in (0x0c..pcie::LEN).step_by(4) {
            assert_eq!(Pcie::new(&RC, false).read(Dword::containing(offset)), 0, "{offset:#x}");
        }
    }

    #[test]
    fn an_endpoint_shows_its_link_at_power_on() {
        let slow = Pcie::new(&endpoint(LinkSpeed::Gt2_5, LinkWidth::X1), false);
        assert!(slow.has_link());
        let expected = [2 << 16 | 0x10, 0x1000_8000, 0x2810, 0x0040_0011, 0x0011_0000];
        assert_eq!(image(&slow)[..5], expected);
        assert_eq!(image(&slow)[5..], [0, 0, 0, 0, 0x10, 0, 2, 0, 0, 0]);
        let fast = Pcie::new(&endpoint(LinkSpeed::Gt5_0, LinkWidth::X16), false);
        assert_eq!((image(&fast)[3], image(&fast)[4]), (0x0040_0102, 0x0102_0000));
        assert_eq!(image(&fast)[5..], [0, 0, 0, 0, 0x10, 0, 6, 2, 0, 0]);
    }

    #[test]
    fn an_endpoint_keeps_what_link_and_device_control_hold() {
        let mut pcie = Pcie::new(&endpoint(LinkSpeed::Gt5_0, LinkWidth::X4), false);
        let power_on = image(&pcie);
        fill(&mut pcie);
        let changed: Vec<_> = (0..).step_by(4).zip(image(&pcie)).filter(|(n, new)| *new != power_on[n / 4]).collect();
        assert_eq!(changed, [(0x08, 0x781f), (0x10, 0x0042_00cb), (0x28, 0x10), (0x30, 0xff9f)]);
        pcie.reset(ResetKind::Flr);
        let link: Vec<_> = [0x08, 0x10, 0x28, 0x30].map(|offset| pcie.read(Dword::containing(offset))).to_vec();
        assert_eq!(link, [0x2810, 0x0042_00cb, 0, 0xff9f], "the link outlives a function level reset");
        pcie.reset(ResetKind::Conventional);
        assert_eq!(image(&pcie), power_on);
    }

    #[test]
    fn a_link_of_2_5_gt_s_has_no_link_control_2() {
        let mut pcie = Pcie::new(&endpoint(LinkSpeed::Gt2_5, LinkWidth::X8), false);
        fill(&mut pcie);
        assert_eq!(pcie.read(Dword::containing(pcie::LINK_CONTROL_2)), 0);
    }

    /// G33: the link of a VF is its PF's.
    #[test]
    fn a_vf_shows_its_pfs_link_capabilities_and_cannot_control_it() {
        let port = endpoint(LinkSpeed::Gt5_0, LinkWidth::X2);
        let (pf, mut vf) = (Pcie::new(&port, false), Pcie::new(&port, true));
        for offset in [0x00, 0x04, 0x0c, 0x24, 0x2c] {
            assert_eq!(vf.read(Dword::containing(offset)), pf.read(Dword::containing(offset)), "{offset:#x}");
        }
        fill(&mut vf);
        for offset in [0x08, 0x10, 0x28, 0x30] {
            assert_eq!(vf.read(Dword::containing(offset)), 0, "{offset:#x}");
        }
    }
}
