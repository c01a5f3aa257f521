//! The two interfaces of a device: to the hierarchy, and to each of its functions.

use crate::{BarIndex, ConfigSpace, Dword, DwordWrite, Effects, Outcome, ResetKind, Rid, Window, WindowId};

/// A device: one function, or a PF and its VFs.
///
/// A device is one value behind one lock, because the registers of a PF determine what its VFs decode. It gets the
/// routing ID of each access and handles every function that it has reserved; a function that does not exist at the
/// moment reads as all-ones and ignores writes.
///
/// A method that may stop work returns it ([`Outcome::stopping`]): the caller waits without the device's lock.
pub trait Device: Send {
    /// Work that an access may leave running for a moment, such as the handle of a stopping thread.
    /// [`std::convert::Infallible`] for a device that runs nothing.
    type Stopping;

    /// Reads a dword of the configuration space of function `rid`. A read has no side effect on configuration space.
    fn config_read(&self, rid: Rid, reg: Dword) -> u32;

    /// Writes a dword of the configuration space of function `rid`.
    fn config_write(&mut self, rid: Rid, reg: Dword, write: DwordWrite) -> Outcome<Self::Stopping>;

    /// Reads `data.len()` bytes at `offset` of a memory window. Offsets outside of it read all-ones.
    fn mmio_read(&mut self, window: WindowId, offset: u64, data: &mut [u8]);

    /// Writes `data` at `offset` of a memory window. Does not change configuration space.
    fn mmio_write(&mut self, window: WindowId, offset: u64, data: &[u8]) -> Outcome<Self::Stopping>;

    /// True if function `rid` may send requests now, such as messages: it exists, its Bus Master Enable is set, and it
    /// and its PF are in D0 (`PCIe 6.2 §7.5.1.1.3`, `§9.3.4.1.3`, `§9.6`).
    fn may_send(&self, rid: Rid) -> bool;

    /// Appends the memory windows that the device decodes now: a pure function of its registers.
    fn windows(&self, out: &mut Vec<Window>);

    /// Resets the device as a whole; a single function is reset through its PCI Express capability.
    fn reset(&mut self, kind: ResetKind) -> Outcome<Self::Stopping>;
}

/// Function of a device: its configuration space, and the registers behind its BARs.
///
/// The same type can be a PF and a VF; [`PfWithVfs`](crate::PfWithVfs) makes a [`Device`] of a PF and its VFs. A VF has
/// no power state of its own: `powered` is true if its PF is in D0 (`PCIe 6.2 §9.6`), and for every other function.
///
/// Every change has two steps: the registers change, and then [`Self::changed`] updates the state behind them. The
/// device that contains the function sets the reach of an outcome.
pub trait Function: Send {
    /// As [`Device::Stopping`].
    type Stopping;

    /// The registers.
    fn config(&self) -> &ConfigSpace;

    /// The registers, for the methods of this trait.
    fn config_mut(&mut self) -> &mut ConfigSpace;

    /// Handles `effects` of the registers: resets the state behind them if they were reset, and stops or starts work.
    fn changed(&mut self, effects: Effects, powered: bool) -> Outcome<Self::Stopping>;

    /// Reads `data.len()` bytes at `offset` of a BAR. Offsets outside of it read all-ones. The MSI-X structures are read
    /// by [`ConfigSpace::msix_read`].
    fn bar_read(&mut self, bar: BarIndex, offset: u64, data: &mut [u8]);

    /// Writes `data` at `offset` of a BAR. Does not change configuration space. The MSI-X structures are written by
    /// [`ConfigSpace::msix_write`].
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

    /// Resets the function: its registers and the state behind them.
    fn reset(&mut self, kind: ResetKind, powered: bool) -> Outcome<Self::Stopping> {
        let effects = self.config_mut().reset(kind);
        self.changed(effects, powered)
    }
}
