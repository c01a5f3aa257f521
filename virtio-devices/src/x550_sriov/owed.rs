//! Work that an access to the NIC leaves for its device.

use std::sync::Arc;

use parking_lot::Mutex;
use pci::ResetKind;
use x550::{Effects, Nic, Place};

use super::drivers::Drivers;
use super::handle::X550Handle;

/// The NIC, and what is left to do after accesses to it. Shared by the functions of a device; its lock is free
/// whenever nobody accesses the device.
#[derive(Debug, Clone)]
pub(super) struct Owed {
    nic: X550Handle,
    left: Arc<Mutex<Left>>,
}

#[derive(Debug)]
struct Left {
    effects: Effects,
    /// The PF's driver may have reported itself.
    reported: bool,
    drivers: Drivers,
}

/// What is left to do after an access.
#[derive(Debug)]
pub(super) struct Taken {
    /// The effects on the NIC; interrupts were sent.
    pub(super) effects: Effects,
    /// True if a driver may have come up or gone down.
    pub(super) drivers: bool,
}

impl Owed {
    /// Nothing is left to do for `nic`, which has `total_vfs` VFs.
    pub(super) fn new(nic: X550Handle, total_vfs: u16) -> Self {
        let left = Left { effects: Effects::NONE, reported: false, drivers: Drivers::new(total_vfs) };
        Self { nic, left: Arc::new(Mutex::new(left)) }
    }

    /// The NIC.
    pub(super) fn nic(&self) -> &X550Handle {
        &self.nic
    }

    /// Changes the NIC.
    pub(super) fn change(&self, change: impl FnOnce(&mut Nic) -> Effects) {
        self.add(self.nic.change(change));
    }

    /// Sets the number of VFs that exist. With `disabled`, VFs were disabled, by a reset of this kind or by a write.
    pub(super) fn set_num_vfs(&self, num_vfs: u16, disabled: Option<Option<ResetKind>>) {
        if let Some(reset) = disabled {
            self.left.lock().drivers.note_disabled(reset);
        }
        // The queues of pools get other owners.
        self.change(|nic| nic.set_num_vfs(num_vfs).and(Effects::QUEUES));
    }

    /// Resets a VF.
    pub(super) fn reset_vf(&self, index: u16, kind: ResetKind) {
        self.left.lock().drivers.note_reset(Place::Vf(index), kind);
        self.add(self.nic.reset_vf(index));
    }

    /// Resets the NIC.
    pub(super) fn reset(&self, kind: ResetKind) {
        self.left.lock().drivers.note_reset(Place::Pf, kind);
        self.add(self.nic.reset());
    }

    /// Records if the registers of a function let it be a bus master.
    pub(super) fn set_master(&self, place: Place, is_master: bool) {
        if self.nic.set_master(place, is_master) {
            self.add(Effects::QUEUES);
        }
    }

    /// Adds effects whose interrupts were sent.
    pub(super) fn add(&self, effects: Effects) {
        let effects = Effects { vectors: Vec::new(), ..effects };
        let mut left = self.left.lock();
        left.effects = std::mem::take(&mut left.effects).and(effects);
    }

    /// Records that the PF wrote the register in which its driver reports itself.
    pub(super) fn note_report(&self) {
        self.left.lock().reported = true;
    }

    /// Takes what is left to do of all accesses since the last call.
    pub(super) fn take(&self) -> Taken {
        let mut left = self.left.lock();
        let reported = std::mem::take(&mut left.reported);
        let effects = std::mem::take(&mut left.effects);
        Taken { drivers: reported || effects.queues, effects }
    }

    /// The drivers of the functions.
    pub(super) fn with_drivers<T>(&self, use_them: impl FnOnce(&mut Drivers) -> T) -> T {
        use_them(&mut self.left.lock().drivers)
    }
}
