//! The PCI configuration access capability (`virtio 1.4 §4.1.4.9`): access to the function's BARs through configuration
//! space, for a driver that has not mapped them.
//!
//! `pci_cfg_data` is not a register: accessing it accesses the location given by bar, offset and length of the
//! capability. It is the only read of configuration space that can have a side effect: on the ISR status.

use pci::{BarIndex, Dword, DwordWrite};

use super::VirtioFunction;
use super::layout::CONFIG_ACCESS;
use crate::{Outcome, VirtioDevice};

/// `cap.bar`, from the start of the capability.
const BAR: u16 = 4;
/// `cap.offset`.
const OFFSET: u16 = 8;
/// `cap.length`.
const LENGTH: u16 = 12;
/// `pci_cfg_data`.
const DATA: u16 = 16;

impl<D: VirtioDevice> VirtioFunction<D> {
    fn config_access_register(&self, offset: u16) -> Dword {
        Dword::containing(self.config.vendor_offset(CONFIG_ACCESS) + offset)
    }

    /// The access that the capability describes: BAR, offset and number of bytes. `None` if the driver described no
    /// legal access.
    fn config_access(&self) -> Option<(BarIndex, u32, usize)> {
        let field = |offset| self.config.read(self.config_access_register(offset));
        let [bar, ..] = field(BAR).to_le_bytes();
        let (offset, length) = (field(OFFSET), field(LENGTH));
        let aligned = matches!(length, 1 | 2 | 4) && offset.is_multiple_of(length);
        Some((BarIndex::new(bar).ok().filter(|_| aligned)?, offset, usize::try_from(length).ok()?))
    }

    /// True if configuration space is registers only: `pci_cfg_data` describes no access.
    pub(crate) fn is_config_static(&self) -> bool {
        self.config_access().is_none()
    }

    /// Reads `reg` if it is `pci_cfg_data`: the bytes accessed, and 0 above them.
    pub(super) fn config_access_read(&self, reg: Dword) -> Option<u32> {
        if reg != self.config_access_register(DATA) {
            return None;
        }
        let mut data = [0; 4];
        if let Some((bar, offset, length)) = self.config_access() {
            self.bar_load(bar, offset.into(), data.get_mut(..length)?);
        }
        Some(u32::from_le_bytes(data))
    }

    /// Makes the described access if `reg` is `pci_cfg_data`. A write of fewer bytes than the access has no effect.
    pub(super) fn config_access_write(&mut self, reg: Dword, write: DwordWrite) -> Outcome {
        if reg != self.config_access_register(DATA) {
            return Outcome::none();
        }
        let Some((bar, offset, length)) = self.config_access() else { return Outcome::none() };
        match (write.mask().to_le_bytes().get(..length), write.value().to_le_bytes().get(..length)) {
            (Some(written), Some(data)) if written.iter().all(|byte| *byte == 0xff) => {
                self.bar_store(bar, offset.into(), data)
            }
            _ => Outcome::none(),
        }
    }
}
