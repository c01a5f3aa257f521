//! KVM memory slots for the memory of virtio memory devices: one for each part with a plugged block.

use std::io;
use std::ops::Range;
use std::sync::{Arc, Weak};

use virtio_devices::{GuestMap, GuestRegion, MemRegion, MemSlots};
use vm_memory::{GuestMemoryBackend, GuestMemoryRegion};

use crate::devices::mem_regions::MemRegions;
use crate::kvm::{self, KvmError};

/// The memory slots of a VM for one device.
struct PlugSlots {
    vm: Weak<kvm::Vm>,
    /// Kept mapped while the VM may have a slot for it.
    _memory: GuestMap,
    /// The first memory slot.
    first: u32,
    /// The addresses in the guest.
    guest: Range<u64>,
    /// The address in this process.
    host: u64,
    /// The size of a part in bytes. The last part may be shorter.
    part: u64,
}

/// Gives `vm`, which no vCPU runs yet, memory slots for the plugged parts of `mem_regions`, and limits the devices'
/// access to `memory` to these parts. The slots' numbers are in `slots`.
///
/// # Errors
///
/// Fails if KVM refuses a slot.
pub(super) fn attach(
    vm: &Arc<kvm::Vm>,
    memory: &GuestMap,
    mem_regions: &MemRegions,
    slots: Range<u32>,
) -> Result<(), KvmError> {
    let mut first = slots.start;
    for plugged in mem_regions.all() {
        let Some(region) = memory.iter().find(|region| region.start_addr().0 == plugged.start()) else { continue };
        region.bitmap().whole().limit(plugged.reach());
        let (own, count) = PlugSlots::of(vm, memory, (plugged, region), first);
        // The slot size was chosen so that there are enough.
        first = first.saturating_add(u32::try_from(count).unwrap_or(u32::MAX));
        if first > slots.end {
            return Err(refused(io::ErrorKind::StorageFull.into()));
        }
        plugged.attach(Arc::new(own)).map_err(refused)?;
    }
    Ok(())
}

fn refused(error: io::Error) -> KvmError {
    KvmError::Ioctl { action: "give the VM its plugged memory", error }
}

impl PlugSlots {
    /// The slots from `first` on for a device's memory, and their number.
    fn of(
        vm: &Arc<kvm::Vm>,
        memory: &GuestMap,
        (plugged, region): (&MemRegion, &GuestRegion),
        first: u32,
    ) -> (Self, usize) {
        let (part, count) = plugged.parts();
        let start = region.start_addr().0;
        let guest = start..start.saturating_add(region.len());
        let host = region.as_ptr() as u64;
        (Self { vm: Arc::downgrade(vm), _memory: memory.clone(), first, guest, host, part }, count)
    }

    /// The slot of a part, and the part's bytes in the region.
    fn place(&self, part: usize) -> io::Result<(u32, Range<u64>)> {
        let invalid = || io::Error::from(io::ErrorKind::InvalidInput);
        let number = u32::try_from(part).map_err(|_| invalid())?;
        let slot = self.first.checked_add(number).ok_or_else(invalid)?;
        let start = u64::from(number).checked_mul(self.part).ok_or_else(invalid)?;
        let end = start.saturating_add(self.part).min(self.guest.end - self.guest.start);
        if start < end { Ok((slot, start..end)) } else { Err(invalid()) }
    }

    fn set(&self, part: usize, shown: bool) -> io::Result<()> {
        let (slot, place) = self.place(part)?;
        // Without a VM no vCPU accesses memory.
        let Some(vm) = self.vm.upgrade() else { return Ok(()) };
        if vm.has_memory(slot) == shown {
            return Ok(());
        }
        let len = if shown { place.end - place.start } else { 0 };
        let host = (self.host + place.start) as *mut u8;
        // SAFETY: the part lies in a mapping of guest memory, to which no references are made, and which the VM's owner
        // keeps mapped for longer than the VM and its vCPUs live.
        unsafe { vm.set_memory(slot, self.guest.start + place.start, host, len) }.map_err(|error| match error {
            KvmError::Ioctl { error, .. } => error,
            error => io::Error::other(error),
        })
    }
}

impl MemSlots for PlugSlots {
    fn show(&self, part: usize) -> io::Result<()> {
        self.set(part, true)
    }

    fn hide(&self, part: usize) -> io::Result<()> {
        self.set(part, false)
    }
}
