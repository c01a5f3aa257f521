//! The PCI Power Management capability (`PCIe 6.2 §7.5.2`): D0 and D3hot, without PME.

use crate::spec::{capability_id, power};
use crate::{Dword, DwordWrite, Effects, Refused};

/// The registers of the capability.
///
/// No_Soft_Reset is set: a function keeps its state in D3hot (`§5.3.1.4`), and so do its VFs.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Power {
    state: u32,
}

impl Power {
    /// True if the function is in D0: only then does it decode memory, send messages and access memory.
    pub fn is_d0(&self) -> bool {
        self.state == power::D0
    }

    /// Reads the dword at `reg` from the start of the capability. The next pointer is 0.
    pub fn read(&self, reg: Dword) -> u32 {
        match reg.offset() {
            power::CAPABILITIES => u32::from(capability_id::POWER_MANAGEMENT) | u32::from(power::VERSION_3) << 16,
            power::CONTROL_STATUS => self.state | power::NO_SOFT_RESET,
            _ => 0,
        }
    }

    /// Writes the dword at `reg`. Refuses unsupported states (`§7.5.2.2`).
    pub fn write(&mut self, reg: Dword, write: DwordWrite) -> Effects {
        if reg.offset() != power::CONTROL_STATUS {
            return Effects::NONE;
        }
        let new = write.apply(self.state, power::STATE);
        if !matches!(new, power::D0 | power::D3_HOT) {
            let [written, ..] = new.to_le_bytes();
            return Effects::refused(Refused::PowerState { written });
        }
        let changed = new != self.state;
        self.state = new;
        Effects { windows: changed, messages: changed, queues: changed, ..Effects::NONE }
    }

    /// Returns to the power-on state.
    pub fn reset(&mut self) {
        *self = Self::default();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_d0_and_d3hot_are_entered() {
        let control = Dword::containing(power::CONTROL_STATUS);
        let mut power = Power::default();
        for (write, d0) in [(3, false), (1, false), (2, false), (0, true), (1, true)] {
            let refused = power.write(control, DwordWrite::full(write.into())).refused;
            let expected = matches!(write, 1 | 2).then_some(Refused::PowerState { written: write });
            assert_eq!((power.is_d0(), refused), (d0, expected), "after {write}");
        }
        assert_eq!(power.read(control), power::NO_SOFT_RESET);
        let _ = power.write(control, DwordWrite::full(u32::MAX));
        assert_eq!(power.read(control), power::NO_SOFT_RESET | power::D3_HOT, "and nothing else is writable");
        let header = power.write(Dword::containing(power::CAPABILITIES), DwordWrite::full(0));
        assert!(header.is_none(), "the header is read-only");
        assert_eq!(power.read(Dword::containing(power::CAPABILITIES)), 0x0003_0001);
        power.reset();
        assert!(power.is_d0());
    }
}
