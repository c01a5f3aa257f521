//! The two sides of a device: towards the hierarchy, and towards each of its functions.

use crate::{BarIndex, ConfigSpace, Dword, DwordWrite, Effects, Outcome, ResetKind, Rid, Window, WindowId};

/// A device: one function, or a PF and its VFs.
///
/// A device is one value behind one lock, because what a VF decodes follows from registers of its PF. It is given the
/// routing ID of each access and answers for every function that it has reserved; a function that does not exist at the
/// moment reads as all-ones and ignores writes.
///
/// A method that may stop something returns it ([`Outcome::stopping`]): the caller waits without the device's lock.
pub trait Device: Send {
    /// Work that an access may leave running for a moment, such as the handle of a thread that was asked to end. A
    /// device that runs nothing has [`std::convert::Infallible`] here.
    type Stopping;

    /// Reads a dword of the configuration space of function `rid`. A read has no side effect on configuration space.
    fn config_read(&self, rid: Rid, reg: Dword) -> u32;

    /// Writes a dword of the configuration space of function `rid`.
    fn config_write(&mut self, rid: Rid, reg: Dword, write: DwordWrite) -> Outcome<Self::Stopping>;

    /// Reads `data.len()` bytes at `offset` of a memory window. Offsets outside of it read all-ones.
    fn mmio_read(&mut self, window: WindowId, offset: u64, data: &mut [u8]);

    /// Writes `data` at `offset` of a memory window. No register of configuration space changes.
    fn mmio_write(&mut self, window: WindowId, offset: u64, data: &[u8]) -> Outcome<Self::Stopping>;

    /// Appends the memory windows that the device decodes now: a pure function of its registers.
    fn windows(&self, out: &mut Vec<Window>);

    /// Resets the device as a whole; for one function's reset see the PCI Express capability.
    fn reset(&mut self, kind: ResetKind) -> Outcome<Self::Stopping>;
}

/// Function of a device: its configuration space, and the registers behind its BARs.
///
/// The same type can be a PF and a VF; [`PfWithVfs`](crate::PfWithVfs) makes a [`Device`] of a PF and its VFs. A VF has
/// no power state of its own: `powered` says whether its PF is in D0 (`PCIe 6.2 §9.6`), and is true for every other
/// function.
///
/// Every change goes one way: the registers change, and [`Self::changed`] makes what is behind them follow. The reach
/// of an outcome is left to the device that the function is part of.
pub trait Function: Send {
    /// As [`Device::Stopping`].
    type Stopping;

    /// The registers.
    fn config(&self) -> &ConfigSpace;

    /// The registers, for the methods of this trait.
    fn config_mut(&mut self) -> &mut ConfigSpace;

    /// The registers had `effects`: resets what is behind them if they were reset, and stops or starts what runs.
    fn changed(&mut self, effects: Effects, powered: bool) -> Outcome<Self::Stopping>;

    /// Reads `data.len()` bytes at `offset` of a BAR. Offsets outside of it read all-ones.
    fn bar_read(&mut self, bar: BarIndex, offset: u64, data: &mut [u8]);

    /// Writes `data` at `offset` of a BAR. No register of configuration space changes.
    fn bar_write(&mut self, bar: BarIndex, offset: u64, data: &[u8], powered: bool) -> Outcome<Self::Stopping>;

    /// Reads a dword of configuration space.
    fn config_read(&self, reg: Dword) -> u32 {
        self.config().read(reg)
    }

    /// Writes a dword of configuration space. A reset that the write initiates is complete when this returns.
    fn config_write(&mut self, reg: Dword, write: DwordWrite, powered: bool) -> Outcome<Self::Stopping> {
        let effects = self.config_mut().write(reg, write);
        self.changed(effects, powered)
    }

    /// Resets the function: its registers and what is behind them.
    fn reset(&mut self, kind: ResetKind, powered: bool) -> Outcome<Self::Stopping> {
        let effects = self.config_mut().reset(kind);
        self.changed(effects, powered)
    }
}
