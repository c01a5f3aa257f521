//! The guest's drivers of the functions, as far as registers show them.
//!
//! A NIC has no register that says if a driver has it. The PF's driver reports itself in CTRL_EXT.DRV_LOAD. A VF's
//! driver is up while one of the VF's receive queues is enabled: the exchange through the mailbox leaves nothing in
//! registers. Transmit queues do not count, because the PF's driver flushes those of a VF by enabling them for a moment.

use pci::ResetKind;
use x550::spec::{self, QUEUE_ENABLE, QUEUE_LEN, receive, vf};
use x550::{Nic, Place};

use crate::ResetBy;

/// True if `len` bytes at `offset` of the PF's BAR 0 touch the register in which its driver reports itself.
pub(super) fn is_report(offset: u64, len: usize) -> bool {
    let first = u64::from(spec::CTRL_EXT);
    offset < first + 4 && u64::try_from(len).is_ok_and(|len| offset.saturating_add(len) > first)
}

/// Driver loaded, in CTRL_EXT.
const DRV_LOAD: u32 = 1 << 28;
/// Queues of a NIC in each direction.
const QUEUES: u16 = 128;

/// The driver of a function.
#[derive(Debug, Clone, Copy, Default)]
struct Driver {
    is_up: bool,
    reset_by: ResetBy,
}

/// The drivers of all functions, at the last look.
#[derive(Debug)]
pub(super) struct Drivers {
    /// The PF's, then those of VFs by index.
    drivers: Box<[Driver]>,
    vfs_disabled_by: ResetBy,
}

const fn cause(kind: ResetKind) -> ResetBy {
    match kind {
        ResetKind::Flr => ResetBy::Flr,
        ResetKind::Conventional => ResetBy::Conventional,
    }
}

fn slot(place: Place) -> usize {
    match place {
        Place::Pf => 0,
        Place::Vf(index) => usize::from(index) + 1,
    }
}

fn dword(nic: &Nic, place: Place, offset: u32) -> u32 {
    let mut data = [0; 4];
    nic.peek(place, offset.into(), &mut data);
    u32::from_le_bytes(data)
}

impl Drivers {
    /// No driver is up.
    pub(super) fn new(total_vfs: u16) -> Self {
        let drivers = vec![Driver::default(); usize::from(total_vfs) + 1].into();
        Self { drivers, vfs_disabled_by: ResetBy::default() }
    }

    /// Looks again. Returns true if a driver came up or went down. One that is down without [`Self::note_reset`] did
    /// that itself.
    pub(super) fn look(&mut self, nic: &Nic) -> bool {
        let mut up = vec![false; self.drivers.len()];
        let mut set = |place, is_up| {
            if let Some(slot) = up.get_mut(slot(place)) {
                *slot |= is_up;
            }
        };
        set(Place::Pf, dword(nic, Place::Pf, spec::CTRL_EXT) & DRV_LOAD != 0);
        for (place, queue) in (0..QUEUES).map(|queue| nic.owner(queue)).filter(|(place, _)| *place != Place::Pf) {
            let control = vf::RECEIVE + QUEUE_LEN * u32::from(queue) + receive::RXDCTL;
            set(place, dword(nic, place, control) & QUEUE_ENABLE != 0);
        }
        let mut changed = false;
        for (driver, is_up) in self.drivers.iter_mut().zip(up) {
            if driver.is_up && !is_up {
                driver.reset_by = ResetBy::Driver;
            }
            changed |= driver.is_up != is_up;
            driver.is_up = is_up;
        }
        changed
    }

    /// Records that a function was reset through PCI. Without a driver there is nothing to record.
    pub(super) fn note_reset(&mut self, place: Place, kind: ResetKind) {
        if let Some(driver) = self.drivers.get_mut(slot(place)).filter(|driver| driver.is_up) {
            *driver = Driver { is_up: false, reset_by: cause(kind) };
        }
    }

    /// Records that VFs were disabled: by a reset of the PF of this kind, or by its driver.
    pub(super) fn note_disabled(&mut self, reset: Option<ResetKind>) {
        self.vfs_disabled_by = reset.map_or(ResetBy::Driver, cause);
    }

    /// True if the driver of a function was up at the last look.
    pub(super) fn is_up(&self, place: Place) -> bool {
        self.drivers.get(slot(place)).is_some_and(|driver| driver.is_up)
    }

    /// The cause of a function's last reset while its driver was up.
    pub(super) fn reset_by(&self, place: Place) -> ResetBy {
        self.drivers.get(slot(place)).map_or(ResetBy::default(), |driver| driver.reset_by)
    }

    /// The cause of the last disabling of VFs.
    pub(super) fn vfs_disabled_by(&self) -> ResetBy {
        self.vfs_disabled_by
    }
}
