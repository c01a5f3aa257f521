//! The Advanced Error Reporting extended capability (`PCIe 6.2 §7.8.4`) of a function without errors.

use crate::spec::{aer, extended_capability_id};
use crate::{Dword, DwordWrite, ResetKind};

/// The registers of the capability. No error is ever logged, so the status registers and the header log read 0.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Aer {
    is_vf: bool,
    uncorrectable_mask: u32,
    uncorrectable_severity: u32,
    correctable_mask: u32,
}

impl Aer {
    /// The power-on state. The masks and severities of a VF are its PF's: its own registers are reserved (`§9.4.2`).
    pub fn new(is_vf: bool) -> Self {
        let mut this = Self { is_vf, uncorrectable_mask: 0, uncorrectable_severity: 0, correctable_mask: 0 };
        this.reset(ResetKind::Conventional);
        this
    }

    /// Reads the dword at `reg` from the start of the capability. The next pointer is 0.
    pub fn read(&self, reg: Dword) -> u32 {
        match reg.offset() {
            aer::HEADER => u32::from(extended_capability_id::AER) | 2 << 16,
            aer::UNCORRECTABLE_MASK => self.uncorrectable_mask,
            aer::UNCORRECTABLE_SEVERITY => self.uncorrectable_severity,
            aer::CORRECTABLE_MASK => self.correctable_mask,
            _ => 0,
        }
    }

    /// Writes the dword at `reg`.
    pub fn write(&mut self, reg: Dword, write: DwordWrite) {
        let (register, writable) = match reg.offset() {
            aer::UNCORRECTABLE_MASK => (&mut self.uncorrectable_mask, aer::UNCORRECTABLE),
            aer::UNCORRECTABLE_SEVERITY => (&mut self.uncorrectable_severity, aer::UNCORRECTABLE),
            aer::CORRECTABLE_MASK => (&mut self.correctable_mask, aer::CORRECTABLE),
            _ => return,
        };
        *register = write.apply(*register, if self.is_vf { 0 } else { writable });
    }

    /// Returns to the power-on state. A function level reset changes nothing: the registers are sticky (`§6.6.2`).
    pub fn reset(&mut self, kind: ResetKind) {
        if kind == ResetKind::Conventional && !self.is_vf {
            self.uncorrectable_mask = 0;
            self.uncorrectable_severity = aer::FATAL;
            self.correctable_mask = aer::ADVISORY;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn image(aer: &Aer) -> Vec<u32> {
        (0..aer::LEN).step_by(4).map(|offset| aer.read(Dword::containing(offset))).collect()
    }

    fn fill(aer: &mut Aer, value: u32) {
        for offset in (0..aer::LEN).step_by(4) {
            aer.write(Dword::containing(offset), DwordWrite::full(value));
        }
    }

    #[test]
    fn masks_and_severities_are_the_only_state_and_sticky() {
        let mut aer = Aer::new(false);
        assert_eq!(image(&aer), [0x0002_0001, 0, 0, 0x0006_2010, 0, 0x2000, 0, 0, 0, 0, 0]);
        fill(&mut aer, u32::MAX);
        let full = [0x0002_0001, 0, 0x0017_f010, 0x0017_f010, 0, 0x31c1, 0, 0, 0, 0, 0];
        assert_eq!(image(&aer), full);
        aer.reset(ResetKind::Flr);
        assert_eq!(image(&aer), full);
        aer.reset(ResetKind::Conventional);
        assert_eq!(aer, Aer::new(false));
    }

    #[test]
    fn a_vf_has_no_masks_of_its_own() {
        let mut aer = Aer::new(true);
        fill(&mut aer, u32::MAX);
        aer.reset(ResetKind::Conventional);
        assert_eq!(image(&aer), [0x0002_0001, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
    }
}
