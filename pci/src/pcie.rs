//! The PCI Express capability of a Root Complex Integrated Endpoint (`PCIe 6.2 §7.5.3`).

use crate::spec::{capability_id, pcie};
use crate::{Dword, DwordWrite};

/// The registers of the capability. A Root Complex Integrated Endpoint has no link: its link, slot and root registers read 0.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pcie {
    is_vf: bool,
    device_control: u32,
}

impl Pcie {
    /// The capability of a VF, whose Device Control holds nothing but Initiate FLR (`§9.3.5`), or of any other function.
    pub fn new(is_vf: bool) -> Self {
        let mut this = Self { is_vf, device_control: 0 };
        this.reset();
        this
    }

    /// Reads the dword at `reg` from the start of the capability. The next pointer is 0.
    pub fn read(&self, reg: Dword) -> u32 {
        match reg.offset() {
            pcie::CAPABILITIES => {
                let capabilities = pcie::VERSION_2 | pcie::TYPE_RC_INTEGRATED_ENDPOINT;
                u32::from(capability_id::PCI_EXPRESS) | u32::from(capabilities) << 16
            }
            pcie::DEVICE_CAPABILITIES => pcie::ROLE_BASED_ERROR_REPORTING | pcie::FLR_CAPABLE,
            pcie::DEVICE_CONTROL => self.device_control,
            _ => 0,
        }
    }

    /// Writes the dword at `reg`, and returns whether that initiates a function level reset.
    #[must_use]
    pub fn write(&mut self, reg: Dword, write: DwordWrite) -> bool {
        if reg.offset() != pcie::DEVICE_CONTROL {
            return false;
        }
        let writable = if self.is_vf { 0 } else { pcie::DEVICE_CONTROL_RW };
        self.device_control = write.apply(self.device_control, writable);
        write.value() & pcie::INITIATE_FLR != 0
    }

    /// Returns to the state of power-on.
    pub fn reset(&mut self) {
        let Self { is_vf, device_control } = self;
        *device_control = if *is_vf { 0 } else { pcie::DEVICE_CONTROL_RESET };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CONTROL: Dword = Dword::containing(pcie::DEVICE_CONTROL);

    #[test]
    fn initiate_flr_reads_zero() {
        let mut pcie = Pcie::new(false);
        assert!(pcie.write(CONTROL, DwordWrite::new(0xffff, 0b0011)));
        assert_eq!(pcie.read(CONTROL), 0x781f);
        assert!(!pcie.write(CONTROL, DwordWrite::new(0x00ff, 0b0001)));
        pcie.reset();
        assert_eq!(pcie, Pcie::new(false));
    }

    /// G33: Device Control of a VF.
    #[test]
    fn a_vfs_device_control_reads_zero() {
        let mut pcie = Pcie::new(true);
        assert!(pcie.write(CONTROL, DwordWrite::full(u32::MAX)));
        assert_eq!(pcie.read(CONTROL), 0);
        assert_ne!(pcie.read(Dword::containing(pcie::DEVICE_CAPABILITIES)) & 1 << 28, 0);
    }

    #[test]
    fn there_is_no_link() {
        for offset in (0x0c..pcie::LEN).step_by(4) {
            assert_eq!(Pcie::new(false).read(Dword::containing(offset)), 0, "{offset:#x}");
        }
    }
}
